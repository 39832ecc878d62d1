"""The house rules that no type checker sees: which way imports run, and what importing lightstep does not do."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightstep
from tests.python import python

PACKAGE = Path(lightstep.__file__).resolve().parent

# What each part of the package may import of the others. Data flows YAML → config → strategy → optimizer →
# {precision, clipping, state} → distributed, and imports run the same way. "lightstep" stands for the public names.
CORE = {"crc32", "distributed", "error_text"}
SIBLINGS = {"precision", "clipping", "state"}
MAY_IMPORT: dict[str, set[str]] = {
    "crc32": set(),
    "version": set(),
    "distributed": set(),
    "error_text": set(),
    "config_errors": set(),
    "extras": set(),
    "paths": set(),
    "config": {"config_errors"},
    "presets": {"config", "config_errors"},
    "optimizer_class": {"config", "config_errors"},
    "chunked_loss": {"config"},
    "precision": CORE,
    "clipping": CORE,
    "state": CORE,
    "optimizer": CORE | SIBLINGS,
    "sharding": CORE | SIBLINGS | {"optimizer", "config", "config_errors"},
}
MAY_IMPORT["checkpoint"] = MAY_IMPORT["sharding"] | {"sharding", "version", "extras", "paths"}
MAY_IMPORT["plan"] = MAY_IMPORT["sharding"] | {"sharding", "extras", "paths", "presets", "optimizer_class"}
MAY_IMPORT["plan"] |= {"chunked_loss"}
MAY_IMPORT["environment"] = {"version"}
MAY_IMPORT["rollout"] = MAY_IMPORT["checkpoint"] | {"checkpoint"}
MAY_IMPORT["strategy"] = MAY_IMPORT["rollout"] | {"rollout", "plan", "presets"}
MAY_IMPORT["deepspeed"] = MAY_IMPORT["strategy"] | {"strategy"}
MAY_IMPORT["lightstep"] = MAY_IMPORT["strategy"] | {"strategy"}
MAY_IMPORT["integrations"] = MAY_IMPORT["deepspeed"] | {"lightstep", "optimizer_class"}
MAY_IMPORT["trainer"] = MAY_IMPORT["integrations"] | {"integrations", "chunked_loss"}
MAY_IMPORT["bench"] = MAY_IMPORT["trainer"] | {"trainer", "environment"}
MAY_IMPORT["cli"] = MAY_IMPORT["bench"] | {"bench", "environment"}
MAY_IMPORT["__main__"] = {"cli", "extras"}

# Libraries that are kept out of the lower parts. distributed/ alone knows DTensors, meshes and process groups there.
MAY_NOT_IMPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("config", "config_errors"), ("torch",)),
    **dict.fromkeys([*SIBLINGS, "optimizer"], ("torch.distributed", "pydantic", "yaml")),
    "distributed": ("pydantic", "yaml"),
}


def _part(module: str) -> str:
    """``lightstep.state.ring`` belongs to ``state``; the package itself is ``lightstep``."""
    return module.split(".")[1] if "." in module else module


def _module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _imports(path: Path, package: Path) -> list[tuple[int, str]]:
    """``(line, full module name)`` of every import in a file, those inside functions too."""
    return list(_imports_in(path, package))


def _imports_in(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    here = _module_name(path, package).split(".")
    if path.name != "__init__.py":
        here = here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                ours = module.split(".")[0] == package.name
                inner = package.joinpath(*module.split(".")[1:], alias.name) if ours else None
                is_module = inner is not None and (inner.is_dir() or inner.with_suffix(".py").is_file())
                yield node.lineno, f"{module}.{alias.name}" if is_module else module


def _violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        part = _part(_module_name(path, package))
        where = path.relative_to(package.parent).as_posix()
        if part not in MAY_IMPORT:
            found.append(f"{where}: {part!r} has no row in MAY_IMPORT; say what it may import")
            continue
        for line, module in _imports(path, package):
            target = _part(module)
            if module.split(".")[0] == package.name and target != part and target not in MAY_IMPORT[part]:
                allowed = ", ".join(sorted(MAY_IMPORT[part])) or "nothing of lightstep"
                found.append(f"{where}:{line} imports {module}; {part} may import {allowed}")
            if any(module == name or module.startswith(f"{name}.") for name in MAY_NOT_IMPORT.get(part, ())):
                found.append(f"{where}:{line} imports {module}, which {part} does not know")
    return found


def test_imports_run_in_one_direction_and_in_no_circle() -> None:
    assert not _violations(PACKAGE), "\n" + "\n".join(_violations(PACKAGE))
    assert _circles(PACKAGE) == []


def _circles(package: Path) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others, type checkers' imports too."""
    paths = {_module_name(path, package): path for path in package.rglob("*.py")}
    targets = {name: {module for _, module in _imports(path, package)} - {name} for name, path in paths.items()}
    reached = {name: _reached(name, targets) for name in targets}
    found = {frozenset(other for other in reached[name] if name in reached.get(other, ())) for name in targets}
    return sorted(sorted(circle) for circle in found if circle)


