"""AdamW and Adam in one pass: the loop's bits, whatever is updated so and whatever is left to the passes apart."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep.optimizer import arithmetic, queue, unit_updater
from lightstep.optimizer.moments import Moments
from lightstep.precision import adam_kernel
from lightstep.precision.adam_batch import corrections
from lightstep.precision.moments import BFloat16, CodedInBFloat16
from lightstep.precision.shared_tables import SharedTable
from lightstep.precision.split import Splitter
from lightstep.state import record, segment
from tests import one_pass_on_cpu as twin
from tests.covering import every_pair, every_value
from tests.distributed.models import TinyTransformer
from tests.one_pass_on_cpu import few_probes, one_pass_fixture
from tests.reference.own_classes import EachParameter
from tests.reference.pair import TWO_GROUPS, Pair, scale_for
from tests.training import Training, assert_same
from tests.unit.test_moments import PLACES, ShortPair

__all__ = ["few_probes", "one_pass_fixture"]

pytestmark = pytest.mark.usefixtures("few_probes", "small_cuts")

OVERFLOWS = (2, 5)
WIDE = functools.partial(TinyTransformer, width=32)  # rows of blocks
ADAMS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW-amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "AdamW-maximize": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "maximize": True, "betas": (0, 0.99)}),
}


@every_pair(
    name=ADAMS,
    parameters=["bfloat16", "float16", "float32"],
    large=[1 << 18, 48],
    backend=PLACES[1:],
    kind=[None, ("bfloat16", "stochastic"), ("int8", "stochastic")],
)
def test_it_equals_the_textbook_loop(
    name: str,
    parameters: str,
    large: int,
    backend: str,
    kind: tuple[str, str] | None,
    one_pass_on_cpu: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment, "LARGE", large)  # parameters in their own memory, or put together
    make = Pair if kind is None else functools.partial(ShortPair, kind=kind)
    pair = make(
        *ADAMS[name],
        {"lr": 1e-3, "eps": 1e-6, **ADAMS[name][1]},
        parameters=parameters,
        backend=backend,
        micro_batches=2,
        max_norm=0.35,
        overflow_at=OVERFLOWS,
        intermittent=True,
        **scale_for(parameters),
    )
    pair.train(4)
    pair.resume()
    pair.train(3)
    pair.check()
    assert one_pass_on_cpu[{"bfloat16": "split", "float16": "whole", "float32": "own"}[parameters]] > 0
    assert kind is None or one_pass_on_cpu[kind[0]] > 0


@pytest.mark.usefixtures("one_pass_on_cpu", "small_units", "never_pauses")
@every_value(parameters=["bfloat16", "float16", "float32"])
def test_a_weight_that_is_transposed_before_backward_is_not_updated_in_it(parameters: str) -> None:
    """Its memory is at the same address, and its present elements are those of the master."""
    settings = {"backend": "stream-in-backward-and-forward", "max_norm": 0.35, **scale_for(parameters)}
    pair = Pair(*TWO_GROUPS["AdamW"], parameters=parameters, **settings)
    for _ in range(2):
        pair.train(2)
        for model in (pair.model, pair.reference_model):
            model.sometimes.weight.data = model.sometimes.weight.data.t()
        pair.reference.adopt(pair.reference_model.sometimes.weight)
        pair.train(2)


@pytest.mark.parametrize("update", ["next_forward", "overlap", "in_backward"])
def test_lanes_with_random_delays(update: str, one_pass_on_cpu: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clipping = {"max_norm": 0.5, **({"scope": "unit"} if update == "in_backward" else {})}
    expected = Training({"backend": "stream", "update": "at_step", "ring_mib": 0.02}, clipping=clipping)
    with monkeypatch.context() as apart:
        twin.uninstall(apart)
        losses = expected.train(4)
    for seed in range(2):
        monkeypatch.setattr(queue, "SUBMIT_IN_STEP", (0, 48)[seed])
        tested = Training({"backend": "stream", "update": update, "ring_mib": 0.02}, clipping=clipping)
        found = tested.train(1)
        tested.delays(seed)
        assert found + tested.train(3) == losses
        assert_same(tested.snapshot(), expected.snapshot())
    assert one_pass_on_cpu["split"] > 0, one_pass_on_cpu


@every_value(backend=["resident", "bulk", "stream"], moments=["float32", "bfloat16", "int8"])
def test_parameters_that_are_put_together_as_on_a_gpu(
    backend: str, moments: str, one_pass_on_cpu: Counter[str], plans: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of several, each with a fingerprint of its own. The plan is for that row, until its memory is freed."""
    monkeypatch.setattr(segment, "CPU_VECTOR", 1)
    monkeypatch.setattr(segment, "_FEW", 1)
    rounding = {} if moments == "float32" else {"moments": moments, "moments_rounding": "stochastic"}
    tested = Training({"backend": backend, **rounding}, make=WIDE)
    losses = tested.train(3)
    assert one_pass_on_cpu["split" if moments == "float32" else moments] > 0
    planned = len(plans)
    if backend != "bulk":  # whose slots exist during a step
        losses += tested.train(1)
        assert len(plans) == planned
    tested.optimizer.release_device_memory()
    losses += tested.train(1)
    assert len(plans) > planned
    with monkeypatch.context() as apart:
        twin.uninstall(apart)
        expected = Training({"backend": backend, **rounding}, make=WIDE)
        assert expected.train(len(losses)) == losses
    assert_same(tested.snapshot(), expected.snapshot())


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_nothing_is_decoded_or_encoded_by_itself(
    moments: str, one_pass_on_cpu: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does it. In the first update, which makes the state, torch's own step has fp32 moments."""
    pair = ShortPair(*ADAMS["AdamW"], {"lr": 1e-3}, backend="resident", kind=(moments, "stochastic"), rounding_seed=2)
    pair.train(2)
    with monkeypatch.context() as steady:
        for name in ("_decoded_row", "_encode_entries"):
            steady.setattr(segment.Segment, name, lambda *_: pytest.fail("moments were coded apart from the update"))
        pair.train(2)
    pair.resume()
    assert one_pass_on_cpu[moments] > 0


class Doubled(BFloat16):
    """In memory it looks as bf16 does, and its codes are others."""

    dtype = torch.float32

    def at(self, planes: Sequence[Tensor]) -> CodedInBFloat16:
        return CodedInDoubles(planes, self._noise)


class CodedInDoubles(CodedInBFloat16):
    def decode(self, out: Tensor) -> None:
        out.copy_(self._codes).mul_(0.5)

    def encode(self, value: Tensor) -> None:
        super().encode(value)
        self._codes.mul_(2)


def test_a_codec_that_the_kernel_does_not_know_is_left_alone(
    one_pass_on_cpu: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"backend": "resident", "moments": "bfloat16"}
    expected = Training(state)
    losses = expected.train(3)
    assert one_pass_on_cpu["bfloat16"] > 0
    one_pass_on_cpu.clear()
    monkeypatch.setattr(Moments, "_codec", lambda *_: Doubled())
    tested = Training(state)
    assert tested.train(3) == losses
    assert not one_pass_on_cpu
    found, wanted = ({key: value.float() for key, value in one.snapshot().items()} for one in (tested, expected))
    assert_same(found, wanted)


def test_other_classes_and_implementations_are_left_alone(one_pass_on_cpu: Counter[str]) -> None:
    class Mine(torch.optim.AdamW):
        pass

    for optimizer_class in (Mine, torch.optim.NAdam, torch.optim.SGD):
        Training({"backend": "resident"}, optimizer_class=optimizer_class).train(3)
    pair = Pair(torch.optim.AdamW, {"lr": 1e-2}, {}, common={"foreach": True}, parameters="bfloat16", backend="stream")
    pair.train(4)
    assert not one_pass_on_cpu


@every_value(backend=["resident", "stream"], wrong=["exp_avg", "weight", "low", "fingerprints"])
def test_a_kernel_with_other_bits_steps_aside(
    wrong: str, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OffByOne:
        @staticmethod
        def update(batch: Any, *others: Any) -> None:
            twin.update(batch, *others)
            for memory in batch.memories:
                rows = {**memory.tensors._asdict(), "fingerprints": batch.fingerprints}
                if (row := rows[wrong]) is not None:
                    row[row.numel() // 2].add_(1)

    monkeypatch.setattr(segment, "LARGE", 48)  # some parameters are updated by themselves
    make = Splitter.__init__
    monkeypatch.setattr(Splitter, "__init__", lambda self, device, checksums=False: make(self, device))
    for module in (arithmetic, unit_updater):
        monkeypatch.setattr(module, "fused_kernel_on", lambda device: OffByOne)
    monkeypatch.setattr(unit_updater, "runs_in_one_pass", functools.cache(adam_kernel.runs_in_one_pass.__wrapped__))
    pair = Pair(torch.optim.AdamW, {"lr": 1e-2}, {}, parameters="bfloat16", backend=backend, max_norm=0.35)
    pair.train(3)
    pair.check()
    assert "differ from torch's" in caplog.text
    assert "AdamW and Adam run in several passes on cpu" in caplog.text


def test_betas_whose_corrections_never_end_are_left_alone() -> None:
    device = torch.device("cpu")
    assert corrections(0.9, 0.9999999, device) is None
    found = corrections(0.9, 0.999, device)
    assert found is not None
    table = found.read()
    steps = torch.tensor([1.0, 7.0, 10_000.0])
    assert torch.equal(table[0, steps.long()], 1 - torch.pow(torch.tensor(0.9), steps))
    assert table[:, -1].tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("one_pass_on_cpu")
@every_value(backend=["resident", "stream"])
def test_nobody_keeps_memory_of_state_that_is_released(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[weakref.ref[torch.UntypedStorage]] = []
    make = record.Slot.__init__

    def spy(slot: record.Slot, buffer: torch.Tensor) -> None:
        buffers.append(weakref.ref(buffer.untyped_storage()))
        make(slot, buffer)

    monkeypatch.setattr(record.Slot, "__init__", spy)
    pair = Pair(*TWO_GROUPS["AdamW"], backend=backend)
    pair.train(3)
    pair.optimizer.release_device_memory()
    assert buffers
    assert not any(buffer() is not None for buffer in buffers)


@pytest.fixture(name="plans")
def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each plan that is made."""
    made: list[None] = []
    plan = unit_updater._plan
    monkeypatch.setattr(unit_updater, "_plan", lambda *args: (made.append(None), plan(*args))[1])
    return made


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=20),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 3e-3, step_size_up=4),
}


@pytest.mark.usefixtures("one_pass_on_cpu")
@pytest.mark.parametrize("backend", ["resident", "stream-in-backward-and-forward"])
def test_betas_that_a_scheduler_cycles_are_read_and_not_planned(backend: str, plans: list[None]) -> None:
    counts: dict[str, int] = {}
    for name, make in SCHEDULERS.items():
        plans.clear()
        pair = Pair(torch.optim.AdamW, {"lr": 1e-2}, {"lr": 1e-3}, backend=backend, max_norm=None)
        schedulers = [make(optimizer) for optimizer in (pair.optimizer, pair.reference.optimizer)]
        pair.train(3, lambda _, each=schedulers: [one.step() for one in each])
        assert (pair.optimizer.param_groups[0]["betas"] == (0.9, 0.999)) == (name == "none")
        counts[name] = len(plans)
    assert counts["OneCycleLR"] == counts["CyclicLR"] == counts["none"] > 0


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_betas_may_leave_what_the_kernel_supports_and_come_back(moments: str, one_pass_on_cpu: Counter[str]) -> None:
    """Memory for decoded moments exists while they are decoded: in first updates, and where the kernel does not run."""
    settings: dict[str, Any] = {"backend": "stream", "max_norm": None, "kind": (moments, "nearest")}
    pair = ShortPair(torch.optim.AdamW, {"lr": 1e-2}, {"lr": 1e-3}, **settings)
    scratch = []
    for betas in [(0.9, 0.999)] * 4 + [(0.9, 0.9999999)] * 2 + [(0.8, 0.99)] * 2:
        for optimizer in (pair.optimizer, pair.reference.optimizer):
            for group in optimizer.param_groups:
                group["betas"] = betas
        before = one_pass_on_cpu.total()
        pair.train(1)
        assert (one_pass_on_cpu.total() > before) == (betas[1] != 0.9999999 and pair.steps > 1)
        staging = pair.optimizer.engine.backend._staging.values()
        scratch.append(sum(row.nbytes for one in staging for row in one.moments))
    assert [size > 0 for size in scratch] == [step not in (2, 3) for step in range(8)]


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_units_are_larger_where_nothing_is_decoded(moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"backend": "stream", "ring_mib": 0.05, "moments": moments}
    counts = []
    for kernel in (False, True):
        if kernel:
            twin.install(monkeypatch)
        training = Training(state, make=WIDE)
        training.train(1)
        counts.append(len(training.optimizer.engine.backend.units()))
    by_class, fused = counts
    assert (fused < by_class) == (moments != "float32") and fused <= by_class


@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
def test_a_running_maximum_that_the_group_does_not_ask_for_has_no_say(
    parameters: str, one_pass_on_cpu: Counter[str]
) -> None:
    """torch leaves it in the state, and alone."""
    pair = Pair(*ADAMS["AdamW-amsgrad"], {"amsgrad": True}, parameters=parameters, backend="resident")
    pair.train(3)
    for group in (*pair.optimizer.param_groups, *pair.reference.optimizer.param_groups):
        group["amsgrad"] = False
    pair.train(3)
    pair.check()


def test_a_gradient_with_other_strides_than_its_neighbours(one_pass_on_cpu: Counter[str]) -> None:
    """A hook of the user's may leave it so: it is copied with those that are updated together."""
    pair = Pair(*ADAMS["AdamW"], {"lr": 1e-3}, backend="resident", max_norm=None)
    for model in (pair.model, pair.reference_model):
        for matrix in (p for p in model.parameters() if p.dim() == 2 and p.requires_grad):
            matrix.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.t().contiguous().t()))
    pair.train(3)
    assert one_pass_on_cpu["split"] > 0


class LateEntry(EachParameter):
    """Has state that its first update does not make."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if state.get("count", 0) == 1:
            state["late"] = torch.ones_like(p)
        p.sub_(grad, alpha=group["lr"])
        state["count"] = state.get("count", 0) + 1


@every_value(
    large=[1 << 18, 48],
    parameters=["bfloat16", "float32"],
    state=[{"backend": "resident"}, {"backend": "stream"}, {"backend": "stream", "moments": "int8"}],
)
def test_a_neighbour_that_needs_more_room_changes_nothing(
    large: int,
    parameters: str,
    state: dict[str, Any],
    one_pass_on_cpu: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record is arranged anew when the kernel has written to weights already."""
    monkeypatch.setattr(segment, "LARGE", large)
    states = []
    for in_one_pass in (True, False):
        if not in_one_pass:
            twin.uninstall(monkeypatch)
        training = Training(state, parameters, make=WIDE)
        names = dict(training.model.named_parameters())
        late = [p for name, p in names.items() if name.endswith("bias")]
        rest = [p for name, p in names.items() if not name.endswith("bias")]
        training.optimizer = training.strategy.create_optimizer(
            training.model,
            param_groups=[
                {"params": rest, "lr": 1e-2},
                {"params": late, "optimizer_class": LateEntry, "lr": 1e-2},
            ],
        )
        training.train(3)
        states.append(training.snapshot())
    assert any(key.endswith("/late") for key in states[0])
    assert_same(*states)
    assert one_pass_on_cpu["split" if parameters == "bfloat16" else "own"] > 0
    assert (one_pass_on_cpu["int8"] > 0) == ("moments" in state)


# -- tables that one stream makes and others read


class Streams:
    """A device whose events are complete when a test says so."""

    def __init__(self) -> None:
        self.current, self.waits, self.complete = "maker", list[tuple[str, str]](), False

    def current_stream(self, _: Any) -> Any:
        name = self.current
        return SimpleNamespace(name=name, wait_event=lambda event: self.waits.append((name, event.of)))

    def event(self, _: Any) -> Any:
        event = SimpleNamespace(of="", query=lambda: self.complete)
        event.record = lambda stream: setattr(event, "of", stream.name)
        return event


def test_other_streams_wait_until_a_table_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr("torch.accelerator.current_stream", streams.current_stream)
    monkeypatch.setattr("torch.Event", streams.event)
    tensor = torch.empty(2, device="meta")
    table = SharedTable(tensor)
    streams.current = "another"
    assert table.read() is tensor and streams.waits == [("another", "maker")]
    streams.complete = True
    assert table.read() is tensor and table.read() is tensor
    assert len(streams.waits) == 1


def test_on_the_cpu_nobody_waits() -> None:
    table = corrections(0.9, 0.999, torch.device("cpu"))
    assert table is corrections(0.9, 0.999, torch.device("cpu")) and table is not None
