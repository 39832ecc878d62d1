"""Stand-ins for servers of vLLM and SGLang, which answer as these do, failures included, and receive the weights.

What they answer was seen with vLLM 0.32.0 and SGLang 0.5.23 on a CPU; ``make test-servers`` checks real ones.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from lightstep.rollout.servers import VllmNcclServer
from lightstep.rollout.transport import WeightInfo, WeightLink

CPU = torch.device("cpu")


class Refusal(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class OnlyTheLast(Refusal):
    """Of several workers the last one has failed."""


@dataclass
class Process:
    """What is lost with a server's process.

    Attributes:
        version: of the weights.
        paused: nothing is generated.
        updating: between the beginning and the end of a set.
        engine: of lightstep's plugin.
    """

    weights: dict[str, Tensor]
    version: str = "default"
    paused: bool = False
    updating: bool = False
    engine: Any = None

    def begin(self, status: int) -> None:
        if self.updating:
            raise Refusal(status, "an update is already active")
        self.updating = True

    def refuse_outside(self, status: int) -> None:
        if not self.updating:
            raise Refusal(status, "no update has been started")

    def end(self, version: str | None) -> None:
        self.updating = False
        self.version = version or self.version


class FakeServer:
    """What both kinds have in common.

    Args:
        weights: the model's, by the names that the engine has for them.
        timeout_s: for a broadcast.
        device: of what is received.
        address: of the interface that requests come by.
        port: 0 for any.

    Attributes:
        calls: the paths that were asked for, in order.
        before: called with each path before it is answered: it may raise, or wait.
        process: its present one.
    """

    has_plugin = True

    def __init__(
        self,
        weights: dict[str, Tensor],
        timeout_s: float = 10.0,
        workers: int = 1,
        device: torch.device = CPU,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.process = Process(_copied(weights))
        self.workers, self._timeout, self.device = workers, timeout_s, device
        self.calls: list[str] = []
        self.before: Callable[[str], object] = lambda path: None
        self._links: dict[str, list[WeightLink]] = {}  # of each worker, by group
        self._unread: list[Exception | None] = []  # answers of the second worker
        self._address = address
        self._http = self._start(port)

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self.port}"

    def _start(self, port: int) -> ThreadingHTTPServer:
        server, process = self, self.process

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

            def _answer(self, payload: dict[str, Any]) -> None:
                path = urlsplit(self.path).path
                try:
                    server.calls.append(self.path)
                    server.before(path)
                    status, content = 200, server.answer(process, path, payload)
                except Refusal as refusal:
                    status, content = refusal.status, {"error": str(refusal)}
                except Exception as error:
                    status, content = 500, {"error": f"{type(error).__name__}: {error}"}
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        http = ThreadingHTTPServer((server._address, port), Handler)
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        return http

    def kill(self) -> None:
        """As a process that is killed: connections break."""
        self._http.shutdown()
        self._http.server_close()
        for group in list(self._links):
            self.leave(group)

    def restart(self, weights: dict[str, Tensor]) -> None:
        """A new process on the same port."""
        port = self.port
        self.kill()
        self.process, self._unread = Process(_copied(weights)), []
        self._http = self._start(port)

    def answer(self, process: Process, path: str, payload: dict[str, Any]) -> Any:
        raise NotImplementedError

    def join(self, group: str, place: dict[str, Any], prefixes: list[str]) -> None:
        """Each worker opens its end of the process group."""
        address, port = place["master_address"], place["master_port"]
        first, size = place["rank_offset"], place["world_size"]

        def open_one(worker: int) -> None:
            limit = timedelta(seconds=self._timeout)
            nested: dist.Store = dist.TCPStore(address, port, is_master=False, timeout=limit)
            for prefix in prefixes:
                nested = dist.PrefixStore(prefix, nested)
            opened.append(WeightLink(0, nested, first + worker, size, self.device, self._timeout, self.has_plugin))

        opened: list[WeightLink] = []
        self._in_threads(open_one)
        self._links[group] = opened

    def _in_threads(self, work: Callable[[int], None]) -> None:
        errors: list[Exception] = []

        def guarded(worker: int) -> None:
            try:
                work(worker)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def leave(self, group: str) -> None:
        for link in self._links.pop(group, ()):
            link.close()

    def receive(self, group: str, nbytes: int) -> Tensor:
        """One broadcast; every worker gets it."""
        links = self._links.get(group)
        if links is None:
            raise Refusal(500, f"no process group {group}")
        buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in links]
        self._in_threads(lambda worker: links[worker].broadcast(buffers[worker]))
        assert all(torch.equal(buffers[0], other) for other in buffers[1:])
        return buffers[0]

    def receive_flat(self, group: str, infos: list[WeightInfo]) -> Iterator[tuple[str, Tensor]]:
        """One broadcast of tensors without padding."""
        data, start = self.receive(group, sum(info.nbytes for info in infos)), 0
        for info in infos:
            stop = start + info.nbytes
            yield info.name, data[start:stop].clone().view(info.dtype).view(info.shape)
            start = stop


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def infos_of(payload: dict[str, Any], dtypes: str) -> list[WeightInfo]:
    listed = zip(payload["names"], payload["shapes"], payload[dtypes], strict=True)
    return [WeightInfo((name,), tuple(shape), getattr(torch, dtype)) for name, shape, dtype in listed]


class ServedModel:
    """A process's weights, as the plugin uses a model of vLLM."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.reloads: list[str] = []

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._process.weights.items()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._process.weights[name].copy_(tensor)


