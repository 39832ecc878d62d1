"""What users install: all modules, the presets and the types, and what of it needs which extra.

``make wheel`` builds a wheel and runs what is in it; ``make test`` itself runs in an editable install.
"""

from __future__ import annotations

import ast
import configparser
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import lightstep
from lightstep.extras import LIBRARIES, MissingLibraryError, needs
from tests.python import python

CHECKOUT = Path(__file__).resolve().parents[2]
OPTIONAL = sorted({library for libraries in LIBRARIES.values() for library in libraries})

HIDDEN = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
"""
"""Importing any of them fails as if it were not installed."""


PLAIN_MODEL = """
import torch
from types import SimpleNamespace

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))

model = Model()
tokens = torch.randint(32, (4, 2, 8))
loader = [[{"input_ids": part, "labels": part} for part in parts] for parts in tokens.split(2)]
"""

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
LOOP = HIDDEN + PLAIN_MODEL + README.split("```python\n", 1)[1].split("```", 1)[0]
"""The first example of the README, where no extra is installed."""


FIND_PRESETS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])  # whatever lightstep this interpreter has installed is behind it
import lightstep
assert Path(lightstep.__file__).resolve().is_relative_to(Path(sys.argv[1]).resolve()), lightstep.__file__
for name in lightstep.available_strategies():
    lightstep.Strategy.load(name)
    print(name)
"""


def test_a_bare_checkout_finds_the_presets_and_runs_the_loop_of_the_readme(tmp_path: Path) -> None:
    for name in ("lightstep", "strategies"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = python("-c", FIND_PRESETS + LOOP, str(tmp_path), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(path.stem for path in (CHECKOUT / "strategies").glob("*.yaml")) != []


def test_every_package_is_in_the_distribution() -> None:
    """With the presets and the type marker; ``make wheel`` looks at what was built."""
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    folders = {path.parent.relative_to(CHECKOUT) for path in (CHECKOUT / "lightstep").rglob("*.py")}
    packages = {".".join(folder.parts) for folder in folders} | {"lightstep.strategies"}
    assert set(parser["options"]["packages"].split()) == packages
    assert dict(parser["options.package_data"]) == {"lightstep": "py.typed", "lightstep.strategies": "*.yaml"}


# -- what importing brings along, and what runs without the libraries of the extras -----------------------------------


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", code, *arguments, cwd=CHECKOUT, imported="transformers.trainer")


def test_importing_lightstep_brings_nothing_along() -> None:
    """And its strategies none of the libraries and compilers that they can do without.

    isal is one function, which takes the place of zlib's where it is installed.
    """
    heavy = ["torch._dynamo", "torch._inductor", *(library for library in OPTIONAL if library != "isal")]
    code = (
        f"import sys, torch; before = set(sys.modules); heavy = {heavy!r}; import lightstep\n"
        "assert set(sys.modules) - before == {'lightstep', 'lightstep.version'}, set(sys.modules) - before\n"
        "lightstep.Strategy.load('stream')\n"
        "assert not set(heavy) & (set(sys.modules) - before), set(heavy) & set(sys.modules)"
    )
    done = python("-c", code, cwd=CHECKOUT, imported="torch")
    assert done.returncode == 0, done.stderr


def test_public_names_are_where_they_are_said_to_be() -> None:
    tree = ast.parse(Path(lightstep.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {name: f"lightstep.{module}" for name, module in lightstep._HOME.items()}.items() <= typed.items()
    assert set(lightstep.__all__) == set(lightstep._HOME) <= set(dir(lightstep))
    for name in lightstep.__all__:
        found = getattr(lightstep, name)
        assert pickle.loads(pickle.dumps(found)) is found
    with pytest.raises(AttributeError, match="module 'lightstep' has no attribute 'Strateggy'"):
        lightstep.Strateggy  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Strateggy'"):
        exec("from lightstep import Strateggy")


MISSING = [
    ([], "typer", "train"),
    (["bench"], "typer", "bench"),
    (["plan", "Llama-3.2-3B"], "transformers", "train"),
    (["train", "examples/train.yaml"], "tensorboard", "train"),
]

WITHOUT = f"""
import sys
from lightstep.__main__ import main
for arguments, library, _ in {MISSING!r}:
    sys.argv[1:], installed = arguments, sys.modules.pop(library, None)
    sys.modules[library] = None
    try:
        main()
    except SystemExit as end:
        assert end.code == 2
    del sys.modules[library]
    if installed is not None:
        sys.modules[library] = installed
"""


def test_commands_name_the_extra_that_is_missing() -> None:
    done = _python(WITHOUT)
    install = "is not installed; install it with: pip install"
    sentences = [f"lightstep: {library} {install} 'lightstep-optim[{extra}]'\n" for _, library, extra in MISSING]
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "".join(sentences))


def test_an_integration_names_the_extra_that_is_missing() -> None:
    done = _python(f"{HIDDEN}import lightstep.integrations.transformers")
    assert "transformers is not installed; install it with: pip install 'lightstep-optim[train]'" in done.stderr


def test_only_libraries_of_the_extra_are_taken_for_missing_ones() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'") as caught, needs("train"):
        import no_such_library  # noqa: F401
    assert not isinstance(caught.value, MissingLibraryError)


def test_extras_are_those_of_the_distribution() -> None:
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    extras = {name: sorted(_names(text)) for name, text in parser["options.extras_require"].items()}
    assert {name: extras[name] for name in LIBRARIES} == {name: sorted(names) for name, names in LIBRARIES.items()}
    needed = {"torch", "filelock", "numpy", "pydantic", "PyYAML", "safetensors"}
    required = parser["options"]["install_requires"]
    assert set(_names(required)) == needed
    assert re.findall(r".*[<>=~!].*", required) == ["torch>=2.11"], "lightstep fits into environments that exist"
    assert f"lightstep-optim[{','.join(LIBRARIES)}]" in parser["options.extras_require"]["dev"]


def _names(requirements: str) -> list[str]:
    lines = [line for line in requirements.split("\n") if line and not line.startswith("#")]
    return [re.split(r"[<>=\[]", line)[0] for line in lines]
