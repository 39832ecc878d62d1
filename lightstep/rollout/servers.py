"""Sending weights to servers of vLLM and SGLang: calls over HTTP, beside broadcasts over a process group, or files.

A set is compared with the server's model before the first byte. It is received while the server is paused, and requests
and version see it when all of it has arrived. After a failure the server stays paused until a complete set arrives.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import json
import re
import shutil
import socket
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lightstep.rollout.transport import (
    Bucket,
    BucketDelta,
    WeightInfo,
    WeightLink,
    WeightTransferError,
    WeightTransport,
)

# -- what servers are told over HTTP -----------------------------------------------------------------------------------

Pause = Literal["wait", "keep", "abort"]

_PASSED, _MOST_CALLS = 5, 20
"""Calls of vLLM that pass one after the other, and how many are made at most."""

_QUICK = 10.0
"""Seconds for a question to a server that may be gone."""


_DISCARD, _KEEP = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
"""For ``SO_LINGER``: whether what the other end has not got is discarded when the socket is closed."""


class NoAnswer(WeightTransferError):
    """A server did not answer within the time limit, or is not there."""


class Server(ABC):
    """One server, and the calls of its protocol. All of them raise ``WeightTransferError``.

    Args:
        url: ``http(s)://host:port``.
        timeout_s: for one call.
        api_key: sent as a bearer token.

    Attributes:
        kind: what it is a server of.
        first, stop: the first version whose protocol is known, and the first one whose is not.
        pauses: what may happen to running requests, by the server's own names. The first is the default.
        has_plugin: it receives by lightstep's plugin, which can keep a set, and apply deltas to it.
    """

    kind: ClassVar[str]
    first: ClassVar[str]
    stop: ClassVar[str]
    pauses: ClassVar[Mapping[Pause, str]]
    has_plugin: ClassVar[bool] = False

    def __init__(self, url: str, timeout_s: float, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"the server's URL is {url!r}; one such as http://host:8000 is needed")
        self._timeout, self._quick = timeout_s, min(_QUICK, timeout_s)
        self._names: frozenset[str] | None = None
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def refuse_other_versions(self) -> None:
        """Raise unless the server's protocol is known."""
        found = self.version()
        if not _numbers(self.first) <= _numbers(found) < _numbers(self.stop):
            raise WeightTransferError(
                f"{self.url} is {self.kind} {found}; the protocols of {self.first} up to, but not including, "
                f"{self.stop} are known. Use such a version, or write a WeightTransport for this one"
            )

    @abstractmethod
    def version(self) -> str:
        """Of the server's software."""

    @abstractmethod
    def weights_version(self) -> str:
        """The version of the weights, as the server knows it."""

    @abstractmethod
    def workers(self) -> int:
        """How many processes of the server get weights."""

    @abstractmethod
    def join(self, place: Mapping[str, Any], group: str, backend: str) -> None:
        """Open the process group ``group``. Returns when all of its members have."""

    @abstractmethod
    def leave(self, group: str) -> None:
        """Close the process group."""

    def check(self, infos: Sequence[WeightInfo]) -> None:
        """Compare a set with the server's model, whose names are kept. Nothing is paused or written."""
        if self._names is None:
            self._names = frozenset(self.names())
        refuse_other_names(infos, self._names, self.url)

    def forget_names(self) -> None:
        """Ask for names again: a server that was restarted may have another model."""
        self._names = None

    def names(self) -> Iterable[str]:
        """Of the tensors of the server's model: an update with an unknown one would leave half a set there."""
        raise NotImplementedError  # the plugin compares by itself

    @abstractmethod
    def pause(self, how: Pause) -> None:
        """Generate nothing from now on."""

    @abstractmethod
    def start(self) -> None:
        """A set begins."""

    @abstractmethod
    def update(self, infos: Sequence[WeightInfo], group: str, keeping: Mapping[str, Any]) -> None:
        """Receive and load a bucket. Returns when it is loaded.

        Args:
            keeping: how the bucket belongs to a set that is kept; empty if none is.
        """

    def holds(self, set_id: str, infos: Sequence[WeightInfo]) -> bool:
        """Whether all workers keep this set, which has tensors such as ``infos``. Nothing is paused or written."""
        return False

    @abstractmethod
    def end(self, version: int) -> None:
        """All of the set has been loaded."""

    @abstractmethod
    def settle(self) -> None:
        """Make ready for a set, whatever a trainer has left that died in the middle of one. Requests go on."""

    @abstractmethod
    def resume(self) -> None:
        """Generate again."""

    def packed(self, bucket: Bucket) -> Tensor:
        """The bytes (uint8) that are broadcast for a bucket; without padding for other receivers than the plugin."""
        if self.has_plugin:
            return bucket.buffer
        tensors = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]
        return bucket.buffer if sum(map(len, tensors)) == len(bucket.buffer) else torch.cat(tensors)

    @staticmethod
    def store_prefix(group: str, device: str) -> str:
        """Of the keys by which the members of a process group meet."""
        return group

    # -- HTTP

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON that the server answers."""
        return self._call(urllib.request.Request(self.url + path, headers=self._headers), timeout_s)

    def post(self, path: str, timeout_s: float | None = None, /, **payload: Any) -> Any:
        """The JSON that the server answers to ``payload``."""
        data = json.dumps(payload).encode()
        return self._call(urllib.request.Request(self.url + path, data, self._headers, method="POST"), timeout_s)

    def _call(self, request: urllib.request.Request, timeout_s: float | None) -> Any:
        try:
            with _opener().open(request, timeout=timeout_s or self._timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise WeightTransferError(f"{request.full_url} answered {error.code}: {text}{self._hint(error)}") from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise NoAnswer(f"{request.full_url} did not answer: {reason}") from error
        return json.loads(text) if text else None

    def _hint(self, error: urllib.error.HTTPError) -> str:
        return ""

    def _try(self, path: str) -> bool:
        """Whether the server takes the call."""
        try:
            self.post(path)
        except NoAnswer:
            raise
        except WeightTransferError:
            return False
        return True


# -- calls that are given up -------------------------------------------------------------------------------------------


class _Connection(http.client.HTTPConnection):
    """Leaves nothing in the network of a request whose answer nobody waits for any more, as after a time limit.

    TCP would send it when the network takes it again. A server would resume in the middle of the next set. Until
    the answer is there, closing the connection resets it, also when this process is killed.
    """

    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)

    def getresponse(self) -> http.client.HTTPResponse:
        opened = self.sock
        answer = super().getresponse()
        with contextlib.suppress(OSError):  # it is closed, if the answer is empty
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _KEEP)
        return answer


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req)


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """As ``urlopen`` has one: it knows the environment's proxies."""
    return urllib.request.build_opener(_Handler, _SecureHandler)


