"""Updates that finish during the next forward: the same bits, whoever looks at the weights and whenever."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.optimizer import queue
from lightstep.state.lanes import CallerLane, Lanes
from tests.distributed.models import Block, TinyTransformer
from tests.patience import PATIENCE
from tests.reference.own_classes import FailingOnce
from tests.training import Training, assert_same, host_activations_of

__all__ = ["assert_same", "host_activations_of"]

OVERLAP = {"backend": "stream", "update": "next_forward", "ring_mib": 0.02}


pytestmark = pytest.mark.usefixtures("small_cuts")


class Held:
    """The update of units with a parameter of this name stands still until the block is left or :meth:`release`."""

    def __init__(self, training: Training, name: str) -> None:
        training.optimizer.synchronize()
        self.updater, self.name, self.free = training.optimizer.engine.updater, name, threading.Event()

    def __enter__(self) -> Held:
        update = self.updater.update

        def unit(unit: Any, of: Any) -> Any:
            if any(owner.name.startswith(self.name) for owner, _, _ in unit.parts):
                assert self.free.wait(PATIENCE)
            return update(unit, of)

        self.updater.update = unit
        return self

    def __exit__(self, *_: object) -> None:
        del self.updater.update
        self.release()

    def release(self) -> None:
        self.free.set()


def beside(job: Callable[[], Any], seconds: float = 60.0) -> threading.Thread | None:
    """Run ``job``; the thread that still does after ``seconds``, or ``None`` as soon as it is done."""
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread if thread.is_alive() else None


def test_step_returns_at_once_and_each_block_waits_for_its_own() -> None:
    training = Training(OVERLAP)
    training.train(2)
    model, hidden = training.model, torch.zeros(1, 7, dtype=torch.bfloat16)
    with Held(training, "blocks.1") as held:
        training.step()
        assert beside(lambda: model.embed(torch.tensor([1]))) is None
        assert beside(lambda: model.blocks[0](hidden)) is None
        late = (lambda: model.blocks[1](hidden), lambda: model.blocks[2](hidden), lambda: model.head(hidden))
        waiting = [beside(forward, 0.05) for forward in late]
        assert None not in waiting
        held.release()
        for thread in waiting:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in waiting)


class NamedStream(CallerLane):
    """The calling thread, as if it were a stream of an accelerator."""

    def __init__(self, stream: Any, status: Any, waited: list[Any]) -> None:
        super().__init__("compute", status)
        self.stream, self._waited = stream, waited

    def wait(self, event: Any) -> None:
        self._waited.append(self.stream)
        super().wait(event)


@pytest.mark.parametrize("update", ["next_forward", "overlap"])
def test_the_stream_of_backward_waits_for_what_another_one_asks_for(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its gradients are freed, and for a rollback."""
    training = Training({**OVERLAP, "update": update}, clipping={"max_norm": 1e6})
    training.train(2)
    waited: list[Any] = []
    stream = "of backward"
    monkeypatch.setattr(Lanes, "caller", lambda self: NamedStream(stream, self._status, waited))
    training.optimizer.backward(training.loss())
    if update == "next_forward":
        training.optimizer.step()
    stream = "of a reader"
    waited.clear()
    training.optimizer.synchronize()
    assert training.optimizer.engine.queue.rolled_back == (update == "overlap")
    assert set(waited) == {"of backward", "of a reader"}


@pytest.mark.parametrize("update", ["next_forward", "overlap"])
def test_a_stream_that_gathers_waits_for_updates_that_another_one_has_waited_for(
    monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    training = Training({**OVERLAP, "update": update})
    training.train(2)
    waited: list[Any] = []
    stream = "of forward"
    monkeypatch.setattr(Lanes, "caller", lambda self: NamedStream(stream, self._status, waited))
    parameters = list(training.model.parameters())
    for _ in range(2):
        training.step()
        stream = "of forward"
        training.optimizer.wait_for_update()
        assert not training.optimizer.has_deferred_updates
        stream = "of gathering"
        waited.clear()
        training.optimizer.wait_on_stream(parameters[:1])
        assert waited == ["of gathering"]
        training.optimizer.wait_on_stream(parameters)
        assert waited == ["of gathering"], "it runs behind all updates already"
        stream = "of forward"
        training.optimizer.wait_on_stream(parameters)
        assert waited == ["of gathering"]


# -- forwards of all kinds


class OpenBlock(Block):
    """May leave its norm out: then some parameters of a layer have gradients, and others have none."""

    normalises = True

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden) if self.normalises else hidden
        return hidden + self.down(torch.tanh(self.up(inner)))