class TransferEngine:
    """vLLM's base class of such engines. What several workers are told, the last one answers."""

    def __init__(self, model: Any, device: torch.device, workers: int = 1) -> None:
        self.model, self.device = model, device
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1, rank=workers - 1, world_size=workers)
        self.model_config = SimpleNamespace(quantization=None)


def import_plugin() -> Any:
    """The module of lightstep's plugin, with as much of vLLM as it touches."""
    transfer = "vllm.distributed.weight_transfer"
    modules: dict[str, Any] = {
        f"{transfer}.base": SimpleNamespace(
            WeightTransferEngine=TransferEngine, WeightTransferInitInfo=object, WeightTransferUpdateInfo=object
        ),
        f"{transfer}.factory": SimpleNamespace(WeightTransferEngineFactory=object),
        "vllm.model_executor.model_loader.reload": SimpleNamespace(
            initialize_layerwise_reload=lambda model: model.reloads.append("begin"),
            finalize_layerwise_reload=lambda model, config: model.reloads.append("end"),
        ),
    }
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop("lightstep.rollout.vllm_plugin", None)
        return importlib.import_module("lightstep.rollout.vllm_plugin")


PLUGIN = import_plugin()  # by the thread that imports this: servers' threads are several


class FakeVllm(FakeServer):
    """With lightstep's plugin."""

    software = "0.32.0"

    def answer(self, process: Process, path: str, payload: dict[str, Any]) -> Any:
        found = {
            "/version": {"version": self.software},
            "/weight_info": {"weight_version": process.version},
            "/get_world_size": {"world_size": self.workers},
        }
        if path in found:
            return found[path]
        acts: dict[str, Callable[[], object]] = {
            "/init_weight_transfer_engine": lambda: self._init(payload["init_info"]),
            "/shutdown_weight_transfer_engine": lambda: self.leave("only"),
            "/pause": lambda: setattr(process, "paused", True),
            "/resume": lambda: setattr(process, "paused", False),
            "/start_weight_update": lambda: process.begin(500),
            "/update_weights": lambda: self._update(process, payload["update_info"]),
            "/finish_weight_update": lambda: self._finish(process, payload.get("weight_version")),
            "/reset_prefix_cache": lambda: None,
        }
        if path not in acts:
            raise Refusal(404, "Not Found")
        self._together(acts[path])
        return {}

    def _together(self, act: Callable[[], object]) -> None:
        """Each worker answers. After the first one's error vLLM does not read the others' answers before the next call
        does."""
        error: Exception | None = None
        try:
            act()
        except Exception as caught:
            error = caught
        if self.workers == 1:
            if error is not None:
                raise error
            return
        self._unread.append(error)
        if isinstance(error, OnlyTheLast):
            error = None
        read = None if error is not None else self._unread.pop(0)
        if error is not None or read is not None:
            raise error or read  # type: ignore[misc]

    def _init(self, place: dict[str, Any]) -> None:
        self.leave("only")
        self.join("only", place, [place["group"]])

    def _update(self, process: Process, info: dict[str, Any]) -> None:
        process.refuse_outside(500)
        if process.engine is None:
            process.engine = PLUGIN.ProcessGroupEngine(ServedModel(process), self.device, self.workers)
            process.engine._link = Broadcasts(self)
        update = PLUGIN.BucketInfo(**info)
        if update.check_only:
            process.updating = self.workers > 1  # what an error of the last worker leaves behind
            try:
                process.engine.receive_weights(update)
            except RuntimeError as error:
                raise OnlyTheLast(500, str(error)) from error
            process.updating = True
            return
        assert process.paused, "a request now would end the engine"
        process.engine.receive_weights(update)

    def _finish(self, process: Process, version: str | None) -> None:
        process.refuse_outside(500)
        if process.engine is not None:
            process.engine.finish_weight_update()
        process.end(version)


