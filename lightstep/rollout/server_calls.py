"""Servers of vLLM and SGLang: the calls of their protocols over HTTP, and the names of their models' tensors."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import re
import socket
import struct
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightstep.rollout.transport import Bucket, WeightInfo, WeightTransferError

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
        self.start()
        try:
            self.post("/update_weights", update_info={**_described(infos), "check_only": True})
        except WeightTransferError as error:
            if not isinstance(error, NoAnswer):
                self._try("/finish_weight_update")  # one worker has refused, and the others have begun
            raise
        self.post("/finish_weight_update")

    def pause(self, how: Pause) -> None:
        self.post(f"/pause?mode={self.pauses[how]}")

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

    def start(self) -> None:
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