class Skipping(TinyTransformer):
    """Leaves blocks and norms out, as layer dropout does."""

    skipped: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OpenBlock(self.embed.embedding_dim) for _ in self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for index, block in enumerate(self.blocks):
            hidden = hidden if index in self.skipped else block(hidden)
        return self.head(hidden)


def run(training: Training, seed: int | None, steps: int, between: Callable[[Training], Any]) -> list[Any]:
    found: list[Any] = [training.step()]
    if seed is not None:
        training.delays(seed)
    for _ in range(steps):
        found.append(between(training))
        found.append(training.step())
    return found


def skip_layers(training: Training) -> None:
    training.model.skipped = frozenset({training.steps % 3, 2 if training.steps % 2 else 0})
    for number, block in enumerate(training.model.blocks):
        block.normalises = (training.steps + number) % 4 > 1


def look(training: Training) -> list[float]:
    with torch.inference_mode():
        return [training.loss(7).item(), float(training.model(torch.tensor([[1, 2]])).float().sum())]


def change_learning_rate(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + training.steps)


def freeze_and_thaw(training: Training) -> None:
    training.model.blocks[1].requires_grad_(training.steps % 2 == 0)


def fail_in_forward(training: Training) -> None:
    with pytest.raises(RuntimeError):
        training.model.blocks[0](torch.zeros(1, 3))


def break_off(training: Training, name: str, micro: int = 0) -> None:
    """The backward of a loss fails at this parameter."""

    def failing(_: Tensor) -> None:
        raise ZeroDivisionError("in backward")

    handle = training.model.get_parameter(name).register_hook(failing)
    with pytest.raises(ZeroDivisionError):
        training.optimizer.backward(training.loss(micro))
    handle.remove()


def fail_in_backward(training: Training) -> None:
    break_off(training, "blocks.1.up.weight", 5)
    training.optimizer.zero_grad()


def goes_on_after_a_load(training: Training, spoil: Callable[[], None], expected: Training) -> None:
    """What ``spoil`` does to the run after two steps is refused until state is loaded, which mends it."""
    training.train(2)
    weights, state = copy.deepcopy(training.model.state_dict()), training.optimizer.state_dict()
    spoil()
    with pytest.raises(RuntimeError, match=r"may be half updated.*Load a checkpoint"):
        training.optimizer.step()
    optimizer = training.optimizer
    calls: dict[str, Callable[[], object]] = {
        "synchronize": optimizer.synchronize,
        "set_residency": lambda: optimizer.set_residency(0),
        "release_device_memory": optimizer.release_device_memory,
        "refresh_master_weights": optimizer.refresh_master_weights,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"may be half updated\. Load a checkpoint before {name}\(\)"):
            call()
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(state)
    training.optimizer.zero_grad()
    training.steps = 2
    assert training.train(2) == expected.train(4)[2:]
    assert_same(training.snapshot(), expected.snapshot())


def save_and_load(training: Training) -> None:
    weights, state = copy.deepcopy(training.model.state_dict()), training.optimizer.state_dict()
    training.step()
    training.steps -= 1
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(state)


BETWEEN = [
    *(skip_layers, look, change_learning_rate, freeze_and_thaw, fail_in_forward, fail_in_backward, save_and_load),
]


UNCLIPPED: dict[str, Any] = {"clipping": {"max_norm": None}, "loss_scale": {"kind": "constant", "scale": 1024.0}}


