"""Who may work on an optimizer: one thread at a time, no fork, and nobody after a step that failed halfway.

*Work* changes weights, state or the queue of updates: ``step()``, a wait that runs deferred updates, a read of one
parameter's state (it uses the same memory). One thread works at a time, and the others wait for it. Work that is asked
for in the middle of work, in the same thread, is refused: it comes from a signal handler, a finalizer or a hook, and
would see half of an update. The library's own code calls, from within work, the methods that are not guarded.

A *reader* (``state_dict()``, a save) works several times, and keeps other threads out in between.

A backward that updates weights keeps other threads out, too, apart from autograd's own: on an accelerator these run the
backward, and not the thread that called it.

A forked child has neither the threads nor the streams that updates run in, and a lock may be held there by a thread
that does not exist. So it is refused before any lock is touched. Data loaders fork their workers, and what these run
may ask for ``model.dtype``. The updates under way go on in the parent alone. So in a child that was forked meanwhile
the parameters have shapes and dtypes, wait for nothing, and refuse whatever needs their values.

The library's own work runs outside of autograd, inference mode and ``torch.compile``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from lightstep.error_text import error_text
from lightstep.optimizer.managed_parameters import ManagedParameters
from lightstep.state.schema import Managed
from lightstep.state.store import Store

__all__ = ["BrokenStep", "StepGuard", "eager", "eager_backward", "no_grad_no_inference", "watch_forks"]


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


class StepGuard:
    """Admits one thread at a time, of the process that made it.

    Args:
        backend: knows the threads in which updates run.
        managed: the parameters.

    Attributes:
        backward: held by the thread that runs a backward in which weights are updated.
        trainer: the thread that ran the last backward or step.
    """

    def __init__(self, backend: Store, managed: ManagedParameters) -> None:
        self.backward = threading.RLock()
        self.trainer: int | None = None
        self._lock = threading.RLock()
        self._work: tuple[int, str] | None = None  # the thread that works, and what it does
        self._process, self._backend, self._managed = os.getpid(), backend, managed

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that made the optimizer."""
        return os.getpid() != self._process

    @property
    def is_busy(self) -> bool:
        """Whether some thread works."""
        return self._work is not None

    @property
    def is_busy_elsewhere(self) -> bool:
        """Whether another thread works."""
        return self._work is not None and not self.is_busy_here

    @property
    def is_busy_here(self) -> bool:
        """Whether this thread works."""
        work = self._work
        return work is not None and work[0] == threading.get_ident()

    @property
    def is_foreign(self) -> bool:
        """Whether this thread is not the one that trains, which may use other streams."""
        return self.trainer not in (None, threading.get_ident()) and torch._C._current_graph_task_id() == -1

    def check(self, what: str) -> None:
        """Raise ``RuntimeError`` in a forked child, and from within work."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{what} in process {os.getpid()}, a fork of process {self._process}, which made the optimizer: a fork "
                "can neither train with it nor read its state. Do that in the process that made it, or make model and "
                "optimizer in the process that trains"
            )
        work = self._work
        if work is not None and work[0] == threading.get_ident():
            self._refuse(what, work[1])
        if (interrupted := self._backend.interrupted_work) is not None:
            self._refuse(what, interrupted)

    def _refuse(self, what: str, work: str) -> None:
        raise RuntimeError(
            f"{what} in the middle of {work} (in a signal handler, a finalizer or a hook): weights and state may be "
            "half updated there. Nothing has been done; set a flag in the handler, and do it after step()"
        )

    def work(
        self, what: str, body: Callable[Parameters, Result], *arguments: Parameters.args, **keywords: Parameters.kwargs
    ) -> Result:
        """Call ``body`` when no other thread works or reads, outside of autograd and inference mode.

        Args:
            what: names it in messages.

        Raises:
            RuntimeError: see :meth:`check`.
        """
        self.check(what)
        in_autograd = torch._C._current_graph_task_id() != -1
        with no_grad_no_inference(), self._lock if in_autograd else self.backward, self._lock:
            try:  # no call between these lines: a handler's exception there would leave the mark
                self._work = (threading.get_ident(), what)
                return body(*arguments, **keywords)
            finally:
                self._work = None

    def settle(self) -> None:
        """If this is another thread than the one that trains, the host waits: their streams may be different ones."""
        if self.is_foreign:
            for device in self._managed.devices:
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """No other thread works in the body, and this one may.

        Raises:
            RuntimeError: see :meth:`check`.
        """
        self.check(what)
        in_autograd = torch._C._current_graph_task_id() != -1
        with self._lock if in_autograd else self.backward, self._lock:
            yield


class BrokenStep:
    """The reason why a step failed, if one did. It is true until state has been loaded for every parameter.

    Args:
        managed: all parameters.
        backend: abandons the step after a failure.

    Attributes:
        reason: why it failed; ``None``: no step is broken.
        stops_others: other ranks need this one to go on.
    """

    def __init__(self, managed: Iterable[Managed], backend: Store) -> None:
        self._managed, self._backend = managed, backend
        self.reason: str | None = None
        self._not_loaded: set[Tensor] = set()
        self._weights_only = self.stops_others = False

    def __bool__(self) -> bool:
        return self.reason is not None

    @property
    def needs_state(self) -> bool:
        """Whether masters that are rebuilt from other weights do not repair it."""
        return self.reason is not None and not self._weights_only

    def fail(self, what: str, error: BaseException) -> None:
        """Mark the step as broken: a part of it has failed. The caller raises the error again if this returns.

        Args:
            what: names the part in the message.

        Raises:
            RuntimeError: what failed, chained to the error itself, unless that is an interrupt.
        """
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
        self._weights_only = weights_only and (self.reason is None or self._weights_only)
        self.reason = reason
        self._not_loaded = {item.param for item in self._managed}
        return reason

    def mark_loaded(self, parameter: Tensor) -> None:
        """State has been loaded for this parameter."""
        self._not_loaded.discard(parameter)
        if not self._not_loaded:
            self.reason = None

    def mark_masters_rebuilt(self) -> None:
        """All masters have been rebuilt from the weights."""
        if self._weights_only:
            self.reason = None

    def refuse(self, remedy: str) -> None:
        """Raise ``RuntimeError`` with the reason and ``remedy`` if a step is broken."""
        if self.reason is not None:
            raise RuntimeError(f"{self.reason}; weights and state may be half updated. {remedy}")


def eager(function: Function) -> Function:
    """``torch.compiler.disable`` without importing ``torch._dynamo``, which takes as long as ``import torch``."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*arguments, **keywords)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what dynamo checks before it traces a function
    return cast(Function, call)


