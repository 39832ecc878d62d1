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
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state import host_fields
from lightstep.state.host_weights import HostWeights
from tests.covering import every_pair
from tests.distributed.models import Block, TinyTransformer, loss_of
from tests.unit.test_next_forward import assert_same
from tests.unit.test_stream import random_delays

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


class Run:
    def __init__(self, weights: dict[str, Any], time: str, precision: dict[str, Any], told: bool = True) -> None:
        torch.manual_seed(0)
        state = {"backend": "stream", "update": time, "ring_mib": 0.02}
        precision = {**precision, "loss_scale": {"kind": "constant", "scale": 64.0}}
        config = {"precision": precision, "optimizer_state": state, "weights": weights, "clipping": {"max_norm": 0.5}}
        self.at_once = not told and time != "overlap"  # all forwards before the first backward
        self.strategy, self.told = Strategy.load({**config, "sharding": {"kind": "single"}}), told
        self.model: Any = self.strategy.prepare_model(Skipping())
        self.optimizer: Any = self.strategy.create_optimizer(self.model, lr=1e-2)

    @property
    def weights(self) -> HostWeights:
        visits = PreparedModel.of(self.model).weight_visits
        assert visits is not None
        return visits.weights

    def loss(self, step: int, micro: int) -> Tensor:
        self.model.number = step + micro
        return loss_of(self.model, step, micro, 0, CPU)

    def train(self, counts: list[int]) -> dict[str, Tensor]:
        for step, count in enumerate(counts):
            losses = (self.loss(step, micro) / count for micro in range(count))
            for micro, loss in enumerate(list(losses) if self.at_once else losses):
                with self.strategy.accumulate(self.model, last=micro == count - 1) if self.told else nullcontext():
                    self.optimizer.backward(loss)
            self.optimizer.step()
        self.optimizer.synchronize()
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            found.update({f"{name}/{key}": torch.as_tensor(v) for key, v in self.optimizer.state[parameter].items()})
        return {name: value.clone() for name, value in found.items()}


@functools.cache
def expected(parameters: str, reduce: str) -> dict[str, Tensor]:
    return Run({}, "at_step", {"parameters": parameters, "reduce": reduce}).train(COUNTS)


@every_pair(
    time=["at_step", "next_forward", "overlap"],
    parameters=["bfloat16", "float16", "float32"],
    reduce=["float32", "parameters"],
    told=[True, False],
    mib=[0.001, 64.0],
)
def test_sums_have_the_bits_of_a_device(
    time: str, parameters: str, reduce: str, told: bool, mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_fields, "_LARGE", 3)
    precision = {"parameters": parameters, "reduce": reduce}
    tested = Run({"placement": "host", "device_mib": mib}, time, precision, told)
    random_delays(tested.weights.lanes, 7, 1e-3)
    assert_same(tested.train(COUNTS), expected(parameters, reduce))


@pytest.mark.parametrize("told", [True, False])
def test_a_sum_has_the_memory_of_its_first_gradient(told: bool) -> None:
    strategy = Strategy.load("offload")
    model = strategy.prepare_model(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))))
    optimizer = strategy.create_optimizer(model, lr=1e-2)

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


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 31, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_is_widened_in_its_place(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fields, "_LARGE", 3)
    lanes = HostWeights(CPU, 1).lanes
    values = torch.randn(2, size, 1).to(dtype)
    field = host_fields.Field(list(values), torch.float32, lanes, "gradients", also_as_likes=True)
    field.bring()
    lanes.synchronize()
    for number in (0, 1):
        field.as_likes[number].copy_(values[number])
    field.widen(1)
    assert torch.equal(field.as_likes[0], values[0]) and torch.equal(field.on_device[1], values[1].float())
    lanes.close()
