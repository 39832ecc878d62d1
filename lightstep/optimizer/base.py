"""The interface of every lightstep optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.optimizer.update import StepResult
from lightstep.precision.loss_scale import LossScale


class BaseOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that also does backward, loss scaling and clipping, and places its state.

    ``param_groups[*]["params"]`` are the model's own parameters. Schedulers, hooks, ``zero_grad``, ``deepcopy`` and
    ``torch.distributed.checkpoint.state_dict`` work on it as on any torch optimizer.
    """

    loss_scale: LossScale
    """Multiplies the loss; ``optimizer.loss_scale.scale`` is its value."""

    @abstractmethod
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Scale ``loss`` (one element) and backpropagate."""

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Consume the gradients (``p.grad is None`` afterwards) and update the weights, or skip on overflow.

        Does not wait for the device; reading the result does (:class:`~lightstep.optimizer.update.StepResult`). For
        exceptions see ``docs/how-a-step-works.md``.
        """

    accumulating: bool | None = None
    """Whether more micro-batches of the step follow the one that is running. ``strategy.accumulate`` sets it on
    optimizers that ``strategy.create_optimizer`` made. ``None``: not known, so that updates wait for ``step()``."""

    unreduced: bool = False
    """Whether a backward has left gradients on their ranks that a step would miss."""

    def expect_reduction(self) -> None:
        """A backward reduces them now, or has done so: :attr:`unreduced` becomes ``False``, unless they are left.
        ``strategy.accumulate`` calls this."""
        self.unreduced = False

    def expect_unreduced(self) -> None:
        """A micro-batch without a reduction has ended, perhaps by the user's own ``loss.backward()``.
        ``strategy.accumulate`` calls this."""

    @contextmanager
    def between_steps(self, what: str = "reading weights and state") -> Iterator[None]:
        """No other thread changes weights or state in the body: what it reads is of one moment, after a whole step.

        Steps in other threads wait for the body. ``state_dict`` and checkpoints use this by themselves.

        Args:
            what: names the body in errors.

        Raises:
            RuntimeError: in a forked process, or in the middle of a step (a signal handler, a finalizer).
        """
        yield

    @abstractmethod
    def wait_for_update(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Wait for deferred updates of these parameters; ``None``: of all.

        On an accelerator the current stream waits and the host does not. Forwards, ``state_dict`` and checkpoints call
        this by themselves.
        """

    @property
    @abstractmethod
    def has_deferred_updates(self) -> bool:
        """Whether updates of the last step may still be pending."""

    def wait_for_step(self) -> None:
        """:meth:`wait_for_update` for the updates of the last ``step()`` only: those that began since then go on."""
        self.wait_for_update()

    def add_update_listener(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` when weights may change before ``step()``."""

    @abstractmethod
    def wait_on_stream(self, parameters: Iterable[Tensor]) -> None:
        """The current stream waits for these parameters' updates, and no other does.

        For a stream that reads weights beside the one that computes (FSDP2 gathers on its own stream). The one that
        computes calls :meth:`wait_for_update` itself.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all deferred work is done, in the parameters and in the state. The host waits.

        Raises:
            RuntimeError: a step or a load has failed halfway, and no state has been loaded since. The three methods
                below do so, too.
        """

    @abstractmethod
    def memory_report(self) -> dict[str, float]:
        """Bytes that this process holds between steps.

        The keys are ``device_bytes``, ``host_bytes``, ``ring_bytes``, ``gradient_stage_bytes``, ``exchange_bytes``
        (matrices sent between ranks), ``saving_bytes`` (copies on the host for asynchronous saves, kept for the next
        one; spare records are in ``host_bytes``), ``delta_bytes`` (on the device, to find what changes in published
        weights), ``parameters`` (elements of the local shards),
        ``device_bytes_per_parameter`` and ``host_bytes_per_parameter``. The last two are per local element: replicas
        that share the state hold less of it each.
        """

    @abstractmethod
    def set_residency(self, gib: float | Literal["auto"]) -> None:
        """Set how much optimizer state stays on the device, in GiB.

        A surplus is offloaded at once; what there is room for is loaded by the next step. No result changes; a step
        gets shorter with each GiB that is not streamed. ``"auto"`` measures the memory that is free at the peak of the
        next steps. In a strategy file this is ``optimizer_state.resident_gib``.

        Raises:
            ValueError: not a number of at least 0 or ``"auto"``, or a state backend other than ``stream``.
        """

    @abstractmethod
    def release_device_memory(self) -> None:
        """Free what the optimizer holds on the device: state, masters, ring, scratch, and the allocator's cache.

        For a phase in which something else needs the memory (a rollout engine). The next step allocates it again. If
        the device has no room then, ``step()`` raises ``torch.OutOfMemoryError`` before it has changed anything, and
        may be called again. Meanwhile the state can be read, on the host. Weights, gradients and 0-dim counters stay on
        the device. The host waits.

        Raises:
            HostMemoryError: the host has no room for the state of ``resident``; nothing has been changed.
        """

    @abstractmethod
    def refresh_master_weights(self) -> None:
        """Rebuild the fp32 masters from the model's weights."""
