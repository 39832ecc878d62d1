"""Light to import and to install: what importing brings along, and what runs without the libraries of the extras."""

from __future__ import annotations

import ast
import configparser
import pickle
import re
import subprocess
from pathlib import Path

import pytest

import lightstep
from lightstep.extras import LIBRARIES, MissingLibraryError, needs
from tests.python import python

CHECKOUT = Path(lightstep.__file__).resolve().parents[1]
OPTIONAL = sorted({library for libraries in LIBRARIES.values() for library in libraries})

HIDDEN = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
"""
"""Importing any of them fails as if it were not installed."""


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


@pytest.mark.parametrize(
    ("arguments", "library", "extra"),
    [
        ([], "typer", "train"),
        (["plan", "Llama-3.2-3B"], "transformers", "train"),
        (["train", "examples/train.yaml"], "transformers", "train"),
        (["train", "examples/train.yaml"], "tensorboard", "train"),
        (["params", "examples/muon.yaml"], "transformers", "train"),
        (["bench"], "typer", "bench"),
    ],
)
def test_a_command_names_the_extra_that_is_missing(arguments: list[str], library: str, extra: str) -> None:
    done = _python(
        f"import sys; sys.modules[{library!r}] = None; from lightstep.__main__ import main; main()", *arguments
    )
    sentence = f"lightstep: {library} is not installed; install it with: pip install 'lightstep-optim[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


@pytest.mark.parametrize("module", ["accelerate", "transformers"])
def test_an_integration_names_the_extra_that_is_missing(module: str) -> None:
    done = _python(f"{HIDDEN}import lightstep.integrations.{module}")
    assert f"{module} is not installed; install it with: pip install 'lightstep-optim[train]'" in done.stderr


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
    assert set(_names(parser["options"]["install_requires"])) == needed
    assert f"lightstep-optim[{','.join(LIBRARIES)}]" in parser["options.extras_require"]["dev"]


def _names(requirements: str) -> list[str]:
    lines = [line for line in requirements.split("\n") if line and not line.startswith("#")]
    return [re.split(r"[<>=\[]", line)[0] for line in lines]
