"""FSDP2's all-gathers wait for deferred updates: each unit's all-gather for those of its own shards.

FSDP2 copies a unit's shards into the all-gather's input on a stream of its own, often before the unit is called. torch
lets users replace the all-gather, and asks it for memory just before that copy: there the stream is made to wait.

Shards that are cast first (fp32 shards, bf16 compute) are read before that. If that has been observed, and a forward
begins with updates pending, its units are gathered from here: ``unshard(async_op=True)`` reads on the current stream,
which can be made to wait first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from lightstep.distributed import local_tensor
from lightstep.sharding.fsdp_groups import ParameterGroup, own_parts, parameter_groups
from lightstep.sharding.hooks import ModuleHook
from lightstep.sharding.parameter_reads import AwaitedParameters, awaited, updates_of

__all__ = ["GatheringGates"]


class GatheringGates:
    """Makes the all-gathers of one FSDP2 model wait, each for the updates of its own shards.

    Args:
        modules: :func:`sharded_modules` of the model; the first one is the root.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._root = weakref.ref(modules[0])
        self._units = weakref.WeakKeyDictionary({module: _gate_all_gathers(module, modules) for module in modules})
        self._called_next: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._last: nn.Module | None = None  # called in the forward that is running
        self._running = self._gathers_here = False
        self._prefetched: tuple[nn.Module, UnshardHandle] | None = None
        self._stream: torch.Stream | None = None
        for module in modules:
            module.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True)
        modules[0].register_forward_hook(ModuleHook(self._after_forward), always_call=True)

    def belongs_to(self, root: nn.Module) -> bool:
        """Whether these are the gates of the model with this outermost FSDP module."""
        return self._root() is root

    def _before_forward(self, module: nn.Module, *_: Any) -> None:
        if module is self._root():
            gates = (gate for unit in self._units.values() for gate in unit)
            self._gathers_here = any(gate.reads_early and gate.pending for gate in gates)
            self._running = True
        if not self._running:  # a block that is recomputed in backward, or called on its own
            return
        if self._last is not None:
            self._called_next[self._last] = weakref.ref(module)
        self._last = module
        if self._gathers_here:
            self._gather(module)

    def _gather(self, module: nn.Module) -> None:
        """Gather this unit unless it is prefetched, and prefetch the one that was called after it last time."""
        if self._prefetched is not None and self._prefetched[0] is module:
            self._prefetched = None
        else:
            self._reshard_prefetched()
            self._unshard(module)
        called_next = self._called_next.get(module, lambda: None)()
        if called_next is not None:
            self._prefetched = (called_next, self._unshard(called_next))

    def _unshard(self, module: nn.Module) -> UnshardHandle:
        assert isinstance(module, FSDPModule)
        gates = self._units[module]
        with self._on_own_stream(gates[0].device):
            for gate in gates:
                gate.wait_on_stream()
            handle = module.unshard(async_op=True)
        assert handle is not None
        return handle

    @contextlib.contextmanager
    def _on_own_stream(self, device: torch.device) -> Iterator[None]:
        """Run the body on another stream, which first waits for the current one: that may still read freed memory."""
        if device.type == "cpu":
            yield
            return
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            yield

    def _after_forward(self, *_: Any) -> None:
        self._reshard_prefetched()
        self._running = self._gathers_here = False
        self._last = None

    def _reshard_prefetched(self) -> None:
        """Reshard a unit that was prefetched but not called: its weights would be stale in the next forward."""
        if self._prefetched is not None:
            module, handle = self._prefetched
            self._prefetched = None
            handle.wait()
            assert isinstance(module, FSDPModule)
            module.reshard()


def _gate_all_gathers(module: nn.Module, sharded: Sequence[nn.Module]) -> list[_GatedAllGather]:
    """Replace the all-gathers of one FSDP module: one, or one for each mesh that its parameters are on."""
    own = awaited(part for other in sharded for part in own_parts(other))
    gates = []
    for group in parameter_groups(module):
        gates.append(_GatedAllGather(group, own))
        group.set_all_gather(gates[-1])
    return gates


class _GatedAllGather:
    """torch's default all-gather for some shards of one FSDP module, after their updates.

    Attributes:
        reads_early: its shards are cast, and so read before :meth:`allocate` can make the stream wait.
    """

    def __init__(self, group: ParameterGroup, own: Sequence[AwaitedParameters]) -> None:
        shards = group.shards
        self.device = local_tensor(shards[0]).device if shards else torch.device("cpu")
        self.reads_early = False
        self._shards = group.shards_later()
        self._dtypes = {local_tensor(shard).dtype for shard in shards}
        self._own = own

    @torch._disable_dynamo  # like torch.compiler.disable, which would import dynamo at once
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gathered weights. The stream on which FSDP2 calls this reads the shards next: it waits."""
        self.reads_early = self._dtypes != {dtype}
        self.wait_on_stream()
        return torch.empty(*size, dtype=dtype, device=device)

    def wait_on_stream(self) -> None:
        """The current stream waits for the updates of the shards."""
        shards = self._shards()
        for updates in updates_of(self._own):
            updates.wait_on_stream(shards)

    @property
    def pending(self) -> bool:
        """Whether updates may be pending."""
        return any(updates.pending for updates in updates_of(self._own))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
        work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work