@contextlib.contextmanager
def eager_backward() -> Iterator[None]:
    """Switch compiled autograd off: it cannot trace hooks, or gradients with another dtype than their parameter's.

    The backward of a compiled forward stays compiled.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    with contextlib.nullcontext() if compiled is None else compiled._disable():
        yield


def no_grad_no_inference() -> contextlib.AbstractContextManager[object]:
    """``torch.no_grad()`` with inference mode switched off.

    Tensors made under ``torch.inference_mode()`` cannot be written to outside of it. Evaluation and generation run
    under it, and may call into the library, which then allocates memory that later steps write to.
    """
    if not torch.is_inference_mode_enabled():
        return torch.no_grad()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


class _Updates(Protocol):
    """Updates of some parameters."""

    @property
    def are_under_way(self) -> bool: ...

    def parameters(self) -> Iterable[Tensor]: ...


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_handlers: list[Any] = []  # that the interpreter calls after forks: none, or one


def watch_forks(updates: _Updates) -> None:
    """In a child that is forked while ``updates`` are under way, make their parameters refuse reads of their values."""
    _watched.add(updates)
    if not _handlers:
        _handlers.append(_in_child)
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for updates in list(_watched):
        if updates.are_under_way:
            for parameter in updates.parameters():
                _refuse_values(parameter)


def _refuse_values(parameter: Tensor) -> None:
    known = type(parameter)
    if not issubclass(known, _NotUpToDate):
        parameter.__class__ = type(known.__name__, (_NotUpToDate, known), {})


class _NotUpToDate:
    """A parameter in a fork, whose update is going on in the parent."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name in _DESCRIPTIONS:
                return func(*args, **(kwargs or {}))
            if name == "__get__" and not isinstance(found := func(*args), Tensor):
                return found
        what = func.__self__.__name__ if name == "__get__" else name
        raise RuntimeError(
            f"{what} of a parameter in process {os.getpid()}, which was forked while the parameter was being updated: "
            "its values are out of date here. Call optimizer.synchronize() before processes are forked (data loaders "
            "fork their workers when iteration begins)"
        )


_DESCRIPTIONS = frozenset(
    getattr(Tensor, name).__name__
    for name in (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "get_device", "__len__"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "__hash__"),
    )
)
