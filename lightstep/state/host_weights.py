"""Weights and gradients that rest on the host, and are on the device while somebody works on them.

The parameters that one module reads together are a :class:`WeightGroup`. Its *fields* are the weights, the gradients
of a step, and their sums over micro-batches. Each field rests in one page-locked slab of exact size. Who needs it on
the device *holds* it::

    group.enter()                 # the model: parameters are on the device in between
    group.leave()
    weights.hold(field)           # an update: works on `field.on_device`
    weights.write_back(field, ranges)
    weights.release(field)

Copies run in lanes of their own, and nobody waits on the host. A field that nobody holds stays on the device until its
memory is needed for another one: the least recently used one goes first. So a block whose forward is the last to run is
still there for its backward, and weights that have just been updated are there for the next forward.

The device memory of a field is one storage that is emptied and filled, as FSDP2 does it. Views of it stay valid: what
autograd has saved in forward has its values again in backward.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightstep.distributed import local_tensor, writes
from lightstep.error_text import error_text
from lightstep.state.host_fields import Field, KeptWeights, Ranges, StayingFields
from lightstep.state.host_memory import require
from lightstep.state.lanes import Lanes, WaitTimes

__all__ = ["HostWeights", "WeightGroup", "WeightHome", "groups_of", "require_room"]

_ADVICE = "Set weights.placement: device, which keeps them on the device, or train a smaller model"

_LONGEST_WAIT = 10.0
"""Seconds that a reader in another thread waits for weights to rest. The thread that trains may be waiting for it."""

_NO_BACKWARD = -1
"""Torch's number of the backward that runs, where none does."""


