"""Weights and gradients that rest on the host: the bits of a run that keeps them on the device."""

from __future__ import annotations

import functools
import gc
import importlib
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import lightstep
from lightstep import Strategy, global_grad_norm
from lightstep.optimizer.host_gradients import HostGradients
from lightstep.optimizer.overlap import SpeculativeUpdates
from lightstep.precision.split import Splitter
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_fields import KeptWeights
from lightstep.state.host_memory import HostSlab
from lightstep.state.host_weights import HostWeights, WeightGroup
from tests.covering import every_value
from tests.distributed.models import CLASSES, VOCABULARY, Block, TinyTransformer
from tests.patience import PATIENCE
from tests.training import Training, assert_same, made
from tests.unit import test_homes_and_times as homes_and_times
from tests.unit.test_homes_and_times import TIMES

__all__ = ["TIMES"]

pytestmark = pytest.mark.usefixtures("small_units")


def make(
    home: str,
    time: str,
    limit: str,
    parameters: str,
    weights: Any = None,
    kind: type[Training] = Training,
    **more: Any,
) -> Training:
    return homes_and_times.make(home, time, limit, parameters, kind, weights=weights, **more)


def clean(snapshot: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the names of wrappers."""
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in snapshot.items()}


def test_memory_of_gradients_is_kept_until_their_update_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers share a unit: its update reads gradients that have left long before the last of them arrives."""
    monkeypatch.setattr("lightstep.state.units.SMALL_UNIT", 1 << 12)
    weights = {"placement": "host", "device_mib": 64}
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(16)])
    _, model, optimizer = made(
        {"optimizer_state": {"backend": "stream", "update": "overlap"}, "weights": weights},
        model,
        torch.optim.AdamW,
        lr=1e-3,
    )
    release, submit = HostGradients._release_oldest, SpeculativeUpdates._submit_speculative
    events: list[str] = []

    def watched_release(gradients: HostGradients) -> None:
        events.append(f"{gradients._under_way[0][0].name}.weight")
        release(gradients)

    def watched_submit(updates: SpeculativeUpdates, speculation: Any, units: Any) -> None:
        events.extend(f"update {owner.name}" for unit in units for owner in unit.owners)
        submit(updates, speculation, units)

    monkeypatch.setattr(HostGradients, "_release_oldest", watched_release)
    monkeypatch.setattr(SpeculativeUpdates, "_submit_speculative", watched_submit)
    for step in range(3):
        events.clear()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.backward(model(inputs).float().square().mean())
        optimizer.step()
    assert len(optimizer._backend.units()) == 4
    updated = [name for name in (f"{layer}.weight" for layer in range(5, 16)) if f"update {name}" in events]
    assert len(updated) == 11
    assert [name for name in updated if events.index(name) < events.index(f"update {name}")] == []
    optimizer.close()


def test_an_update_does_not_make_the_copy_on_the_device_out_of_date() -> None:
    """What it is about to write to need not be brought again; what somebody else has written to must be."""
    weights = HostWeights(torch.device("cpu"), 1 << 20)
    parameter = nn.Parameter(torch.zeros(4))
    group = WeightGroup(weights, [parameter], "a layer")

    def on_device() -> list[float]:
        weights.hold(group.weights, group)
        found: list[float] = group.weights.on_device[0].tolist()
        weights.release(group.weights)
        return found

    assert on_device() == [0.0] * 4
    group.weights.on_host[0].fill_(1.0)  # unseen
    group.note_own_write([parameter])
    assert on_device() == [0.0] * 4
    with torch.no_grad():
        parameter.add_(1.0)
    group.note_own_write([parameter])
    assert on_device() == [2.0] * 4


def slow_copy() -> tuple[HostWeights, Any]:
    """A field of weights on its way to the host, and what owns it."""
    weights = HostWeights(torch.device("cpu"), 2**20)
    group = WeightGroup(weights, [nn.Parameter(torch.zeros(4))], "weights")
    weights.lanes.delay = lambda lane: sleep(0.05)
    weights.hold(group.weights, group)
    group.weights.take_back()
    return weights, group.weights


