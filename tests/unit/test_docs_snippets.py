"""The examples in README, docs/ and examples/ run as they stand."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests import commands_page
from tests.snippets import CHECKOUT, Script, run_script, scripts_of

PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
SCRIPTS = [script for page in PAGES for script in scripts_of(page)]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_an_example_runs(script: Script, tmp_path: Path) -> None:
    status, output = run_script(script, tmp_path)
    assert status == 0, f"{script.page}:{script.line}\n{output}"


def test_examples_that_do_not_run_here_are_python() -> None:
    """Those of libraries that are not installed, and parts of longer scripts."""
    assert {"README.md", "plain-loop.md"} <= {script.page.name for script in SCRIPTS}, "some do run"
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            compile(block, page.name, "exec")


def test_the_example_of_lightning_fabric_runs(tmp_path: Path) -> None:
    source = CHECKOUT / "examples" / "fabric.py"
    script = Script(source, 1, "python", 0, source.read_text(encoding="utf-8").splitlines(), ("--steps", "2"))
    status, output = run_script(script, tmp_path)
    assert status == 0, output
    assert "step 2: loss" in output
    assert (tmp_path / "runs" / "fabric" / "lightstep.json").is_file()


def test_the_example_of_exactness_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = CHECKOUT / "examples" / "exactness.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--backend", "stream", "--steps", "6"])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "6 steps" in said and "every bit equal" in said and " 0 of them clipped" not in said


SERVER_IN_A_FORK = f"""
import multiprocessing, os, subprocess, sys, tests.vllm_stand_in
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, {str(CHECKOUT / "examples")!r})

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
"""In front of examples/grpo_server.py: the server that it starts is a fork, which has imported everything."""


def test_the_example_of_servers_trains_with_one(tmp_path: Path) -> None:
    """Server and trainer have the same weights in the end: their greedy answers are the same."""
    sizes = ["--hidden", "64", "--layers", "1", "--prompts", "4", "--group", "4", "--warmup", "4", "--steps", "3"]
    code = f"{SERVER_IN_A_FORK}\nimport grpo_server; grpo_server.main()"
    given = ("--server-python", "python", *sizes, "--output", str(tmp_path / "out"))
    script = Script(CHECKOUT / "examples" / "grpo_server.py", 1, "python", 0, [code], given)
    status, output = run_script(script, tmp_path)
    assert status == 0, output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["rewards"]) == 3 and result["same_greedy_answers"] == 1


@pytest.mark.parametrize("module", ["lightstep", "lightstep.checkpoint", "lightstep.checkpoint.formats"])
def test_the_reference_has_every_public_name(module: str) -> None:
    entries = re.findall(r"^::: \S+\.(\w+)$", (CHECKOUT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(importlib.import_module(module).__all__) <= set(entries)


def test_the_reference_lists_the_members_of_each_class() -> None:
    """Otherwise every method without an underscore would be on the page, and with it what only lightstep calls."""
    reference = (CHECKOUT / "docs" / "api.md").read_text(encoding="utf-8")
    for module, name, members in re.findall(
        r"^::: (\S+)\.([A-Z]\w+)$(.*?)(?=^:::|\Z)", reference, re.MULTILINE | re.DOTALL
    ):
        assert "members:" in members, name
        shown = getattr(importlib.import_module(module), name)
        attributes = {*dir(shown), *getattr(shown, "__annotations__", {})}
        assert set(re.findall(r"^        - (\w+)$", members, re.MULTILINE)) <= attributes, name


def test_the_page_of_commands_is_that_of_the_program() -> None:
    """``python -m tests.commands_page`` writes it anew."""
    assert commands_page.PAGE.read_text(encoding="utf-8") == commands_page.text()


PAGE = """
text
<!-- run
hidden = 3
-->
```python
shown = hidden + 1
```

```python
never = run
```

<!-- run: continued -->
```python
print("sum", shown)
{more}
```
"""


def page(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def run(path: Path) -> tuple[int, str]:
    (script,) = scripts_of(path)
    return run_script(script, path.parent)


def test_a_block_goes_on_where_the_one_before_ended_and_an_error_has_the_line_of_the_page(tmp_path: Path) -> None:
    status, output = run(page(tmp_path, PAGE.format(more="unknown")))
    assert status == 1 and output.startswith("sum 4\n")
    assert 'page.py", line 17, in <module>' in output and "NameError" in output


def test_ranks_see_each_other_and_fail_together(tmp_path: Path) -> None:
    code = "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('rank', dist.get_rank())\n"
    code += "dist.barrier()\nassert dist.get_rank() == 1\ndist.barrier()"
    status, output = run(page(tmp_path, f"<!-- run: torchrun 2 -->\n```python\n{code}\n```\n"))
    assert status == 1
    assert "rank 0" in output and "rank 1" in output and "AssertionError" in output


def test_commands_run_until_one_fails(tmp_path: Path) -> None:
    commands = "test -f examples/train.yaml\necho here\nfalse\necho there"
    assert run(page(tmp_path, f"<!-- run -->\n```bash\n{commands}\n```\n")) == (1, "here\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- run: twice -->\n```python\n```\n", "page.md:1: 'run: twice'; allowed: run, run: continued"),
        ("\n<!-- run -->\n\n```python\n```\n", "page.md:2: below this mark a ```python or ```bash block is needed"),
        ("<!-- run: continued -->\n```python\n```\n", "page.md:1: there is no python block that this one continues"),
    ],
)
def test_a_mark_that_runs_nothing_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        scripts_of(page(tmp_path, text))


def test_the_tests_that_pages_name_are_there() -> None:
    sources = [file.read_text(encoding="utf-8") for file in (CHECKOUT / "tests").rglob("*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)}
    for page in PAGES:
        assert {*re.findall(r"`(test_\w+)(?:\[.*?\])?`", page.read_text(encoding="utf-8"))} <= defined, page.name
