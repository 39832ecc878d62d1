"""The contract every lightstep optimizer keeps, whatever does the work behind it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.optimizer.result import StepResult
from lightstep.precision.loss_scale import LossScale


class BaseOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that also owns backward, loss scaling, clipping and the place of its state.

    ``param_groups[*]["params"]`` are the model's own parameters. Schedulers, hooks, ``zero_grad``, ``deepcopy`` and
    ``torch.distributed.checkpoint.state_dict`` work on it as on any torch optimizer.
    """

    loss_scale: LossScale
    """What the loss is multiplied with; ``optimizer.loss_scale.scale`` reads it."""

    @abstractmethod
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Scale ``loss`` (one element) and backpropagate."""

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Consume the gradients (``p.grad is None`` afterwards) and update the weights, or skip on overflow.

        Never waits for the device unless the result is read: see :class:`~lightstep.optimizer.result.StepResult`, and
        ``docs/how-a-step-works.md`` for the exceptions.
        """

    accumulating: bool | None = None
    """Whether the micro-batch that is running is not its step's last one. ``strategy.accumulate`` says so to those that
    ``strategy.create_optimizer`` made; ``None``: nobody does, and updates wait for ``step()``."""

    unreduced: bool = False
    """Whether the last backward left gradients on their ranks that a step would miss; ``strategy.accumulate`` takes it
    back where the next one reduces them."""

    @abstractmethod
    def wait_for_update(self, parameters: Iterable[Tensor] | None = None) -> None:
        """What is done next sees these parameters updated (``None``: all of them) when a step's updates are deferred.

        On an accelerator the current stream waits and the host does not. Forwards, ``state_dict`` and checkpoints call
        this by themselves.
        """

    @property
    @abstractmethod
    def has_deferred_updates(self) -> bool:
        """Whether updates of the last step may still be under way."""

    def wait_for_step(self) -> None:
        """:meth:`wait_for_update` of all that ``step()`` has decided; what began since then goes on."""
        self.wait_for_update()

    def tell_of_updates(self, listener: Callable[[], object]) -> None:
        """``listener`` is called when weights have changed outside of ``step()``."""

    @abstractmethod
    def wait_on_stream(self, parameters: Iterable[Tensor]) -> None:
        """The current stream waits for these parameters' updates, and no other does.

        For a stream that reads weights beside the one that computes (FSDP2 gathers on its own), which calls
        :meth:`wait_for_update` in its turn.
        """

    def land(self, parameters: Iterable[Tensor] | None = None) -> None:
        """The earlier name of :meth:`wait_for_update`."""
        self.wait_for_update(parameters)

    def hold(self, parameters: Iterable[Tensor]) -> None:
        """The earlier name of :meth:`wait_on_stream`."""
        self.wait_on_stream(parameters)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all deferred work has landed in the parameters and the state."""

    @abstractmethod
    def memory_report(self) -> dict[str, float]:
        """Bytes held by this process between steps: ``device_bytes``, ``host_bytes``, ``ring_bytes``,
        ``gradient_stage_bytes``, ``exchange_bytes`` (matrices on their way between ranks), ``saving_bytes`` (copies on
        the host for asynchronous saves, kept for the next one; spare records are in ``host_bytes``), ``parameters``
        (elements of its local shards), ``device_bytes_per_parameter`` and ``host_bytes_per_parameter``: per local
        element, so that replicas that share the state hold less of it each."""

    @abstractmethod
    def set_residency(self, gib: float | Literal["auto"]) -> None:
        """Keep this much optimizer state on the device, in GiB. A surplus leaves now, what fits comes next step.

        No result changes; a step gets shorter with each GiB that is not streamed. ``"auto"`` measures what is spare at
        the peak of the next steps. In a strategy file it is ``optimizer_state.resident_gib``.

        Raises:
            ValueError: not a number of at least 0 or ``"auto"``, or a state backend other than ``stream``.
        """

    @abstractmethod
    def release_device_memory(self) -> None:
        """Give back what the optimizer holds on the device: state, masters, ring, scratch, and the allocator's cache.

        For a phase in which something else needs the memory (a rollout engine). It comes back by itself with the next
        step. If the device has no room then, ``step()`` raises ``torch.OutOfMemoryError`` before it has changed
        anything, and may be called again. Meanwhile the state can be read, on the host. Weights, gradients and 0-dim
        counters stay on the device. The host waits.

        Raises:
            HostMemoryError: the host has no room for the state of ``resident``; nothing was changed.
        """

    @abstractmethod
    def refresh_master_weights(self) -> None:
        """Rebuild the fp32 masters from the model's weights."""