def test_a_copy_that_begins_while_another_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _weights, field = slow_copy()
    wait = type(field.returned).synchronize

    def wait_and_begin_another(event: Any) -> None:
        wait(event)
        field.take_back()

    with monkeypatch.context() as patch:
        patch.setattr(type(field.returned), "synchronize", wait_and_begin_another)
        field.settle()
    field.settle()
    assert field.returned.completed == field.returned.recorded


def test_a_second_reader_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread waits already, and has not read yet."""
    _weights, field = slow_copy()
    waits, wait = threading.Event(), type(field.returned).synchronize
    monkeypatch.setattr(type(field.returned), "synchronize", lambda event: (waits.set(), wait(event)))
    reader = threading.Thread(target=field.settle)
    reader.start()
    assert waits.wait(PATIENCE)
    field.settle()
    assert field.returned.completed == field.returned.recorded
    reader.join()


def test_a_reader_that_was_interrupted_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _weights, field = slow_copy()

    def interrupt(event: Any) -> None:
        if event is field.returned:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(field.returned), "synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            field.settle()
    field.settle()
    assert field.returned.completed == field.returned.recorded


def kept_weights(value: float) -> tuple[HostWeights, WeightGroup, KeptWeights, Callable[[], None]]:
    weights = HostWeights(torch.device("cpu"), 1 << 20)
    group = WeightGroup(weights, [nn.Parameter(torch.full((4,), value))], "a layer")
    kept = KeptWeights(group.weights, group.parameters, HostSlab(group.weights.nbytes), weights.lock)
    kept.wanted = [0]
    group.kept.append(kept)

    def visit() -> None:
        weights.forget_idle()  # as a forward of the model
        group.enter()
        with torch.no_grad():
            group.leave()
        weights.lanes.synchronize()

    return weights, group, kept, visit


def test_kept_weights_are_out_of_date_after_any_write() -> None:
    _, group, kept, visit = kept_weights(1.0)
    (parameter,) = group.parameters
    visit()
    assert kept.is_current(0) and kept.on_host[0].tolist() == [1.0] * 4
    with torch.no_grad():
        parameter.add_(1.0)
    assert not kept.is_current(0)
    visit()
    assert kept.is_current(0) and kept.on_host[0].tolist() == [2.0] * 4
    group.note_updated([0])  # the update was announced before the weights were kept
    assert not kept.is_current(0)
    visit()
    group.settle()  # for a reader, who may write through p.data
    parameter.data.fill_(3.0)
    assert not kept.is_current(0)
    visit()
    assert kept.on_host[0].tolist() == [3.0] * 4


def test_kept_weights_stay_while_an_update_may_be_undone() -> None:
    _, group, kept, visit = kept_weights(1.0)
    visit()
    kept.uses += 1
    with torch.no_grad():
        group.parameters[0].add_(1.0)
    visit()
    assert kept.on_host[0].tolist() == [1.0] * 4 and not kept.is_current(0)
    kept.uses -= 1
    visit()
    assert kept.on_host[0].tolist() == [2.0] * 4 and kept.is_current(0)


def test_two_optimizers_keep_weights_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the weights that it trains, and its own memory for them."""
    finals = []
    for weights in ({"placement": "device"}, {"placement": "host", "device_mib": 64.0}):
        torch.manual_seed(0)
        state = {"backend": "stream", "update": "overlap", "ring_mib": 0.05}
        strategy = Strategy.load({"optimizer_state": state, "weights": weights, "clipping": {"max_norm": 1e9}})
        model = strategy.prepare_model(TinyTransformer())
        named = list(model.named_parameters())
        halves = [[p for n, (_, p) in enumerate(named) if n % 2 == half] for half in range(2)]
        optimizers: list[Any] = [
            strategy.create_optimizer(model, param_groups=[{"params": h}], lr=1e-2) for h in halves
        ]
        for step in range(6):
            if step == 4:
                optimizers.pop().close()
            tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
            targets = torch.randint(CLASSES, (24,), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets)
            optimizers[0].backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for parameter in halves[1]:
                parameter.grad = None
        finals.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizers[0].close()
    assert_same(finals[1], finals[0])


