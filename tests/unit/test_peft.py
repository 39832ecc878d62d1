"""Methods of PEFT under 16-bit weights: they train, and the first loss is that of the model in fp32, rounded."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

from lightstep import Strategy
from tests.reference.tiny_llama import Rows, make_llama

LINEAR: dict[str, Any] = {"target_modules": ["q_proj"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1},
    "C3A": {**LINEAR, "block_size": 4},
    "FOURIERFT": {**LINEAR, "n_frequency": 20},
    "IA3": {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LORA": LINEAR,
    "OFT": {**LINEAR, "r": 0, "oft_block_size": 4},
    "POLY": {**LINEAR, "n_tasks": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2]},
    "VBLORA": {**LINEAR, "vector_length": 8, "num_vectors": 16},
    "VERA": LINEAR,
}
"""One of each kind: of 41 methods the others add, multiply, rotate, look up and prepend as these do."""


def adapted(method: str) -> nn.Module:
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[method]]
    model = make_llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **SETTINGS[method]))


def batch(method: str) -> dict[str, torch.Tensor]:
    rows = [Rows()[number] for number in range(2)]
    tasks = {"task_ids": torch.zeros(2, dtype=torch.long)} if method == "POLY" else {}
    return {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")} | tasks


def trained(method: str, **settings: Any) -> tuple[nn.Module, list[float]]:
    strategy = Strategy.load("stream", {"optimizer_state.ring_mib": 0.05, **settings})
    model = strategy.prepare_model(adapted(method))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    torch.manual_seed(2)
    losses = []
    for _ in range(2):
        loss = model(**batch(method)).loss
        losses.append(float(loss))
        optimizer.backward(loss)
        optimizer.step()
    optimizer.synchronize()
    return model, losses


@pytest.mark.parametrize("method", SETTINGS)
def test_a_method_trains_in_16_bits(method: str) -> None:
    """On the device, and with the same bits on the host: losses, what is saved of the adapter, and merged weights."""
    before = adapted(method)
    expected, names = before(**batch(method)).loss, {n for n, p in before.named_parameters() if p.requires_grad}
    model, losses = trained(method)
    assert losses[0] == pytest.approx(float(expected), rel=0.02)  # weights and activations have 8 bits
    trained_weights = {name: p for name, p in model.named_parameters() if name in names}
    start = {name: p.to(torch.bfloat16) for name, p in before.named_parameters() if name in names}
    assert {p.dtype for p in trained_weights.values()} == {torch.bfloat16}
    assert any(not torch.equal(p, start[name]) for name, p in trained_weights.items())

    other, found = trained(method, **{"weights.placement": "host", "optimizer_state.update": "overlap"})
    assert found == losses
    assert_same(peft.get_peft_model_state_dict(other), peft.get_peft_model_state_dict(model))
    if hasattr(model.base_model, "merge_and_unload") and method != "POLY":  # which PEFT refuses to merge
        assert_same(other.merge_and_unload().state_dict(), model.merge_and_unload().state_dict())


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
