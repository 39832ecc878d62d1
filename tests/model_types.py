"""Every causal language model of transformers, made tiny: is the loss that of plain mixed precision?

``python -m tests.model_types docs/model-types.md`` tries all types and writes the page; with names behind the path only
those. tests/unit/test_model_types.py tries some. The plain model is the same one
after ``model.to(torch.bfloat16)``, with what ``from_pretrained(dtype=torch.bfloat16)`` leaves in fp32 put back.
"""

from __future__ import annotations

import copy
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightstep import Strategy

TOKENS = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(0))

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "d_model": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "n_ctx": 64, "n_inner": 48, "d_ff": 48, "ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2, "num_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "rotary_dim": 4, "embedding_size": 32, "n_layers": 2, "n_heads": 4, "emb_dim": 32, "dim": 32,
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "mamba_d_state": 8, "ssm_state_size": 8, "state_size": 8, "time_step_rank": 4, "mamba_dt_rank": 4,
    "mamba_n_groups": 1, "n_groups": 1, "num_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "lru_width": 32, "attention_window_size": 16,
    "sliding_window": 8, "word_embed_proj_dim": 32, "ffn_hidden_size": 48, "num_kv_heads": 2,
    "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4],
    "attention_head_size": 8, "attention_hidden_size": 32, "max_seq_len": 64, "d_kv": 8,
    "expert_ffn_hidden_size": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    "dense_intermediate_size": 48, "shared_intermediate_size": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
}  # fmt: skip
"""What makes a model small, by the names that configurations have for it."""

OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"head_dim": 16},
    "falcon_h1": {"mamba_d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
"""What a type needs beside that."""


class Outcome(NamedTuple):
    """``kept``: the tensors that are fp32; ``result``: ``equal``, or what is wrong."""

    model_type: str
    kept: tuple[str, ...]
    result: str


def types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make(model_type: str) -> nn.Module:
    """The tiny model of a type, in fp32, always with the same weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    for tensor in model.buffers():  # routing biases are zero at first
        if tensor.dim() == 1 and tensor.is_floating_point() and not bool(tensor.any()):
            tensor.uniform_(0.1, 0.2)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000, "it is not tiny"
    return model


def tiny_config(model_type: str) -> Any:
    default = AutoConfig.for_model(model_type)
    config = type(default)(**_sizes(default) | OWN.get(model_type, {}))
    for name in getattr(config, "sub_configs", {}):
        sub = getattr(config, name, None)
        if sub is not None:
            setattr(config, name, type(sub)(**_sizes(sub)))
    return config


def _sizes(default: Any) -> dict[str, Any]:
    names = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    mapped = set(getattr(default, "attribute_map", {}).values())
    values = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in values:  # multi-head latent attention
        values["num_key_value_heads"] = values["num_attention_heads"]
    return {n: v for n, v in values.items() if getattr(default, "attribute_map", {}).get(n, n) == n or n not in mapped}


def plain(model: Any, dtype: torch.dtype) -> nn.Module:
    """``model.to(dtype)``, with the values that ``from_pretrained(dtype=...)`` leaves in fp32."""
    made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    cast = copy.deepcopy(model).to(dtype)
    for name, tensor in _tensors(model):
        buffer = name in dict(model.named_buffers()) and made.get_buffer(name).dtype != dtype
        if tensor.is_complex() or (
            tensor.is_floating_point() and (buffer or any(re.search(p, name) for p in patterns))
        ):
            cast.get_parameter_or_buffer(name).data = tensor.data.clone()
    return cast


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def loss_of(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss


def attempt(model_type: str, preset: str = "resident") -> Outcome:
    """Make the model, prepare it, train a step, and compare the losses before it."""
    try:
        model = make(model_type)
        with torch.no_grad():
            loss_of(model)
    except Exception as error:
        return Outcome(model_type, (), f"not made: {_line(error)}")
    strategy = Strategy.load(preset, {"optimizer_state.ring_mib": 1})
    try:
        with torch.no_grad():
            expected = loss_of(plain(model, strategy.parameter_dtype))
    except Exception as error:
        return Outcome(model_type, (), f"plain torch fails: {_line(error)}")
    prepared = strategy.prepare_model(model)
    kept = tuple(sorted({n.rpartition(".")[2] for n, t in _tensors(prepared) if t.dtype == torch.float32}))
    try:
        optimizer = strategy.create_optimizer(prepared, torch.optim.AdamW, lr=1e-3)
        loss = loss_of(prepared)
        optimizer.backward(loss)
        applied = bool(optimizer.step())
    except Exception as error:
        return Outcome(model_type, kept, f"differs: {_line(error)}")
    same = torch.equal(loss, expected) or bool(loss.isnan() and expected.isnan())
    return Outcome(model_type, kept, "equal" if same and applied else f"differs: {float(loss)} for {float(expected)}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:110]


HEAD = """# Model types

Every causal language model of transformers that could be made tiny, under the preset `resident`: a step is trained, and
the loss is compared with plain mixed precision, `model.to(torch.bfloat16)` with what
`from_pretrained(dtype=torch.bfloat16)` leaves in fp32 ([the rule](strategy-files.md#which-tensors-are-cast)).
`python -m tests.model_types docs/model-types.md` writes this page, here on a CPU with transformers {version} and torch
{torch}.

{count} types: {equal} have the same loss bit for bit.

| model type | what stays fp32, beside rotary frequencies | loss |
|---|---|---|
"""


def main(path: Path, chosen: list[str]) -> None:
    outcomes = []
    for model_type in chosen or types():
        start = time.perf_counter()
        outcomes.append(attempt(model_type))
        sys.stderr.write(f"{outcomes[-1]} {time.perf_counter() - start:.1f} s\n")
    path.write_text(page(outcomes))


def page(outcomes: list[Outcome]) -> str:
    tried = [outcome for outcome in outcomes if not outcome.result.startswith("not made")]
    others = [outcome for outcome in outcomes if outcome not in tried]
    equal = sum(outcome.result == "equal" for outcome in tried)
    versions = {"version": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    rows = [f"| {o.model_type} | {', '.join(f'`{name}`' for name in _named(o))} | {_cell(o.result)} |" for o in tried]
    skipped = [f"- {o.model_type}: {_cell(o.result.removeprefix('not made: '))}" for o in others]
    head = HEAD.format(count=len(tried), equal=equal, **versions)
    rest = ["", "Not tried, because the script makes no tiny model of them:", "", *skipped] if skipped else []
    return head + "\n".join([*rows, *rest]) + "\n"


def _named(outcome: Outcome) -> list[str]:
    return [name for name in outcome.kept if not name.endswith("inv_freq")]


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "").replace(">", "")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(Path(sys.argv[1]), sys.argv[2:])