def test_a_write_between_backward_and_step_that_nobody_counts() -> None:
    """The reader of a weight may write through ``p.data``: the step must not begin from what is on the device."""
    run = make("stream", "overlap", "not clipped", "bfloat16", {"placement": "host", "device_mib": 64.0})
    run.train(3)
    for _ in range(2):
        run.optimizer.backward(run.loss())
        weight = run.model.embed.weight
        before = weight.norm().item()
        weight.data.mul_(0.5)
        run.optimizer.step()
        run.steps += 1
        assert 0.4 < run.model.embed.weight.norm().item() / before < 0.6
    run.optimizer.close()


# ---- one thing at a time, beside a run with weights on the device


def a_refresh_brings_what_was_written_to_data(run: Training) -> Any:
    """Weights that have just been updated are on the device already, and are out of date there. Others are still on
    their way to the host, where masters are made of them."""
    run.train(1)
    run.delays(7, 0.02 if run.optimizer._backend.name == "resident" else 1e-3)
    run.train(1)
    for block in run.model.blocks:
        block.up.weight.data.mul_(0.5)
    run.optimizer.refresh_master_weights()
    run.delays(0, 0.0)
    return run.train(2)


def masters_that_are_loaded_into_fp32_weights_stay(run: Training) -> Any:
    """The weights of the last step are still on their way to where the masters are written."""
    source = make("resident", "at_step", "clipped", "bfloat16", make=WIDE)
    source.train(2)
    run.train(1)
    run.delays(3, 0.02)
    run.train(1)
    run.optimizer.load_state_dict(source.optimizer.state_dict())
    run.delays(0, 0.0)
    return run.train(2)


def what_is_assigned_to_data_between_forward_and_backward_counts(run: Training) -> Any:
    head = run.model.head.weight
    run.train(1)
    run.loss()
    head.data = torch.full_like(head, 0.5)
    return run.train(2)


def a_held_parameter_is_written_to_after_the_step(run: Training) -> Any:
    """Its update would otherwise be on its way to it still."""
    held, losses = list(run.model.parameters()), run.train(1)
    run.delays(3, 2e-2)
    for _ in range(3):
        losses += run.train(1)
        losses.append([parameter.detach().float().sum().item() for parameter in held])
        with torch.no_grad():
            for parameter in held:
                parameter.mul_(0.5)
    return losses


def parameters_that_change_their_memory_while_they_are_updated(run: Training) -> Any:
    """Blocks have several units: some are updated before the block has left backward."""
    chance, put = random.Random(0), WeightGroup._put

    def put_slowly(group: WeightGroup, number: int, tensor: Tensor) -> None:
        sleep(chance.random() * 1e-3)
        put(group, number, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGroup, "_put", put_slowly)
        return run.train(3)


def an_adapter_comes_in_mid_run(run: Training) -> Any:
    """Its weights stay on the device, and two micro-batches' gradients of theirs are added up in fp32, too."""
    losses, block = run.train(1), run.model.blocks[1]
    block.adapter = nn.Linear(16, 16).to(torch.bfloat16)
    block.register_forward_hook(lambda block, _, out: out + block.adapter(out))
    run.optimizer.add_param_group({"params": list(block.adapter.parameters())})
    return losses + run.train(3)


WIDE = partial(TinyTransformer, width=16)
STORIES: list[tuple[Callable[[Training], Any], str, str, str, str]] = [
    (a_refresh_brings_what_was_written_to_data, "resident", "next_forward", "clipped", "bfloat16"),
    (a_refresh_brings_what_was_written_to_data, "stream", "overlap", "clipped", "float32"),
    (masters_that_are_loaded_into_fp32_weights_stay, "resident", "at_step", "clipped", "float32"),
    (what_is_assigned_to_data_between_forward_and_backward_counts, "resident", "at_step", "clipped", "bfloat16"),
    (a_held_parameter_is_written_to_after_the_step, "resident", "at_step", "not clipped", "bfloat16"),
    (an_adapter_comes_in_mid_run, "stream", "overlap", "not clipped", "bfloat16"),
    (a_held_parameter_is_written_to_after_the_step, "resident", "in_backward", "not clipped", "bfloat16"),
    (parameters_that_change_their_memory_while_they_are_updated, "stream", "overlap", "not clipped", "bfloat16"),
    (parameters_that_change_their_memory_while_they_are_updated, "stream", "in_backward", "not clipped", "bfloat16"),
]


