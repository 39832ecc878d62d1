"""examples/grpo_server.py trains with a stand-in for vLLM's server, which it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE
from tests.snippets import CHECKOUT


def test_it_trains_with_a_server(tmp_path: Path) -> None:
    """Server and trainer have the same weights in the end: their greedy answers are the same."""
    command = tmp_path / "python"
    command.write_text(f"#!{sys.executable}\nfrom tests.vllm_stand_in import main\nmain()\n")
    command.chmod(0o755)
    sizes = ["--hidden", "64", "--layers", "1", "--prompts", "4", "--group", "4", "--warmup", "4", "--steps", "3"]
    script = [sys.executable, str(CHECKOUT / "examples" / "grpo_server.py"), "--server-python", str(command)]
    own = {**os.environ, "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*script, *sizes, "--output", str(tmp_path)], env=own, check=True, timeout=PATIENCE)
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["rewards"]) == 3 and result["same_greedy_answers"] == 1
