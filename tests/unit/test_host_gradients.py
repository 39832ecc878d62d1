"""Gradients and sums of micro-batches of weights that rest on the host: the bits of a device, and the memory."""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep import Strategy
from lightstep.config import ConfigError
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state import host_fields
from lightstep.state.host_weights import HostWeights
from lightstep.state.spare_memory import GIB
from tests.covering import every_pair, every_value
from tests.distributed.models import Block, TinyTransformer, loss_of
from tests.training import Training, assert_same, made, random_delays

CPU = torch.device("cpu")
COUNTS = [1, 3, 1, 2, 4]
"""Micro-batches of each step."""


class Mixed(Block):
    """Its weights have two dtypes."""

    def __init__(self) -> None:
        super().__init__(7)
        self.wide = nn.Parameter(torch.ones(7))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.wide.to(hidden.dtype)


class Skipping(TinyTransformer):
    """A micro-batch leaves out parts, so that the sums of one group have different numbers of gradients."""

    _keep_in_fp32_modules_strict = ("wide",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(3))
        self.number = 0

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens))
        if self.number % 2:
            hidden = hidden * self.gain
        for number, block in enumerate(self.blocks):
            if (self.number + number) % 3:
                hidden = block(hidden)
            elif (self.number + number) % 2:
                hidden = hidden * block.wide.to(hidden.dtype)
        return self.head(hidden)


class Run(Training):
    """Some are not told which micro-batch is the last, and some of those compute all losses before the first backward.

    Args:
        kept: the strategy's ``weights``.
    """

    def __init__(self, kept: dict[str, Any], time: str, parameters: str, reduce: str, told: bool = True) -> None:
        state, scale = {"backend": "stream", "update": time, "ring_mib": 0.02}, {"kind": "constant", "scale": 64.0}
        super().__init__(state, parameters, Skipping, loss_scale=scale, weights=kept, reduce=reduce)
        self.told, self.at_once = told, not told and time != "overlap"

    @property
    def weights(self) -> HostWeights:
        visits = PreparedModel.of(self.model).weight_visits
        assert visits is not None
        return visits.weights

    def loss_of(self, step: int, micro: int) -> Tensor:
        self.model.number = step + micro
        return loss_of(self.model, step, micro, 0, CPU)

    def last(self, is_last: bool) -> Any:
        return self.strategy.accumulate(self.model, last=is_last) if self.told else nullcontext()

    def run(self, counts: list[int]) -> dict[str, Tensor]:
        for step, count in enumerate(counts):
            losses = (self.loss_of(step, micro) / count for micro in range(count))
            for micro, loss in enumerate(list(losses) if self.at_once else losses):
                with self.last(micro == count - 1):
                    self.optimizer.backward(loss)
            self.optimizer.step()
        return self.snapshot()


@functools.cache
def expected(parameters: str, reduce: str) -> dict[str, Tensor]:
    return Run({}, "at_step", parameters, reduce).run(COUNTS)


