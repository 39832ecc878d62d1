"""Callbacks around the step get the gradients that the Trainer gives them: clipped before it, still there after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from lightstep import ConfigError
from lightstep.integrations.transformers import LightstepTrainer
from tests.covering import every_value
from tests.reference.pair import FP16_SCALE
from tests.reference.tiny_llama import Rows, make_llama, training_arguments
from tests.unit.test_transformers_trainer import on_the_cpu, same_weights  # noqa: F401

MAX_NORM = 0.05
FP32: dict[str, Any] = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": MAX_NORM}}
BF16: dict[str, Any] = {"clipping": {"max_norm": MAX_NORM}}
FP16: dict[str, Any] = {**BF16, "precision": {"parameters": "float16", "loss_scale": FP16_SCALE}}
STREAM = {"optimizer_state": {"backend": "stream", "ring_mib": 0.05}}
OVERLAP = {"optimizer_state": STREAM["optimizer_state"] | {"update": "overlap"}}


class Watch(TrainerCallback):
    """Keeps the gradients before and after each step."""

    def __init__(self) -> None:
        self.before: list[list[Tensor]] = []
        self.after: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before.append([p.grad.clone() for p in model.parameters()])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after.append([p.grad.clone() for p in model.parameters()])


class Noise(TrainerCallback):
    """Adds noise to clipped gradients (differential privacy)."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        generator = torch.Generator().manual_seed(state.global_step)
        for p in model.parameters():
            p.grad.add_(0.01 * torch.randn(p.shape, generator=generator))


class AfterOnly(TrainerCallback):
    """Counts gradients."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.counts.append(sum(p.grad is not None for p in model.parameters()))


def ran(folder: Path, strategy: dict[str, Any] | None, *callbacks: TrainerCallback, **changes: Any) -> Any:
    model = changes.pop("model", None) or make_llama()
    values = {"max_grad_norm": MAX_NORM, "train_sampling_strategy": "sequential", "max_steps": 3, "optim": "sgd"}
    args = training_arguments(folder, **values | {"learning_rate": 0.1} | changes)
    given: dict[str, Any] = {"train_dataset": Rows(), "callbacks": list(callbacks)}
    ours = {} if strategy is None else {"strategy": strategy}
    trainer = (LightstepTrainer if ours else Trainer)(model, args, **given, **ours)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watch, Any]:
    """A run of the Trainer's own, with noise."""
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
        return watch, ran(tmp_path_factory.mktemp("shown"), None, watch, Noise())


@pytest.mark.parametrize("more", [{}, OVERLAP], ids=["resident", "overlap"])
def test_gradients_are_those_that_the_trainer_shows(
    tmp_path: Path, more: dict[str, Any], shown: tuple[Watch, Any]
) -> None:
    """In fp32, before and after the step; noise is added to clipped ones."""
    (expected, plain), found = shown, Watch()
    trainer = ran(tmp_path, FP32 | more, found, Noise())
    assert len(found.before) == len(found.after) == 3
    last = {"rtol": 1e-5, "atol": 1e-8}  # the norm's last bit
    torch.testing.assert_close([found.before, found.after], [expected.before, expected.after], **last)
    weights = [[p.detach() for p in each.model.parameters()] for each in (trainer, plain)]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)
    first, other = (each.state.log_history[0]["grad_norm"] for each in (trainer, plain))
    assert first == pytest.approx(other)


@every_value(values=[BF16, FP16], accumulation=[1, 2])
def test_watching_changes_nothing(tmp_path: Path, values: dict[str, Any], accumulation: int) -> None:
    """Weights, norms and scales are bit for bit those of the run that clips in its step."""
    changes = {"gradient_accumulation_steps": accumulation, "optim": "adamw_torch", "learning_rate": 3e-3}
    changes["max_steps"] = 2
    plain, watch = ran(tmp_path, values, **changes), Watch()
    watched = ran(tmp_path, values, watch, **changes)
    same_weights(watched.model, plain.model)
    found, expected = (
        [(e["grad_norm"], e["loss_scale"]) for e in t.state.log_history if "grad_norm" in e] for t in (watched, plain)
    )
    assert found == expected and all(norm > MAX_NORM for norm, _ in found)
    for gradients in watch.before + watch.after:
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert float(norm) == pytest.approx(MAX_NORM, rel=1e-4)


def test_the_event_after_the_step_alone(tmp_path: Path) -> None:
    callback = AfterOnly()
    trainer = ran(tmp_path, BF16 | STREAM, callback, max_steps=2)
    assert callback.counts == [21, 21]
    assert all(p.grad is None for p in trainer.model.parameters())
    same_weights(trainer.model, ran(tmp_path, BF16 | STREAM, max_steps=2).model)


def test_an_overflow_is_skipped(tmp_path: Path) -> None:
    """An inf that a callback finds, or leaves there."""

    class Break(Watch):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 1:
                next(model.parameters()).grad[0] = torch.inf

    trainer = ran(tmp_path, FP16, Break())
    assert [entry["loss_scale"] for entry in trainer.state.log_history if "loss_scale" in entry] == [1024, 1024, 512]
    assert trainer.lr_scheduler.last_epoch == 2


IN_BACKWARD = {"clipping": {"max_norm": None}, "optimizer_state": {"update": "in_backward"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (IN_BACKWARD, "AfterOnly: .*in_backward has used and freed the gradients.*update: at_step"),
        ({"clipping": {"max_norm": MAX_NORM, "scope": "unit"}}, "AfterOnly: .*scope unit clips each layer"),
    ],
    ids=["in_backward", "unit"],
)
def test_gradients_that_cannot_be_shown(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    """Before the first step."""
    with pytest.raises(ConfigError, match=message):
        ran(tmp_path, values, AfterOnly(), max_grad_norm=1.0)