@pytest.mark.parametrize(
    ("between", "parameters", "update"),
    [
        (skip_layers, "float32", "next_forward"),
        (skip_layers, "bfloat16", "in_backward"),
        (fail_in_forward, "float16", "next_forward"),
    ],
)
def test_what_happens_between_steps(between: Callable[[Training], Any], parameters: str, update: str) -> None:
    """More of it are programs of ``test_programs.py``; all of it happens on a GPU."""
    expected = Training({"backend": "resident"}, parameters, Skipping, **UNCLIPPED)
    tested = Training({**OVERLAP, "update": update}, parameters, Skipping, **UNCLIPPED)
    assert run(tested, 3, 5, between) == run(expected, None, 5, between)
    assert_same(tested.snapshot(), expected.snapshot())
    tested.optimizer.close()


def test_weights_that_were_moved_while_they_were_updated_are_trained_on() -> None:
    """Exchanging the storage of parameters from an old list too early loses that one update, and no other."""
    training = Training(OVERLAP, "float32")
    training.train(2)
    known = list(training.model.parameters())
    with Held(training, "blocks.2"):
        training.step()
        for parameter in known:
            parameter.data = parameter.data.clone()
    training.step()
    before = copy.deepcopy(training.model.state_dict())
    training.step()
    after = training.model.state_dict()
    names = ["embed.weight", "blocks.0.up.weight", "blocks.2.up.weight", "blocks.2.down.weight", "head.weight"]
    assert [name for name in names if torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("update", ["at_step", "next_forward"])
def test_a_failure_is_raised_once_and_needs_a_checkpoint(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the step or by the next forward; in the middle of the update either way."""
    monkeypatch.setattr(FailingOnce, "left", -1)
    training = Training({**OVERLAP, "update": update}, optimizer_class=FailingOnce)

    def spoil() -> None:
        FailingOnce.left = 3
        with pytest.raises(RuntimeError, match=r"the update of .* failed .*the base optimizer fails"):  # noqa: PT012
            training.step()
            training.loss()
        FailingOnce.left = -1

    goes_on_after_a_load(training, spoil, Training({"backend": "resident"}))


@pytest.mark.parametrize("name", ["wait", "run"])
def test_an_interrupt_loses_no_update_or_needs_a_checkpoint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits may be interrupted; where units were being submitted nobody knows which are done."""
    monkeypatch.setattr(queue, "SUBMIT_IN_STEP", 2)
    monkeypatch.setattr(queue, "SUBMIT_AHEAD", 0)
    training, expected = Training(OVERLAP), Training({"backend": "resident"})
    for one in (training, expected):
        one.train(3)

    where: Any = CallerLane if name == "wait" else training.optimizer._backend.lanes.compute
    wait, caller = CallerLane.wait, threading.get_ident()

    def interrupted(*arguments: Any) -> None:
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        wait(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.wait_for_update(list(training.model.blocks[1].parameters()))
    if name == "run":
        with pytest.raises(RuntimeError, match=r"the update under way failed .*Load a checkpoint"):
            training.step()
        return
    for one in (training, expected):
        one.train(2)
    assert_same(training.snapshot(), expected.snapshot())


@pytest.mark.parametrize("update", ["at_step", "next_forward", "overlap"])
def test_a_graph_from_before_the_step_is_refused(update: str) -> None:
    """As torch refuses it after its own ``step()``: its weights are being updated."""
    training = Training({"backend": "stream", "ring_mib": 0.02, "update": update}, clipping={"max_norm": None})
    training.train(3)
    training.optimizer.synchronize()
    training.optimizer._backend.lanes.delay = lambda lane: time.sleep(0.01)
    named = dict(training.model.named_parameters())
    older = training.loss()
    with training.strategy.accumulate(training.model, last=True):
        training.optimizer.backward(training.loss(1))
    training.optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(older, named["embed.weight"])
    training.optimizer._backend.lanes.delay = None
    training.train(1)
