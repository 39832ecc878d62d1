"""Inputs of recomputed blocks, which rest in page-locked host memory between forward and backward.

A block that is recomputed in backward saves nothing but its inputs. They are copied to the host while the next blocks
run, and their device memory is free two blocks later. In backward each block's inputs are brought while the block
behind it is still at work. Inputs of the last two blocks are still there. Copies run in lanes of their own, and nobody
waits on the host.

What needs no gradient (masks, position embeddings) stays on the device, and so does a tensor that several blocks take:
it is there once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightstep.distributed import dense_strides
from lightstep.state.host_memory import HostSlab, require
from lightstep.state.lanes import Lanes

__all__ = ["HostActivations"]

_WHAT = "the inputs of recomputed blocks"
_ADVICE = (
    "Set sharding.activation_checkpointing: true, which keeps them on the device, or train with smaller micro-batches"
)

_ON_DEVICE = 2
"""Blocks whose inputs are still on the device when that of the next one is saved."""


class HostActivations:
    """Runs blocks whose inputs rest on the host. One object serves all blocks of a model; copies of the model share it.

    Args:
        device: where the model computes. Tensors elsewhere stay where they are.

    Attributes:
        SMALLEST: bytes of a tensor that is worth a copy.
        sent, brought: how many tensors have been copied to the host and back.
    """

    SMALLEST: ClassVar[int] = 1 << 20

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lanes = Lanes(device, small_pieces=False)
        self.buffers = _Buffers(self.lanes)
        self.sent = self.brought = 0
        self._visits: list[weakref.ref[_Visit]] = []  # the last ones, whose inputs are on the device
        self._within = threading.local()

    def __deepcopy__(self, _: dict[int, Any]) -> HostActivations:
        return self

    def __reduce__(self) -> Any:
        return type(self), (self.device,)

    def checkpoint(self, recomputed: Callable[..., Any], function: Any, /, *arguments: Any, **named: Any) -> Any:
        """``recomputed(function, *arguments, **named)``, with the tensors among the arguments on the host meanwhile.

        Args:
            recomputed: runs the function, saves its tensor arguments for autograd and nothing else, and runs it again
                in backward: ``torch.utils.checkpoint.checkpoint``.
        """
        # A block within another one is recomputed with it, and its inputs are not saved.
        if not torch.is_grad_enabled() or getattr(self._within, "block", False):
            return recomputed(function, *arguments, **named)
        while isinstance(function, partial):
            arguments, named = (*function.args, *arguments), {**function.keywords, **named}
            function = function.func
        # Tensors by name and in tuples are saved, too. Other containers are passed on as they are: blocks may fill
        # them.
        leaves, structure = tree_flatten((arguments, tuple(named.values())), lambda value: type(value) is not tuple)
        needing = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        visit = self._begin({_identity(tensor) for tensor in needing if self._may_leave(tensor)})

        def run(*leaves: Any) -> Any:
            arguments, values = tree_unflatten(leaves, structure)
            self._within.block = True
            try:
                return function(*arguments, **dict(zip(named, values, strict=True)))
            finally:
                self._within.block = False

        with torch.autograd.graph.saved_tensors_hooks(visit.pack, _unpack):
            return recomputed(run, *leaves)

    def _may_leave(self, tensor: Tensor) -> bool:
        here = type(tensor) is Tensor and tensor.device == self.device
        return here and tensor.nbytes >= self.SMALLEST and _is_dense(tensor)

    def _begin(self, leaving: set[Any]) -> _Visit:
        recent = [visit for reference in self._visits if (visit := reference()) is not None]
        for visit in recent[: 1 - _ON_DEVICE]:
            visit.leave_device()
        visit = _Visit(self, leaving, recent[-1] if recent else None)
        self._visits = [*map(weakref.ref, recent[1 - _ON_DEVICE :]), weakref.ref(visit)]
        return visit

    def on_device(self, tensor: Tensor) -> _Parcel | None:
        """The parcel of a recent block with this tensor."""
        for reference in self._visits:
            visit = reference()
            for parcel in () if visit is None else visit.parcels():
                if parcel.is_of(tensor):
                    return parcel
        return None


class _Visit:
    """The inputs of one block's forward. They keep it alive, not the other way round.

    Args:
        leaving: the identities of tensors that are to rest on the host.
        previous: the visit before it, whose inputs backward needs next.
    """

    def __init__(self, owner: HostActivations, leaving: set[Any], previous: _Visit | None) -> None:
        self.owner, self._leaving = owner, leaving
        self._previous = None if previous is None else weakref.ref(previous)
        self._parcels: list[weakref.ref[_Parcel]] = []

    def parcels(self) -> Iterator[_Parcel]:
        return (parcel for reference in self._parcels if (parcel := reference()) is not None)

    def pack(self, tensor: Tensor) -> _Parcel | Tensor:
        """What autograd keeps in place of a tensor."""
        if _identity(tensor) not in self._leaving:
            return tensor
        known = self.owner.on_device(tensor)
        if known is None:
            known = _Parcel(self, tensor)
        elif known.visit is not self:
            known.stays = True
        self._parcels.append(weakref.ref(known))
        return known

    def leave_device(self) -> None:
        for parcel in self.parcels():
            parcel.leave_device()

    def bring(self) -> None:
        for parcel in self.parcels():
            if not parcel.is_taken:
                parcel.bring()

    def bring_previous(self) -> None:
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.bring()


class _Parcel:
    """One tensor: on the device, on its way, or on the host.

    Attributes:
        stays: several blocks take it, and it stays on the device.
        is_taken: backward has had it, and will hardly want it again.
    """

    def __init__(self, visit: _Visit, tensor: Tensor) -> None:
        self.visit, self.stays, self.is_taken = visit, False, False
        self._owner = visit.owner
        self._tensor: Tensor | None = tensor.detach()
        self._version: int | None = tensor._version  # None: the tensor has been on the host
        self._is_changed = False
        self._like = _identity(tensor)
        self._buffer = self._owner.buffers.take(tensor.nbytes)
        lanes = self._owner.lanes
        lane = lanes.device_to_host
        lanes.caller().record(self._buffer.ready)
        lane.wait(self._buffer.ready)
        lane.wait(self._buffer.read)
        lane.copy(self._buffer.bytes[: tensor.nbytes], _flat(self._tensor), _WHAT)
        lane.record(self._buffer.filled)
        self._owner.sent += 1

    def is_of(self, tensor: Tensor) -> bool:
        return self._tensor is not None and self._version == tensor._version and self._like == _identity(tensor)

    def leave_device(self) -> None:
        """Free the device memory, which the caller may use again after the copy."""
        if self._version is not None and not self.stays:
            self._note_change()
            self._owner.lanes.caller().wait(self._buffer.filled)
            self._tensor = self._version = None

    def bring(self) -> None:
        """Queue the copy to the device, if the tensor is not there."""
        if self._tensor is not None:
            return
        _, shape, stride, dtype = self._like
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self._owner.device)
        lanes = self._owner.lanes
        lane = lanes.host_to_device
        lanes.caller().record(self._buffer.ready)  # what has used this memory before
        lane.wait(self._buffer.ready)
        lane.wait(self._buffer.filled)
        lane.copy(_flat(tensor), self._buffer.bytes[: tensor.nbytes], _WHAT)
        lane.record(self._buffer.read)
        self._tensor = tensor
        self._owner.brought += 1

    def unpack(self) -> Tensor:
        self.bring()
        self.visit.bring()
        self.visit.bring_previous()
        tensor = self._tensor
        assert tensor is not None
        self._note_change()
        if self._is_changed:
            raise RuntimeError(
                "a tensor that a recomputed block takes, of shape "
                f"{tuple(tensor.shape)}, was modified by an in-place operation after the block began, and gradients "
                "need it as it was; write to a copy (activation_checkpointing: host)"
            )
        if not self.stays:
            self._owner.lanes.caller().wait(self._buffer.read if self._version is None else self._buffer.filled)
            self._tensor = self._version = None  # from here on the caller keeps it, as long as it is needed
            self.is_taken = True
        return tensor

    def _note_change(self) -> None:
        if self._tensor is not None and self._version is not None:
            self._is_changed |= self._tensor._version != self._version

    def __del__(self) -> None:
        """The graph is gone. What is under way may still use both memories."""
        buffer = getattr(self, "_buffer", None)
        if buffer is None:
            return
        if self._tensor is not None:
            lanes = self._owner.lanes
            lane = lanes.host_to_device if self._version is None else lanes.device_to_host
            if lane.stream is not None:
                self._tensor.record_stream(lane.stream)
        self._owner.buffers.give_back(buffer)


def _unpack(packed: _Parcel | Tensor) -> Tensor:
    return packed.unpack() if isinstance(packed, _Parcel) else packed


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    """What tells a tensor from others, as long as it is there: autograd packs another object."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one range of memory, each once, as they are."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or dense_strides(tensor) == tensor.stride()


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Buffer:
    """Page-locked memory for one tensor.

    Attributes:
        ready: after the work that comes before a copy.
        filled: after the copy from the device.
        read: after the copy to the device.
    """

    def __init__(self, nbytes: int, lanes: Lanes) -> None:
        require(nbytes, _WHAT, _ADVICE)
        self._slab = HostSlab(nbytes, device=lanes.device, what=_WHAT)
        self.nbytes = nbytes
        self.bytes = self._slab.tensor(torch.uint8, nbytes)
        self.ready, self.filled, self.read = (lanes.event() for _ in range(3))


class _Buffers:
    """Buffers that are used again: at most as many as have been in use at once."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes, self._lock = lanes, threading.Lock()
        self._idle: list[_Buffer] = []

    def take(self, nbytes: int) -> _Buffer:
        """The smallest idle buffer that has room; else a new one, in place of an idle one that is too small.

        Raises:
            HostMemoryError: the host has too little memory.
        """
        with self._lock:
            idle = sorted(self._idle, key=lambda buffer: buffer.nbytes)
            fitting = next((buffer for buffer in idle if buffer.nbytes >= nbytes), None)
            if fitting is not None:
                self._idle.remove(fitting)
                return fitting
            if idle:
                self._idle.remove(idle[-1])
        del idle
        return _Buffer(_rounded(nbytes), self._lanes)

    def give_back(self, buffer: _Buffer) -> None:
        """Called by the collector, too, perhaps in the middle of :meth:`take`: it must not lock."""
        self._idle.append(buffer)

    def idle_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._idle)


def _rounded(nbytes: int) -> int:
    """Up to an eighth more, so that batches of similar lengths share buffers."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step
