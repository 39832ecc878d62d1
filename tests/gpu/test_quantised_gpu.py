"""Adapters beside frozen quantised weights on a GPU: those stay what they are, and training is that of plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep import Strategy
from tests.quantised import dequantised, quantised_by_bitsandbytes

pytestmark = pytest.mark.gpu


class Float8(nn.Module):
    """A linear layer whose frozen weight is float8, with one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("weight_scale", torch.tensor(0.125))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() * self.weight_scale).to(x.dtype).T


def weight_of(layer: nn.Module) -> Tensor:
    return layer.weight.float() * layer.weight_scale if isinstance(layer, Float8) else dequantised(layer)


@pytest.mark.parametrize("name", ["resident", "stream", "stream-overlap", "fp32"])
@pytest.mark.parametrize("storage", ["float8", "int8", "uint8", "float16", "bfloat16", "float32"])
def test_quantised_weights_stay_and_the_rest_trains(name: str, storage: str) -> None:
    layer = Float8().cuda() if storage == "float8" else quantised_by_bitsandbytes(storage, "cuda")
    torch.manual_seed(1)
    given = nn.Sequential(nn.Linear(64, 64), copy.deepcopy(layer), nn.Linear(64, 8)).cuda()
    strategy = Strategy.load(name, overrides={"clipping.max_norm": None})
    before, plain = weight_of(layer), copy.deepcopy(given)
    masters = [p.detach().clone().requires_grad_() for index in (0, 2) for p in plain[index].parameters()]
    for index in (0, 2):
        plain[index].to(strategy.parameter_dtype)
    model = strategy.prepare_model(given)
    optimizer: Any = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    reference = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    trained = [p for index in (0, 2) for p in plain[index].parameters()]
    for step in range(4):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to("cuda", strategy.parameter_dtype)
        loss, expected = (each(x).float().square().mean() for each in (model, plain))
        assert torch.equal(loss, expected)
        optimizer.backward(loss)
        optimizer.step()
        expected.backward()
        for master, p in zip(masters, trained, strict=True):
            master.grad, p.grad = p.grad.float(), None
        reference.step()
        for master, p in zip(masters, trained, strict=True):
            p.data.copy_(master)
    assert torch.equal(weight_of(model[1]), before)
    optimizer.close()
