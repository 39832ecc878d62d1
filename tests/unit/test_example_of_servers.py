"""examples/grpo_server.py trains with a stand-in for vLLM's server, which it starts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.snippets import CHECKOUT, Script, run_script

EXAMPLE = CHECKOUT / "examples" / "grpo_server.py"
SERVER_IN_A_FORK = f"""
import multiprocessing, os, subprocess, sys, tests.vllm_stand_in
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, {str(EXAMPLE.parent)!r})

class Popen:
    def __init__(self, command, **_):
        assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
        target = tests.vllm_stand_in.main
        self._process = multiprocessing.get_context("fork").Process(target=target, args=(command[3:],), daemon=True)
        self._process.start()
        self.terminate, self.wait = self._process.terminate, self._process.join

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

subprocess.Popen = Popen
"""
"""In front of the example: the server that it starts is a fork, which has imported everything."""


def test_it_trains_with_a_server(tmp_path: Path) -> None:
    """Server and trainer have the same weights in the end: their greedy answers are the same."""
    sizes = ["--hidden", "64", "--layers", "1", "--prompts", "4", "--group", "4", "--warmup", "4", "--steps", "3"]
    code = f"{SERVER_IN_A_FORK}\nimport grpo_server; grpo_server.main()"
    given = ("--server-python", "python", *sizes, "--output", str(tmp_path / "out"))
    status, output = run_script(Script(EXAMPLE, 1, "python", 0, [code], given), tmp_path)
    assert status == 0, output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["rewards"]) == 3 and result["same_greedy_answers"] == 1
