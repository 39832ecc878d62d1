"""Updates in backward: the bits of updates in ``step()``, with the gradients of two layers at a time."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightstep.config import ConfigError
from lightstep.optimizer import update
from lightstep.optimizer.in_backward import IN_BACKWARD, FinalUpdates
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.precision.loss_scale import DynamicLossScale
from lightstep.state.lanes import CallerLane
from lightstep.strategy.base import Strategy
from tests.covering import every_value
from tests.distributed.models import TinyTransformer
from tests.patience import PATIENCE
from tests.training import OnVectors, assert_same, made, random_delays
from tests.unit import test_next_forward as others
from tests.unit.test_next_forward import Skipping

pytestmark = pytest.mark.usefixtures("small_cuts")

BACKENDS: dict[str, dict[str, Any]] = {
    "stream": {"backend": "stream", "ring_mib": 0.02},
    "resident": {"backend": "resident"},
    "partly resident": {"backend": "stream", "ring_mib": 0.02, "resident_gib": 6 * 1024 / 2**30},
}
SCALES = {"bfloat16": "none", "float16": {"kind": "constant", "scale": 1000.0}, "float32": "none"}
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {"max_norm": None},
    "unit": {"max_norm": 0.05, "scope": "unit"},
}


class Training(others.Training):
    """Without clipping by the global norm and dynamic scales, whenever updates happen."""

    def __init__(
        self,
        state: dict[str, Any],
        parameters: str = "bfloat16",
        make: Callable[[], nn.Module] = TinyTransformer,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        clipping: str = "none",
    ) -> None:
        super().__init__(state, parameters, make, optimizer_class, CLIPPING[clipping], SCALES[parameters])


def in_backward(backend: str = "stream") -> dict[str, Any]:
    return {**BACKENDS[backend], "update": "in_backward"}


# -- models and what happens between steps


def halve_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.data.mul_(0.5)


@pytest.mark.parametrize("state", [in_backward(), in_backward("resident"), {**BACKENDS["stream"], "update": "overlap"}])
def test_gradient_hooks_that_are_registered_late_count(state: dict[str, Any]) -> None:
    """Whoever hooks a gradient after the first backward still changes it before its layer is updated."""
    found = []
    for values in ({"backend": "resident"}, state):
        training = Training(values)
        training.train(2)
        for parameter in (p for p in training.model.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(halve_gradient)
        training.train(3)
        found.append(training.snapshot())
    assert_same(found[1], found[0])


@pytest.mark.parametrize("as_on_accelerator", [False, True])
def test_hyperparameters_that_change_after_backward_are_refused(
    monkeypatch: pytest.MonkeyPatch, as_on_accelerator: bool
) -> None:
    if as_on_accelerator:
        monkeypatch.setattr(update, "_is_on_accelerator", lambda value: True)
    expected, tested = Training({"backend": "resident"}), Training(in_backward())
    group = tested.optimizer.param_groups[0]

    def change_them() -> None:
        for key, changed in {"lr": 1e-3, "weight_decay": 0.5, "betas": (0.5, 0.9)}.items():
            before, group[key] = group[key], changed
            with pytest.raises(RuntimeError, match=f"{key} of a parameter group changed between backward"):
                tested.optimizer.step()
            group[key] = before
        group["lr"].mul_(0.5)
        with pytest.raises(RuntimeError, match="lr of a parameter group changed"):
            tested.optimizer.step()
        group["lr"].mul_(2)
        other = tested.optimizer.param_groups[1]["params"]
        other.insert(0, group["params"].pop())
        with pytest.raises(RuntimeError, match="params of a parameter group changed"):
            tested.optimizer.step()
        group["params"].append(other.pop(0))

    for training in (expected, tested):
        training.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        training.train(2)
    tested.before_step = change_them
    assert tested.train(2) == expected.train(2)
    assert_same(tested.snapshot(), expected.snapshot())


# -- memory


class Chain(nn.Module):
    """Linear layers with nothing between them."""

    def __init__(self, layers: int = 8, width: int = 48) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Recomputed(Chain):
    """Each layer's forward runs again in backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


