"""The loss with the logits of some tokens at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightstep import ConfigError, chunked_loss
from lightstep.chunked_loss import ChunkedLoss, whole_loss
from lightstep.plan.model import LOSS_CHUNK, _Tracker, _with_blocks, load_shape
from lightstep.sharding.preparation import checkpoint_activations
from lightstep.trainer.config import TrainConfig
from tests.distributed.models import tiny_llama
from tests.training import Training, assert_same
from tests.unit.test_trainer import _train, configured, loops, text

__all__ = ["configured", "loops", "text"]


def words(seed: int) -> torch.Tensor:
    return torch.randint(31, (3, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_loss_and_gradients_are_the_models_own(chunk: int) -> None:
    torch.manual_seed(0)
    model = tiny_llama()
    before = dict(vars(model)), dict(vars(model.lm_head))
    whole_loss(model, words(0)).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = ChunkedLoss(model, chunk)(model, words(0))
    loss.backward()
    torch.testing.assert_close(loss, whole_loss(model, words(0)))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)
    assert (dict(vars(model)), dict(vars(model.lm_head))) == before, "nothing is left of it"


def test_never_more_logits_than_those_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noting(logits: Any, *given: Any, **named: Any) -> Any:
        sizes.append(len(logits))
        return cross_entropy(logits, *given, **named)

    monkeypatch.setattr(chunked_loss, "cross_entropy", noting)
    model = tiny_llama()
    ChunkedLoss(model, 10)(model, words(0)).backward()
    assert sizes == [10, 10, 4, 4, 10, 10], "in forward, and again in backward"


def test_logits_of_a_large_vocabulary_take_less_than_a_gigabyte() -> None:
    """4,096 tokens of 128,256 words, with checkpoints, beside what chunks of 64 tokens take; whole they take 2 GB."""
    model, tokens = load_shape("Llama-3.2-3B"), 4096

    def peak(loss_chunk: int) -> int:
        small: Any = _with_blocks(model, 3, torch.bfloat16)
        checkpoint_activations(small)
        batch = torch.zeros(4, tokens // 4, dtype=torch.long, device="meta")
        loss_of, tracker = ChunkedLoss(small, loss_chunk), _Tracker(small)
        with tracker:
            loss = loss_of(small, batch)
            tracker.backward()
            loss.backward()
        return tracker.result(28).peak

    assert peak(LOSS_CHUNK) - peak(64) < 1e9, "with the chunks of plans and of the bench"


class InChunks(Training):
    """Each loss goes through the head twice."""

    def loss(self, micro: int = 0) -> torch.Tensor:
        loss_of = ChunkedLoss(self.model, 5)
        return loss_of(self.model, words(self.steps)) + loss_of(self.model, words(10 + self.steps))


@pytest.mark.parametrize("time", ["overlap", "in_backward"])
def test_with_weights_on_the_host(time: str) -> None:
    clipping = {"max_norm": 1.0, "scope": "unit" if time == "in_backward" else "global"}
    expected, tested = (
        InChunks({"backend": "stream", "update": time}, make=tiny_llama, clipping=clipping, weights=weights)
        for weights in (None, {"placement": "host", "device_mib": 0.001})
    )
    assert tested.train(3) == expected.train(3)
    assert_same(tested.snapshot(), expected.snapshot())


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=6, max_position_embeddings=32,
        )
    )  # fmt: skip


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = gemma()
    with pytest.raises(ConfigError, match="loss of Gemma2ForCausalLM is not that of its head's logits alone"):
        ChunkedLoss(model, 4).check(model, 8)
    plain = tiny_llama()
    ChunkedLoss(plain, 4).check(plain, 8)
    with pytest.raises(ConfigError, match="Linear has no head"):
        ChunkedLoss(nn.Linear(2, 2), 4)


def test_a_run_in_chunks(configured: Any, tmp_path: Path) -> None:
    losses = []
    for number, chunk in enumerate((None, 10)):
        config: TrainConfig = configured(name=f"run{number}", loss_chunk=chunk)
        outcome, said = _train(config)
        losses.append([*outcome.losses.values(), outcome.validation_after])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    resumed, said = _train(configured(name="run1", loss_chunk=None, steps=8), resume=True)
    assert "loss_chunk" in said and resumed.step == 8
