"""One run: the link, then the contenders one after another, in rounds of alternating order.

A contender computes one global gradient norm, clips to one norm, updates with fp32 AdamW (or Muon, see `--optimizer`)
and leaves new bf16 weights on the device. Contenders differ in where the state lives and how it gets there. The same
class does single steps from given gradients (`step`) and whole iterations from a batch (`iterate`).

One contender at a time is in memory. Where the host's speed decides, all those of a case stay there, so that rounds can
be short: the host changes its speed from one minute to the next.

Steps run back to back, and each is timed from the end of the one before, on the device's main stream. So work that a
step leaves behind (pending copies, prefetched buffers, updates during the next forward) is not free: it delays the
next step. A contender that fails gets a note, and the run continues.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightstep.bench.machine import (
    FORWARD,
    STEP,
    Ranks,
    StepProfile,
    free_memory,
    gc_frozen,
    pinned_bytes,
    profile_step,
    synchronize,
)
from lightstep.bench.report import Values, View, conditions
from lightstep.config import ConfigError
from lightstep.config_errors import suggest
from lightstep.distributed import local_tensor
from lightstep.optimizer.rules import Rule
from lightstep.plan.timing import MeasuredLink, lap_times

logger = logging.getLogger(__name__)

# -- what is measured --------------------------------------------------------------------------------------------------

MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"class": "AdamW", **ADAMW},
    "muon": {"class": "Muon + AdamW", "muon": MUON, "adamw": ADAMW},
}
"""`--optimizer`: its entry in the JSON file. Muon is for the hidden matrices, AdamW for the rest."""


class Skipped(Exception):
    """This contender cannot run here; the message is the row's note."""


class Contender(ABC):
    """One row of the table. Building it allocates what a step needs, except state that its optimizer creates lazily.

    Attributes:
        model: the model that is trained; called with a batch, it returns the loss.
        optimizers: the values of `--optimizer` that it supports.
        max_norm: the global norm that it clips to.
        loss, grad_norm: of the last iteration, 0-dim on the device. The norm is the one before clipping, None if the
            contender does not expose it.
        redone_steps: how many steps before the last one had to redo or roll back updates of their backward, None for
            peers.
        host_ms: how long the host was in the last iteration's forward, backward and step.
    """

    name: str
    about: str
    kind: Literal["lightstep", "peer", "baseline"] = "peer"
    gradient_dtype: torch.dtype = torch.bfloat16
    needs_group: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...]] = ("adamw",)
    max_norm: float = MAX_NORM
    model: nn.Module
    loss: Tensor
    grad_norm: Tensor | None = None
    redone_steps: int | None = None
    host_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def placed(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients, shaped like `gradient_weights()`, as :meth:`step` takes them: as backward would leave them."""
        return list(gradients)

    @abstractmethod
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One optimizer step. `gradients` may be changed, but not kept."""

    def iterate(self, batch: Sequence[Tensor]) -> None:
        """Forward, backward and step. Waits for the device only if the contender itself does."""
        with self.accumulate():
            times = [time.perf_counter()]
            with record_function(FORWARD):
                loss = self.model(*batch)
            times.append(time.perf_counter())
            self.backward(loss)
            times.append(time.perf_counter())
            with record_function(STEP):
                self.update()
            times.append(time.perf_counter())
        self.loss = loss.detach()
        forward, backward, step = (1e3 * (after - before) for before, after in itertools.pairwise(times))
        self.host_ms = forward, backward, step

    def set_max_norm(self, max_norm: float) -> None:
        """Clip to this global norm from the next step on."""
        self.max_norm = max_norm

    def accumulate(self) -> AbstractContextManager[object]:
        """Context of one iteration."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """One optimizer step from the gradients in the model, which are cleared."""
        self.step([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])
        self.model.zero_grad()

    def weights(self) -> list[Tensor]:
        """The weights that the next forward uses (this rank's shards)."""
        return [local_tensor(parameter.detach()) for parameter in self.model.parameters()]

    def gradient_weights(self) -> list[Tensor]:
        """Tensors with the shapes of the gradients."""
        return self.weights()

    def device_weights(self) -> list[Tensor]:
        """All tensors on the device that count as weights."""
        return self.weights()

    def host_tensors(self) -> list[Tensor]:
        """The tensors that the contender keeps in host memory."""
        return []

    def host_bytes(self) -> int:
        return nbytes(self.host_tensors())

    def finish(self) -> None:
        """Make the host or the current stream wait until the last step's weights and host state are written."""
        return

    def close(self) -> None:
        """Release what garbage collection does not."""
        return


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(local_tensor(tensor.detach()).nbytes for tensor in tensors)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global 2-norm, 0-dim fp32, for gradients of any dtype."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


# -- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_arguments(name: str) -> dict[str, Any]:
    """Keyword arguments of `strategy.create_optimizer`."""
    if name == "adamw":
        return {"optimizer_class": torch.optim.AdamW, **ADAMW}
    matrices = Rule(torch.optim.Muon, kinds="hidden_matrices", **MUON)
    return {"rules": [matrices, Rule(torch.optim.AdamW, kinds="rest", **ADAMW)]}


def torch_optimizers(
    name: str, model: nn.Module, updated: Sequence[Tensor], **adamw: Any
) -> list[torch.optim.Optimizer]:
    """torch's optimizers on `updated`, one tensor for each parameter of the model, in its order.

    Args:
        adamw: the implementation of AdamW, for example `fused=True`.
    """
    if name == "adamw":
        return [torch.optim.AdamW(updated, **adamw, **ADAMW)]
    matrices, rest = split_matrices(model, updated)
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **adamw, **ADAMW)]