class Chained(OnVectors):
    """A chain whose layers are units of their own."""

    rows, width, micro_batches = 4, 48, 1

    def __init__(self, backend: str, make: type[Chain] = Chain) -> None:
        super().__init__({**in_backward(backend), "ring_mib": 0.2}, make=make, clipping=CLIPPING["none"])

    def before_step(self) -> None:
        assert all(parameter.grad is None for parameter in self.model.parameters())

    def hold_updates(self, until: Callable[[int], threading.Event]) -> None:
        """That of each layer stands still until the event for its number is set."""
        updater = self.optimizer.engine.updater
        update, numbers = updater.update, {f"blocks.{n}.weight": n for n in range(len(self.model.blocks))}

        def unit(unit: Any, of: Any) -> Any:
            number = numbers[unit.parts[0][0].name]
            assert until(number).wait(PATIENCE), f"backward waits for layer {number}"
            return update(unit, of)

        updater.update = unit


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients there are whenever one arrives."""
    gradients: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    add_gradient = FinalUpdates.add_gradient

    def counting(self: FinalUpdates, item: Any, gradient: Tensor) -> None:
        gradients.append(weakref.ref(gradient))
        add_gradient(self, item, gradient)
        del gradient
        counts.append(sum(reference() is not None for reference in gradients))

    monkeypatch.setattr(FinalUpdates, "add_gradient", counting)
    return counts


@every_value(backend=BACKENDS, micro_batches=[1, 3])
def test_gradients_of_two_layers_at_a_time(backend: str, micro_batches: int, alive: list[int]) -> None:
    chained = Chained(backend)
    chained.micro_batches = micro_batches
    chained.train(3)
    assert len(alive) == 3 * 8 and max(alive) <= 2


def test_a_recomputed_layer_does_not_wait_for_the_one_behind_it(alive: list[int]) -> None:
    """Each is updated after the gradient of the one in front of it was computed, and before that one's arrives."""
    chained = Chained("stream", Recomputed)
    chained.step()
    computed = [threading.Event() for _ in chained.model.blocks]
    for block, event in zip(chained.model.blocks, computed, strict=True):
        block.weight.register_hook(lambda _, event=event: event.set())
    chained.hold_updates(until=lambda number: computed[max(number - 1, 0)])
    chained.step()
    assert len(alive) == 2 * 8 and max(alive) <= 2


def test_a_layer_that_is_read_in_backward_is_updated_if_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    chained = Chained("stream", Recomputed)
    chained.step()
    free, seen = threading.Event(), []
    wait = CallerLane.wait

    def waiting(self: CallerLane, event: Any) -> None:
        free.set()
        wait(self, event)

    def reading(_: Tensor) -> None:
        monkeypatch.setattr(CallerLane, "wait", waiting)
        seen.append(chained.model.blocks[4].weight.clone())
        free.set()

    chained.model.blocks[3].weight.register_hook(reading)
    done = threading.Event()
    done.set()
    chained.hold_updates(until=lambda number: free if number == 4 else done)
    before = chained.model.blocks[4].weight.clone()
    chained.step()
    assert torch.equal(seen[0], chained.model.blocks[4].weight)
    assert not torch.equal(seen[0], before)


class Normed(nn.Module):
    """A matrix that is cut over several units, in a layer with small parameters."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.down = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(self.down(self.norm(hidden)))


class CutTraining(OnVectors):
    """Three layers with matrices that are cut.

    Args:
        in_hooks: names of parameters that a backward hook of each layer's norm reads; their values are in ``seen``.
        delays: a seed of those in the lanes, from the second step on.
    """

    rows, width, micro_batches = 4, 96, 1

    def __init__(self, backend: str, update: str, in_hooks: Sequence[str] = (), delays: int | None = None) -> None:
        state = {**BACKENDS[backend], "update": update} | ({"ring_mib": 0.1} if backend == "stream" else {})
        super().__init__(state, make=lambda: nn.Sequential(*(Normed() for _ in range(3))), clipping=CLIPPING["none"])
        self.slowness, self.seen = delays, list[Tensor]()

        def hook(norm: nn.Module, *_: Any) -> None:
            (block,) = (block for block in self.model if block.norm is norm)
            self.seen += [block.get_parameter(name).detach().clone() for name in in_hooks]

        self.model.register_forward_pre_hook(lambda _, given: (given[0].requires_grad_(),))  # backward hooks need it
        for block in self.model if in_hooks else ():
            block.norm.register_full_backward_hook(hook)

    def loss(self, micro: int = 0) -> Tensor:
        if self.steps and self.slowness is not None:
            random_delays(self.optimizer.engine.backend.lanes, self.slowness + self.steps, 2e-3)
        return super().loss(micro)

    def units_of(self, name: str) -> int:
        units = self.optimizer.engine.backend.units()
        return sum(any(item.name == name for item, *_ in unit.parts) for unit in units)


@pytest.mark.parametrize("read", [["norm.weight"], ["norm.bias", "down.weight"]], ids=str)
def test_a_hook_reads_a_neighbour_of_a_matrix_that_is_cut(read: list[str]) -> None:
    """The first unit of a layer to be updated has the end of the matrix, but the matrix is not complete with it."""
    expected, resident = CutTraining("resident", "at_step"), CutTraining("resident", "in_backward", read)
    losses = expected.train(3)
    resident.train(3)
    for seed in range(2):
        tested = CutTraining("stream", "in_backward", read, delays=seed)
        assert tested.train(3) == losses
        assert_same(tested.snapshot(), expected.snapshot())
        assert tested.units_of("0.down.weight") > 2
        assert len(tested.seen) == 9 * len(read)
        assert all(map(torch.equal, tested.seen, resident.seen)), seed


# -- what goes wrong


def test_a_second_backward_is_refused_before_anything_happens() -> None:
    training = Training(in_backward())
    training.train(1)
    first, second = training.loss(0), training.loss(1)
    training.optimizer.backward(first)
    with pytest.raises(RuntimeError, match=r"accumulate\(model, last=False\)"):
        training.optimizer.backward(second)
    training.optimizer.step()
    training.train(1)


def test_a_second_backward_by_hand_is_refused_by_the_step() -> None:
    training = Training(in_backward())
    training.train(1)
    training.optimizer.backward(training.loss(0))
    training.loss(1).backward()
    with pytest.raises(RuntimeError, match=r"as from a second backward before step\(\)"):
        training.optimizer.step()


def test_a_backward_that_breaks_off() -> None:
    training = Training(in_backward())

    def spoil() -> None:
        others.break_off(training, "blocks.1.up.weight")
        with pytest.raises(RuntimeError, match="may be half updated"):
            training.optimizer.backward(training.loss())

    others.goes_on_after_a_load(training, spoil, Training({"backend": "resident"}))


class Reentrant(nn.Module):
    """One layer twice, each time recomputed by a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return checkpoint(self.layer, torch.tanh(hidden), use_reentrant=True)


