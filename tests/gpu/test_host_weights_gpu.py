"""Weights and gradients that rest on the host, on a GPU and under sleeps: the bits of a run that keeps them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from lightstep import Strategy
from lightstep.bench.models import Llama, LlamaShape
from tests.covering import every_pair
from tests.gpu.test_next_forward_gpu import Training
from tests.unit.test_homes_and_times import HOMES, LIMITS
from tests.unit.test_host_weights import TIMES, check_other_placements, clean, make
from tests.unit.test_next_forward import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_units")]


@every_pair(
    home=HOMES,
    time=TIMES,
    limit=LIMITS,
    parameters=["bfloat16", "float16", "float32"],
    mib=[0.001, 0.02, 64.0],
    recompute=[False, True, "host"],
)
def test_the_same_bits(
    home: str,
    time: str,
    limit: str,
    parameters: str,
    mib: float,
    recompute: bool | str,
    inputs_leave: None,
) -> None:
    weights = {"placement": "host", "device_mib": mib}
    expected = make("resident", time if time == "in_backward" else "at_step", limit, parameters, kind=Training)
    losses, wanted = expected.train(8), expected.snapshot()
    for seed in range(3):
        tested = make(home, time, limit, parameters, weights, Training, recompute=recompute)
        assert all(parameter.device.type == "cpu" for parameter in tested.model.parameters())
        found = tested.train(2)
        tested.delays(seed)
        assert found + tested.train(6) == losses, seed
        assert_same(clean(tested.snapshot()), wanted)
        tested.optimizer.close()


def test_a_run_goes_on_with_another_placement(tmp_path: Path) -> None:
    check_other_placements(tmp_path, Training)


class OwnHead(Llama):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        chunks = zip(hidden.split(16), targets.flatten().split(16), strict=True)
        losses = [checkpoint(self._loss, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(losses).sum() / len(hidden)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(linear(hidden, self.lm_head.weight).float(), targets, reduction="sum")


@every_pair(time=TIMES, tied=[False, True], chunk=["in the model", "by its weight", "outside of it"])
def test_a_head_that_runs_several_times(time: str, tied: bool, chunk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are added up as one, though its weights come and go: in bf16, as autograd does it."""
    monkeypatch.setattr("lightstep.bench.models.LOSS_CHUNK", 16)
    shape = LlamaShape("tiny", 64, 128, 32, 3, 257, 16, tied)
    weights: list[dict[str, Tensor]] = []
    for name in ("resident", "offload"):
        overrides: dict[str, Any] = {"sharding.activation_checkpointing": True, "optimizer_state.update": time}
        overrides["clipping.scope"] = "unit" if time == "in_backward" else "global"
        if name == "offload":
            overrides["weights.device_mib"] = 0.2
        strategy = Strategy.load(name, overrides=overrides)
        made = shape.make(strategy.device, length=32)
        made.__class__ = OwnHead if chunk == "by its weight" else Llama
        model = strategy.prepare_model(made)
        optimizer: Any = strategy.create_optimizer(model, lr=1e-3)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(257, (4, 33), generator=generator).cuda()
            tokens, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
            if chunk != "outside of it":
                loss = model(tokens, targets)
            else:
                hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
                parts = zip(hidden.split(16), targets.flatten().split(16), strict=True)
                loss = sum(cross_entropy(model.lm_head(part).float(), own) for part, own in parts)
            optimizer.backward(loss)
            optimizer.step()
        weights.append({key: value.cpu().clone() for key, value in model.state_dict().items()})
        optimizer.close()
    assert_same(weights[1], weights[0])