def split_matrices(model: nn.Module, updated: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split `updated` into the tensors of hidden matrices and those of all other parameters."""
    pairs = list(zip(updated, hidden_matrices(model), strict=True))
    return [tensor for tensor, hidden in pairs if hidden], [tensor for tensor, hidden in pairs if not hidden]


def hidden_matrices(model: nn.Module) -> list[bool]:
    """For each parameter, whether it is a matrix inside a block."""
    inside = {id(parameter) for parameter in model.layers.parameters()}  # type: ignore[union-attr]
    return [parameter.dim() == 2 and id(parameter) in inside for parameter in model.parameters()]


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One contender before it is built.

    Attributes:
        name: as on the command line.
        label: as shown in tables and charts.
        build: makes the contender, or raises.
        resident: whether it is a strategy that keeps all state on the device; others are compared with it.
        needs_group: whether it needs a process group even on one rank.
    """

    name: str
    label: str
    kind: str
    about: str
    build: Callable[[Any], Contender]
    resident: bool = False
    needs_group: bool = False

    @classmethod
    def from_class(cls, contender: type[Contender]) -> Entry:
        def build(task: Task) -> Contender:
            if task.optimizer not in contender.optimizers:
                raise Skipped(f"supports --optimizer {', '.join(contender.optimizers)} only, not {task.optimizer}")
            return contender(task)  # type: ignore[call-arg]

        kind, about = contender.kind, contender.about
        return cls(contender.name, contender.name, kind, about, build, needs_group=contender.needs_group)


@dataclass(frozen=True)
class Task(ABC):
    """What every contender does, how it is measured, and how the result is shown.

    Attributes:
        case: the size (tokens or tensors) or the model, for tasks that are measured at several.
        stem: file name of the result, without its suffix.
        case_name: the JSON key of `case`.
        provides_gradients: whether steps are given gradients instead of running backward.
        max_norm: the global norm to clip to.
        optimizer: `--optimizer`.
        threads: torch's CPU threads; None: this rank's share of the cores.
        has_loop_by_hand: whether times are compared with the loop by hand.
        keeps_contenders: whether the contenders of a case stay in memory from round to round.
        peers: the contenders that `--peers` can name.
        baseline: a contender that is measured before all others.
        view: how tables and chart show the result; None: the task writes its own files instead.
    """

    device: torch.device
    seed: int

    stem: ClassVar[str]
    case_name: ClassVar[str | None] = None
    default_peers: ClassVar[str] = "all"
    max_norm: float = field(default=MAX_NORM, kw_only=True)
    optimizer: str = field(default="adamw", kw_only=True)
    provides_gradients: ClassVar[bool] = False
    keeps_contenders: ClassVar[bool] = False
    threads: ClassVar[int | None] = None
    peers: ClassVar[tuple[type[Contender], ...]]
    baseline: ClassVar[type[Contender] | None] = None
    view: ClassVar[View | None] = None

    case: int | str = field(default=0, kw_only=True)

    @property
    def has_loop_by_hand(self) -> bool:
        return self.optimizer == "muon"

    @property
    def settings(self) -> dict[str, Any]:
        """Overrides for every strategy."""
        return {"clipping.max_norm": self.max_norm}

    def default_strategies(self, ranks: int) -> tuple[str, ...]:
        """The strategies of `--strategies default` on `ranks` ranks."""
        return ("resident", "stream", "stream-overlap")

    @abstractmethod
    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """A new model on the device. Equal seeds give equal weights."""

    def model_for_peers(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """The same model, changed as `settings` tells strategies to change theirs."""
        return self.model(dtype)

    @abstractmethod
    def measure(self, measurement: Measurement) -> None:
        """Measure one round of one contender."""

    def probe(self, measurement: Measurement) -> None:
        """Further measurements, after the last round."""
        return

    @abstractmethod
    def head(self, run: Run) -> Values:
        """The JSON values that belong to the whole run."""

    @abstractmethod
    def figures(self, run: Run, row: Row) -> Values:
        """The JSON values of one row. A collective: all ranks call it."""

    def compare(self, run: Run, rows: Sequence[Row], values: Sequence[Values]) -> None:
        """Add values that compare the rows of one case with each other."""
        return


def parse_peers(text: str | None, task: Task) -> list[Entry]:
    """The entries of `--peers`: names separated by commas, `all` or `none`.

    Raises:
        ValueError: an unknown peer.
    """
    text = text or task.default_peers
    known = {peer.name: peer for peer in task.peers}
    names = list(known) if text == "all" else split_names(text)
    for name in names:
        if name not in known:
            hint = suggest(name, list(known))
            raise ValueError(f"--peers {name}: no such peer{hint}; allowed are all, none and {', '.join(known)}")
    return [Entry.from_class(known[name]) for name in names]


def split_names(text: str) -> list[str]:
    """Names separated by commas, without duplicates; `none` gives an empty list. Commas in `[...]` are the name's."""
    names = [name.strip() for name in re.split(r",(?![^\[\]]*\])", text) if name.strip()]
    return [] if names == ["none"] else list(dict.fromkeys(names))


class Spread(NamedTuple):
    """The middle and the range of a row's times; of several ranks, the slowest."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, times: Sequence[float], middle: Callable[[Sequence[float]], float], ranks: Ranks) -> Spread:
        """A collective: all ranks call it. `middle` is a median or a mean."""
        return cls(*ranks.maximum([middle(times), min(times), max(times)]))

    def per_1e9(self, count: int) -> Spread:
        """The same for 10⁹ of what these times took `count` of."""
        return Spread(*(time / count * 1e9 for time in self))

    def values(self, key: str) -> dict[str, Any]:
        """Its two JSON values."""
        return {key: self.middle, f"{key}_range": [self.least, self.most]}


@dataclass
class Row:
    """What was measured of one contender at one size on this rank, over all rounds. None: not measurable here.

    Attributes:
        windows: for each round, the ms of each step.
        remaining_ms: for each round, the ms from the end of the last step until everything was written.
        host_ms: for each iteration of all rounds, those of the host in forward, backward and step.
        peak_bytes: peak device memory, without the inputs.
        extra: what only this row's task measures.
        note: why there are no figures.
        skipped: the contender cannot run here; otherwise a note means that it failed.
    """

    entry: Entry
    task: Task
    windows: list[list[float]] = field(default_factory=list)
    remaining_ms: list[float] = field(default_factory=list)
    host_ms: list[tuple[float, float, float]] = field(default_factory=list)
    parameters: int = 0
    weight_bytes: int = 0
    input_bytes: int = 0
    peak_bytes: int | None = None
    host_bytes: int = 0
    profile: StepProfile | None = None
    sample: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    skipped: bool = False

    @property
    def times(self) -> list[float]:
        """The ms of each step of all rounds."""
        return [time for window in self.windows for time in window]

    def host_waits(self, ranks: Ranks) -> dict[str, Any]:
        """The JSON values of how often the host waited for the device. A collective: all ranks call it."""
        seen = self.profile
        most = ranks.maximum([float(seen.waits if seen else 0)])[0]
        return {
            "host_syncs": None if seen is None else int(most),
            "first_sync": None if seen is None else seen.first_wait,
        }


@dataclass(frozen=True)
class Effort:
    """Timed steps in each round, untimed steps before them, and rounds."""

    steps: int
    warmup: int
    rounds: int = 1


@dataclass
class Run:
    """Everything measured so far.

    Attributes:
        tasks: one for each case, otherwise alike.
        checkpoints: the folder for timed saves.
    """

    tasks: Sequence[Task]
    effort: Effort
    ranks: Ranks
    rows: list[Row]
    checkpoints: Path | None = None
    link: MeasuredLink | None = None

    @classmethod
    def create(
        cls,
        tasks: Sequence[Task],
        effort: Effort,
        ranks: Ranks,
        entries: Sequence[Entry],
        checkpoints: Path | None = None,
    ) -> Run:
        """A run that has measured nothing yet."""
        baseline = tasks[0].baseline
        contenders = [*([] if baseline is None else [Entry.from_class(baseline)]), *entries]
        return cls(tasks, effort, ranks, [Row(entry, task) for task in tasks for entry in contenders], checkpoints)

    @property
    def task(self) -> Task:
        """The first task, for what all cases have in common."""
        return self.tasks[0]

    @property
    def cases(self) -> list[int | str]:
        return [task.case for task in self.tasks]


def measure_all(run: Run, progress: Callable[[str], None]) -> None:
    """Fill the rows. `progress` is called with a sentence before each contender, and may save the rows so far."""
    progress("the link")
    run.link = run.ranks.measure_link()
    if run.task.keeps_contenders:
        for task in run.tasks:
            _measure_in_turn(run, [row for row in run.rows if row.task is task], progress)
    else:
        _measure_in_turn(run, run.rows, progress)
    again = run.ranks.measure_link()
    if run.link is not None and again is not None:
        run.link = run.link.or_faster(again)


def _measure_in_turn(run: Run, rows: Sequence[Row], progress: Callable[[str], None]) -> None:
    measurements: dict[str, Measurement] = {}  # of contenders that are in memory
    try:
        for number in range(run.effort.rounds):
            for row in rows if number % 2 == 0 else reversed(rows):  # fair if the machine slows down
                if row.note is not None:
                    continue
                progress(f"round {number + 1} of {run.effort.rounds}: {row.entry.label}")
                measurements.setdefault(row.entry.name, Measurement(run, row)).measure(number)
                if row.note is not None or not row.task.keeps_contenders:
                    _close(measurements, row.entry.name)
    finally:
        for name in list(measurements):
            _close(measurements, name)


def _close(measurements: dict[str, Measurement], name: str) -> None:
    measurement = measurements.pop(name)
    measurement.close()
    device = measurement.device
    del measurement
    free_memory(device)


class Measurement:
    """One contender, from building it to releasing it.

    Attributes:
        inputs: gradients or batches, which steps use in turn.
        number: of the round.
        untimed: iterations before those that are timed; two in later rounds of a contender that stays in memory.
    """

    contender: Contender
    inputs: Sequence[Sequence[Tensor]] = ()

    def __init__(self, run: Run, row: Row) -> None:
        self.run, self.row = run, row
        self.device = row.task.device

    @property
    def _is_built(self) -> bool:
        return "contender" in vars(self)

    def measure(self, number: int) -> None:
        """Run all phases of a round on all ranks. A failure on any rank becomes the row's note."""
        self.number, self.untimed = number, 2 if self._is_built else 1 + self.run.effort.warmup
        for phase in self._phases():
            self.run.ranks.barrier()
            note, skipped = _failure(phase)
            note = self.run.ranks.first_error(note)
            if note is not None:
                self.row.note, self.row.skipped = note, skipped
                return

    def _phases(self) -> Iterator[Callable[[], None]]:
        if not self._is_built:
            yield self._build
        yield partial(self.row.task.measure, self)
        if self.number == self.run.effort.rounds - 1:
            yield partial(self.row.task.probe, self)

    def _build(self) -> None:
        self._device_before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        self._pinned_before = pinned_bytes(self.device)
        if self.row.entry.needs_group:
            self.run.ranks.ensure_group()
        self.contender = self.row.entry.build(self.row.task)
        self.row.weight_bytes = nbytes(self.contender.device_weights())
        self.row.parameters = sum(weight.numel() for weight in self.contender.weights())

    @gc_frozen()
    def time(self, work: Callable[[Any], None], warmup: int, synchronize: bool) -> None:
        """Warm up, then time one window of steps and record their memory.

        Args:
            work: one step, called with its inputs.
            synchronize: finish the warm-up first. Otherwise the first step includes what the warm-up left pending.
        """
        for warm in self._steps(work, warmup):
            warm()
        if synchronize:
            self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        steps = self._steps(work, self.run.effort.steps)
        *window, remaining = lap_times([*steps, self.contender.finish], self.device)
        self.row.windows.append(window)
        self.row.remaining_ms.append(remaining)
        if self.number == 0 or not self.row.task.keeps_contenders:  # else others have come to the device since
            self._record_memory()

    def _steps(self, work: Callable[[Any], None], count: int) -> list[Callable[[], None]]:
        return [partial(work, self.inputs[step % len(self.inputs)]) for step in range(count)]

    def profile(self, work: Callable[[Any], None]) -> None:
        """Profile one step."""
        self.row.profile = profile_step(partial(work, self.inputs[0]), self.contender.finish, self.device)

    def _record_memory(self) -> None:
        given = sum(map(nbytes, self.inputs))
        # The inputs of one step count; the second set that the bench alternates with does not.
        self.row.input_bytes = given // len(self.inputs)
        pinned = pinned_bytes(self.device) - self._pinned_before
        self.row.host_bytes = self.contender.host_bytes() + unlisted_pinned_bytes(self.contender, pinned)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self._device_before - given
            self.row.peak_bytes = max(peak, self.row.peak_bytes or 0)

    def synchronize(self) -> None:
        """Wait until all work is done."""
        self.contender.finish()
        synchronize(self.device)

    def close(self) -> None:
        if self._is_built:
            self.contender.close()
            del self.contender
        self.inputs = ()


def unlisted_pinned_bytes(contender: Contender, pinned: int) -> int:
    """Bytes of torch's pinned allocator beyond the contender's tensors: rounding, and blocks that steps reuse."""
    return max(0, pinned - nbytes(tensor for tensor in contender.host_tensors() if tensor.is_pinned()))


def _failure(phase: Callable[[], None]) -> tuple[str | None, bool]:
    try:
        phase()
    except Skipped as reason:
        return str(reason), True
    except Exception as error:
        logger.info("a contender failed", exc_info=True)
        first_line = (str(error).strip().splitlines() or [""])[0]
        is_sentence = isinstance(error, ConfigError)  # of ours, about what was given
        return first_line if is_sentence else f"{type(error).__name__}: {first_line}", False
    return None, False


# -- the result -------------------------------------------------------------------------------------------------------


def as_json(run: Run) -> Values:
    """All figures so far: the slowest rank's times and the largest memory. A collective: all ranks call it."""
    shown: list[Values] = []
    for task in run.tasks:
        rows = [row for row in run.rows if row.task is task]
        values = [_values(run, row) for row in rows]
        task.compare(run, rows, values)
        shown += values
    return {
        **conditions(run.task.device),
        **run.task.head(run),
        "warmup": run.effort.warmup,
        "rounds": run.effort.rounds,
        "ranks": run.ranks.world_size,
        "link_gb_per_s": asdict(run.link) if run.link is not None else None,
        "rows": shown,
    }


def _values(run: Run, row: Row) -> Values:
    entry, task = row.entry, row.task
    named = {"name": entry.name, "label": entry.label, "kind": entry.kind, "about": entry.about}
    head: Values = {**named, "resident": entry.resident, "note": row.note, "skipped": row.skipped}
    if task.case_name is not None:
        head[task.case_name] = task.case
    return head if row.note is not None or not row.windows else {**head, **task.figures(run, row)}


def add_times_by_hand(run: Run, values: Sequence[Values], key: str) -> None:
    """Compare rows with the loop by hand, if the task does; ``key`` is the figure of their time."""
    times = {shown["name"]: shown[key] for shown in values if key in shown}
    by_hand = times.get("torch" if run.ranks.world_size == 1 else "torch-fsdp2")
    for shown in (shown for shown in values if key in shown and run.task.has_loop_by_hand):
        shown["times_by_hand"] = None if by_hand is None else shown[key] / by_hand


def add_rounds_by_hand(rows: Sequence[Row], values: Sequence[Values]) -> None:
    """The lowest and the highest ratio to the loop by hand of one round's mean times."""
    means = {row.entry.name: [statistics.fmean(window) for window in row.windows] for row in rows if row.note is None}
    by_hand = means.get("torch")
    for shown in values if by_hand else ():
        ratios = [time / hand for time, hand in zip(means.get(shown["name"], ()), by_hand or (), strict=False)]
        shown["times_by_hand_range"] = [min(ratios), max(ratios)] if ratios else None