@pytest.mark.parametrize(
    ("story", "home", "time", "limit", "parameters"),
    STORIES,
    ids=[f"{story[0].__name__}-{story[2]}" for story in STORIES],
)
def test_beside_weights_on_the_device(
    story: Callable[[Training], Any], home: str, time: str, limit: str, parameters: str
) -> None:
    found = []
    for weights in (None, {"placement": "host", "device_mib": 64.0}):
        own = (home, time) if weights else ("resident", time if time == "in_backward" else "at_step")
        run = make(*own, limit, parameters, weights, make=WIDE)
        found.append((story(run), clean(run.snapshot())))
        run.optimizer.close()
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1])


# ---- a forward that uses weights by itself


def two_forwards(run: Training) -> None:
    run.optimizer.backward(run.loss(4) + run.loss(5))
    run.optimizer.step()


def fail(run: Training) -> None:
    def raising(*_: Any) -> None:
        raise ValueError("a user's hook")

    for register in (run.model.blocks[1].register_forward_hook, run.model.blocks[1].register_full_backward_hook):
        handle = register(raising)
        with pytest.raises(ValueError, match="a user's hook"):
            run.optimizer.backward(run.loss(5))
        handle.remove()
        run.optimizer.zero_grad()
        run.model.zero_grad()


class OwnHead(TinyTransformer):
    """It takes the weights of two modules, and does not call these."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = nn.functional.embedding(tokens, self.embed.weight)
        for block in self.blocks:
            hidden = block(hidden * self.gain)
        return nn.functional.linear(hidden, self.head.weight)


class LikeLigers(torch.autograd.Function):
    """Liger's fused loss, without its kernels: both gradients are computed in forward, and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss, by_states, by_weight = states.new_zeros((), dtype=torch.float32), [], torch.zeros_like(weight)
        for part, own in zip(states.split(5), targets.split(5), strict=True):
            logits = (part @ weight.t()).float()
            loss += nn.functional.cross_entropy(logits, own, reduction="sum")
            change = (logits.softmax(-1) - nn.functional.one_hot(own, logits.shape[1])).to(weight.dtype)
            by_states.append(change @ weight)
            by_weight += change.t() @ part
        ctx.save_for_backward(torch.cat(by_states), by_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        by_states, by_weight = ctx.saved_tensors
        return (by_states * given[0]).to(by_states.dtype), (by_weight * given[0]).to(by_weight.dtype), None


class FusedLoss(TinyTransformer):
    """The loss takes the head's weight and computes its gradient in forward; nobody calls the head."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for block in self.blocks:
            hidden = block(hidden)
        return LikeLigers.apply(hidden.flatten(0, 1), self.head.weight, targets) / len(targets)


class FusedTraining(Training):
    def loss(self, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + micro)
        tokens = torch.randint(VOCABULARY, (4, 6), generator=generator)
        return self.model(tokens, torch.randint(CLASSES, (24,), generator=generator))


class WrittenInForward(TinyTransformer):
    """Its embedding, and tables in its blocks, have a ``max_norm``, to which each forward brings what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.max_norm = 1.0
        for block in self.blocks:
            block.table = nn.Embedding(4, self.embed.embedding_dim, max_norm=0.5)
            block.register_forward_hook(lambda block, _, out: out + block.table(torch.tensor([1, 3])).sum(0))


@dataclass
class Hidden:
    """What torch's containers do not know, but FSDP2 does."""

    states: Tensor


class Opaque:
    """What FSDP2 does not know either."""

    def __init__(self, states: Tensor) -> None:
        self.states = states


class ObjectBlock(Block):
    def forward(self, hidden: Any) -> Any:
        return type(hidden)(super().forward(hidden.states))


class InObjects(TinyTransformer):
    """Its blocks take and return objects."""

    kind: Any = Hidden

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ObjectBlock(self.embed.embedding_dim) for _ in self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.kind(self.frozen(self.embed(tokens)) * self.gain)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.states)


