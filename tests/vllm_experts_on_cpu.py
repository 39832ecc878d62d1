"""Does vLLM generate the same tokens after it has loaded the same weights again? On a CPU, without lightstep.

VLLM_ENVIRONMENT/bin/python tests/vllm_experts_on_cpu.py

For a tiny dense model and a tiny Qwen3-MoE, by vLLM's own reload, and by ``model.load_weights``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
PROMPT, COUNT = [2, 3, 11, 4, 5, 12], 8


def make_model(is_dense: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
    others = {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
    if is_dense:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=256, **sizes, **others))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=256, **experts, **sizes, **others))


def tokens(llm: Any) -> list[int]:
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    return list(llm.generate({"prompt_token_ids": PROMPT}, settings, use_tqdm=False)[0].outputs[0].token_ids)


def main() -> None:
    os.environ.update(SETTINGS, VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import vllm
    from safetensors.torch import load_file

    for is_dense in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(is_dense).bfloat16()
            model.save_pretrained(folder)
            files = sorted(Path(folder).glob("*.safetensors"))
            for how in ("reload_weights", "load_weights"):
                options = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True}
                llm = vllm.LLM(folder, skip_tokenizer_init=True, seed=0, **options)
                before = tokens(llm)
                assert tokens(llm) == before, "not even without loading"
                pairs = [pair for file in files for pair in load_file(file).items()]
                try:
                    if how == "reload_weights":
                        llm.collective_rpc("reload_weights")
                    else:
                        llm.apply_model(lambda inner, pairs=pairs: inner.load_weights(pairs) and None)
                    after = tokens(llm)
                    said = "the same tokens" if after == before else f"other tokens: {before}, then {after}"
                except AssertionError as error:
                    said = f"refused: {error}"
                sys.stdout.write(f"vLLM {vllm.__version__}, {type(model).__name__}, {how}: {said}\n")
                sys.stdout.flush()
                del llm


if __name__ == "__main__":
    main()