# -- protocols ---------------------------------------------------------------------------------------------------------


class Vllm(Server):
    """A server of vLLM in development mode, whose weight-transfer engine is
    :class:`~lightstep.rollout.vllm_plugin.ProcessGroupEngine`."""

    kind, first, stop = "vLLM", "0.28", "0.34"
    engine = "lightstep"
    has_plugin = True
    pauses: ClassVar[Mapping[Pause, str]] = {"wait": "wait", "keep": "keep", "abort": "abort"}

    def version(self) -> str:
        return str(self.get("/version", self._quick)["version"])

    def weights_version(self) -> str:
        return str(self.get("/weight_info", self._quick)["weight_version"])

    def workers(self) -> int:
        return int(self.get("/get_world_size")["world_size"])

    def join(self, place: Mapping[str, Any], group: str, backend: str) -> None:
        info = {**place, "group": group, "backend": backend, "timeout_s": self._timeout}
        self.post("/init_weight_transfer_engine", init_info=info)

    def leave(self, group: str) -> None:
        self.post("/shutdown_weight_transfer_engine", self._quick)

    def check(self, infos: Sequence[WeightInfo]) -> None:
        self._start_anew()
        try:
            self.post("/update_weights", update_info={**_described(infos), "check_only": True})
        except WeightTransferError as error:
            if not isinstance(error, NoAnswer):
                self._try("/finish_weight_update")  # one worker has refused, and the others have begun
            raise
        self.post("/finish_weight_update")

    def pause(self, how: Pause) -> None:
        self.post(f"/pause?mode={self.pauses[how]}")

    def start(self) -> None:
        self._start_anew()

    def update(self, infos: Sequence[WeightInfo], group: str, keeping: Mapping[str, Any]) -> None:
        self.post("/update_weights", update_info={**_described(infos), **keeping})

    def holds(self, set_id: str, infos: Sequence[WeightInfo]) -> bool:
        try:
            self.post("/start_weight_update")
            self.post("/update_weights", update_info={**_described(infos[:1]), "check_only": True, "base": set_id})
            self.post("/finish_weight_update")
        except NoAnswer:
            raise
        except WeightTransferError:  # whatever it is, a whole set is right
            self._try("/finish_weight_update")
            return False
        return True

    def end(self, version: int) -> None:
        self.post("/finish_weight_update", weight_version=str(version))
        self.post("/reset_prefix_cache")

    def settle(self) -> None:
        """After an error of several workers vLLM reads only the first one's answer, and takes each of the others' for
        that of a later call. So this calls what does no harm until no error comes any more."""
        passed = 0 if self.workers() > 1 else _PASSED
        for _ in range(_MOST_CALLS):
            if passed < _PASSED:
                passed = passed + 1 if self._try("/shutdown_weight_transfer_engine") else 0

    def _start_anew(self) -> None:
        """Start a set, and end one that is open."""
        for _ in range(_MOST_CALLS):
            if self._try("/start_weight_update"):
                return
            self._try("/finish_weight_update")
        self.post("/start_weight_update")

    def resume(self) -> None:
        self.post("/resume")

    def _hint(self, error: urllib.error.HTTPError) -> str:
        if error.code != 404:
            return ""
        option = f"--weight-transfer-config '{json.dumps({'backend': self.engine})}'"
        return f" (start it with VLLM_SERVER_DEV_MODE=1 and {option})"


