"""Programs in forks of the process that ranks of the pool are forked from, where all is imported that tests need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


class Forked:
    """Runs ``target(*arguments)``. The methods are those of ``subprocess.Popen``."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it runs after {timeout} s"
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
