"""TRL's own trainers: every home has the bits of `resident`. ``pip install trl`` first; without it they are skipped.

On a GPU, if there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightstep.integrations.transformers import LightstepMixin
from tests.reference.tiny_llama import make_llama

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets, which TRL needs, is not installed")

WORDS = [f"w{number}" for number in range(40)]
HOMES = ["stream", "stream-overlap", "offload"]


class SFT(LightstepMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    pass


class DPO(LightstepMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<end>", "<unknown>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", model_max_length=64
    )


def words(start: int, count: int = 6) -> str:
    return " ".join(WORDS[(start + 3 * place) % len(WORDS)] for place in range(count))


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "max_length": 32,
        "bf16": False,
    }


def sft(folder: Path, strategy: str, **arguments: Any) -> Any:
    rows = datasets.Dataset.from_list([{"text": words(start)} for start in range(16)])
    args = trl.SFTConfig(**settings(folder))
    return SFT(make_llama(), args, strategy=strategy, train_dataset=rows, processing_class=tokenizer(), **arguments)


def dpo(folder: Path, strategy: str) -> Any:
    pairs = [
        {"prompt": words(n, 3), "chosen": " " + words(n + 9, 3), "rejected": " " + words(n + 20, 4)} for n in range(16)
    ]
    args = trl.DPOConfig(**settings(folder), sync_ref_model=True, ref_model_sync_steps=2)
    rows = datasets.Dataset.from_list(pairs)
    reference = make_llama(1).bfloat16()
    return DPO(
        make_llama(),
        ref_model=reference,
        args=args,
        strategy=strategy,
        train_dataset=rows,
        processing_class=tokenizer(),
    )


def trained(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    return losses, {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters()}


def assert_the_same(found: tuple[list[float], dict[str, torch.Tensor]], wanted: Any) -> None:
    assert found[0] == wanted[0]
    assert [name for name, tensor in wanted[1].items() if not torch.equal(tensor, found[1][name])] == []


@pytest.mark.parametrize("home", HOMES)
def test_sft(home: str, tmp_path: Path) -> None:
    wanted = trained(sft(tmp_path, "resident"))
    assert wanted[0][-1] < wanted[0][0]
    assert_the_same(trained(sft(tmp_path, home)), wanted)


def test_sft_of_adapters(tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found = [trained(sft(tmp_path, home, peft_config=adapter)) for home in ("resident", "stream-overlap")]
    assert_the_same(found[1], found[0])


@pytest.mark.parametrize("home", HOMES)
def test_dpo_with_a_reference_that_follows(home: str, tmp_path: Path) -> None:
    wanted, found = dpo(tmp_path, "resident"), dpo(tmp_path, home)
    assert_the_same(trained(found), trained(wanted))
    references = [list(trainer.ref_model.parameters()) for trainer in (wanted, found)]
    assert all(torch.equal(expected.cpu(), own.cpu()) for expected, own in zip(*references, strict=True))
    before = make_llama(1).bfloat16().parameters()
    assert not any(torch.equal(p.cpu(), q) for p, q in zip(references[1], before, strict=True) if q.dim() == 2)