class InOpaqueObjects(InObjects):
    kind = Opaque


FORWARDS: dict[str, tuple[type[TinyTransformer], type[Training]]] = {
    "reads": (OwnHead, Training),
    "fuses": (FusedLoss, FusedTraining),
    "passes other objects": (InOpaqueObjects, Training),
    "writes": (WrittenInForward, Training),
    "passes dataclasses": (InObjects, Training),
}
"""What a forward does with weights by itself, or what its blocks pass on."""


def around_two_forwards(run: Training, slows: bool = False) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses and weights of a run whose third step's backward goes through two forwards."""
    losses = run.train(2)
    if slows:
        run.delays(1)
    two_forwards(run)
    found = losses + run.train(1), clean(run.snapshot())
    run.optimizer.close()
    return found


@functools.cache
def expected_around(forward: str, in_backward: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    make_model, kind = FORWARDS[forward]
    time = "in_backward" if in_backward else "at_step"
    return around_two_forwards(make("resident", time, "clipped", "bfloat16", make=make_model, kind=kind))


@every_value(forward=FORWARDS, time=TIMES, mib=[64.0, 0.001, 0.001, 0.001], recompute=[False, False, "host"])
def test_a_forward_that_uses_weights_by_itself(
    forward: str, time: str, mib: float, recompute: bool | str, inputs_leave: None
) -> None:
    """In a backward through two forwards that of the second has used the device memory for other weights by then."""
    make_model, kind = FORWARDS[forward]
    if forward == "writes":  # a recomputed forward writes again
        recompute = False
    weights = {"placement": "host", "device_mib": mib}
    tested = make("stream", time, "clipped", "bfloat16", weights, make=make_model, kind=kind, recompute=recompute)
    losses, snapshot = around_two_forwards(tested, slows=True)
    expected = expected_around(forward, time == "in_backward")
    assert losses == expected[0]
    assert_same(snapshot, expected[1])


def test_weights_are_read_on_the_host_between_forward_and_backward() -> None:
    """The device memory in which the forward has used them may be freed at any time."""
    run = make("resident", "at_step", "clipped", "bfloat16", {"placement": "host", "device_mib": 0.001})
    run.train(1)
    expected = clean(run.snapshot())
    loss = run.loss(5)
    for name, parameter in run.model.named_parameters():
        item = run.optimizer.engine.managed.get(parameter)
        assert torch.equal(parameter, expected[name])
        assert item is None or parameter.data_ptr() == item.home.on_host.data_ptr()
    run.optimizer.backward(loss)
    run.optimizer.step()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize(("time", "home"), [("overlap", "stream"), ("in_backward", "resident")])
def test_modules_that_get_a_weight_later_read_that_of_the_last_step(time: str, home: str) -> None:
    training = make(home, time, "not clipped", "bfloat16", {"placement": "host", "device_mib": 64.0})
    training.train(1)
    head, kept = training.model.head, nn.Module()
    kept.weight = head.weight
    nn.utils.parametrize.register_parametrization(head, "weight", Doubled())
    training.train(1)
    training.delays(1, 2e-2)
    training.train(1)
    found = [kept.weight.detach().clone(), head.weight.detach().clone()]
    training.optimizer.synchronize()
    assert torch.equal(found[0], kept.weight) and torch.equal(found[1], 2 * kept.weight)


def test_a_forward_without_a_backward_before_step_is_no_write_to_weights() -> None:
    """It leaves them on the device: they are not where updates in backward have left them."""
    expected, tested = (
        make("stream", "in_backward", "not clipped", "bfloat16", {"placement": "host", "device_mib": 0.001})
        for _ in range(2)
    )
    tested.before_step = lambda: tested.loss(7)
    assert tested.train(3) == expected.train(3)
    assert_same(tested.snapshot(), expected.snapshot())


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lightstep-")}


@pytest.mark.parametrize(
    ("time", "failed", "keeps"),
    [("next_forward", False, False), ("overlap", True, False), ("overlap", False, True), ("in_backward", True, False)],
)
def test_a_model_that_is_given_up_leaves_neither_memory_nor_threads(time: str, failed: bool, keeps: bool) -> None:
    """At once: page-locked memory must not wait for the garbage collector."""
    importlib.import_module("torch._dynamo")  # keeps the frames that import it
    gc.collect()
    before = lane_threads()
    gc.disable()
    try:
        run = make("stream", time, "clipped", "bfloat16", {"placement": "host", "device_mib": 0.02})
        run.train(2)
        if failed:
            fail(run)
        visits = PreparedModel.of(run.model).weight_visits
        assert visits is not None
        fields = [weakref.ref(field) for group in visits.weights.groups for field in group.fields]
        weight = run.model.blocks[0].up.weight.detach().clone()
        kept = run.model.blocks[0].up if keeps else None
        del run, visits
        if kept is not None:
            assert torch.equal(kept.weight, weight)
            return
        end = monotonic() + 10
        while lane_threads() - before and monotonic() < end:
            sleep(0.01)
        assert not lane_threads() - before
        assert not [field for field in fields if field() is not None]
    finally:
        gc.enable()


def test_a_run_goes_on_with_another_placement(tmp_path: Path) -> None:
    check_other_placements(tmp_path, Training)


def check_other_placements(folder: Path, kind: type[Training]) -> None:
    """The run changes its placement at each resume."""
    expected = make("resident", "at_step", "clipped", "bfloat16", kind=kind)
    losses = expected.train(6)
    placements = [{"placement": "host"}, None, {"placement": "host", "device_mib": 0.005}]
    for number, weights in enumerate(placements):
        run = make("stream", "overlap", "clipped", "bfloat16", weights, kind)
        if number:
            run.strategy.load_checkpoint(folder / str(number - 1), run.model, run.optimizer)
            run.steps = 2 * number
        assert run.train(2) == losses[2 * number : 2 * number + 2]
        run.strategy.save_checkpoint(folder / str(number), run.model, run.optimizer)
    assert_same(run.snapshot(), expected.snapshot())


@every_value(
    time=["at_step", "next_forward", "overlap"],
    parameters=["bfloat16", "float16", "float32"],
    norm_type=[2.0, 1.0, float("inf")],
)
def test_the_norm_of_gradients_on_the_host(time: str, parameters: str, norm_type: float) -> None:
    """As between backward and step with weights on the device; what the user adds to ``p.grad`` counts."""

    def norms(run: Training) -> list[Tensor]:
        found = [global_grad_norm(run.model.parameters(), norm_type)]
        for step in range(2):
            for micro in range(2):
                run.optimizer.backward(run.loss(micro))
                found.append(global_grad_norm(run.model.parameters(), norm_type))
                found.append(global_grad_norm(list(run.model.parameters())[1:3], norm_type))
            head = run.model.head.weight
            own = torch.full_like(head, 0.25)
            head.grad = own if head.grad is None else head.grad + own
            found.append(global_grad_norm(run.model.parameters(), norm_type))
            found.append(run.optimizer.step().grad_norm)
            found.append(global_grad_norm(run.model.parameters(), norm_type))
            run.delays(step)
        return found

    expected = norms(make("resident", "at_step", "clipped", parameters))
    run = make("stream", time, "clipped", parameters, {"placement": "host", "device_mib": 0.02})
    found = norms(run)
    assert all(norm > 0 for norm in found[1:6])
    assert [float(norm) for norm in found] == [float(norm) for norm in expected]
    run.optimizer.close()


CLIPS: dict[str, Callable[[list[Tensor]], object]] = {
    "lightstep": lambda parameters: lightstep.clip_grad_norm_(parameters, 1.0),
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "generator": lambda parameters: nn.utils.clip_grad_norm_((p for p in parameters), 1.0),
    "with_norm": lambda parameters: nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.ones(())),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
}


