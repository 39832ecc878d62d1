"""Sending weights to servers of SGLang by files, where no process group reaches them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file

from lightstep.rollout.server_protocols import Pause, Sglang
from lightstep.rollout.transport import Bucket, WeightInfo, WeightTransferError, WeightTransport

__all__ = ["SglangFolder"]


class SglangFolder(WeightTransport):
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

    uses_file_names = True

    def __init__(
        self,
        urls: str | Sequence[str],
        folder: str | Path,
        *,
        pause: Pause = "keep",
        timeout_s: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        if pause not in Sglang.pauses:
            raise ValueError(f"pause is {pause!r}; SGLang has {', '.join(map(repr, Sglang.pauses))}")
        self._servers = [Sglang(url, timeout_s, api_key) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._servers:
            raise ValueError("SglangFolder without a URL; give one such as http://host:8000")
        self._folder, self._pause = Path(folder).absolute(), pause
        self._version = self._files = 0
        self._loaded: Path | None = None

    @property
    def _set(self) -> Path:
        return self._folder / f"set-{self._version}"

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        infos = [info for bucket in buckets for info in bucket]
        if not infos:
            raise WeightTransferError("there are no weights to send")
        self._on_all(lambda server: server.refuse_other_versions())
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

    def _on_all(self, call: Callable[[Sglang], object]) -> None:
        """Call for all servers at the same time; raises the first error."""
        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(call, self._servers))
