"""accelerate on one device: its own loop, the textbook loop's weights."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn

from lightstep import ConfigError, Strategy
from lightstep.integrations.accelerate import LightstepAccelerator, connect, prepare
from tests.reference.pair import FP16_SCALE
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.tiny_model import TinyModel, loss_of

VALUES: dict[str, Any] = {"sharding": {"kind": "single"}, "clipping": {"max_norm": 0.5}}
FP16 = VALUES | {"precision": {"parameters": "float16", "loss_scale": FP16_SCALE}}
STREAM = {"backend": "stream", "ring_mib": 0.05, "update": "next_forward"}
BOTH = pytest.mark.parametrize("values", [VALUES | {"optimizer_state": STREAM}, FP16], ids=["bf16, overlap", "fp16"])
OVERFLOWS = {2, 3}


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state for the life of a process. A GPU, if there is one, is left alone."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    reset()
    yield
    reset()


class Training:
    """What a user of accelerate has: two micro-batches a step, a scheduler, the norm for the logs."""

    def __init__(self, values: dict[str, Any], seed: int = 0, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        self.strategy = Strategy.load(values)
        torch.manual_seed(seed)
        model = TinyModel()
        optimizer = self.strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        self.model, self.optimizer, self.scheduler = prepare(
            self.accelerator, model, optimizer, scheduler, strategy=self.strategy
        )
        self.norms: list[torch.Tensor] = []
        self.skipped: list[int] = []

    def train(self, steps: range) -> None:
        accelerator = self.accelerator
        for step in steps:
            for micro in range(2):
                with accelerator.accumulate(self.model):
                    loss = loss_of(self.model, step, micro)
                    accelerator.backward(loss * (math.inf if step in OVERFLOWS and micro == 1 else 1.0))
                    if accelerator.sync_gradients:
                        self.norms.append(accelerator.clip_grad_norm_(self.model.parameters(), 0.5))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            if accelerator.optimizer_step_was_skipped:
                self.skipped.append(step)
            assert self.optimizer.step_was_skipped is accelerator.optimizer_step_was_skipped


def same(tested: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(tested.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs"


@BOTH
def test_accelerate_s_loop_is_the_textbook_loop(values: dict[str, Any]) -> None:
    training = Training(values)
    training.train(range(5))
    assert training.skipped == sorted(OVERFLOWS)
    training.optimizer.synchronize()

    torch.manual_seed(0)
    given = TinyModel()
    model = Strategy.load(values).prepare_model(copy.deepcopy(given))
    loop = ReferenceLoop(
        [{"params": list(model.parameters())}],
        torch.optim.AdamW,
        masters=dict(zip(model.parameters(), given.parameters(), strict=True)),
        lr=1e-2,
        weight_decay=0.1,
        loss_scale=values.get("precision", {}).get("loss_scale", "none"),
        max_norm=0.5,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.9)
    for step, norm in enumerate(training.norms):
        for micro in range(2):
            loss = loss_of(model, step, micro)
            loop.backward(loss * (math.inf if step in OVERFLOWS and micro == 1 else 1.0) / 2)
        if loop.step(norm):
            scheduler.step()
    assert loop.clipped_steps > 0
    same(training.model, model)
    assert training.scheduler.get_last_lr() == scheduler.get_last_lr()


def test_no_sync_by_hand_is_a_micro_batch_before_the_last() -> None:
    """Without ``accumulate``: accelerate takes each micro-batch for the last one, and layers may be updated in it."""
    weights = []
    for update in ("at_step", "in_backward"):
        state = {"backend": "stream", "ring_mib": 0.05, "update": update}
        training = Training(VALUES | {"clipping": {"max_norm": None}, "optimizer_state": state})
        accelerator, model = training.accelerator, training.model
        for step in range(3):
            with accelerator.no_sync(model):
                for micro in range(2):
                    accelerator.backward(loss_of(model, step, micro))
            accelerator.backward(loss_of(model, step, 2))
            assert training.optimizer.step()
        training.optimizer.synchronize()
        weights.append(training.model)
    same(weights[1], weights[0])


@BOTH
def test_save_state_and_load_state(tmp_path: Path, values: dict[str, Any]) -> None:
    """With a skipped step behind it, and by the automatic names; after a crash while the checkpoint was replaced."""
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    first = Training(values, project_config=project)
    first.train(range(3))
    first.accelerator.save_state()
    first.train(range(3, 6))
    saved = tmp_path / "checkpoints" / "checkpoint_0"
    assert (saved / "lightstep" / "lightstep.json").is_file()
    (saved / "lightstep").rename(saved / ".lightstep.replaced-0123abcd")

    reset()
    second = Training(values, seed=1, project_config=project)
    second.accelerator.load_state()
    second.train(range(3, 6))
    for training in (first, second):
        training.optimizer.synchronize()
    same(second.model, first.model)
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()
    assert torch.equal(torch.stack(second.norms[-2:]), torch.stack(first.norms[-2:]))
    assert second.optimizer.loss_scale.scale == first.optimizer.loss_scale.scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_that_plain_accelerate_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its fp32 weights become masters."""
    torch.manual_seed(0)
    plain, model = Accelerator(cpu=True), TinyModel().to(dtype)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = plain.prepare(model, torch.optim.AdamW(trainable, lr=1e-2))
    plain.backward(loss_of(model, 0, 0))
    optimizer.step()
    plain.save_state(str(tmp_path))
    reset()
    accelerator, strategy, other = Accelerator(cpu=True), Strategy.load(VALUES), TinyModel()
    tested, ours = prepare(accelerator, other, strategy.create_optimizer(other, lr=1e-2), strategy=strategy)
    accelerator.load_state(str(tmp_path))
    for p, q in zip(tested.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q.bfloat16())
        if dtype == torch.float32 and p.requires_grad:
            assert torch.equal(ours.optimizer.state[p]["master"], q)
    if dtype == torch.bfloat16:
        assert len(ours.state_dict()["state"]) == len(optimizer.state_dict()["state"])