class WeightGroup:
    """Parameters that are brought and taken back together.

    Args:
        room: elements of memory for each parameter, if that is more than it has.

    Attributes:
        weights: the field in which they rest. The parameters are its tensors on the host, and from :meth:`enter` on
            those on the device, until :meth:`rest`.
        name: for messages.
        visits: of modules that have entered it, and not left.
        kept: second copies of weights on the host, for each optimizer whose updates of them may be undone.
    """

    def __init__(
        self, owner: HostWeights, parameters: Sequence[nn.Parameter], name: str, room: Sequence[int] | None = None
    ) -> None:
        self._owner = weakref.ref(owner)  # which has this group: memory and threads of a model that is gone go at once
        self.parameters, self.name = list(parameters), name
        locals_ = [local_tensor(parameter).detach() for parameter in parameters]
        self.weights = Field(locals_, None, owner.lanes, f"the weights of {name}", room=room)
        self._others: dict[torch.dtype | None, Field] = {}
        self.visits = 0
        self.kept: list[KeptWeights] = []
        self._is_at_rest = True
        self._versions: list[int] | None = None  # of the weights on the device
        if room is not None:
            self.weights.host.zero_()
        self._at_rest = [_with_own_storage(rest) for rest in self.weights.on_host]
        for number, (local, rest) in enumerate(zip(locals_, self._at_rest, strict=True)):
            rest.copy_(local)
            self._put(number, rest)
        owner.add(self)

    @property
    def is_owned(self) -> bool:
        """Whether the model is still there."""
        return self._owner() is not None

    @property
    def owner(self) -> HostWeights:
        owner = self._owner()
        assert owner is not None, f"{self.name}: it lives as long as the model"
        return owner

    def _put(self, number: int, tensor: Tensor) -> None:
        """Make ``tensor`` the memory of a parameter."""
        self.parameters[number].data = tensor

    def gradients(self, dtype: torch.dtype | None = None) -> Field:
        """The field of gradients in this dtype (``None``: the parameters' own); made at the first call.

        That of sums in fp32 has the memory for gradients in the parameters' own dtypes, too: a parameter has one or the
        other. It takes over what has arrived in a field of its own.
        """
        own = self._others.get(None)
        if dtype is None and (sums := self._others.get(torch.float32)) is not None:
            return sums
        if own is not None and all(rest.dtype == dtype for rest in self.weights.on_host):
            return own
        if dtype not in self._others:
            what, is_sum = f"the gradients of {self.name}", dtype is torch.float32
            require(sum(rest.numel() * (dtype or rest.dtype).itemsize for rest in self.weights.on_host), what, _ADVICE)
            rests = self.weights.on_host
            made = Field(rests, dtype, self.owner.lanes, what, is_used_once=True, also_as_likes=is_sum)
            if is_sum and own is not None:
                self.owner.drop(self._others.pop(None))
                made.take_over(own)
            self._others[dtype] = made
        return self._others[dtype]

    @property
    def missing_gradients(self) -> int:
        """Bytes of gradients that have no memory on the host yet."""
        dtype, rests = self.owner.gradient_dtype, self.weights.on_host
        return 0 if self._others else sum(rest.numel() * (dtype or rest.dtype).itemsize for rest in rests)

    @property
    def fields(self) -> list[Field]:
        return [self.weights, *self._others.values()]

    # -- visits of the model

    def enter(self) -> None:
        """The parameters are on the device from here on, for work on the current stream."""
        self.owner.hold(self.weights, self)
        self.weights.is_fresh = False
        self.visits += 1
        if self._is_at_rest:
            self._place(self.weights.on_device)

    def leave(self) -> None:
        """End what :meth:`enter` began, if it did; with the last one the parameters are on the host again.

        While autograd records, :meth:`rest` does that later: a parameter that changes its device gets another node in
        the graph, and gradients of several uses would not be added up in one.
        """
        if not self.visits:
            return
        self.visits -= 1
        if not self.visits:
            self._take_back_writes()
            self.keep_after_forward()
        if not torch.is_grad_enabled():
            self.rest()
        self.owner.release(self.weights)

    @property
    def is_entered(self) -> bool:
        return self.visits > 0

    def keep_after_forward(self) -> None:
        """A module has read the weights on the device, which holds them still."""
        if self.kept and torch._C._current_graph_task_id() == _NO_BACKWARD:
            for kept in self.kept:
                kept.keep()

    def rest(self) -> None:
        """The parameters are on the host, unless a module has entered them, or another thread trains."""
        if not self.visits and not self._is_at_rest and not self.owner.is_foreign():
            replaced = self._replaced_on_device()
            for number, values in replaced.items():
                self._check_replaced(number, values)
            self._place(self._at_rest)
            for number, values in replaced.items():
                self.write(number, values)

    def leave_all(self) -> None:
        """End all that :meth:`enter` has begun."""
        while self.visits:
            self.leave()
        self.rest()

    def abandon(self) -> None:
        """The lanes have failed: no visit goes on, and the parameters are on the host."""
        self.visits = 0
        self.forget()
        if not self._is_at_rest:
            self._place(self._at_rest)
        for field in self.fields:
            self.owner.abandon_field(field)
        for kept in self.kept:
            kept.note_written(range(len(self.parameters)))

    def _place(self, tensors: Sequence[Tensor]) -> None:
        with self.owner.lock:  # an update in a lane compares the parameters with where they rest
            self._is_at_rest = tensors is not self.weights.on_device
            for number, tensor in enumerate(tensors):
                self._put(number, tensor)

    # -- writes by others

    def note_versions(self) -> None:
        """The weights on the device are the parameters as they are now."""
        self._versions = [writes(parameter) for parameter in self.parameters]

    def note_updated(self, numbers: Collection[int]) -> None:
        """So are these parameters: an update has written them. Others may have been written to meanwhile."""
        for kept in self.kept:
            kept.note_written(numbers)
        with self.owner.lock:
            if self._versions is not None:
                for number in numbers:
                    self._versions[number] = writes(self.parameters[number])

    def _take_back_writes(self) -> None:
        """What a forward has written to its weights (an embedding with ``max_norm``) goes to the host as well."""
        with self.owner.lock:
            if self._versions is None or not self.is_outdated():
                return
            now = enumerate(zip(self.parameters, self._versions, strict=True))
            written = [number for number, (parameter, version) in now if writes(parameter) != version]
            rest = self.weights.on_host
            self.weights.take_back([self.weights.bytes_of(number, 0, rest[number].numel()) for number in written])
            self.note_versions()

    def note_own_write(self, parameters: Iterable[Tensor]) -> None:
        """An update will write to these parameters: they count as written to, and what is on the device stays."""
        with self.owner.lock:
            is_known = not self.is_outdated()
            torch.autograd.graph.increment_version(list(parameters))
            if is_known:
                self.note_versions()

    def forget(self) -> None:
        """What is on the device may be out of date, and is brought again."""
        self.weights.is_fresh, self._versions = False, None

    def is_outdated(self) -> bool:
        """Whether somebody may have written to the weights on the host after they were brought."""
        return self._versions is None or any(
            writes(parameter) != version for parameter, version in zip(self.parameters, self._versions, strict=True)
        )

    def adopt_replaced(self) -> None:
        """Copy weights that somebody has put in other memory (``p.data = ...``) or transposed to where they rest.

        Raises:
            ValueError: they have another shape or dtype, or somebody holds the tensor that ``p.data`` was before.
        """
        if not self._is_at_rest:
            return
        for number, (parameter, rest) in enumerate(zip(self.parameters, self.weights.on_host, strict=True)):
            local = local_tensor(parameter)
            is_here = local.data_ptr() == rest.data_ptr()
            if is_here and local.stride() == rest.stride():
                continue
            self._check_replaced(number, local)
            self.write(number, local.detach().clone() if is_here else local.detach())
            self._put(number, self._at_rest[number])

    def _replaced_on_device(self) -> dict[int, Tensor]:
        """What somebody has put in other memory, by number, since a module has read it."""
        pairs = enumerate(zip(self.parameters, self.weights.on_device, strict=True))
        return {number: p.data for number, (p, own) in pairs if p.data_ptr() != own.data_ptr()}

    def _check_replaced(self, number: int, values: Tensor) -> None:
        """Refuse values that do not fit, and those that would be written to memory which somebody else holds."""
        rest = self.weights.on_host[number]
        if (values.shape, values.dtype) != (rest.shape, rest.dtype):
            raise ValueError(
                f"a parameter of {self.name} is {values.dtype} of shape {tuple(values.shape)} now, and rests "
                f"on the host as {rest.dtype} of shape {tuple(rest.shape)} (weights.placement: host); cast or "
                "resize the model before prepare_model"
            )
        is_elsewhere = values.data_ptr() != rest.data_ptr()
        if is_elsewhere and _holders(self._at_rest[number]) > _holders(_with_own_storage(rest)):
            raise ValueError(
                f"the p.data of a parameter of {self.name} of shape {tuple(rest.shape)} was replaced, and the tensor "
                "that it was before is still held (by a variable, or a state_dict()). Its memory is where the weight "
                "rests (weights.placement: host), and would get the new values. Assign the former tensor to p.data "
                "again, and write the new values with p.data.copy_(); what is to be restored later, keep as a clone()"
            )

    def write(self, number: int, values: Tensor) -> None:
        """Write to a weight where it rests: it is brought again, and counts as written to by somebody else."""
        self.weights.settle()
        self.weights.on_host[number].copy_(values)
        torch.autograd.graph.increment_version([self.parameters[number]])
        self.forget()

    def settle(self) -> None:
        """Somebody reads the parameters, or writes to them: they are complete and on the host, unless a module has
        entered them, and no copy to the device is still to read them.

        A reader in another thread than the one that trains waits until they are.

        Raises:
            RuntimeError: the reader is a signal handler or a finalizer, which interrupts what moves them.
        """
        if not self.is_owned:  # the model is gone, but for some of its modules
            self.weights.settle()
            return
        if self.owner.is_locked_here:
            raise RuntimeError(
                f"{self.name} was read in the middle of a copy of weights from or to the host (in a signal handler or "
                "a finalizer). Nothing has been done; set a flag in the handler, and read after step()"
            )
        if self.owner.is_foreign():
            self._wait_for_rest()
        elif self.owner.on_read(self):
            return
        self.weights.settle()
        self.expect_writes()
        self.rest()

    def expect_writes(self) -> None:
        """A reader may write to the weights, also in ways that nobody counts: PEFT merges through ``p.data``."""
        self.forget()
        for kept in self.kept:
            kept.note_written(range(len(self.parameters)))

    def _wait_for_rest(self) -> None:
        end = time.monotonic() + _LONGEST_WAIT
        while not self._is_at_rest and time.monotonic() < end:
            time.sleep(0.001)