def test_clipping_what_is_not_in_p_grad_is_refused() -> None:
    run = make("stream", "at_step", "clipped", "bfloat16", {"placement": "host"})
    listed, other = list(run.model.parameters()), nn.Linear(2, 2)
    message = "the gradients of 18 of 22 parameters are on the host .* set clipping.max_norm"
    for clip in CLIPS.values():
        run.optimizer.backward(run.loss())
        with pytest.raises(ValueError, match=message):
            clip(listed)
        other(torch.ones(2)).sum().backward()
        clip(list(other.parameters()))
        run.optimizer.step()
        clip([*listed, *other.parameters()])
    run.optimizer.close()


def test_fingerprints_leave_memory_that_can_be_freed() -> None:
    weight, out = torch.ones(4, 8, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    Splitter(weight.device, checksums=True).fingerprints(weight.view(-1), 0, [(0, 32)], out)
    assert out.item() and weight.untyped_storage().resizable()


def test_parameters_that_share_memory_are_refused_and_not_untied() -> None:
    model = TinyTransformer()
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight and blocks\.1\.up\.weight share memory"):
        Strategy.load("offload", overrides={"precision.parameters": "float32"}).prepare_model(model)


def test_a_parameter_made_of_the_memory_of_a_weight_is_refused() -> None:
    """A parametrization makes one of the weight: copies to the host would undo its updates now and then."""
    strategy = Strategy.load("offload", overrides={"precision.parameters": "float32"})
    model = nn.utils.parametrizations.weight_norm(strategy.prepare_model(nn.Linear(4, 4)))
    optimizer = strategy.create_optimizer(model)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"original1 came after prepare_model, and has the memory in which a weight"):
        optimizer.step()