@every_pair(
    time=["at_step", "next_forward", "overlap"],
    parameters=["bfloat16", "float16", "float32"],
    reduce=["float32", "parameters"],
    told=[True, False],
    mib=[0.001, 64.0],
    gib=[0, 4e-6, 1],
)
def test_sums_have_the_bits_of_a_device(
    time: str, parameters: str, reduce: str, told: bool, mib: float, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all are on the host, some are, and none is."""
    monkeypatch.setattr(host_fields, "_LARGE", 3)
    kept = {"placement": "host", "device_mib": mib, "gradients_gib": gib}
    tested = Run(kept, time, parameters, reduce, told)
    random_delays(tested.weights.lanes, 7, 1e-3)
    assert_same(tested.run(COUNTS), expected(parameters, reduce))
    staying = list(tested.weights.staying)
    assert all(field.is_present and not field.holds for field in staying)
    made = [field for group in tested.weights.groups for field in group.fields[1:]]
    if gib == 4e-6:
        assert 0 < tested.weights.staying.nbytes <= gib * GIB and set(staying) < set(made)
    else:
        assert set(staying) == (set(made) if gib else set())


TIMES = ["at_step", "next_forward", "overlap"]
BF16 = "bfloat16", "float32"
"""Of the parameters, and of sums."""


def staying_run(time: str, gib: float | str = 1.0, told: bool = True) -> Run:
    return Run({"placement": "host", "device_mib": 0.001, "gradients_gib": gib}, time, *BF16, told)


@every_value(time=TIMES[1:], told=[True, False])
def test_what_stays_leaves_when_its_memory_is_lent(time: str, told: bool) -> None:
    """Also between two micro-batches, and before a sum in fp32 takes over."""
    tested, plain = staying_run(time, told=told), Run({}, time, *BF16, told)
    random_delays(tested.weights.lanes, 3, 1e-3)
    found = []
    for run in (tested, plain):
        for step, count in enumerate(COUNTS):
            for micro in range(count):
                with run.last(micro == count - 1):
                    run.optimizer.backward(run.loss_of(step, micro) / count)
                if (step + micro) % 3 == 2 or (step, micro) == (1, 0):
                    run.optimizer.release_device_memory()
                    assert run is plain or not list(run.weights.staying)
            run.optimizer.step()
        found.append(run.run([]))
    assert_same(*found)


def test_a_model_is_evaluated_before_its_last_gradients_have_left_the_device() -> None:
    """The evaluation lets those go that ``step()`` would have used first: copies that it begins run outside of it."""
    found = []
    for weights, time in (({"placement": "host", "device_mib": 0.001}, "overlap"), ({}, "at_step")):
        run = Run(weights, time, *BF16)
        run.optimizer.max_norm = None
        run.run([1, 1])
        with run.strategy.accumulate(run.model, last=True):
            run.optimizer.backward(run.loss_of(2, 0))
        with torch.inference_mode():
            run.loss_of(0, 0)
        run.optimizer.step()
        found.append(run.run([1]))
    assert_same(*found)


def test_a_device_without_room_keeps_fewer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """First for gradients, then for weights, which come before gradients that stay."""
    tested = staying_run("overlap")
    bring, staying, phases = host_fields.Field.bring, tested.weights.staying, ["gradients", "weights"]

    def checked(field: host_fields.Field) -> None:
        phase = phases[0] if phases else ""
        if (phase == "gradients" and field.is_used_once and len(list(staying)) == 2) or (
            phase == "weights" and not field.is_used_once and list(staying)
        ):
            raised.append((phase, staying.nbytes))
            phases[0] = phase if phase == "weights" else "over"
            raise torch.OutOfMemoryError("no room")
        bring(field)

    raised = list[tuple[str, int]]()
    monkeypatch.setattr(host_fields.Field, "bring", checked)
    wanted = Run({}, "at_step", *BF16)
    for is_over in (False, True):
        expected = wanted.run(COUNTS)
        assert_same(tested.run(COUNTS), expected)
        assert staying.nbytes == 0 if is_over else 0 < staying.nbytes <= raised[0][1]
        phases.pop(0)
    assert [phase for phase, _ in raised] == ["gradients", "weights", "weights"]
    assert sum("weights.gradients_gib: cpu has no room for more than" in text for text in caplog.messages) == 2


class Memory:
    """A device of 100 kB, of which everything else takes a part."""

    margin = 10_000

    def __init__(self) -> None:
        self.other, self.held = 20_000, lambda: 0

    def reserved(self) -> tuple[int, int]:
        return (self.other + self.held(),) * 2

    def available(self) -> int:
        return 100_000


def test_auto_keeps_what_the_first_steps_leave_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr(host_fields, "device_memory", lambda device: memory)
    tested, wanted = staying_run("next_forward", "auto"), Run({}, "at_step", *BF16)
    staying = tested.weights.staying
    memory.held = lambda: staying.nbytes
    sizes, oldest = [], list[host_fields.Field]()
    for other in (20_000, 20_000, 20_000, 20_000, 80_000, 86_000, 86_000):
        memory.other = other
        expected, newest = wanted.run([2]), list(staying)[1:]
        for field in newest:  # updates may still read them when they are to leave
            tested.weights.hold(field)
        assert_same(tested.run([2]), expected)
        for field in newest:
            tested.weights.release(field)
        sizes.append(staying.nbytes)
        oldest += list(staying)[:1]
    everything = sum(field.nbytes for group in tested.weights.groups for field in group.fields[1:])
    assert sizes[:5] == [0, 0, 0, everything, everything], "until half of the margin is used"
    assert len(set(oldest)) == 1, "the newest leave first"
    assert min(sizes[5:]) > 0 and max(sizes[5:]) <= 100_000 - 86_000 - memory.margin, sizes


@pytest.mark.parametrize(
    ("weights", "state", "said"),
    [
        ({"gradients_gib": 1}, {}, "placement is device, where all of them are"),
        ({"placement": "host", "gradients_gib": -1}, {}, "gradients_gib"),
        ({"placement": "host", "gradients_gib": "auto"}, {"resident_gib": "auto"}, "set one of them to a number"),
    ],
)
def test_what_has_no_effect_is_refused(weights: dict[str, Any], state: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Strategy.load(
            {"sharding": {"kind": "single"}, "optimizer_state": {"backend": "stream", **state}, "weights": weights}
        )


@pytest.mark.parametrize("told", [True, False])
def test_a_sum_has_the_memory_of_its_first_gradient(told: bool) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    strategy, model, optimizer = made("offload", model, lr=1e-2)

    def bytes_after(count: int) -> float:
        for micro in range(count):
            with strategy.accumulate(model, last=micro == count - 1) if told else nullcontext():
                optimizer.backward(model(torch.ones(2, 256, dtype=torch.bfloat16)).float().square().mean())
        optimizer.step()
        return optimizer.memory_report()["host_bytes_per_parameter"]

    def gradients() -> list[weakref.ref[Any]]:
        visits = PreparedModel.of(model).weight_visits
        assert visits is not None
        return [weakref.ref(field) for group in visits.weights.groups for field in group.fields[1:]]

    assert bytes_after(1) == pytest.approx(14, rel=0.03)
    narrow = gradients()
    assert bytes_after(2) == pytest.approx(16, rel=0.03)
    assert bytes_after(1) == pytest.approx(16, rel=0.03)
    assert len(gradients()) == len(narrow) == 4 and not any(field() for field in narrow), "their memory is free"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_is_widened_in_its_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fields, "_LARGE", 3)
    lanes = HostWeights(CPU, 1).lanes
    for size in (0, 1, 2, 3, 4, 5, 7, 8, 31, 1000):
        values = torch.randn(2, size, 1).to(dtype)
        field = host_fields.Field(list(values), torch.float32, lanes, "gradients", also_as_likes=True)
        field.bring()
        lanes.synchronize()
        for number in (0, 1):
            field.as_likes[number].copy_(values[number])
        field.widen(1)
        assert torch.equal(field.as_likes[0], values[0]) and torch.equal(field.on_device[1], values[1].float()), size
    lanes.close()
