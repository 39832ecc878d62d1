"""What is known of an optimizer class, or found out on small tensors.

Nobody can read from a class what it computes over which tensors: a class that is not torch's is tried.

It takes the same steps in three ways, and the bits are compared: by itself over all parameters, as in a plain
loop; as lightstep runs it on whole tensors, with units one after the other and other tensor objects in every step; and
on tensors that were joined and cut. The trial is loud: gradients of many magnitudes, a tensor above the sizes from
which classes behave differently, settings that are on, and more steps than the periods in use.
"""

from __future__ import annotations

import collections
import functools
import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightstep.distributed import dense_strides
from lightstep.error_text import error_text
from lightstep.optimizer.matrix_stack import Matrix
from lightstep.optimizer.undisturbed import undisturbed
from lightstep.optimizer.update import GroupValues, copied, equal_settings, same_value, settings_of

__all__ = [
    "TriedClass",
    "UntriedError",
    "counts_steps",
    "is_carried",
    "is_torchs_own",
    "needs_whole_tensors",
    "rates_differ",
    "read_settings",
    "torchs_own_needs_whole_tensors",
    "undecorated_step",
    "written_settings",
]

_CPU = torch.device("cpu")  # explicit everywhere: users may change torch's default device and dtype

_LARGE = (136, 128)
"""8-bit states (bitsandbytes, torchao) begin at 4096 elements, and factored moments at 128 rows and columns."""

_SHAPES = (_LARGE, (48, 64), (64,), (4, 16, 32), (16,))
_MATRICES = (_LARGE, (48, 64), (16, 16))
_STEPS = 27
"""More than the periods of classes that do something every so many steps: 5 (lookahead), 10, 25 (preconditioners)."""

_FEW_STEPS = 7  # for classes that are seen not to be element-wise after 3: products of matrices take long

_LOUD = (1.0, 1e-3, 10.0, 0.0, 1.0, 1e3, 1e-8, 100.0, 0.1)
_CALM = (1.0,)  # for classes that fail or diverge otherwise: decompositions of matrices
_SMALLEST_RATE, _DECAY = 1e-2, 0.1
_MOST_ELEMENTS = 16  # of a tensor among the attributes that a class changes

Segments = list[list[tuple[int, int, int]]]
"""Each segment is a list of parameters (by number) with the range of their elements that it has."""


class UntriedError(TypeError):
    """A class fails on every input of the trial. It may run on another device."""


class TriedClass(Protocol):
    """What the trial needs to know of a class's arithmetic."""

    optimizer_class: type[torch.optim.Optimizer]
    hyperparameters: dict[str, Any]
    defaults: dict[str, Any]

    def prepared(self, hyperparameters: dict[str, Any], device: torch.device) -> TriedClass:
        """A copy with an instance of the class of its own."""
        ...

    def resolved(self, settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]: ...
    def update(self, pairs: Sequence[tuple[Any, Tensor]], overflow: Tensor, values: GroupValues) -> None: ...


class _Conditions(NamedTuple):
    shapes: tuple[tuple[int, ...], ...]
    magnitudes: tuple[float, ...]
    decays: bool

    @property
    def is_loud(self) -> bool:
        return self.magnitudes is _LOUD


_ATTEMPTS = [
    _Conditions(_SHAPES, _LOUD, True),
    _Conditions(_SHAPES, _LOUD, False),
    _Conditions(_SHAPES, _CALM, False),
    _Conditions(_MATRICES, _LOUD, True),
    _Conditions(_MATRICES, _CALM, False),
]


