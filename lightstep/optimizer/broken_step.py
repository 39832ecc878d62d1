"""A step that failed halfway: some parameters are updated and others are not, until all state is loaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType

from torch import Tensor

from lightstep.error_text import error_text
from lightstep.state.schema import Managed
from lightstep.state.store import Store


class OnError:
    """A context manager that calls ``handle`` with the error if its body fails, and lets the error go on.

    It is entered for every unit: one that is made of a generator takes four times as many calls.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: Callable[[BaseException], object]) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None:
            self._handle(error)


class BrokenStep:
    """The reason why a step failed, if one did. It is true until state has been loaded for every parameter.

    Args:
        managed: all parameters.
        backend: abandons the step after a failure.

    Attributes:
        stops_others: other ranks need this one to go on.
    """

    def __init__(self, managed: Iterable[Managed], backend: Store) -> None:
        self._managed, self._backend = managed, backend
        self._reason: str | None = None
        self._not_loaded: set[Tensor] = set()
        self._weights_only = self.stops_others = False

    def __bool__(self) -> bool:
        return self._reason is not None

    def guard(self, what: str) -> OnError:
        """Mark the step as broken if the body fails.

        Args:
            what: names the body in the message.

        Raises:
            RuntimeError: what failed, chained to the error itself. Interrupts are raised as they are.
        """
        return OnError(partial(self._fail, what))

    def _fail(self, what: str, error: BaseException) -> None:
        message = self.mark_failed(what, error)
        if self.stops_others and isinstance(error, Exception):
            message = self.mark(f"{message}; other ranks wait for this one until its process ends")
        self._backend.abandon()
        if isinstance(error, Exception):
            raise RuntimeError(message) from error

    def mark_failed(self, what: str, error: BaseException) -> str:
        """:meth:`mark` with a reason made of ``what`` and the error."""
        return self.mark(f"{what} failed ({error_text(error)})")

    def mark(self, reason: str, weights_only: bool = False) -> str:
        """Mark the step as broken; returns ``reason``.

        Args:
            weights_only: only weights are affected; masters rebuilt from other weights repair it, too.
        """
        self._weights_only = weights_only and (self._reason is None or self._weights_only)
        self._reason = reason
        self._not_loaded = {item.param for item in self._managed}
        return reason

    def mark_loaded(self, parameter: Tensor) -> None:
        """State has been loaded for this parameter."""
        self._not_loaded.discard(parameter)
        if not self._not_loaded:
            self._reason = None

    def mark_masters_rebuilt(self) -> None:
        """All masters have been rebuilt from the weights."""
        if self._weights_only:
            self._reason = None

    def refuse(self, remedy: str) -> None:
        """Raise ``RuntimeError`` with the reason and ``remedy`` if a step is broken."""
        if self._reason is not None:
            raise RuntimeError(f"{self._reason}; weights and state may be half updated. {remedy}")