def test_two_gradients_of_one_parameter_in_a_backward_are_refused() -> None:
    model = Reentrant()
    _, model, optimizer = made(
        {"clipping": {"max_norm": None}, "optimizer_state": in_backward("resident")}, model, lr=1e-2
    )
    loss = model(torch.randn(2, 6, dtype=torch.bfloat16, requires_grad=True)).float().sum()
    with pytest.raises(RuntimeError, match="reentrant activation checkpointing"):
        optimizer.backward(loss)


def test_strategies_that_need_all_gradients_are_refused() -> None:
    for settings in (
        {"clipping": {"max_norm": 1.0}},
        {"clipping": {"max_norm": None}, "precision": {"loss_scale": "dynamic"}},
    ):
        with pytest.raises(ConfigError) as caught:
            Strategy.load({**settings, "optimizer_state": in_backward()})
        said = str(caught.value)
        for part in (
            "clipping.scope to unit",
            "precision.loss_scale to none",
            "next_forward or at_step",
            "stay in memory",
        ):
            assert part in said
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="no global norm"):
        MixedPrecisionOptimizer(parameters, max_norm=1.0, update_time=IN_BACKWARD)
    with pytest.raises(ValueError, match="constant loss scale"):
        MixedPrecisionOptimizer(parameters, loss_scale=DynamicLossScale(), update_time=IN_BACKWARD)


def test_settings_that_need_all_gradients_are_refused_later_too() -> None:
    training = Training(in_backward())
    training.train(1)
    before = training.snapshot()
    for name, setting in (("max_norm", 0.1), ("loss_scale", DynamicLossScale())):
        own = getattr(training.optimizer, name)
        setattr(training.optimizer, name, setting)
        with pytest.raises(ValueError, match=r"have no global norm|cannot skip a whole step"):
            training.optimizer.backward(training.loss())
        setattr(training.optimizer, name, own)
    assert_same(training.snapshot(), before)


def test_gradients_of_an_incomplete_layer_are_given_up_before_the_step() -> None:
    """All other layers have been updated by then."""
    training = Training(in_backward(), make=Skipping)
    training.train(2)
    training.model.blocks[1].normalises = False
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.optimizer.backward(training.loss())
    training.optimizer.zero_grad()
    training.optimizer.step()
    after = training.model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert "blocks.0.up.weight" in changed and not [name for name in changed if name.startswith("blocks.1")]


def test_nothing_is_saved_between_backward_and_step(tmp_path: Path) -> None:
    training = Training(in_backward())
    training.train(2)
    training.optimizer.backward(training.loss())
    for saving in (
        training.optimizer.state_dict,
        lambda: copy.deepcopy(training.optimizer),
        lambda: training.strategy.save_checkpoint(tmp_path / "early", training.model, training.optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"Call step\(\) first"):
            saving()
    training.optimizer.step()
    training.strategy.save_checkpoint(tmp_path / "after", training.model, training.optimizer)


def test_an_error_before_any_layer_was_updated_changes_nothing() -> None:
    training, expected = Training(in_backward()), Training({"backend": "resident"})
    training.train(2)
    others.break_off(training, "head.weight")
    training.optimizer.zero_grad()
    assert training.train(2) == expected.train(4)[2:]
    assert_same(training.snapshot(), expected.snapshot())


class WithoutBias(nn.Linear):
    """Has a bias that it does not use."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight)


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_a_layer_in_which_a_gradient_is_missing_is_updated_in_the_step(backend: str) -> None:
    model = nn.Sequential(WithoutBias(4, 4), nn.Linear(4, 4))
    expected = copy.deepcopy(model)
    reference = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    state = {"backend": backend, "update": "in_backward"}
    values = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": None}, "optimizer_state": state}
    _, model, optimizer = made(values, model, torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(inputs).sum())
        optimizer.step()
        expected(inputs).sum().backward()
        reference.step()
        reference.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
