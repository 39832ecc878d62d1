"""transformers' ``use_liger_kernel`` with weights on the host: the bits of the same run with weights on the device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.liger import apply_liger_kernel
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from lightstep import Strategy
from tests.reference.tiny_llama import make_llama
from tests.unit.test_host_weights_elsewhere import TIMES, Run, nobody_moves_it, same, values

__all__ = ["nobody_moves_it"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger_kernel"),
]

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def torchs_rotary(fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger replaces it for the whole process."""
    for module in (modeling_llama, modeling_qwen2):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("time", TIMES)
def test_the_trainer(time: str, tied: bool, tmp_path: Path) -> None:
    runs = []
    for placement in ("device", "host"):
        model = make_llama(tie_word_embeddings=tied, **SIZES)
        arguments = {"use_cpu": False, "use_liger_kernel": True}
        runs.append(Run(tmp_path / placement, values(placement, time), model=model, arguments=arguments))
        assert "liger_kernel" in runs[-1].trainer.model.model.norm.forward.__func__.__module__
    same(
        {name: value.cpu() for name, value in runs[1].weights.items()}, {n: v.cpu() for n, v in runs[0].weights.items()}
    )
    assert (runs[1].logs, runs[1].last) == (runs[0].logs, runs[0].last)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_loop_of_ones_own(kind: str, tied: bool) -> None:
    found = []
    for placement in ("device", "host"):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {**SIZES, "vocab_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": tied}
        model: Any = (
            modeling_llama.LlamaForCausalLM(modeling_llama.LlamaConfig(**sizes))
            if kind == "llama"
            else modeling_qwen2.Qwen2ForCausalLM(modeling_qwen2.Qwen2Config(**sizes))
        )
        apply_liger_kernel(model, None)
        strategy = Strategy.load(values(placement, "overlap"))
        model = strategy.prepare_model(model)
        optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
        losses = []
        for step in range(6):
            tokens = torch.randint(48, (2, 32), generator=torch.Generator().manual_seed(step)).to(strategy.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            optimizer.backward(loss.float())
            optimizer.step()
        optimizer.synchronize()
        found.append((losses, {name: value.cpu() for name, value in model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    same(found[1][1], found[0][1])


def test_the_logits_of_16384_tokens_take_less_than_a_gigabyte() -> None:
    """Over 128,256 words: without the head's weight, with its gradient."""
    sizes = {"hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8}
    model: Any = make_llama(vocab_size=128_256, num_hidden_layers=1, max_position_embeddings=4096, **sizes)
    apply_liger_kernel(model, None)
    strategy = Strategy.load("offload")
    model = strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-5)
    before: list[int] = []

    def begin_loss(*_: Any) -> None:
        torch.cuda.synchronize()
        before.append(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    base: nn.Module = model.model
    base.register_forward_hook(begin_loss)
    tokens = torch.randint(128_256, (4, 4096), device=strategy.device)
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        optimizer.backward(loss.float())
        optimizer.step()
        weight = model.lm_head.weight
        assert peak - before[-1] - weight.nbytes < 1e9, (peak, before)
