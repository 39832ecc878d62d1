"""A stand-in for vLLM's command that generates, as ``examples/grpo_server.py`` starts and asks it."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from transformers import LlamaForCausalLM

from tests.rollout_servers import FakeVllm, Process, Refusal


class Generating(FakeVllm):
    """Answers with the weights that it has."""

    def __init__(self, folder: Path, port: int) -> None:
        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        super().__init__({name: p.detach() for name, p in self._model.named_parameters()}, timeout_s=60.0, port=port)

    def answer(self, process: Process, path: str, payload: dict[str, Any]) -> Any:
        if path == "/health":
            return {}
        if path == "/v1/completions":
            return self._complete(process, payload)
        return super().answer(process, path, payload)

    @torch.no_grad()
    def _complete(self, process: Process, asked: dict[str, Any]) -> Any:
        if process.paused:
            raise Refusal(503, "paused")
        generator = torch.Generator().manual_seed(asked.get("seed", 0))
        tokens = torch.tensor(asked["prompt"]).repeat_interleave(asked.get("n", 1), 0)
        start, found = tokens.shape[1], []
        for _ in range(asked["max_tokens"]):
            logits = functional_call(self._model, process.weights, (tokens,)).logits[:, -1]
            logs = logits.float().log_softmax(-1)
            sampled = asked["temperature"] > 0
            new = torch.multinomial(logs.exp(), 1, generator=generator) if sampled else logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
            found.append(logs.gather(1, new))
        logprobs = torch.cat(found, 1).tolist()
        choices = [
            {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": each}}
            for index, (ids, each) in enumerate(zip(tokens[:, start:].tolist(), logprobs, strict=True))
        ]
        return {"choices": choices}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    args, _ = parser.parse_known_args(arguments)
    torch.set_num_threads(1)
    Generating(args.model, args.port)
    threading.Event().wait()
