"""Gradients that leave the device in backward, as the modules whose weights rest on the host complete them.

The sum of a step's micro-batches is on the host: one gradient in its own dtype, several in fp32 (or as ``p.grad`` would
be added up), in the same memory. A gradient that arrives later is added to it on the device, in the order of the
micro-batches. ``p.grad`` is ``None`` after a backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, starmap

import torch
from torch import Tensor

from lightstep.clipping import add_keeper
from lightstep.distributed import differs_across_ranks, like, local_tensor
from lightstep.optimizer.step_guard import no_grad_no_inference
from lightstep.precision.gradient_sums import set_grad
from lightstep.precision.gradients import refuse_sparse
from lightstep.state.host_fields import Field
from lightstep.state.host_weights import HostWeights, WeightGroup, WeightHome

__all__ = ["HostGradients", "by_turns"]

_UNDER_WAY = 2
"""Groups whose gradients may be on their way to the host before the model waits for the first of them."""

_turns = count()


def by_turns(takers: Iterable[HostGradients]) -> list[HostGradients]:
    """The optimizer that was made last, or has begun a backward since, first: it takes what others would take, too.
    One that was replaced may live until the garbage collector finds it."""
    return sorted(takers, key=lambda taker: -taker.turn)


class HostGradients:
    """The gradients of one optimizer's parameters.

    Args:
        float32: add up micro-batches in fp32.

    Attributes:
        on_arrival: called with the parameters and their gradients so far, which are on the device until it returns.
        on_drop: called with the parameters whose gradients have been dropped before a step used them.
        is_awaited: called with a parameter and its gradient on the device: whether an update in backward is still to be
            submitted that reads it. It waits for other layers, if a unit has parameters of several.
        is_accumulating: whether another micro-batch follows in this step, as far as anybody has said.
        is_first: called with a parameter: whether ``step()`` will update it before all others. Its gradient is still
            on the device then, if no forward comes before.
        turn: a number that grows from one maker, or backward, to the next.
    """

    is_incomplete = False

    def __init__(self, weights: HostWeights, float32: bool) -> None:
        self._weights, self._float32, self.turn = weights, float32, next(_turns)
        self._stored: dict[Tensor, Tensor] = {}  # by parameter: a field's tensor on the device, empty now
        self._fields: dict[Tensor, tuple[Field, Tensor]] = {}  # the last one that a parameter's gradient was in
        self._under_way: deque[tuple[WeightGroup, list[Field], dict[Tensor, Tensor]]] = deque()  # by parameter
        self._parameters: frozenset[Tensor] = frozenset()
        self.on_arrival: Callable[[Sequence[tuple[Tensor, Tensor]]], object] = lambda arrived: None
        self.is_awaited: Callable[[Tensor, Tensor], bool] = lambda parameter, gradient: False
        self.is_accumulating: Callable[[], bool] = lambda: False
        self.is_first: Callable[[Tensor], bool] = lambda parameter: False
        self._staying: dict[Tensor, Tensor | None] = {}  # what is on the device alone; ``None``: in its field
        self._measured = weights.lanes.event()
        self.on_drop: Callable[[Sequence[Tensor]], object] = lambda parameters: None
        add_keeper(self)
        weights.taken.add(self)

    def set_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Take the gradients of exactly these parameters."""
        self._parameters = frozenset(parameters)

    def takes(self, parameter: Tensor) -> bool:
        """Whether its gradients leave ``p.grad``: those of a module that came after ``prepare_model`` (an adapter) stay
        there."""
        return self._weights.home_of(parameter) is not None

    def begin(self) -> None:
        """A backward begins."""
        self.turn = next(_turns)

    # -- arrivals

    def take(self, group: WeightGroup) -> None:
        """The module of this group has left backward: its gradients go to the host."""
        arrived = [
            (number, parameter)
            for number, parameter in enumerate(group.parameters)
            if parameter.grad is not None and parameter in self._parameters
        ]
        later = [one for one in arrived if one[1] in self._stored]
        first = [one for one in arrived if one[1] not in self._stored]
        if first:
            self._store(group, first)
        if later:
            self._add(group, later)

    def _store(self, group: WeightGroup, arrived: Sequence[tuple[int, Tensor]]) -> None:
        tensors = {number: self._newest(parameter) for number, parameter in arrived}
        self._measure([(parameter, tensors[number]) for number, parameter in arrived])
        is_sum = any(_is_widened(parameter, tensors[number]) for number, parameter in arrived)
        if is_sum or (self._float32 and self.is_accumulating()):
            self._sums(group)
        by_field: dict[Field, dict[int, Tensor]] = {}
        for number, parameter in arrived:
            home, dtype = self._home(parameter), tensors[number].dtype
            field = home.gradient_field(dtype)
            by_field.setdefault(field, {})[number] = tensors[number]
            self._keep(parameter, field, home.gradient(dtype))
        for field, own in by_field.items():
            waiting = {number: group.parameters[number] for number in own}
            if not all(map(self.is_first, waiting.values())):
                self._weights.store(field, own)
            elif self._weights.keep(field, own):
                self._staying |= dict.fromkeys(waiting.values())
            else:
                kept: dict[Tensor, Tensor] = {parameter: own[number] for number, parameter in waiting.items()}
                self._staying.update(kept)
                self._stored |= kept
        self._under_way.append((group, list(by_field), {parameter: tensors[number] for number, parameter in arrived}))
        while len(self._under_way) > _UNDER_WAY and not any(starmap(self.is_awaited, self._under_way[0][2].items())):
            self._release_oldest()

    def staying(self) -> set[WeightGroup]:
        """The groups with gradients that ``step()`` will use before all others, and that are still on the device."""
        return {self._home(parameter).group for parameter in self._staying}

    def release(self) -> None:
        """Use the device memory of the last gradients again: the model waits for their copies to the host."""
        for parameter, kept in self._staying.items():
            if kept is not None and self._stored.get(parameter) is kept:
                home, (field, stored) = self._home(parameter), self._fields[parameter]
                with no_grad_no_inference():  # the forward may be an evaluation
                    self._weights.store(field, {home.number: kept})
                self._stored[parameter] = stored
                self._under_way.append((home.group, [field], {parameter: kept}))
        self._staying = {}
        while self._under_way:
            self._release_oldest()

    def _release_oldest(self) -> None:
        """The device memory of the oldest gradients may be used again: the model waits for their copies, and for the
        updates in backward that read them."""
        group, fields, _ = self._under_way.popleft()
        for event in (group.weights.updated, *(field.returned for field in fields)):
            self._weights.waits.wait(self._weights.lanes.caller(), event)

    def _add(self, group: WeightGroup, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Add these gradients to those that are on the host."""
        sums = self._sums(group) if self._float32 else group.gradients()
        held = dict.fromkeys([sums, *(self._fields[parameter][0] for _, parameter in arrived)])
        with self._holding(held):
            added = []
            for number, parameter in arrived:
                total, earlier = (sums.on_device if self._float32 else sums.as_likes)[number], self._stored[parameter]
                if total is not earlier and earlier is sums.as_likes[number]:
                    sums.widen(number)
                elif total is not earlier:
                    total.copy_(earlier)
                added.append((parameter, total.add_(self._newest(parameter))))
                self._keep(parameter, sums, total)
            self._measure(added)
            self._weights.write_back(sums, [sums.bytes_of(n, 0, p.numel()) for n, p in arrived])

    def _sums(self, group: WeightGroup) -> Field:
        """The field of sums in fp32; what is in the one of gradients in the parameters' dtypes moves there."""
        sums = group.gradients(torch.float32)
        for parameter, moved in zip(group.parameters, sums.as_likes, strict=True):
            field, stored = self._fields.get(parameter, (sums, moved))
            if field not in group.fields:
                self._fields[parameter] = sums, moved
                if self._stored.get(parameter) is stored:
                    self._stored[parameter] = moved
        return sums

    def _measure(self, arrived: Sequence[tuple[Tensor, Tensor]]) -> None:
        caller = self._weights.lanes.caller()
        caller.wait(self._measured)  # of a stream that reduces other gradients
        self.on_arrival(arrived)
        caller.record(self._measured)

    def wait_until_measured(self) -> None:
        """The current stream waits for what :attr:`on_arrival` has queued: FSDP2 reduces gradients on another one."""
        self._weights.lanes.caller().wait(self._measured)

    def _keep(self, parameter: Tensor, field: Field, stored: Tensor) -> None:
        self._stored[parameter] = stored
        self._fields[parameter] = field, stored
        self._home(parameter).arrivals += 1
        parameter.grad = None

    def _newest(self, parameter: Tensor) -> Tensor:
        """``p.grad`` on the device, laid out as the weight; the user may have put it on the host, where that is."""
        given, rest = parameter.grad, self._home(parameter).on_host
        assert given is not None
        refuse_sparse(given)
        gradient = local_tensor(given).detach().to(self._weights.device)
        if gradient.is_contiguous() if rest.is_contiguous() else gradient.stride() == rest.stride():
            return gradient
        return torch.empty_like(rest, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    def _sum(self, parameter: Tensor, earlier: Tensor) -> Tensor:
        total = earlier.to(torch.float32 if self._float32 else earlier.dtype, copy=True)
        return total.add_(self._newest(parameter).to(total.device))

    def _home(self, parameter: Tensor) -> WeightHome:
        home = self._weights.home_of(parameter)
        assert home is not None, "it belongs to a group"
        return home

    # -- as sums of gradients: see :mod:`lightstep.precision.gradients`

    def has_gradient(self, parameter: Tensor) -> bool:
        return parameter.grad is not None

    def is_own_gradient(self, parameter: Tensor) -> bool:
        return False

    def totals(self) -> Mapping[Tensor, Tensor]:
        """The gradients on the host, as tensors on the device that are empty until somebody holds them."""
        return self._stored

    def before_step(self) -> None:
        """Raise ``RuntimeError`` if another optimizer has the gradient of one of the parameters, and this has none."""
        if len(self._weights.taken) == 1:
            return
        for other in self._weights.taken:
            for parameter in other.taken_among(self._parameters - self._stored.keys()):
                raise RuntimeError(
                    f"another optimizer of this model has taken the gradient of a parameter of shape "
                    f"{tuple(parameter.shape)} to the host (weights.placement: host): it was made later, or began the "
                    "last backward. Call optimizer.backward(loss) of the optimizer that steps next, or "
                    "model.zero_grad() before that backward if the gradient is an older one"
                )

    def taken_among(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those of these parameters whose gradients it has taken."""
        return [parameter for parameter in parameters if parameter in self._stored]

    def complete(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Add up what is on the host and in ``p.grad``: while these parameters' gradients arrive, in ``p.grad``; with
        ``None``, in :meth:`totals`."""
        for parameter in list(self._stored) if parameters is None else [p for p in parameters if p in self._stored]:
            if parameter.grad is None and parameters is None:
                continue
            with self.holding({parameter: self._stored[parameter]}):
                earlier = self._stored.pop(parameter)
                if parameter.grad is None:  # the last micro-batch does not use it
                    total = earlier.clone()
                else:
                    total = self._sum(parameter, earlier)
            parameter.grad = None
            if parameters is None:
                self._stored[parameter] = total
                self._measure([(parameter, total)])
            else:  # a parameter that no module has entered is on the host
                set_grad(parameter, like(parameter, total.to(parameter.device)))

    def measured(self, parameter: Tensor) -> Tensor | None:
        """The parameter, on the device of its gradients, and empty; ``None``: it is none of these."""
        home = self._weights.home_of(parameter) if parameter in self._parameters else None
        if home is None:
            return None
        found = like(parameter, home.on_device.detach()).requires_grad_(parameter.requires_grad)
        found.differs_across_ranks = differs_across_ranks(parameter)  # type: ignore[attr-defined]
        return found

    @contextmanager
    def reading(self, parameter: Tensor) -> Iterator[Tensor]:
        """In the body, the sum of what is on the host and in ``p.grad`` is on the device."""
        earlier = self._stored[parameter]
        with self.holding({parameter: earlier}):
            yield earlier if parameter.grad is None else self._sum(parameter, earlier)

    def drop(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Drop the gradients of these parameters; returns the parameters that had one."""
        dropped = [parameter for parameter in parameters if self._stored.pop(parameter, None) is not None]
        for parameter in dropped:
            self._staying.pop(parameter, None)
        if dropped:
            self.on_drop(dropped)
        return dropped

    def clear(self) -> None:
        """The gradients have been consumed or dropped."""
        self._stored, self._staying = {}, {}

    # -- their use

    @contextmanager
    def holding(self, gradients: Mapping[Tensor, Tensor], update: bool = False) -> Iterator[None]:
        """In the body these gradients, by parameter, are on the device.

        Args:
            update: see :meth:`HostWeights.release`.
        """
        known = (self._fields.get(parameter, (None, None)) for parameter in gradients)
        pairs = zip(known, gradients.values(), strict=True)
        with self._holding([field for (field, own), given in pairs if field is not None and own is given], update):
            yield

    def wait_until_stored(self, parameters: Iterable[Tensor]) -> None:
        """The current stream writes to these gradients next: it waits until none is on its way to the host."""
        for field in dict.fromkeys(self._fields[parameter][0] for parameter in parameters if parameter in self._fields):
            self._weights.lanes.caller().wait(field.returned)

    @contextmanager
    def _holding(self, fields: Iterable[Field], update: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            for field in dict.fromkeys(fields):
                self._weights.hold(field, update=update)
                stack.callback(self._weights.release, field, update)
            yield


def _is_widened(parameter: Tensor, gradient: Tensor) -> bool:
    return gradient.dtype is torch.float32 and parameter.dtype is not torch.float32