class FakeVllmNccl(FakeVllm):
    """With vLLM's own engine for NCCL, of which this has the calls: the group is gloo's.

    NCCL's identifier is a port here; see :class:`NcclOnCpu`.
    """

    has_plugin = False

    def answer(self, process: Process, path: str, payload: dict[str, Any]) -> Any:
        if path == "/weight_checker":
            return {"checksums": dict.fromkeys(process.weights, "")}
        return super().answer(process, path, payload)

    def _init(self, place: dict[str, Any]) -> None:
        if "master_address" in place or not place["packed"]:
            raise Refusal(500, "an identifier, and packed tensors")
        port = int(base64.b64decode(place["nccl_unique_id_b64"]).rstrip(b"\0"))
        self.leave("only")
        self.join("only", {**place, "master_address": "127.0.0.1", "master_port": port}, [])

    def _update(self, process: Process, info: dict[str, Any]) -> None:
        process.refuse_outside(500)
        assert process.paused and info.keys() == {"names", "dtype_names", "shapes"}
        for name, tensor in self.receive_flat("only", infos_of(info, "dtype_names")):
            if name not in process.weights:
                raise Refusal(500, f"no {name}")
            process.weights[name].copy_(tensor)


class NcclOnCpu(VllmNcclServer):
    """Meets :class:`FakeVllmNccl` over gloo."""

    def _device(self) -> torch.device:
        return CPU

    def _new_link(self, store: dist.Store, size: int, device: torch.device) -> Future[WeightLink]:
        meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("0", str(meeting.port).encode().ljust(128, b"\0"))
        opened: Future[WeightLink] = Future()

        def open_one() -> None:
            try:
                opened.set_result(WeightLink(0, meeting, 0, size, device, self._timeout))
            except Exception as error:
                opened.set_exception(error)

        threading.Thread(target=open_one, daemon=True).start()
        return opened


class Broadcasts:
    """The links of all workers of a server, which get the same."""

    def __init__(self, server: FakeServer) -> None:
        self._server, self.device = server, server.device

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._server.receive("only", len(tensor)))


class FakeSglang(FakeServer):
    software = "0.5.23"
    has_plugin = False

    def answer(self, process: Process, path: str, payload: dict[str, Any]) -> Any:
        found = {
            "/server_info": {"version": self.software, "tp_size": self.workers, "dp_size": 1, "pp_size": 1},
            "/model_info": {"weight_version": process.version},
            "/weights_checker": {"ranks": [{"checksums": dict.fromkeys(process.weights, "")}]},
        }
        if path in found:
            return found[path]
        group = payload.get("group_name", "")
        acts: dict[str, Callable[[], object]] = {
            "/init_weights_update_group": lambda: self.join(group, payload, [group, f"{group}/", "cpu/"]),
            "/destroy_weights_update_group": lambda: self.leave(group),
            "/pause_generation": lambda: setattr(process, "paused", True),
            "/continue_generation": lambda: setattr(process, "paused", False),
            "/begin_weight_update": lambda: process.begin(400),
            "/update_weights_from_distributed": lambda: self._update(process, payload),
            "/end_weight_update": lambda: (process.refuse_outside(400), process.end(None)),
            "/update_weights_from_disk": lambda: self._load(process, payload),
            "/update_weight_version": lambda: setattr(process, "version", payload["new_version"]),
        }
        if path not in acts:
            raise Refusal(404, "Not Found")
        acts[path]()
        return {"success": True}

    def _load(self, process: Process, payload: dict[str, Any]) -> None:
        files = sorted(Path(payload["model_path"]).glob("*.safetensors"))
        if not files:
            raise Refusal(400, "Failed to get weights iterator")
        for name, tensor in (item for file in files for item in load_file(file).items()):
            process.weights[name].copy_(tensor)
        process.version = payload["weight_version"]

    def _update(self, process: Process, payload: dict[str, Any]) -> None:
        process.refuse_outside(400)
        for name, tensor in self.receive_flat(payload["group_name"], infos_of(payload, "dtypes")):
            if name in process.weights:  # SGLang ignores others, and says that it succeeded
                process.weights[name].copy_(tensor)