class WeightHome:
    """Where one parameter rests: its group, and its number in it.

    Attributes:
        arrivals: how many gradients have been taken to the host so far.
    """

    def __init__(self, group: WeightGroup, number: int) -> None:
        self.group, self.number = group, number
        self.on_host, self.on_device = group.weights.on_host[number], group.weights.on_device[number]
        self.arrivals = 0

    def gradient_field(self, dtype: torch.dtype) -> Field:
        """The field that takes a gradient of this dtype."""
        return self.group.gradients(None if dtype == self.on_host.dtype else dtype)

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """The tensor of that field on the device, which is empty until somebody holds the field."""
        field = self.gradient_field(dtype)
        return (field.as_likes if dtype == self.on_host.dtype else field.on_device)[self.number]


class TakenGradients(Protocol):
    """Gradients that have been taken out of ``p.grad``."""

    def taken_among(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those of these parameters whose gradients it has taken."""

    def drop(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Drop those of these parameters; returns the parameters that had one."""


class HostWeights:
    """All groups of one model.

    Args:
        device: where weights are worked on.
        device_bytes: how much device memory fields may take up; those that are held may take more.
        gradients_gib: how much gradients may take up beside that, and need not leave; ``"auto"``: what is free.

    Attributes:
        groups: those that have been made so far.
        lock: held while fields come, go, or are held.
        is_foreign: whether another thread trains than this one, which then must not move parameters.
        on_read: called with a group whose parameters are read; returns whether they are on the device, for a module.
        waits: those of the streams that read weights and make gradients, for the copies from and to the host.
        stalls: those of the stream that computes for these, if they are others.
        staying: gradients that are on the device alone.
        taken: gradients of these weights, of each optimizer.
        gradient_dtype: that of the gradients that the host has to have room for, as far as it is known; ``None``: the
            parameters'.
    """

    def __init__(self, device: torch.device, device_bytes: int, gradients_gib: float | str = 0) -> None:
        self.device, self._device_bytes = device, device_bytes
        self.on_read: Callable[[WeightGroup], bool] = lambda group: group.is_entered
        self.is_foreign: Callable[[], bool] = lambda: False
        self.lanes, self.waits = Lanes(device, small_pieces=False), WaitTimes()
        self.stalls: WaitTimes | None = None
        self.lock = threading.RLock()
        self._present: OrderedDict[Field, None] = OrderedDict()  # the one that will be needed last comes first
        self.staying = StayingFields(device, gradients_gib)
        self.gradient_dtype: torch.dtype | None = None
        self.taken: weakref.WeakSet[TakenGradients] = weakref.WeakSet()
        self.groups: list[WeightGroup] = []
        self._homes: dict[nn.Parameter, WeightHome] = {}

    @property
    def is_locked_here(self) -> bool:
        """Whether the calling thread holds :attr:`lock`."""
        return self.lock._is_owned()  # type: ignore[attr-defined]  # as threading.Condition asks it

    def add(self, group: WeightGroup) -> None:
        """Called by each new group."""
        self.groups.append(group)
        self._homes |= {parameter: WeightHome(group, number) for number, parameter in enumerate(group.parameters)}

    def home_of(self, parameter: Tensor) -> WeightHome | None:
        """``None`` if the parameter is none of these."""
        return self._homes.get(parameter)  # type: ignore[call-overload]

    def refuse_memory_of_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse parameters that are none of these, in memory where one of these rests, or rested (a parametrization
        makes one of a weight).

        Raises:
            ValueError: with the name of such a parameter: copies from and to the device would undo its updates.
        """
        groups = {rest.data_ptr(): group for group in self.groups for rest in group.weights.on_host if rest.numel()}
        for name, tensor in named:
            group = groups.get(tensor.untyped_storage().data_ptr())
            if group is not None:
                raise ValueError(
                    f"{name} came after prepare_model, and has the memory in which a weight of {group.name} rests "
                    "(weights.placement: host): register parametrizations before prepare_model, or make the new "
                    "parameter of a clone()"
                )

    def drop_gradients(self, parameters: Sequence[Tensor], set_to_none: bool) -> None:
        """What ``zero_grad`` does to gradients of these parameters that are not in ``p.grad``."""
        for parameter in [parameter for taken in list(self.taken) for parameter in taken.drop(parameters)]:
            if not set_to_none and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    # -- how long the model waits

    def measure_waits(self, begin: bool) -> None:
        """Begin, or end, to measure how long the model waits for copies from and to the host."""
        for times in filter(None, (self.waits, self.stalls)):
            if begin:
                times.start()
            else:
                times.stop()

    def waited(self) -> float | None:
        """Milliseconds that the computation has waited for the copies; ``None`` while it may still wait.

        Where other streams wait for the copies, the computation waits no longer than they do for this reason.
        """
        found = [times.milliseconds() for times in (self.waits, self.stalls) if times is not None]
        sums = [sum(times) for times in found if times is not None]
        return min(sums) if len(sums) == len(found) else None

    # -- on the device

    def hold(self, field: Field, group: WeightGroup | None = None, update: bool = False) -> None:
        """Have the field on the device, ready for work on the caller's stream, until :meth:`release`.

        Args:
            group: that of a field of weights, which others may have written to. The holder of any other field may write
                to it at once, and what is on its way to the host must not change any more.
            update: as for :meth:`release`.
        """
        with self.lock:
            self._bring(field, group)
            field.holds += 1
            field.is_expected = False
        caller, events = self.lanes.caller(), [field.arrived] if group is not None else [field.arrived, field.returned]
        for event in events:
            if update:
                caller.wait(event)
            else:
                self.waits.wait(caller, event)

    def prefetch(self, group: WeightGroup) -> None:
        """Bring the weights of a group that will be needed soon, unless others that will be take up the room."""
        field = group.weights
        with self.lock:
            if not field.holds and (field.is_present or self._has_room(field.nbytes)):
                with suppress(torch.OutOfMemoryError):  # when it is needed, what nobody holds is freed for it
                    self._bring(field, group)
                    field.is_expected = True

    def expect_no_more(self, group: WeightGroup) -> None:
        """A group that was brought ahead is not needed after all: its memory may be used as any other's."""
        with self.lock:
            group.weights.is_expected = False

    def release(self, field: Field, update: bool = False) -> None:
        """The caller's work so far was the last that the holder does with it.

        Args:
            update: the holder is an update: it may run on another stream than the model.
        """
        self.lanes.caller().record(field.updated if update else field.used)
        with self.lock:
            if not field.holds:  # it has been abandoned
                return
            field.holds -= 1
            if field in self._present:
                self._present.move_to_end(field, last=not field.is_used_once)

    def store(self, field: Field, tensors: dict[int, Tensor]) -> None:
        """Take gradients on the device, by number, straight to the host, in place of what the field has there; or into
        the field's memory on the device, if it stays."""
        if self.keep(field, tensors):
            return
        with self.lock:
            if field.is_present:
                self._free(field)
        field.fill(tensors)

    def keep(self, field: Field, tensors: dict[int, Tensor]) -> bool:
        """Copy gradients into the field's memory on the device, if it stays; returns whether it does."""
        with self.lock:
            if stays := self._stays(field):
                field.put(tensors)
        return stays

    def _stays(self, field: Field) -> bool:
        if field not in self.staying and self.staying.has_room(field):
            try:
                if not field.is_present:
                    field.bring()
            except torch.OutOfMemoryError:
                self.staying.limit()
                return False
            self._present.pop(field, None)
            self.staying.add(field)
        return field in self.staying

    def write_back(self, field: Field, ranges: Ranges | None = None) -> None:
        """Take bytes that the caller has written to a held field back to the host, unless it stays."""
        if field in self.staying:
            field.note_written()
        else:
            field.take_back(ranges)
        field.is_fresh = True

    def _bring(self, field: Field, group: WeightGroup | None) -> None:
        if group is not None:
            group.adopt_replaced()
            if field.is_present and not field.holds and group.is_outdated():
                self._free(field)
        if not field.is_present:
            self._make_room(field.nbytes)
            self._bring_into_memory(field)
            self._present[field] = None
            if group is not None:
                group.note_versions()

    def _bring_into_memory(self, field: Field) -> None:
        """Bring the field; if the device has no room, free all others that nobody holds first, those that stay last.

        Raises:
            torch.OutOfMemoryError: that was not enough. Nothing has changed.
        """
        for others in (self._present, self.staying):
            try:
                field.bring()
                return
            except torch.OutOfMemoryError:
                self._free_idle(others)
        self.staying.limit()
        try:
            field.bring()
        except torch.OutOfMemoryError as error:
            held, size, most = sum(one.nbytes for one in self._present), field.nbytes, self._device_bytes
            raise torch.OutOfMemoryError(
                f"the device has no room for {field.what} ({_mib(size)}), which rest on the host, beside {_mib(held)} "
                f"of others that are in use: set weights.device_mib (now {_mib(most)}) to less, or use smaller "
                "micro-batches; call optimizer.zero_grad() before the next backward"
            ) from error

    def refuse_kept_graph(self, gathered: bool = False) -> None:
        """A backward with ``create_graph`` runs. Its own backward reads weights that no module has entered.

        Args:
            gathered: FSDP2 gathers the weights, and they have no memory on the device when backward has used them.

        Raises:
            RuntimeError: they do not all stay on the device.
        """
        if gathered:
            raise RuntimeError(
                "create_graph=True, and FSDP2 gathers weights that rest on the host (weights.placement: host) for each "
                "module's backward alone: a second derivative needs all of them. Set weights.placement: device, and "
                "call model.set_reshard_after_backward(False)"
            )
        size = sum(group.weights.nbytes for group in self.groups)
        if size > self._device_bytes:
            raise RuntimeError(
                f"create_graph=True, and of {_mib(size)} of weights that rest on the host (weights.placement: host) "
                f"the device keeps {_mib(self._device_bytes)}: a second derivative needs all of them there. Set "
                "weights.device_mib to more than they take, or weights.placement: device"
            )

    def _make_room(self, nbytes: int) -> None:
        """Free fields that nobody holds, until there is room; those that are expected come last."""
        taken = sum(field.nbytes for field in self._present)
        idle = [field for field in self._present if not field.holds]
        for field in sorted(idle, key=lambda field: field.is_expected):
            if taken + nbytes <= self._device_bytes:
                return
            taken -= field.nbytes
            self._free(field)

    def _has_room(self, nbytes: int) -> bool:
        """Whether there is room, once what is neither held nor expected is freed."""
        kept = sum(field.nbytes for field in self._present if field.holds or field.is_expected)
        return kept + nbytes <= self._device_bytes

    def _free(self, field: Field) -> None:
        if field in self.staying:
            field.copy_back()
            self.staying.discard(field)
        field.free()
        self._present.pop(field, None)

    def _free_idle(self, fields: Iterable[Field]) -> None:
        for field in [field for field in fields if not field.holds]:
            self._free(field)

    def forget_idle(self, fresh: bool = False, but: Collection[WeightGroup] = ()) -> None:
        """What nobody holds is brought again at its next use: the user may have written to the weights meanwhile.

        Args:
            fresh: also weights that have just been updated.
            but: groups that stay as they are unless somebody reads them through the model.
        """
        with self.lock:
            for group in self.groups:
                if (fresh or not group.weights.is_fresh) and group not in but:
                    group.forget()

    def drop(self, field: Field) -> None:
        """The field is used no more, but by who holds it. The host gets what it has."""
        with self.lock:
            if not field.holds and field.is_present:
                self._free(field)
            elif field in self.staying:
                field.copy_back()
                self.staying.discard(field)
                self._present[field] = None

    def abandon_field(self, field: Field) -> None:
        """The lanes have failed. What stays on the device has not been in them."""
        if field in self.staying and field.has_memory:
            field.holds = 0
            return
        self.staying.discard(field)
        field.abandon()

    def fit_staying(self) -> None:
        """A step has begun: what has no room on the device any more leaves, at once or when its update has read it."""
        for field in self.staying.surplus():
            self.drop(field)

    def free(self) -> None:
        """Free the device memory of all fields that nobody holds."""
        with self.lock:
            self._free_idle([*self._present, *self.staying])
            self.staying.remeasure()

    @contextmanager
    def holding(self, groups: Iterable[WeightGroup]) -> Iterator[None]:
        """Hold the weights of these groups in the body."""
        with ExitStack() as stack:
            for group in groups:
                self.hold(group.weights, group)
                stack.callback(self.release, group.weights)
            yield

    # -- all of them

    def abandon(self) -> None:
        """Clear a failure in the lanes. The weights on the host may be incomplete, until they are loaded.

        Raises:
            RuntimeError: the device does not work any more.
        """
        try:
            self.lanes.reset()
            with self.lock:
                for group in self.groups:
                    group.abandon()
                self._present.clear()
        except Exception as error:
            raise RuntimeError(
                f"a copy between host and device failed before, and the device does not answer ({error_text(error)}): "
                "restart the process and load the last checkpoint"
            ) from error

    def rest(self) -> None:
        """All parameters are on the host, but for those that modules have entered."""
        for group in self.groups:
            group.rest()

    def leave_all(self) -> None:
        """Leave what a forward or backward has entered that was interrupted."""
        for group in self.groups:
            group.leave_all()

    def settle(self) -> None:
        """The host is about to read the weights: block it until they are complete."""
        for group in self.groups:
            group.settle()

    def wait_for_copies(self) -> None:
        """Block the host until no copy from or to where weights rest is under way."""
        for group in self.groups:
            group.weights.settle()

    def synchronize(self) -> None:
        """Block the host until all weights and gradients have arrived where they go."""
        self.rest()
        self.forget_idle(fresh=True)  # the caller may write to weights now, also through ``p.data``
        self.lanes.synchronize()

    def memory(self) -> dict[str, int]:
        """``host_bytes`` and ``device_bytes`` now."""
        fields = [field for group in self.groups for field in group.fields]
        return {
            "host_bytes": sum(field.nbytes for field in fields),
            "device_bytes": sum(field.nbytes for field in fields if field.is_present),
        }


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def require_room(moved: int, gradients: int) -> None:
    """Check that the host has room for so many bytes of weights and of gradients, before anything is moved.

    Raises:
        HostMemoryError: it has not.
    """
    require(moved + gradients, "weights and gradients", _ADVICE)


def _with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory, in a storage that nothing else has yet."""
    return torch.from_dlpack(tensor)


def _holders(tensor: Tensor) -> int:
    """How many tensors there are with this one's storage, and itself."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def groups_of(homes: Iterable[Any]) -> list[WeightGroup]:
    """The groups of some homes (``None`` is none), each once."""
    return list(dict.fromkeys(home.group for home in homes if home is not None))