def test_evaluation_without_and_prepare_with_an_optimizer() -> None:
    """What is not trained is accelerate's own affair."""
    accelerator = Training(VALUES).accelerator
    assert next(accelerator.prepare(TinyModel()).parameters()).dtype == torch.float32
    assert len(list(accelerator.prepare(torch.utils.data.DataLoader(list(range(4)))))) == 4
    assert isinstance(accelerator, Accelerator)


class OwnAccelerator(Accelerator):
    """A subclass, as libraries make them."""


def test_accelerators_are_pickled_and_copied() -> None:
    """As plain ones, with the strategy's settings."""
    training = Training(VALUES)
    for accelerator in (training.accelerator, connect(OwnAccelerator(cpu=True), training.strategy)):
        for again in (pickle.loads(pickle.dumps(accelerator)), copy.deepcopy(accelerator)):
            assert isinstance(again, LightstepAccelerator) and type(again).__mro__[1:] == type(accelerator).__mro__[1:]
            assert again.strategy.config == training.strategy.config
            assert again.strategy.chosen == VALUES
            assert again.gradient_accumulation_steps == accelerator.gradient_accumulation_steps


def test_measuring_clips_nothing() -> None:
    training = Training(VALUES | {"clipping": {"max_norm": None}})
    training.accelerator.backward(loss_of(training.model, 0, 0))
    norm = training.accelerator.clip_grad_norm_(training.model.parameters(), math.inf)
    assert torch.equal(norm, training.optimizer.step().grad_norm)


# -- what is refused


def test_what_was_made_elsewhere() -> None:
    model, strategy = TinyModel(), Strategy.load(VALUES)
    theirs = torch.optim.AdamW(model.parameters())
    right = {"accelerator": Accelerator(cpu=True), "model": model, "strategy": strategy}
    right["optimizer"] = strategy.create_optimizer(model, lr=1e-2)
    of_another = "not made by this strategy for this TinyModel"
    for name, wrong, kind, message in (
        ("optimizer", theirs, TypeError, r"torch.optim.adamw.AdamW.*strategy.create_optimizer\(model, AdamW"),
        ("strategy", Strategy.load(VALUES), ValueError, of_another),
        ("model", TinyModel(), ValueError, of_another),
        ("accelerator", model, TypeError, r"is of type TinyModel; an accelerate\.Accelerator is ne"),
        ("strategy", "stream", TypeError, "strategy is 'stream'; the Strategy that made the optim"),
    ):
        given = right | {name: wrong}
        with pytest.raises(kind, match=message):
            prepare(given["accelerator"], given["model"], given["optimizer"], strategy=given["strategy"])


def test_one_model_and_one_optimizer() -> None:
    training = Training(VALUES)
    model = TinyModel()
    second = training.strategy.create_optimizer(model, lr=1e-2)
    with pytest.raises(ValueError, match=r"has an optimizer already .*accelerator.free_memory\(\)"):
        prepare(training.accelerator, model, second, strategy=training.strategy)
    training.accelerator.free_memory()
    prepare(training.accelerator, model, second, strategy=training.strategy)


@pytest.mark.parametrize(
    ("mixed_precision", "message"),
    [("fp16", r"mixed_precision is 'fp16', .*preset 'fp16'"), ("bf16", "which autocast would compute in bfloat16")],
)
def test_mixed_precision_beside_fp16_weights(mixed_precision: str, message: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model, strategy = TinyModel(), Strategy.load(FP16)
    with pytest.raises(ConfigError, match=message):
        prepare(accelerator, model, strategy.create_optimizer(model, lr=1e-2), strategy=strategy)


def test_clipping_that_the_strategy_does_not_do() -> None:
    """At the wrong place, to another norm, of a part of the parameters, by value."""
    training = Training(VALUES)
    accelerator, model = training.accelerator, training.model
    everything = list(model.parameters())
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, 0, 0))
        with pytest.raises(RuntimeError, match=r"if accelerator.sync_gradients:"):
            accelerator.clip_grad_norm_(everything, 0.5)
    for parameters, norm, kind, message in (
        (everything, (1.0, 2), ConfigError, r"clipping.max_norm 0.5 and norm_type 2.0.*'clipping.max_norm': 1.0"),
        (everything, (0.5, 1), ConfigError, "norm_type=1"),
        (everything[:1], (0.5, 2), ValueError, r"without \d+ of the optimizer's parameters"),
    ):
        with pytest.raises(kind, match=message):
            accelerator.clip_grad_norm_(parameters, *norm)
    with pytest.raises(ConfigError, match=r"clip_grad_value_\(0.1\)"):
        accelerator.clip_grad_value_(everything, 0.1)


# -- the optimizer's part


def test_an_optimizer_that_has_been_set_up_is_not_started_over() -> None:
    training = Training(VALUES)
    training.train(range(1))
    with pytest.raises(RuntimeError, match="shard the model before the first step"):
        training.optimizer.start_over(training.strategy._make_backend(training.model))


def test_there_is_no_norm_before_the_step_with_updates_in_backward() -> None:
    values = VALUES | {"clipping": {"max_norm": None}, "optimizer_state": {"update": "in_backward"}}
    strategy = Strategy.load(values)
    model = strategy.prepare_model(TinyModel())
    optimizer: Any = strategy.create_optimizer(model, lr=1e-2)
    optimizer.backward(loss_of(model, 0, 0))
    with pytest.raises(RuntimeError, match="read the norm from the result of step"):
        optimizer.grad_norm()
