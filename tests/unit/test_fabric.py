"""``fabric.setup`` with a lightstep optimizer: the same weights as without Fabric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch import Tensor, nn

from lightstep import Strategy
from tests.reference.tiny_model import TinyModel, loss_of

FP16 = {"precision": {"parameters": "float16", "loss_scale": {"kind": "dynamic", "init_scale": 2.0**8}}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "resident": {},
    "fp16": {**FP16, "clipping": {"max_norm": 0.5}},
    "next_forward": {"optimizer_state": {"backend": "stream", "update": "next_forward"}, "clipping": {"max_norm": 0.5}},
    "in_backward": {
        "optimizer_state": {"backend": "stream", "update": "in_backward"},
        "clipping": {"max_norm": 0.5, "scope": "unit"},
    },
}


class Run:
    """A model and its optimizer, set up by Fabric or not."""

    def __init__(self, values: dict[str, Any], fabric: Fabric | None = None) -> None:
        torch.manual_seed(0)
        self.strategy = Strategy.load(values)
        self.model: Any = self.strategy.prepare_model(TinyModel())
        self.optimizer = self.strategy.create_optimizer(self.model, lr=1e-2)
        if fabric is not None:
            self.model, self.optimizer = fabric.setup(self.model, self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 8)

    def train(self, steps: range, backward: Any = None) -> None:
        for step in steps:
            for micro in range(2):
                with self.strategy.accumulate(self.model, last=micro == 1):
                    (backward or self.optimizer.backward)(loss_of(self.model, step, micro) / 2)
            assert self.optimizer.step()
            self.scheduler.step()

    def everything(self) -> list[Tensor]:
        self.optimizer.synchronize()
        entries = [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]
        return [*self.strategy.unwrap_model(self.model).state_dict().values(), *entries]


def same(one: Run, other: Run) -> None:
    pairs = list(zip(one.everything(), other.everything(), strict=True))
    assert len(pairs) > 20
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_weights_as_without_fabric(fabric: Fabric, name: str) -> None:
    """By ``fabric.backward`` as well where nothing scales the loss."""
    plain, run = Run(STRATEGIES[name]), Run(STRATEGIES[name], fabric)
    plain.train(range(4))
    run.train(range(2))
    run.train(range(2, 4), fabric.backward if name == "resident" else None)
    same(run, plain)


def test_updates_in_backward_begin_through_the_wrapper(fabric: Fabric) -> None:
    run = Run(STRATEGIES["in_backward"], fabric)
    before = run.model.head.weight.clone()
    run.optimizer.backward(loss_of(run.model, 0))
    assert not torch.equal(run.model.head.weight, before)
    with pytest.raises(RuntimeError, match="a second backward"):
        run.optimizer.backward(loss_of(run.model, 0))
    with pytest.raises(RuntimeError, match=r"Call step\(\) first"):
        run.optimizer.state_dict()
    assert run.optimizer.step()


def mixed_fabric() -> Fabric:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    return Fabric(accelerator="cpu", devices=1, plugins=plugin)


def test_fabrics_own_precision_and_clipping_over_fp32_weights() -> None:
    """With neither a scale nor clipping of ours, the loop is Fabric's own."""

    def train(create: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        fabric = mixed_fabric()
        model: nn.Module = TinyModel()
        model, optimizer = fabric.setup(model, create(model))
        for step in range(5):
            optimizer.zero_grad()
            for micro in range(2):
                fabric.backward(loss_of(model, step, micro) * (1e38 if step == 2 else 1))
            fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()
        return list(model.state_dict().values())

    strategy = Strategy.load("fp32", overrides={"clipping.max_norm": None})
    mine = train(lambda model: strategy.create_optimizer(model, lr=1e-2, foreach=True))
    theirs = train(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("name", "ours"), [("fp16", False), ("next_forward", False), ("next_forward", True)])
def test_a_checkpoint_goes_on_bit_for_bit(fabric: Fabric, tmp_path: Path, name: str, ours: bool) -> None:
    """By ``fabric.save``, or by ``strategy.save_checkpoint``."""
    values = STRATEGIES[name]
    run, later = Run(values, fabric), Run(values, fabric)
    run.train(range(3))
    whole, restored = (
        {"model": one.model, "optimizer": one.optimizer, "scheduler": one.scheduler} for one in (run, later)
    )
    if ours:
        run.strategy.save_checkpoint(tmp_path / "step", *whole.values())
        later.strategy.load_checkpoint(tmp_path / "step", *restored.values())
    else:
        fabric.save(tmp_path / "step", whole)
        fabric.load(tmp_path / "step", restored)
    for one in (run, later):
        one.train(range(3, 5))
    same(later, run)
    assert later.optimizer.loss_scale.state_dict() == run.optimizer.loss_scale.state_dict()
