"""Weights on the host under accelerate, the Trainer and Fabric: the bits of the same run with weights on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from lightning_fabric import Fabric
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from lightstep import ConfigError, Strategy
from lightstep.integrations.transformers import LightstepTrainer
from lightstep.sharding.prepared_model import PreparedModel
from tests.covering import every_value
from tests.reference.tiny_llama import Rows, make_llama, training_arguments
from tests.training import made, random_delays
from tests.unit import test_accelerate as in_accelerate

BASE: dict[str, Any] = {"sharding": {"kind": "single"}, "clipping": {"max_norm": 0.5}}
TIMES = ["at_step", "next_forward", "overlap"]


def values(placement: str, time: str = "next_forward", **more: Any) -> dict[str, Any]:
    state = {"backend": "stream", "ring_mib": 0.05, "update": time}
    weights = {"placement": "host", "device_mib": 0.005} if placement == "host" else {}
    return {**BASE, "optimizer_state": state, "weights": weights, **more}


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state for the life of a process. A GPU, if there is one, is left alone."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def nobody_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `model.to(device)` would bring all weights there. On the CPU it would go unnoticed."""
    to = nn.Module.to

    def checked(self: nn.Module, *given: Any, **named: Any) -> nn.Module:
        assert PreparedModel.of(self).weight_visits is None, "the model is moved after it was put on the host"
        return to(self, *given, **named)

    monkeypatch.setattr(nn.Module, "to", checked)


def delay(model: nn.Module, seed: int = 0) -> None:
    visits = PreparedModel.of(model).weight_visits
    if visits is not None:
        random_delays(visits.weights.lanes, seed)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(tested: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tested.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tested[name], expected[name])] == []


# ---- accelerate


@every_value(time=TIMES[1:], fp16=[False, True])
def test_accelerate(time: str, fp16: bool, tmp_path: Path) -> None:
    """Micro-batches, skipped steps, norms for the logs; saved, and resumed under either placement."""
    more = {"precision": in_accelerate.FP16["precision"]} if fp16 else {}
    found = []
    for number, placement in enumerate(("device", "host")):
        run = in_accelerate.Training(values(placement, time, **more))
        delay(run.model)
        run.train(range(3))
        run.accelerator.save_state(str(tmp_path / placement))
        run.train(range(3, 6))
        run.optimizer.synchronize()
        found.append((weights_of(run.model), run.norms, run.skipped, run.scheduler.get_last_lr()))
        fresh = in_accelerate.Training(values(("device", "host")[1 - number], time, **more), seed=7)
        fresh.accelerator.load_state(str(tmp_path / placement))
        fresh.train(range(3, 6))
        fresh.optimizer.synchronize()
        same(weights_of(fresh.model), found[0][0])
    same(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=0, equal_nan=True)
    assert found[0][2:] == found[1][2:]


# ---- the Trainer


class Delays(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        delay(model)


class Run:
    def __init__(self, folder: Path, given: Any, kind: type[Trainer] = LightstepTrainer, **options: Any) -> None:
        arguments = options.pop("arguments", {})
        resume = options.pop("resume", None)
        evaluates_first = options.pop("evaluates_first", False)
        rows, model = Rows(), options.pop("model", None) or make_llama()
        args = training_arguments(folder, train_sampling_strategy="sequential", **{"max_steps": 3, **arguments})
        options["callbacks"] = [Delays(), *options.get("callbacks", ())]
        self.trainer: Any = kind(model, args, strategy=given, train_dataset=rows, eval_dataset=rows, **options)
        self.first = self.trainer.evaluate()["eval_loss"] if evaluates_first else None
        self.trainer.train(resume_from_checkpoint=resume)
        self.last = self.trainer.evaluate()["eval_loss"]
        self.weights = weights_of(self.trainer.model)
        names = ("loss", "grad_norm", "learning_rate", "eval_loss", "loss_scale")
        self.logs = [{k: v for k, v in entry.items() if k in names} for entry in self.trainer.state.log_history]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "bf16 autocast, no accumulation": {"bf16": True, "gradient_accumulation_steps": 1},
    "recomputing, reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "recomputing, not reentrant, own norm, the best": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "max_grad_norm": 0.1,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    },
}  # fmt: skip


@every_value(arguments=ARGUMENTS, time=TIMES)
def test_the_trainer(arguments: str, time: str, tmp_path: Path) -> None:
    runs = []
    for placement in ("device", "host"):
        preset = dict(values(placement, time))
        if "max_grad_norm" in ARGUMENTS[arguments]:
            preset.pop("clipping")
        first = "bf16" in ARGUMENTS[arguments]
        runs.append(Run(tmp_path / placement, preset, arguments=ARGUMENTS[arguments], evaluates_first=first))
    same(runs[1].weights, runs[0].weights)
    assert (runs[1].logs, runs[1].first, runs[1].last) == (runs[0].logs, runs[0].first, runs[0].last)
    rests = PreparedModel.of(runs[1].trainer.model).weight_visits
    assert rests is not None and all(not group.is_entered for group in rests.weights.groups)


def test_the_trainer_resumes(tmp_path: Path) -> None:
    """With weights at either place."""
    uninterrupted = Run(tmp_path / "uninterrupted", values("device"), arguments={"max_steps": 4}).weights
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    more = {"asynchronous_saves": True}
    Run(tmp_path / "run", values("host"), arguments=saving, **more)
    for placement in ("host", "device"):
        checkpoint = str(tmp_path / "run" / "checkpoint-2")
        resumed = Run(tmp_path / "run", values(placement), arguments={"max_steps": 4}, resume=checkpoint, **more)
        same(resumed.weights, uninterrupted)
    resumed.trainer.save_model(str(tmp_path / "whole"))
    again = make_llama(3).from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    same(weights_of(again), uninterrupted)


def test_callbacks_that_read_gradients_are_refused(tmp_path: Path) -> None:
    class Reader(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"weights\.placement host takes gradients to the host before; set placement"):
        Run(tmp_path, values("host"), callbacks=[Reader()])


# ---- Fabric


def test_fabric() -> None:
    found = []
    for placement in ("device", "host"):
        fabric = Fabric(devices=1, accelerator="cpu")
        strategy, model, optimizer = made(values(placement), make_llama(), torch.optim.AdamW, lr=1e-2)
        model, optimizer = fabric.setup(model, optimizer, move_to_device=False)
        rows = Rows()
        for number in range(8):
            batch = {key: rows[number][key][None] for key in ("input_ids", "labels")}
            with strategy.accumulate(model, last=number % 2 == 1):
                optimizer.backward(model(**batch).loss / 2)
            if number == 1 and placement == "host":
                for how in ({"max_norm": 1.0}, {"clip_val": 1.0}):
                    with pytest.raises(ValueError, match=r"are on the host .*set clipping\.max_norm"):
                        fabric.clip_gradients(model, optimizer, **how)
            if number % 2 == 1:
                optimizer.step()
        optimizer.synchronize()
        found.append(weights_of(model.module))
    same(found[1], found[0])


# ---- what creates the optimizer first


def test_a_model_that_was_never_prepared_is_refused() -> None:
    strategy = Strategy.load(values("host"))
    model = make_llama().bfloat16()
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    optimizer.backward(model(**{key: Rows()[0][key][None] for key in ("input_ids", "labels")}).loss)
    with pytest.raises(ConfigError, match=r"call model = strategy\.prepare_model\(model\) before the first step"):
        optimizer.step()
