"""Memory of a worker that only generates, with the rollout role and without it.

    python examples/rollout_memory.py                  # on GPUs: Llama-3.2-3B; two are needed
    python examples/rollout_memory.py --device cpu     # 0.2 B parameters

Without the role, the worker prepares the model as a trainer does and keeps an inference copy as well, as reported in
https://github.com/verl-project/verl/issues/4229. With it, a second process trains and sends its weights. Each variant
runs in fresh processes; the worker receives weights and generates a few tokens.

Prints a table and writes ``roles.json`` to ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import LlamaConfig, LlamaForCausalLM

from lightstep import Strategy, TransformersEngine

WITHOUT, WITH = "sharded model and inference copy", "role rollout, mode async"
REPORTED = {
    "source": "https://github.com/verl-project/verl/pull/4257, for issue 4229",
    "model": "Qwen2.5-3B",
    "gb": {WITHOUT: 22, WITH: 14},
}
"""Memory of one rollout worker, with its inference engine."""

Sizes = dict[str, int]
SIZES: dict[str, Sizes] = {
    "cuda": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "cpu": {
        "hidden_size": 1152,
        "intermediate_size": 4096,
        "num_hidden_layers": 9,
        "num_attention_heads": 36,
        "num_key_value_heads": 9,
        "vocab_size": 21_696,
    },
}
PROMPT, NEW_TOKENS = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=SIZES, default=default, help=f"default: {default}")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--output", type=Path, default=Path("runs/rollout-memory"))
    given = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("it starts the processes that it needs itself; run it without torchrun")
    given.output.mkdir(parents=True, exist_ok=True)
    sizes = SIZES[given.device]
    rows = [
        {"name": name, **measured(name, sizes, given.device, given.seed), "reported_gb": REPORTED["gb"][name]}
        for name in (WITHOUT, WITH)
    ]
    values = {"device": given.device, "torch": torch.__version__, "model": sizes, "rows": rows, "reported": REPORTED}
    (given.output / "roles.json").write_text(json.dumps(values, indent=2) + "\n")
    print(table(rows))


def measured(name: str, sizes: Sizes, device: str, seed: int) -> dict[str, int]:
    """The worker's figures, from fresh processes."""
    ranks = 2 if name == WITH else 1
    config = LaunchConfig(1, 1, ranks, run_id="roles", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    figures: dict[int, dict[str, int]] = elastic_launch(config, run_rank)(name, sizes, device, seed)
    return figures[ranks - 1]


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each worker, in GB."""
    lines = [f"{'GB':<36}{'weights':>9}{'held':>9}{'peak':>9}{'reported for verl':>20}"]
    for row in rows:
        held = [row[f"{key}_bytes"] / 1e9 for key in ("inference_weight", "held", "peak")]
        lines.append(f"{row['name']:<36}" + "".join(f"{each:>9.2f}" for each in held) + f"{row['reported_gb']:>20}")
    return "\n".join([*lines, f"Reported: {REPORTED['model']}, {REPORTED['source']}"])


# -- one process ------------------------------------------------------------------------------------------------------


def run_rank(name: str, sizes: Sizes, device: str, seed: int) -> dict[str, int] | None:
    """Run one of the processes, in torchrun's environment. The last rank is the worker."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rollout = {"mode": "async"} if name == WITH else {}
    torch.manual_seed(seed)
    with Strategy.load("fsdp2", overrides={"roles.rollout": rollout}) as strategy:
        strategy.start()
        if name == WITHOUT or strategy.role == "rollout":
            return run_worker(strategy, sizes)
        strategy.publish_weights(strategy.prepare_model(lambda: make_model(sizes)))
        return None


def run_worker(strategy: Strategy, sizes: Sizes) -> dict[str, int]:
    # The first call of generate() in a process also loads libraries that later calls share.
    small = {**sizes, "hidden_size": sizes["num_attention_heads"] * 8, "num_hidden_layers": 1, "vocab_size": 64}
    generate(make_model(small).to_empty(device=strategy.device))
    memory = Memory(strategy.device)
    trained = strategy.prepare_model(lambda: make_model(sizes)) if strategy.role == "trainer" else None
    engine = TransformersEngine(strategy.prepare_model(lambda: make_model(sizes), role="rollout"))
    if trained is None:
        strategy.receive_weights(engine)
    else:
        strategy.publish_weights(trained, to=engine)
    generate(engine.model)
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    return {"inference_weight_bytes": weights, "held_bytes": memory.held(), "peak_bytes": memory.peak()}


def make_model(sizes: Sizes) -> nn.Module:
    """A Llama on the meta device; preparing it allocates its memory."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(pad_token_id=0, **sizes))


@torch.no_grad()
def generate(model: Any) -> None:
    prompt = torch.ones(1, PROMPT, dtype=torch.long, device=next(model.parameters()).device)
    model.generate(input_ids=prompt, attention_mask=prompt, max_new_tokens=NEW_TOKENS, do_sample=False)


class Memory:
    """Memory that this process allocated since construction: on its GPU, or on the host if it has none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = self._now()

    def held(self) -> int:
        """Bytes allocated now."""
        return self._now() - self._before

    def peak(self) -> int:
        """The most bytes at any moment."""
        most = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else host_bytes("VmHWM")
        return most - self._before

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else host_bytes("VmRSS")


def host_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
