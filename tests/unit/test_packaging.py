"""What users install: all modules, the presets and the types, from a wheel and a bare checkout.

``make test`` itself runs in an editable install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.python import python
from tests.unit.test_extras import HIDDEN

CHECKOUT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (CHECKOUT / "strategies").glob("*.yaml"))

# Whatever lightstep this interpreter has installed is behind the one at ``where``.
LIST_PRESETS = """
import sys
from pathlib import Path
where = sys.argv[1]
sys.path.insert(0, where)
import lightstep
assert Path(lightstep.__file__).resolve().is_relative_to(Path(where).resolve()), lightstep.__file__
for name in lightstep.available_strategies():
    lightstep.Strategy.load(name)
    print(name)
"""

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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout as git would make it: building leaves files beside the sources."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy)
    for name in ("lightstep", "strategies"):
        shutil.copytree(CHECKOUT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _build(checkout: Path) -> Path:
    """Build a wheel with this environment's setuptools, and unpack it."""
    call = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    built = checkout.parent / "built"
    built.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", call, str(built)], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("*.whl")
    unpacked = checkout.parent / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    return unpacked


def _presets_found(where: Path, then: str = "") -> list[str]:
    """What a Python finds that imports the lightstep at ``where``; it also runs ``then``."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = python("-c", LIST_PRESETS + then, str(where), cwd=where, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_wheel_holds_every_module_preset_and_the_type_marker(checkout: Path) -> None:
    unpacked = _build(checkout)
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    packaged = {name for name in files if ".dist-info/" not in name}
    modules = {path.relative_to(checkout).as_posix() for path in (checkout / "lightstep").rglob("*.py")}
    presets = {f"lightstep/strategies/{name}.yaml" for name in PRESETS}
    assert packaged == modules | presets | {"lightstep/py.typed"}
    assert PRESETS
    assert _presets_found(unpacked, LOOP) == PRESETS


def test_a_bare_checkout_finds_the_presets(checkout: Path) -> None:
    assert _presets_found(checkout) == PRESETS


def test_nothing_but_torch_is_held_to_a_version() -> None:
    """Other requirements stay open, so that lightstep fits into environments that exist."""
    lines = (CHECKOUT / "setup.cfg").read_text().split("install_requires =")[1].split("\n\n")[0].split()
    assert [line for line in lines if any(sign in line for sign in "<>=~!")] == ["torch>=2.11"]
