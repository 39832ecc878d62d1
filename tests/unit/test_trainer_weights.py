"""Weights that the Trainer's files hold under other names than the model: resuming and the best model restore them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from lightstep import CheckpointError, ConfigError
from lightstep.integrations.transformers import LightstepTrainer
from tests.reference.pair import FP16_SCALE, same_tree
from tests.reference.tiny_llama import Rows, make_llama, training_arguments
from tests.reference.tiny_models import make_converted
from tests.unit.test_transformers_trainer import on_the_cpu  # noqa: F401

RESIDENT = {"optimizer_state": {"backend": "resident"}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "fp32": {"precision": {"parameters": "float32"}, **RESIDENT},
    "fp16": {"precision": {"parameters": "float16", "loss_scale": FP16_SCALE}, **RESIDENT},
    "stream": {"optimizer_state": {"backend": "stream", "ring_mib": 0.05}},
}


class TextRows(Rows):
    """Without the token that stands for an image."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {"input_ids": row["input_ids"].clamp(min=1), "labels": row["labels"]}


def made(folder: Path, model: nn.Module, strategy: str | None, **options: Any) -> Any:
    steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "learning_rate": 5e-2}
    args = training_arguments(folder, **steps | {"train_sampling_strategy": "sequential"} | options.pop("more", {}))
    given = {"train_dataset": TextRows(), "eval_dataset": torch.utils.data.Subset(TextRows(), range(6)), **options}
    if strategy is None:
        return Trainer(model, args, **given)
    return LightstepTrainer(model, args, strategy=STRATEGIES[strategy], **given)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("kind", "only_model"), [("mixtral", True), ("llava", False)])
def test_the_best_model_is_loaded_whole(tmp_path: Path, kind: str, only_model: bool) -> None:
    """The best one is the first: later steps make the loss larger."""
    seen: dict[int, dict[str, Tensor]] = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen[state.global_step] = weights(model)

    more = {"load_best_model_at_end": True, "save_only_model": only_model, "eval_strategy": "steps", "eval_steps": 2}
    more |= {"metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 3e-3, "max_steps": 4}
    trainer = made(tmp_path, make_converted(kind), "resident", callbacks=[Watch()], more=more)
    trainer.train()
    same_tree("weights", weights(trainer.model), seen[trainer.state.best_global_step])
    assert trainer.state.best_global_step == 2


@pytest.mark.parametrize(("kind", "strategy"), [("mixtral", "resident"), ("llava", "stream")])
def test_a_checkpoint_of_the_plain_trainer_is_loaded_whole(tmp_path: Path, kind: str, strategy: str) -> None:
    """Its fp32 weights are the weights, rounded, and the masters of 16-bit ones, not rounded."""
    begun: list[tuple[dict[str, Tensor], dict[Tensor, dict[str, Any]]]] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"].optimizer
            masters = {n: optimizer.state[p].get("master", p).float().clone() for n, p in model.named_parameters()}
            begun.append((weights(model), masters))

    plain = made(tmp_path, make_converted(kind), None, more={"max_steps": 2})
    plain.train()
    ours = made(tmp_path, make_converted(kind, seed=1), strategy, callbacks=[Watch()])
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found, masters = begun[0]
    expected = weights(plain.model)
    same_tree("weights", found, {name: tensor.to(found[name].dtype) for name, tensor in expected.items()})
    same_tree("weights", masters, {name: expected[name] for name in masters})


def test_a_folder_without_a_trained_weight_is_refused(tmp_path: Path) -> None:
    """The Trainer logs a warning, and the weight would stay what it was. A tied or a frozen one may be missing."""
    made(tmp_path, make_llama(), "fp32").train()
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "lightstep-files.json").unlink()
    file = checkpoint / "model.safetensors"
    saved = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in saved.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"the checkpoint has no {name}, which this LlamaForCausalLM trains"):
        made(tmp_path, make_llama(1), "fp32").train(resume_from_checkpoint=str(checkpoint))
    frozen = make_llama(1)
    frozen.get_parameter(name).requires_grad_(False)
    made(tmp_path / "other", frozen, "fp32")._load_from_checkpoint(str(checkpoint))
    for seed, resumed in ((0, None), (1, str(tmp_path / "tied" / "checkpoint-2"))):
        tied = made(tmp_path / "tied", make_llama(seed, tie_word_embeddings=True), "fp32")
        tied.train(resume_from_checkpoint=resumed)


def test_a_class_that_transformers_cannot_make(tmp_path: Path) -> None:
    model = make_converted("mixtral")

    class Own(type(model)):
        def __init__(self, config: Any, head: int) -> None:
            super().__init__(config)

    torch.manual_seed(0)
    made(tmp_path, Own(model.config, 3), "fp32").train()
    with pytest.raises(CheckpointError, match=r"Own.from_pretrained failed with TypeError.*backend stream"):
        made(tmp_path, Own(model.config, 3), "fp32").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# -- learnt prompts


PROMPTS: dict[str, dict[str, Any]] = {
    "PromptTuningConfig": {},
    "PrefixTuningConfig": {"prefix_projection": True, "encoder_hidden_size": 8},
    "CPTConfig": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
}


def prompted(kind: str, seed: int = 0) -> Any:
    virtual = {} if kind == "CPTConfig" else {"num_virtual_tokens": 3}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **virtual, **PROMPTS[kind])
    base = make_llama()
    torch.manual_seed(seed)
    return peft.get_peft_model(base, config)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("mixtral", "resident"),
        ("deepseek_v3", "fp16"),
        ("llava", "fp32"),
        ("PromptTuningConfig", "resident"),
        ("PrefixTuningConfig", "fp32"),
    ],
)
def test_a_resumed_run_has_the_weights_of_the_uninterrupted_one(tmp_path: Path, kind: str, strategy: str) -> None:
    """Of prompts with what computes them."""
    make = prompted if kind in PROMPTS else make_converted
    through = made(tmp_path, make(kind), strategy)
    through.train()
    resumed = made(tmp_path, make(kind, seed=1), strategy)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same_tree("weights", weights(resumed.model), weights(through.model))
    tested, expected = (one.optimizer.optimizer.state_dict()["state"] for one in (resumed, through))
    same_tree("state", tested, expected)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "CPTConfig"])
def test_files_that_do_not_have_what_computes_the_prompts(tmp_path: Path, kind: str) -> None:
    best = {"load_best_model_at_end": True, "save_only_model": True, "eval_strategy": "steps", "eval_steps": 2}
    with pytest.raises(ConfigError, match="PEFT saves the prompts, and neither what computes them"):
        made(tmp_path, prompted(kind), "resident", more=best).train()
    made(tmp_path, prompted(kind), None).train()
    with pytest.raises(CheckpointError, match=r"has the prompts, as PEFT saves them, and not .*prompt_encoder"):
        made(tmp_path, prompted(kind), "stream").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