class VllmNccl(Vllm):
    """A server of vLLM in development mode, whose weight-transfer engine is vLLM's own ``nccl``."""

    first, engine, has_plugin = "0.32", "nccl", False
    check = Server.check

    def names(self) -> Iterable[str]:
        return frozenset(self.post("/weight_checker", action="checksum")["checksums"])

    def join(self, place: Mapping[str, Any], group: str, backend: str) -> None:
        one_broadcast = {"packed": True, "packed_buffer_size_bytes": 1 << 40, "packed_num_buffers": 1}
        self.post("/init_weight_transfer_engine", init_info={**place, **one_broadcast})

    def update(self, infos: Sequence[WeightInfo], group: str, keeping: Mapping[str, Any]) -> None:
        self.post("/update_weights", update_info=_described(infos))


class Sglang(Server):
    """A server of SGLang."""

    kind, first, stop = "SGLang", "0.5.21", "0.6"
    pauses: ClassVar[Mapping[Pause, str]] = {"keep": "retract", "abort": "abort"}

    def version(self) -> str:
        return str(self.get("/server_info", self._quick)["version"])

    def weights_version(self) -> str:
        return str(self.get("/model_info", self._quick)["weight_version"])

    def workers(self) -> int:
        known = self.get("/server_info")
        if known["dp_size"] != 1:
            raise WeightTransferError(f"{self.url} has dp_size {known['dp_size']}, and SGLang's updates need 1")
        return int(known["tp_size"]) * int(known.get("pp_size", 1))

    def join(self, place: Mapping[str, Any], group: str, backend: str) -> None:
        self.post("/init_weights_update_group", **place, group_name=group, backend=backend)

    def leave(self, group: str) -> None:
        self.post("/destroy_weights_update_group", self._quick, group_name=group)

    def names(self) -> Iterable[str]:
        ranks = self.post("/weights_checker", action="checksum")["ranks"]
        return frozenset(name for rank in ranks for name in rank["checksums"])

    def pause(self, how: Pause) -> None:
        self.post("/pause_generation", mode=self.pauses[how])

    def start(self) -> None:
        self.post("/begin_weight_update")

    def update(self, infos: Sequence[WeightInfo], group: str, keeping: Mapping[str, Any]) -> None:
        listed = _described(infos)
        listed["dtypes"] = listed.pop("dtype_names")
        self.post("/update_weights_from_distributed", **listed, group_name=group, load_format="flattened_bucket")

    def load(self, folder: Path, version: int) -> None:
        """Load a whole set from files."""
        self.post("/update_weights_from_disk", model_path=str(folder), weight_version=str(version))

    def end(self, version: int) -> None:
        self.post("/end_weight_update")
        self.post("/update_weight_version", new_version=str(version), abort_all_requests=False)

    def settle(self) -> None:
        self._try("/end_weight_update")  # which it refuses if nothing is open

    def resume(self) -> None:
        self.post("/continue_generation")

    @staticmethod
    def store_prefix(group: str, device: str) -> str:
        """Torch nests three stores in a group that is made by hand: by its name, its name again, and the device."""
        return f"{group}/{group}//{device}/"


