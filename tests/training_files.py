"""Files for ``lightstep train``: a tiny run over a short text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_dropout": 0.1,
}
BATCH = {"sequences": 4, "length": 32, "accumulation": 2}


def training_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """What a file says; the text is written to ``folder``, unless there is one."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {n} of a text that says {n * n % 97}\n" for n in range(200)))
    values = {
        "output": str(folder / "runs"),
        "strategy": "fp32",
        "model": {"config": MODEL},
        "data": str(text),
        "steps": 6,
        "batch": BATCH,
        "optimizer": {"lr": 0.01},
        "scheduler": {"warmup_steps": 2},
        "validation": {"sequences": 4},
        "checkpoint": {"every": 2, "keep": 3},
        "log_every": 2,
        "sample": None,
        "trackers": [],
    }
    return values | changes
