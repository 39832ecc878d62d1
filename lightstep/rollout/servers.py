"""Sending weights to servers of vLLM and SGLang: calls over HTTP, beside broadcasts over a process group, or files.

A set is compared with the server's model before the first byte. It is received while the server is paused, and requests
and version see it when all of it has arrived. After a failure the server stays paused until a complete set arrives.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lightstep.rollout.server_calls import Pause, Server, Sglang, Vllm, VllmNccl
from lightstep.rollout.transport import (
    Bucket,
    BucketDelta,
    WeightInfo,
    WeightLink,
    WeightTransferError,
    WeightTransport,
)
from lightstep.state.lanes import thread_joined_at_exit

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

    # -- one set

    def identify(self, set_id: str, base: str | None) -> None:
        self._set_id, self._base = set_id, base or ""

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        infos = _infos_of(buckets)
        if self._servers != self._next_servers:
            self._servers = [server for server in self._servers if server in self._next_servers]
            self.close()
            self._servers = self._next_servers
        self._on_all(lambda server: server.refuse_other_versions())  # also finds those that are gone
        known = (bool(self._base) or self._link is not None) and self._all_know_the_last_version()
        holds = known and bool(self._base) and all(self._on_all(lambda server: server.holds(self._base, infos)))
        self.accepts_deltas = holds and (self._faster is None or self._faster.is_deltas())
        if self._link is not None and (not known or (self._base and not holds)):
            self.close()
        if self._link is None:
            self._on_all(lambda server: server.settle())
            self._connect()
        self._version = version
        self.takes_device = self._link is not None and self._link.device.type != "cpu"
        if self._checks:
            self._on_all(lambda server: server.check(infos))
        self._buckets_left = len(buckets)
        self._begun = time.monotonic()
        self._on_all(lambda server: server.pause(self._pause))  # from here on, only a complete set makes them go on
        self._on_all(lambda server: server.start())

    def _all_know_the_last_version(self) -> bool:
        """Whether every server still has what it got last. One that was restarted has not."""
        found = self._on_all(lambda server: server.weights_version())
        return all(version == str(self._version) for version in found)

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
        self._on_all(lambda server: server.resume())
        if self._faster is not None:
            self._faster.note(self.accepts_deltas, time.monotonic() - self._begun)

    def abort(self, reason: str) -> None:
        """Paused servers stay paused: they may have half of this set, or of one whose trainer has died."""
        self.close()

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

    def close(self) -> None:
        """Close the process group. Servers go on, unless they wait for a complete set."""
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
    """What ``call`` returns or raises. A program that ends waits some seconds for it: a broadcast ends at its time
    limit, and a group that is being closed when the interpreter ends would abort the process."""
    future: Future[Any] = Future()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # what was queued there comes first

    def run() -> None:
        try:
            with torch.cuda.stream(stream):
                future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    thread_joined_at_exit(run, "lightstep-servers")
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
