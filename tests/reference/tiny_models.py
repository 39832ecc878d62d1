"""Tiny models whose weights transformers stores under other names, or cut and joined: experts, towers, heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.reference.tiny_llama import VOCABULARY

_BODY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def _mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**_BODY, num_local_experts=4, num_experts_per_tok=2))


def _qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_BODY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8))


def _deepseek_v3() -> PreTrainedModel:
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    body = {key: value for key, value in _BODY.items() if key != "head_dim"}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**body, **heads, **experts, n_group=1, topk_group=1))


def _llava() -> PreTrainedModel:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_EYE, projection_dim=16), text_config=LlamaConfig(**_BODY), image_token_index=0
    )
    return LlavaForConditionalGeneration(config)


CONVERTED: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "llava": _llava,
}


def make_converted(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return CONVERTED[kind]()