def _described(infos: Sequence[WeightInfo]) -> dict[str, Any]:
    return {
        "names": [info.name for info in infos],
        "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


def _numbers(version: str) -> tuple[int, ...]:
    """``0.32.0+cpu`` as ``(0, 32, 0)``."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version, maxsplit=1)[0]))


# -- names

_JOINED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Layers of a checkpoint, and the layers into which engines join them."""

_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.")
_JOINED_EXPERTS = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2", "w1": "w13", "w3": "w13", "w2": "w2"}


def engine_names(name: str) -> list[str]:
    """The names that a checkpoint's tensor may have in an engine: its own, or that of what it is joined into."""
    found = [name]
    parts = name.split(".")
    found += [".".join([*parts[:i], _JOINED[part], *parts[i + 1 :]]) for i, part in enumerate(parts) if part in _JOINED]
    expert = _EXPERT.search(name)
    if expert is not None and expert[1] in _JOINED_EXPERTS:
        joined = f"{_JOINED_EXPERTS[expert[1]]}_{name[expert.end() :]}"
        found += [f"{name[: expert.start()]}.experts.{within}{joined}" for within in ("", "routed_experts.")]
    return found


def refuse_other_names(infos: Sequence[WeightInfo], known: Iterable[str], where: str) -> None:
    """Compare a set with the names of an engine's tensors.

    Raises:
        WeightTransferError: a tensor of the set is unknown there, or one there gets nothing.
    """
    known = frozenset(known)
    filled: set[str] = set()
    unknown = []
    for info in infos:
        found = [target for name in info.names for target in engine_names(name) if target in known]
        filled.update(found)
        if not found:
            unknown.append(info.name)
    missing = sorted(known - filled)
    if unknown or missing:
        texts = [f"{name} is unknown there" for name in unknown] + [f"{name} gets nothing" for name in missing]
        more = f"; {len(texts) - 3} more" if len(texts) > 3 else ""
        raise WeightTransferError(
            f"{where} has another model than the one that is trained: {'; '.join(texts[:3])}{more}. Nothing was sent"
        )


# -- transports --------------------------------------------------------------------------------------------------------

_FIRST_ID = "0"
"""Under which torch's group puts NCCL's identifier of its first communicator."""

_TRIES, _AGAIN = 2, 32
"""Of deltas and of whole sets, and after how many sets the slower ones are tried again."""

_GRACE = 2.0
"""Seconds in which a call's own error may arrive, after the broadcast has failed or the time is over."""


class _Servers(WeightTransport):
    """Servers of one kind.

    Raises:
        ValueError: there is no URL, or one is not ``http(s)://...``; an unknown ``pause``.
    """

    protocol: ClassVar[type[Server]]
    uses_file_names = True

    def __init__(self, urls: str | Sequence[str], pause: Pause | None, timeout_s: float, api_key: str | None) -> None:
        allowed = list(self.protocol.pauses)
        if pause is not None and pause not in allowed:
            raise ValueError(f"pause is {pause!r}; {self.protocol.kind} has {', '.join(map(repr, allowed))}")
        self._pause, self._timeout, self._api_key = pause or allowed[0], timeout_s, api_key
        self._servers = [self._server(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._servers:
            raise ValueError(f"{type(self).__name__} without a URL; give one such as http://host:8000")

    def _server(self, url: str) -> Server:
        return self.protocol(url, self._timeout, self._api_key)

    def _on_all(self, call: Callable[[Any], Any]) -> list[Any]:
        """Call for all servers at the same time; raises the first error."""
        calls = [_in_thread(call, server) for server in self._servers]
        wait(calls)
        return [one.result() for one in calls]


class ServerTransport(_Servers):
    """Servers of one kind that get the same weights, each with any number of tensor-parallel workers.

    Pass it as ``publish_weights(model, to=...)``. A server that was replaced or restarted is found before the next set.

    Args:
        urls: of the servers, such as ``http://host:8000``. :meth:`add` and :meth:`drop` change them between sets.
        pause: what happens to running requests: they are finished first (``wait``, the default of vLLM), kept and
            continued with the new weights (``keep``, the default of SGLang, which does not wait), or aborted.
        backend: of the process group; ``None``: ``nccl`` if the weights are on a GPU, else ``gloo``.
        timeout_s: seconds for one broadcast, and for one call.
        address: of this host as the servers see it; ``None``: that of the interface by which the first one is reached.
        api_key: sent as a bearer token.
        check: compare names with the servers' models before anything is sent.
        deltas: only ``VllmServer``. Weights that did not change since the last set are not sent. Each worker keeps a
            set in host memory for that, and each trainer its shards of one. ``"auto"``: where that takes less time than
            whole sets.

    Raises:
        ValueError: there is no URL, or one is not ``http(s)://...``; an unknown ``pause`` or ``deltas``; ``deltas``
            where servers load whole tensors only.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        pause: Pause | None = None,
        backend: Literal["gloo", "nccl"] | None = None,
        timeout_s: float = 300.0,
        address: str | None = None,
        api_key: str | None = None,
        check: bool = True,
        deltas: bool | Literal["auto"] = False,
    ) -> None:
        if deltas not in (False, True, "auto"):
            raise ValueError(f"deltas is {deltas!r}; allowed are False, True and 'auto'")
        if deltas and not self.protocol.has_plugin:
            raise ValueError(f"{type(self).__name__} loads whole tensors only; leave deltas out, or use VllmServer")
        super().__init__(urls, pause, timeout_s, api_key)
        self._next_servers = self._servers  # and the servers of the last set
        self.deltas, self._faster = bool(deltas), _Faster() if deltas == "auto" else None
        self._begun = 0.0
        self._set_id, self._base, self._buckets_left = "", "", 0
        self._backend, self._address, self._checks = backend, address, check
        self._link: WeightLink | None = None
        self._number, self._version = 0, 0  # of the link, and of the set
        self._joined = False  # servers have joined the group of this number
        self._half_sent = False  # some server may have half of a set
        self._name = f"lightstep-{uuid.uuid4().hex[:8]}"  # servers may remember the groups of an earlier trainer

    @property
    def urls(self) -> list[str]:
        """The servers that the next set goes to."""
        return [server.url for server in self._next_servers]

    def add(self, url: str) -> None:
        """Send to this server, too, from the next set on."""
        self._next_servers = [*self._next_servers, self._server(url)]

    def drop(self, url: str) -> None:
        """Do not send to this server any more, from the next set on. It may be gone.

        Raises:
            ValueError: it is none of :attr:`urls`, or the only one.
        """
        left = [server for server in self._next_servers if server.url != url.rstrip("/")]
        if not left or len(left) == len(self._next_servers):
            raise ValueError(f"drop({url!r}): the servers are {', '.join(self.urls)}, and one has to stay")
        self._next_servers = left

    def close(self) -> None:
        """Close the process group. Servers go on, unless they wait for a complete set."""
        self._disconnect()

    # -- one set

    def identify(self, set_id: str, base: str | None) -> None:
        self._set_id, self._base = set_id, base or ""

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        infos = _infos_of(buckets)
        if self._servers != self._next_servers:
            self._servers = [server for server in self._servers if server in self._next_servers]
            self._disconnect()
            self._servers = self._next_servers
        self._on_all(lambda server: server.refuse_other_versions())  # also finds those that are gone
        known = (bool(self._base) or self._link is not None) and self._all_know_the_last_version()
        holds = known and bool(self._base) and all(self._on_all(lambda server: server.holds(self._base, infos)))
        self.accepts_deltas = holds and (self._faster is None or self._faster.is_deltas())
        if self._link is not None and (not known or (self._base and not holds)):
            self._disconnect()
        if self._link is None:
            self._on_all(lambda server: server.settle())
            self._connect()
        self._version = version
        self.takes_device = self._link is not None and self._link.device.type != "cpu"
        if self._checks:
            self._on_all(lambda server: server.check(infos))
        self._buckets_left = len(buckets)
        self._begun = time.monotonic()
        self._half_sent = True  # from here on, only a complete set makes them go on
        self._on_all(lambda server: server.pause(self._pause))
        self._on_all(lambda server: server.start())

    def _all_know_the_last_version(self) -> bool:
        """Whether every server still has what it got last. One that was restarted has not."""
        found = self._on_all(lambda server: server.weights_version())
        return self._half_sent or all(version == str(self._version) for version in found)

    def send(self, bucket: Bucket) -> None:
        self._transfer(bucket.infos, self._servers[0].packed(bucket), None)

    def send_delta(self, delta: BucketDelta) -> None:
        self._transfer(delta.infos, delta.buffer, delta.changed)

    def _transfer(self, infos: Sequence[WeightInfo], data: Tensor, changed: int | None) -> None:
        """One broadcast, beside a call to each server. An empty delta needs no broadcast."""
        assert self._link is not None
        link, group = self._link, self._group
        keeping = self._keeping(changed)
        calls = [_in_thread(server.update, infos, group, keeping) for server in self._servers]
        try:
            self._wait_for(calls, _in_thread(link.send, data) if changed != 0 else None)
        except BaseException:
            self._close_link()  # the others must not wait for their part of the broadcast
            raise

    def _keeping(self, changed: int | None) -> dict[str, Any]:
        """What receivers are told that keep the set."""
        self._buckets_left -= 1
        if not self.deltas:
            return {}
        base = self._base if self.accepts_deltas else ""
        told = {"set_id": self._set_id, "base": base, "is_last": self._buckets_left == 0}
        return told if changed is None else {**told, "changed": changed}

    def _wait_for(self, calls: Sequence[Future[Any]], broadcast: Future[None] | None) -> None:
        """Wait for all, or raise the first error: that of a call, if there is one, says most."""
        work = [*calls, *([] if broadcast is None else [broadcast])]
        wait(work, self._timeout, FIRST_EXCEPTION)
        wait(calls, _GRACE, FIRST_EXCEPTION)
        what, cause = self._failure(work)
        if what:
            raise WeightTransferError(
                f"{what}. Training can go on; {', '.join(self.urls)} will stay paused until a complete set arrives"
            ) from cause

    def _failure(self, work: Sequence[Future[Any]]) -> tuple[str, BaseException | None]:
        """The first error of what was waited for, or that it took too long; ``""`` if all is done."""
        failed = next((one.exception() for one in work if one.done() and one.exception() is not None), None)
        if failed is not None:
            return str(failed) or type(failed).__name__, failed
        return ("" if all(one.done() for one in work) else f"no answer within {self._timeout:g} s"), None

    def finish(self) -> None:
        self._on_all(lambda server: server.end(self._version))
        self._half_sent = False
        self._on_all(lambda server: server.resume())
        if self._faster is not None:
            self._faster.note(self.accepts_deltas, time.monotonic() - self._begun)

    def abort(self, reason: str) -> None:
        """Paused servers stay paused: they may have half of this set, or of one whose trainer has died."""
        self._disconnect()

    # -- the process group

    @property
    def _group(self) -> str:
        return f"{self._name}-{self._number}"

    def _connect(self) -> None:
        """Open a process group with all workers of all servers; this process is the first member."""
        self._on_all(lambda server: server.forget_names())
        sizes = self._on_all(lambda server: server.workers())
        size, self._number = 1 + sum(sizes), self._number + 1
        address = self._address or _address_towards(self._servers[0].url)
        device = self._device()
        backend = "gloo" if device.type == "cpu" else "nccl"
        self._joined = True
        link, place = self._open(address, size, device)
        calls = []
        for n, server in enumerate(self._servers):
            own = {"rank_offset": 1 + sum(sizes[:n]), "world_size": size}
            calls.append(_in_thread(server.join, {**place, **own}, self._group, backend))
        try:
            self._wait_for_members(calls, link, address)
        except BaseException:
            link.add_done_callback(_close_if_open)
            raise
        self._link = link.result()

    def _open(self, address: str, size: int, device: torch.device) -> tuple[Future[WeightLink], dict[str, Any]]:
        """Open this end of the group. Returns it, and where the other members find it."""
        limit = timedelta(seconds=self._timeout)
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        meeting = dist.PrefixStore(self.protocol.store_prefix(self._group, device.type), store)
        link = self._new_link(meeting, size, device)
        return link, {"master_address": address, "master_port": store.port}

    def _new_link(self, store: dist.Store, size: int, device: torch.device) -> Future[WeightLink]:
        own_kind = self.protocol.has_plugin
        return _in_thread(WeightLink, self._number, store, 0, size, device, self._timeout, own_kind)

    def _wait_for_members(self, calls: Sequence[Future[Any]], link: Future[WeightLink], address: str) -> None:
        wait(work := [*calls, link], self._timeout, FIRST_EXCEPTION)
        what, cause = self._failure(work)
        if what:
            raise WeightTransferError(
                f"no process group with {', '.join(self.urls)}: {what}. They have to reach this host as {address} "
                "(address=...). Nothing was sent"
            ) from cause

    def _device(self) -> torch.device:
        if self._backend == "gloo" or not torch.cuda.is_available():
            if self._backend == "nccl":
                raise WeightTransferError("backend is nccl, and this process has no GPU; leave it out, or set gloo")
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _close_link(self) -> None:
        """In a thread: gloo waits for a broadcast that is under way, up to its timeout."""
        if self._link is not None:
            _in_thread(self._link.close)
        self._link = None

    def _disconnect(self) -> None:
        self._close_link()
        if self._joined:
            self._joined = False
            with contextlib.suppress(WeightTransferError):
                self._on_all(lambda server: server.leave(self._group))


class _Faster:
    """Whether deltas or whole sets took less time lately. Both are tried twice at first: they allocate memory then."""

    def __init__(self) -> None:
        self._seconds, self._tried, self._left = {False: 0.0, True: 0.0}, {False: 0, True: 0}, _AGAIN

    def is_deltas(self) -> bool:
        """What the next set should be. The slower one has its turn now and then: links and learning rates change."""
        if min(self._tried.values()) < _TRIES:
            return self._tried[True] <= self._tried[False]
        self._left = self._left - 1 if self._left else _AGAIN
        return (self._seconds[True] < self._seconds[False]) is bool(self._left)

    def note(self, is_deltas: bool, seconds: float) -> None:
        """A set arrived."""
        self._seconds[is_deltas] = seconds
        self._tried[is_deltas] += 1


class VllmServer(ServerTransport):
    """Servers of vLLM 0.28 to 0.33, in development mode, with lightstep's plugin (tried: 0.32.0).

    lightstep has to be installed beside vLLM. Start it with::

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "lightstep"}'
    """

    protocol = Vllm


class VllmNcclServer(ServerTransport):
    """Servers of vLLM 0.32 and 0.33, in development mode, with vLLM's own engine for NCCL, without lightstep.

    Start it with::

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'

    A trainer needs a GPU. That engine has no time limit: where a trainer dies in the middle of a set, the server waits
    for ever, and has to be restarted. Deltas need :class:`VllmServer`.
    """

    protocol = VllmNccl

    def _open(self, address: str, size: int, device: torch.device) -> tuple[Future[WeightLink], dict[str, Any]]:
        """NCCL makes an identifier, by which the members meet when the last one has it."""
        store, deadline = dist.HashStore(), time.monotonic() + self._timeout
        link = self._new_link(store, size, device)
        while not store.check([_FIRST_ID]):
            if link.done() or time.monotonic() > deadline:
                what = link.exception() if link.done() else f"no identifier within {self._timeout:g} s"
                raise WeightTransferError(f"NCCL did not open a group: {what}. Nothing was sent")
            time.sleep(0.002)
        return link, {"nccl_unique_id_b64": base64.b64encode(store.get(_FIRST_ID)).decode()}

    def _new_link(self, store: dist.Store, size: int, device: torch.device) -> Future[WeightLink]:
        def connected() -> WeightLink:
            link = WeightLink(self._number, store, 0, size, device, self._timeout, own_kind=False)
            link.connect()
            return link

        return _in_thread(connected)

    def _device(self) -> torch.device:
        device = super()._device()
        if device.type == "cpu":
            raise WeightTransferError("vLLM's engine nccl needs a trainer with a GPU; VllmServer takes gloo, too")
        return device


class SglangServer(ServerTransport):
    """Servers of SGLang from 0.5.21 on (tried: 0.5.23), which need nothing of lightstep's."""

    protocol = Sglang


class SglangFolder(_Servers):
    """Servers of SGLang that load each set from a folder, which they and the first trainer see under one path.

    Pass it as ``publish_weights(model, to=...)``. Unlike :class:`SglangServer` it needs no process group, and takes
    servers with any ``dp_size``. The folder holds one set, and two while the next one is written.

    Args:
        urls: of the servers, such as ``http://host:8000``.
        folder: for nothing else.
        pause: what happens to running requests: ``keep`` (default) or ``abort``.
        timeout_s: seconds for one call.
        api_key: sent as a bearer token.

    Raises:
        ValueError: there is no URL, or one is not ``http(s)://...``; an unknown ``pause``.
    """

    protocol = Sglang

    def __init__(
        self,
        urls: str | Sequence[str],
        folder: str | Path,
        *,
        pause: Pause = "keep",
        timeout_s: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        super().__init__(urls, pause, timeout_s, api_key)
        self._folder = Path(folder).absolute()
        self._version = self._files = 0
        self._loaded: Path | None = None

    @property
    def _set(self) -> Path:
        return self._folder / f"set-{self._version}"

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        infos = _infos_of(buckets)
        self._on_all(lambda server: server.refuse_other_versions())
        self._on_all(lambda server: server.forget_names())  # nothing tells whether it was restarted
        self._on_all(lambda server: server.check(infos))
        self._version, self._files = version, 0
        shutil.rmtree(self._set, ignore_errors=True)
        self._set.mkdir(parents=True)

    def send(self, bucket: Bucket) -> None:
        self._files += 1
        tensors = {info.name: tensor.cpu() for info, tensor in bucket}
        save_file(tensors, self._set / f"model-{self._files:05}.safetensors", {"format": "pt"})

    def finish(self) -> None:
        self._on_all(lambda server: server.pause(self._pause))
        self._on_all(lambda server: server.load(self._set, self._version))  # after an error they stay paused
        self._on_all(lambda server: server.resume())
        self._loaded = self._set
        for other in self._folder.glob("set-*"):  # also those of an earlier trainer
            if other != self._loaded:
                shutil.rmtree(other, ignore_errors=True)

    def abort(self, reason: str) -> None:
        if self._set != self._loaded:
            shutil.rmtree(self._set, ignore_errors=True)


def _infos_of(buckets: Sequence[Sequence[WeightInfo]]) -> list[WeightInfo]:
    """All of a set; there has to be something."""
    infos = [info for bucket in buckets for info in bucket]
    if not infos:
        raise WeightTransferError("there are no weights to send")
    return infos


def _in_thread(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """What ``call`` returns or raises. The program may end before: a broadcast ends at its time limit."""
    future: Future[Any] = Future()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # what was queued there comes first

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lightstep-servers", daemon=True).start()
    return future


def _close_if_open(link: Future[WeightLink]) -> None:
    if link.exception() is None:
        link.result().close()


def _address_towards(url: str) -> str:
    """This host's address on the interface by which ``url`` is reached."""
    parts = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise WeightTransferError(f"{url} cannot be reached: {error}") from error
        return str(probe.getsockname()[0])
