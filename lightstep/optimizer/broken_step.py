"""A step that broke off: some parameters are updated and others are not, until state is loaded for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor

from lightstep.state.backend import Managed, StateBackend


class BrokenStep:
    """What broke a step off, if one did; true until every parameter has been given its state again.

    Args:
        managed: all parameters.
        backend: abandoned after a failure: nobody will wait for the rest of the step.
    """

    def __init__(self, managed: Iterable[Managed], backend: StateBackend) -> None:
        self._managed, self._backend = managed, backend
        self._what: str | None = None
        self._left: set[Tensor] = set()
        self._weights_only = False

    def __bool__(self) -> bool:
        return self._what is not None

    @contextlib.contextmanager
    def guard(self, what: str, then: str = "") -> Iterator[None]:
        """After an error in here some units are updated and others are not.

        Args:
            then: what else follows from it.

        Raises:
            RuntimeError: what failed, from the error itself. Interrupts go on as they are.
        """
        try:
            yield
        except Exception as error:
            message = self.because(self.note(what, error) + then)
            self._backend.abandon()
            raise RuntimeError(message) from error
        except BaseException as interruption:
            self.note(what, interruption)
            self._backend.abandon()
            raise

    def note(self, what: str, error: BaseException) -> str:
        """From now on nothing goes on; returns what failed."""
        return self.because(f"{what} failed ({type(error).__name__}: {error})")

    def because(self, reason: str, weights_only: bool = False) -> str:
        """:meth:`note` in other words; ``weights_only``: the state is what it was, and would do for other weights."""
        self._weights_only = weights_only and (self._what is None or self._weights_only)
        self._what = reason
        self._left = {item.param for item in self._managed}
        return reason

    def repaired(self, parameter: Tensor) -> None:
        """This one has been given its state."""
        self._left.discard(parameter)
        if not self._left:
            self._what = None

    def refreshed(self) -> None:
        """Masters were made of the weights."""
        if self._weights_only:
            self._what = None

    def refuse(self, remedy: str) -> None:
        """Raises ``RuntimeError`` with what failed and ``remedy``, if something has."""
        if self._what is not None:
            raise RuntimeError(f"{self._what}; weights and state may be half updated. {remedy}")