def _reached(start: str, targets: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = targets.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "lightstep"
    (package / "state").mkdir(parents=True)
    for name, line in {
        "ring": "from lightstep.state import store",
        "store": "if TYPE_CHECKING:\n    from lightstep.state.lanes import Lane",
        "lanes": "def f():\n    from lightstep.state import ring",
        "units": "from lightstep.state import ring",
    }.items():
        (package / "state" / f"{name}.py").write_text(line + "\n")
    assert _circles(package) == [[f"lightstep.state.{name}" for name in ("lanes", "ring", "store")]]


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("config.py", "import torch.distributed as dist", "config.py:1 imports torch.distributed"),
        ("clipping.py", "from lightstep import state", "clipping.py:1 imports lightstep.state"),
        ("state/ring.py", "from ..precision import split", "ring.py:1 imports lightstep.precision.split"),
        ("optimizer/base.py", "from lightstep import Strategy", "base.py:1 imports lightstep;"),
        ("helpers.py", "import math", "helpers.py: 'helpers' has no row in MAY_IMPORT"),
    ],
)
def test_a_wrong_import_is_named(tmp_path: Path, file: str, line: str, message: str) -> None:
    package = tmp_path / "lightstep"
    for name in ("state/ring.py", "precision/split.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / file).write_text(line + "\n")
    (violation,) = _violations(package)
    assert message in violation


# Modules that need one of these are imported only where it is installed.
OPTIONAL_LIBRARIES = ("deepspeed", "torchao", "triton", "verl", "vllm")

# Every way to a device or a process group is closed before lightstep is imported, so that the test can fail on a
# machine without a GPU too.
IMPORT_WITHOUT_DEVICES = """
import importlib, logging, pkgutil, torch, torch.distributed

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on some CPUs it misses a library of its own, and says so

def forbidden(name):
    def call(*args, **kwargs):
        raise AssertionError(f"importing lightstep called {name}")
    return call

torch.cuda._lazy_init = forbidden("torch.cuda._lazy_init")
torch.accelerator.current_device_index = forbidden("torch.accelerator.current_device_index")
torch.distributed.init_process_group = forbidden("torch.distributed.init_process_group")
torch.distributed.new_group = forbidden("torch.distributed.new_group")

import lightstep
for module in pkgutil.walk_packages(lightstep.__path__, "lightstep."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in %(optional)r:
                raise
assert not torch.cuda.is_initialized(), "CUDA was initialised"
assert not torch.distributed.is_initialized(), "a process group was started"
"""


def test_importing_touches_no_device_and_prints_nothing() -> None:
    code = IMPORT_WITHOUT_DEVICES % {"optional": OPTIONAL_LIBRARIES}
    done = python("-c", code, cwd=PACKAGE.parent, imported="transformers.trainer")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