def test_other_tensors_are_refused() -> None:
    """A quantised weight would become what it stands for."""
    model = TinyTransformer()
    model.head.weight = nn.Parameter(TwoTensor(torch.randn(3, 4), torch.randn(3, 4)))
    with pytest.raises(ValueError, match=r"head\.weight is a TwoTensor, and weights that rest on the host are plain"):
        Strategy.load("offload", overrides={"precision.parameters": "float32"}).prepare_model(model)


def test_a_model_that_is_cast_afterwards_is_told() -> None:
    run = make("stream", "next_forward", "clipped", "bfloat16", {"placement": "host"})
    run.train(1)
    run.model.float()
    with pytest.raises(ValueError, match="cast or resize the model before prepare_model"):
        run.loss()


@pytest.mark.parametrize("holds", ["data", "state_dict"])
def test_weights_that_are_swapped_out_are_not_overwritten(holds: str) -> None:
    """The memory of what is swapped out is where the weight rests."""
    run = make("stream", "next_forward", "clipped", "bfloat16", {"placement": "host"})
    run.train(1)
    weight = run.model.head.weight
    kept = weight.data if holds == "data" else run.model.state_dict()["head.weight"]
    before = kept.clone()
    for _ in range(2):
        weight.data = torch.zeros_like(weight)
        with pytest.raises(ValueError, match=r"is still held .* Assign the former tensor to p\.data again"):
            run.loss()
        assert torch.equal(kept, before)
        weight.data = kept
        run.loss()
    assert torch.equal(run.model.head.weight, before)
    del kept
    weight.data = torch.zeros_like(weight)
    run.loss()
    assert not run.model.head.weight.any()


def test_an_empty_weight_is_replaced() -> None:
    model = TinyTransformer()
    model.blocks[0].none = nn.Parameter(torch.zeros(0, 4))
    model = Strategy.load("offload", overrides={"precision.parameters": "float32"}).prepare_model(model)
    kept = model.blocks[0].none.data
    model.blocks[0].none.data = torch.zeros(0, 4)
    model(torch.zeros(1, 2, dtype=torch.long))
    assert kept.shape == (0, 4)