@dataclass
class _Outcome:
    """After the last step: values and state of each tensor, and settings of each group.

    Attributes:
        random: the class has drawn random numbers.
        changed: attributes of the class's instance that changed and that cannot be carried from step to step.
        on_parameters: attributes that the class has set on its parameters.
        borrowed: the names of entries that hold, in a list or an object, tensors whose memory is used again.
    """

    values: list[Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    random: bool = False
    changed: list[str] = field(default_factory=list)
    on_parameters: list[str] = field(default_factory=list)
    borrowed: set[str] = field(default_factory=set)


def needs_whole_tensors(tried: TriedClass, settings: Sequence[Mapping[str, Any]], device: torch.device) -> bool:
    """Whether a class is not element-wise under these groups' settings.

    A class may say so by ``whole_tensors = True`` or ``False``; the trial then checks the rest.

    Raises:
        TypeError: the class cannot be updated unit by unit; with what it does and what to do.
        UntriedError: it cannot be tried on this device.
    """
    known = _verdicts.setdefault(tried.optimizer_class, [])
    rates = rates_differ([tried.defaults, *({**tried.defaults, **each} for each in settings)])
    compared = [tried.hyperparameters, {"rates differ": rates}, *settings]
    case = (undecorated_step(tried.optimizer_class), device.type, compared)
    for verdict in known:
        if verdict.is_for(case):
            break
    else:
        verdict = _Verdict(case[0], case[1], copied(case[2]), *_judge(tried, settings, device))
        known.append(verdict)
    if verdict.refusal is not None:
        raise verdict.refusal[0](verdict.refusal[1])
    declared = getattr(tried.optimizer_class, "whole_tensors", None)
    return verdict.whole if declared is None else bool(declared)


def read_settings(tried: TriedClass, settings: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of those of some groups' settings that a step of the class reads.

    A key that is none of the class's defaults (``rank``) may switch to other arithmetic; names of groups are not read.
    """
    return _Trial(tried, settings, _CPU).read_settings() if any(settings) else set()


def written_settings(tried: TriedClass) -> set[str]:
    """The names of settings that a step writes into its groups: counts, and whether it was the first one.

    In a trial they begin as the class makes them: state begins there, too.
    """
    trial = _Trial(tried, [{}], _CPU)
    trial._steps = 1
    try:
        written = trial._run_plainly().groups[0]
    except TypeError:
        return set()
    given = trial._groups()[0]
    skipped = {"params", "fused", "foreach", "lr", "initial_lr"}
    return {k for k in written.keys() - skipped if k not in given or not _same_setting(written[k], given[k])}


@dataclass
class _Verdict:
    step: Any
    device_type: str
    settings: list[Mapping[str, Any]]
    whole: bool
    refusal: tuple[type[TypeError], str] | None  # not the error: it refers to all tensors of the trial

    def is_for(self, case: tuple[Any, str, Sequence[Mapping[str, Any]]]) -> bool:
        step, device_type, settings = case
        alike = step is self.step and device_type == self.device_type and len(settings) == len(self.settings)
        return alike and all(map(equal_settings, settings, self.settings))


_verdicts: WeakKeyDictionary[type, list[_Verdict]] = WeakKeyDictionary()


def _judge(
    tried: TriedClass, settings: Sequence[Mapping[str, Any]], device: torch.device
) -> tuple[bool, tuple[type[TypeError], str] | None]:
    try:
        return _Trial(tried, settings, device).needs_whole(), None
    except TypeError as error:
        return True, (type(error), str(error))


class _Trial:
    """The trial of one class under the settings of some groups."""

    def __init__(self, tried: TriedClass, settings: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        self._tried, self._device, self._settings = tried, device, settings
        self._name, self._steps = tried.optimizer_class.__name__, 3
        self._alive: list[Any] = []  # no tensor gets the id() of an earlier one, which a table may know

    def needs_whole(self) -> bool:
        plain = self._run_plainly()
        self._refuse_sparse(plain)
        whole = self._mixes_elements(plain)
        self._steps = _FEW_STEPS if whole else _STEPS
        plain = self._run_plainly()
        self._check_whole(plain)
        return whole or self._mixes_elements(plain)

    def _refuse_sparse(self, plain: _Outcome) -> None:
        entries = (item for state in plain.states for item in state.items() if isinstance(item[1], Tensor))
        sparse = [(key, value.layout) for key, value in entries if value.layout is not torch.strided]
        if sparse:
            raise TypeError(
                f"{self._name} keeps {sparse[0][0]!r} as a tensor of layout {sparse[0][1]}, and lightstep keeps dense "
                "ones: use an optimizer whose state is dense"
            )

    def _mixes_elements(self, plain: _Outcome) -> bool:
        """Whether joined and cut tensors get other bits. Random numbers depend on shapes: they are not compared."""
        if plain.random or not self._conditions.is_loud or _keeps_other_shapes(plain):
            return True
        segments = self._joined_segments()
        try:
            joined = self._run_as_lightstep(segments)
        except Exception:  # it takes matrices only
            return True
        return not _equals_joined(plain, joined, segments)

    def _run_plainly(self) -> _Outcome:
        """The loudest run that the class can take.

        Raises:
            TypeError: it can take none.
        """
        first: Exception | None = None
        for conditions in _ATTEMPTS:
            self._conditions = conditions
            try:
                outcome = self._in_a_plain_loop()
            except Exception as error:
                first = first or error
                continue
            if all(bool(value.isfinite().all()) for value in outcome.values) or not conditions.is_loud:
                return outcome
        shown = error_text(first) if first is not None else "infinite values"
        raise UntriedError(
            f"{self._name} failed in the trial of its step on small tensors ({shown}). lightstep calls step() "
            "without a closure, on fp32 tensors with gradients that have no graph: classes that evaluate the loss "
            "again (SAM, LBFGS), differentiate the gradients (AdaHessian), or need the model or processes cannot run; "
            "use an optimizer whose step() needs gradients only, such as torch.optim.AdamW"
        ) from first

    def _check_whole(self, plain: _Outcome) -> None:
        """Raise ``TypeError`` unless whole tensors, in units one after the other, give the bits of the plain loop."""
        last = len(plain.values) - 1
        # Backwards, unless random numbers are drawn in the order of the updates.
        numbers = range(last + 1) if plain.random else range(last, -1, -1)
        segments: Segments = [[(number, 0, plain.values[number].numel())] for number in numbers]
        try:
            whole = self._run_as_lightstep(segments, whole=True)
        except Exception as error:
            raise TypeError(
                f"{self._name} runs in a plain loop, and failed in the trial of units one after the other "
                f"({error_text(error)}): it is given other parameters in each update, in param_groups and state that "
                "are made for it. Use an optimizer whose step() reads only its groups and self.state[parameter]"
            ) from error
        order = list(numbers)
        same = all(_same(plain.values[n], whole.values[i]) for i, n in enumerate(order))
        if not same or plain.changed or self._differing_settings(plain, whole):
            raise TypeError(self._explain(plain, whole))

    def _differing_settings(self, plain: _Outcome, other: _Outcome) -> list[str]:
        """The names of settings that the class wrote, with other values."""
        pairs = zip(plain.groups, other.groups, strict=True)
        skipped = {"params", "fused", "foreach"}
        return sorted({k for a, b in pairs for k in a.keys() & b.keys() - skipped if not _same_setting(a[k], b[k])})

    def _explain(self, plain: _Outcome, whole: _Outcome) -> str:
        if plain.changed:
            return (
                f"{self._name} keeps {', '.join(plain.changed)} in attributes of its own (a table by parameter?), and "
                "the tensors that lightstep gives it are other objects in every step. Keep what belongs to a parameter "
                "in self.state[parameter], and numbers in its group; or use another optimizer"
            )
        names = self._differing_settings(plain, whole)
        sliced = sorted({key for state in plain.states for key, value in state.items() if _has_gaps(value)})
        if sliced and not names:
            return (
                f"{self._name} keeps {', '.join(map(repr, sliced))} as a slice of a larger tensor, and sums over it "
                "have other last bits than over the slice alone, which is what lightstep keeps between steps. Put "
                "slice.clone() into the state"
            )
        if plain.on_parameters:
            return (
                f"{self._name} sets {', '.join(plain.on_parameters)} on its parameters, and the tensors that lightstep "
                "gives it are other objects in every step. Keep what belongs to a parameter in self.state[parameter]"
            )
        if whole.borrowed:
            return (
                f"{self._name} keeps tensors that it was given (gradients, weights or state) in "
                f"{', '.join(map(repr, sorted(whole.borrowed)))}, and lightstep uses their memory again in the next "
                "update. Put tensor.clone() there"
            )
        if not names and (shared := _shared_memory(plain)):
            return (
                f"{self._name} has the same memory in {shared}, and lightstep keeps each entry by itself between "
                "steps: what is written into one does not reach the other. Keep it in one entry, or put tensor.clone() "
                "into the other"
            )
        written = f"; it writes {', '.join(map(repr, names))} into its groups" if names else " (a norm of its own?)"
        return (
            f"{self._name} computes something over all its parameters together{written}, and lightstep applies it to "
            "one unit of parameters after the other; clip with clipping.max_norm, or use an optimizer whose update of "
            "a parameter depends on that parameter, its state and its group alone"
        )

    # -- what is updated

    def _groups(self) -> list[dict[str, Any]]:
        """Live groups. Their learning rates differ from each other's and the constructor's if the given ones do."""
        groups = [self._loud({**self._tried.defaults, **settings}) for settings in self._settings]
        for number, settings in enumerate(self._settings):
            own = {**self._tried.defaults, **settings}
            if rates_differ([self._tried.defaults, own]) and type(groups[number].get("lr")) is float:
                groups[number]["lr"] /= number + 2
        return groups

    def _arguments(self) -> dict[str, Any]:
        """The constructor's keyword arguments, as loud as the groups."""
        loud = self._loud(self._tried.defaults)
        changed = {key: value for key, value in loud.items() if value is not self._tried.defaults[key]}
        named = (
            inspect.signature(self._tried.optimizer_class).parameters.keys() & changed.keys() & {"lr", "weight_decay"}
        )
        return {**copied(self._tried.hyperparameters), **{key: changed[key] for key in named}}

    def _loud(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under which differences show: a schedule may begin with a rate or a decay of 0."""
        loud = copied(dict(settings))
        rate, decay = loud.get("lr"), loud.get("weight_decay")
        if isinstance(rate, Tensor):
            loud["lr"] = rate.to(self._device).clamp(min=_SMALLEST_RATE)
        elif type(rate) in (int, float):
            loud["lr"] = float(max(rate, _SMALLEST_RATE))
        if self._conditions.decays and type(decay) in (int, float) and decay == 0:
            loud["weight_decay"] = _DECAY
        return loud

    def _numbers(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Values of all groups' parameters, and their gradients in each step."""
        values, directions = _drawn_numbers(self._conditions.shapes, len(self._settings), self._device)
        magnitudes = self._conditions.magnitudes
        steps = [
            [each * magnitudes[(step + 2 * number) % len(magnitudes)] for number, each in enumerate(drawn)]
            for step, drawn in enumerate(directions[: self._steps])
        ]
        return [value.clone() for value in values], steps

    def _joined_segments(self) -> Segments:
        """Within each group: the first parameter in two pieces, and all others joined, which is above 4096."""
        sizes = [torch.Size(shape).numel() for shape in self._conditions.shapes]
        segments: Segments = []
        for first in range(0, len(self._settings) * len(sizes), len(sizes)):
            segments += [[(first, 0, 2048)], [(first, 2048, sizes[0])]]
            segments.append([(first + number, 0, size) for number, size in enumerate(sizes) if number])
        return segments

    # -- runs

    def read_settings(self) -> set[str]:
        """The names of settings that a step reads; all of them if it fails."""
        self._conditions, self._steps, read = _ATTEMPTS[-1], 1, set[str]()
        try:
            self._in_a_plain_loop(read)
        except Exception:
            return {key for settings in self._settings for key in settings}
        return read

    def _in_a_plain_loop(self, read: set[str] | None = None) -> _Outcome:
        """What the class computes by itself.

        Args:
            read: gets the names of settings that a step reads.
        """
        values, steps = self._numbers()
        parameters = [nn.Parameter(value) for value in values]
        arguments = self._arguments()
        tried = self._tried.prepared(arguments, self._device)
        groups = [tried.resolved(group, self._device) for group in self._groups()]
        each = len(self._conditions.shapes)
        for number, group in enumerate(groups):
            group["params"] = parameters[number * each : (number + 1) * each]
        step = undecorated_step(self._tried.optimizer_class)
        with undisturbed(self._device) as generators:
            optimizer = tried.optimizer_class(groups, **arguments)
            before = _attributes(optimizer)
            if read is not None:
                optimizer.param_groups = [_WatchedGroup(group, read) for group in optimizer.param_groups]
            for gradients in steps:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                with torch.no_grad():
                    step(optimizer)
            random = generators.drawn()
        states = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
        changed = sorted(_uncarried(before, _attributes(optimizer)))
        set_by_class = sorted({key for parameter in parameters for key in vars(parameter)})
        values = [p.detach() for p in parameters]
        return _Outcome(values, states, optimizer.param_groups, random, changed, set_by_class)

    def _run_as_lightstep(self, segments: Segments, whole: bool = False) -> _Outcome:
        """Each segment is a unit."""
        (values, steps), groups = self._numbers(), self._groups()
        masters = [_gathered(values, segment, whole) for segment in segments]
        states: list[dict[str, Any]] = [{} for _ in segments]
        owners = [groups[segment[0][0] // len(self._conditions.shapes)] for segment in segments]
        overflow = torch.zeros((), dtype=torch.float32, device=self._device)
        tried, borrowed = self._tried.prepared(self._arguments(), self._device), set[str]()
        with undisturbed(self._device):
            for gradients in steps:
                numbers = GroupValues(groups)
                for i, segment in enumerate(segments):
                    state = states[i]
                    seen = Matrix(masters[i].clone(), owners[i], state)
                    self._alive.append(seen)
                    gradient = _gathered(gradients, segment, whole)
                    lent = [each for each in (seen.master, gradient, *state.values()) if _is_in_a_record(each)]
                    tried.update([(seen, gradient)], overflow, numbers)
                    borrowed |= _borrowing(seen.state, lent)
                    masters[i] = seen.master.clone()
                    states[i] = {key: _renewed(value) for key, value in seen.state.items()}
                    for each in lent:  # its memory has something else in the next update
                        each.fill_(math.nan if each.is_floating_point() else 1)
                numbers.write_back()
        return _Outcome([master.detach() for master in masters], states, groups, borrowed=borrowed)


class _WatchedGroup(dict[str, Any]):
    """A group that records the names of settings that are read. Who copies it reads all of them."""

    def __init__(self, group: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(group)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self._read.update(super().keys())
        return super().items()


@functools.lru_cache(maxsize=4)
def _drawn_numbers(
    shapes: tuple[tuple[int, ...], ...], groups: int, device: torch.device
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values of parameters, and normal numbers for their gradients in each step; always the same."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    return [drawn(s) * 0.1 for s in shapes * groups], [[drawn(s) for s in shapes * groups] for _ in range(_STEPS)]


def rates_differ(settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups have different learning rates, leaving schedules aside."""
    rates = [each.get("initial_lr", each.get("lr")) for each in settings]
    return any(rate is not rates[0] and not same_value(rate, rates[0]) for rate in rates)


def _gathered(values: Sequence[Tensor], segment: list[tuple[int, int, int]], whole: bool) -> Tensor:
    if whole:
        return values[segment[0][0]].clone()
    return torch.cat([values[number].view(-1)[start:stop] for number, start, stop in segment])


def _renewed(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_in_a_record(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.dim() > 0 and value.layout is torch.strided


def _borrowing(state: Mapping[str, Any], lent: Sequence[Tensor]) -> set[str]:
    """The names of entries that are no tensors, and hold some with memory of ``lent``."""
    memory = {each.untyped_storage().data_ptr() for each in lent}
    return {key for key, value in state.items() if not isinstance(value, Tensor) and _holds(value, memory)}


def _holds(value: Any, memory: Container[int], depth: int = 4) -> bool:
    """Whether it is a tensor in this memory, or has one."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.untyped_storage().data_ptr() in memory
    if isinstance(value, Mapping):
        values: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, collections.deque)):
        values = value
    else:
        values = getattr(value, "__dict__", {}).values()
    return depth > 0 and any(_holds(each, memory, depth - 1) for each in values)


def _shared_memory(outcome: _Outcome) -> str | None:
    """Two entries of a state that are, or hold, the same memory; or one that has the parameter's."""
    for value, state in zip(outcome.values, outcome.states, strict=True):
        tensors = {repr(key): entry for key, entry in state.items() if _is_in_memory(entry)}
        for owner, tensor in {**tensors, "the parameter": value}.items():
            memory = {tensor.untyped_storage().data_ptr()}
            others = [key for key, entry in state.items() if repr(key) != owner and _holds(entry, memory)]
            if others:
                return f"{others[0]!r} and {owner}"
    return None


def _is_in_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


def _has_gaps(value: Any) -> bool:
    """Whether a copy has other strides: it is a slice of a larger tensor, whose memory would not be kept."""
    return isinstance(value, Tensor) and value.stride() != dense_strides(value)


def _keeps_other_shapes(outcome: _Outcome) -> bool:
    """Whether state has shapes such as row sums, for which flat data has no room."""
    return any(
        isinstance(entry, Tensor) and entry.dim() > 0 and entry.shape != value.shape
        for value, state in zip(outcome.values, outcome.states, strict=True)
        for entry in state.values()
    )


def _equals_joined(plain: _Outcome, joined: _Outcome, segments: Segments) -> bool:
    """Whether segments have the values and the state of the parameters that they are parts of."""
    for i, segment in enumerate(segments):
        stops = [0, *accumulate(stop - start for _, start, stop in segment)]
        for (number, start, stop), first in zip(segment, stops, strict=False):
            mine, theirs = slice(first, first + stop - start), slice(start, stop)
            if not _same(joined.values[i][mine], plain.values[number].reshape(-1)[theirs]):
                return False
            one, other = joined.states[i], plain.states[number]
            if one.keys() != other.keys() or not all(_same_entry(one[k], other[k], mine, theirs) for k in one):
                return False
    return True


def _same_entry(joined: Any, plain: Any, mine: slice, theirs: slice) -> bool:
    if isinstance(joined, Tensor) and isinstance(plain, Tensor) and plain.dim() and joined.dim():
        return _same(joined.reshape(-1)[mine], plain.reshape(-1)[theirs])
    if isinstance(joined, Tensor) and isinstance(plain, Tensor):
        return joined.dtype == plain.dtype and _same(joined, plain)
    return same_value(joined, plain)


def _same(one: Tensor, other: Tensor) -> bool:
    """``torch.equal``, dtypes included; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _same_setting(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same(one, other)
    return same_value(one, other)


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The instance's attributes, with copies of those that can be carried from step to step."""
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "defaults")}
    return {key: copied(value) if is_carried(value) else _Marked(value) for key, value in own.items()}


class _Marked:
    """An object that cannot be copied: the same one, with as many elements, counts as unchanged."""

    def __init__(self, value: Any) -> None:
        self._value, self._size = value, len(value) if hasattr(type(value), "__len__") else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Marked) and self._value is other._value and self._size == other._size

    __hash__ = None  # type: ignore[assignment]


def _uncarried(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The names of attributes that have changed, and are not plain values of a few elements."""
    for key, value in now.items():
        if key in before and (before[key] == value if isinstance(value, _Marked) else same_value(before[key], value)):
            continue
        if isinstance(value, _Marked) or _elements(value) > _MOST_ELEMENTS:
            yield key


def _elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(_elements, value.values()))
    return sum(map(_elements, value)) if isinstance(value, (list, tuple)) else 0


def is_carried(value: Any) -> bool:
    """Whether an attribute can be copied and saved: a number, a string, a tensor, or a list or dictionary of such."""
    if type(value) is dict:
        return all(type(key) in (str, int) for key in value) and all(map(is_carried, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_carried, value))
    return value is None or type(value) in (int, float, bool, str) or type(value) is Tensor


# -- without a trial ---------------------------------------------------------------------------------------------------


def torchs_own_needs_whole_tensors(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether a class of torch's is not element-wise; they are known, and need no trial."""
    declared = getattr(optimizer_class, "whole_tensors", None)
    return optimizer_class.__name__ in ("Adafactor", "Muon") if declared is None else bool(declared)


def counts_steps(
    optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], shape: tuple[int, ...]
) -> bool:
    """Whether a step changes the optimizer's groups, numeric attributes, or state that is no parameter's.

    Args:
        shape: the shape of a parameter that the class takes.
    """
    parameter = torch.zeros(shape, dtype=torch.float32, device=_CPU)
    parameter.grad = torch.ones_like(parameter)
    with undisturbed(_CPU):
        optimizer = optimizer_class([parameter], **copied(dict(hyperparameters)))

        def numbers() -> dict[str, Any]:
            kept = {key: value for key, value in vars(optimizer).items() if type(value) in (int, float, bool)}
            shared = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
            return copied({"attributes": kept, "group": settings_of(optimizer.param_groups[0]), "shared": shared})

        before = numbers()
        undecorated_step(optimizer_class)(optimizer)
        return not same_value(before, numbers())


def is_torchs_own(optimizer_class: type) -> bool:
    return optimizer_class.__module__.startswith("torch.optim.")


def undecorated_step(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """``step`` without the wrapper that calls hooks: the outer optimizer calls them, once per step."""
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
