"""How lightstep runs the optimizer classes that packages publish: ``python -m tests.optimizer_classes PACKAGE ...``.

Each class trains a small model in the plain loop of ``tests/reference`` and under lightstep, by each update time and in
units of one layer. Masters must be the same bits in the end. ``--write docs/optimizers.md`` puts the result between the
two markers of that page. A class that the plain loop itself cannot run is left out, and counted.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import inspect
import json
import multiprocessing
import pkgutil
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightstep import Strategy
from tests.reference.plain_loop import ReferenceLoop

STEPS, SEED = 24, 0
DEVICE = "cpu"
"""Set by ``--device``."""
BEGIN, END = "<!-- published classes: begin -->", "<!-- published classes: end -->"
# The gradients of a step are this many times the usual ones: rules by size or RMS must be met on both sides.
LOUDNESS = (1.0, 30.0, 0.01, 1.0, 1000.0, 1e-4)
# Arguments that a constructor asks for and that have no value which suits all classes.
ARGUMENTS = {
    "lr": 1e-3,
    "num_iterations": STEPS,
    "total_steps": STEPS,
    "t_max": STEPS,
    "num_epochs": 2,
    "num_batches_per_epoch": STEPS,
}
# A small ring: the model below has several units.
SMALL_RING = {"optimizer_state.ring_mib": 3, "optimizer_state.resident_gib": 0}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("resident", {}),
    "stream": ("stream", SMALL_RING),
    "next_forward": ("stream", {**SMALL_RING, "optimizer_state.update": "next_forward"}),
    "overlap": ("stream-overlap", SMALL_RING),
    "in_backward": ("stream", {**SMALL_RING, "optimizer_state.update": "in_backward", "clipping.scope": "unit"}),
}


@dataclass(frozen=True)
class Finding:
    """What came of one class: ``equal``, ``whole``, ``refused``, ``differs``, ``crashed`` or ``not run``."""

    name: str
    outcome: str
    reason: str = ""


class Block(nn.Module):
    """Matrices, vectors, and a convolution's kernel of three dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.down(nn.functional.gelu(self.up(self.norm(inputs))))
        return inputs + hidden + self.mix(inputs.transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    """Tensors of 48 to 48 000 elements; ``matrices_only`` for classes that refuse other shapes."""

    def __init__(self, matrices_only: bool = False) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embedding = nn.Embedding(1000, 48)
        self.blocks = nn.ModuleList(Block(48) for _ in range(3))
        self.head = nn.Linear(48, 40)
        if matrices_only:
            self.requires_grad_(False)
            for parameter in self.parameters():
                parameter.requires_grad_(parameter.dim() == 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def loss(self, step: int) -> Tensor:
        """The same batch for the same step."""
        generator = torch.Generator().manual_seed(step)
        tokens, labels = torch.randint(40, (2, 4, 12), generator=generator).to(DEVICE)
        logits = self(tokens).float()
        return LOUDNESS[step % len(LOUDNESS)] * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def examine(name: str, optimizer_class: type[Optimizer]) -> Finding:
    """Train with the class in the plain loop and under every strategy."""
    plain_error = ""
    for matrices_only in (False, True):
        try:
            expected = plain_masters(optimizer_class, matrices_only)
        except Exception as error:
            plain_error = plain_error or _short(error)
            continue
        return compare(name, optimizer_class, expected, matrices_only)
    return Finding(name, "not run", plain_error)


def compare(name: str, optimizer_class: type[Optimizer], expected: Sequence[Tensor], matrices_only: bool) -> Finding:
    """Compare the masters of every strategy with ``expected``."""
    whole = False
    if not _equal(expected, plain_masters(optimizer_class, matrices_only, seed=SEED + 1)):
        return _without_comparison(name, optimizer_class, matrices_only)
    for title in STRATEGIES:
        try:
            found, is_whole = masters(title, optimizer_class, matrices_only)
        except (TypeError, ValueError) as error:
            refusal = optimizer_class.__name__ in str(error)
            return Finding(name, "refused" if refusal else "crashed", f"{title}: {error}")
        except Exception as error:
            return Finding(name, "crashed", f"{title}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        if not _equal(expected, found):
            distances = [float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)]
            return Finding(name, "differs", f"{title}: by up to {max(distances):.2g}")
        whole = whole or is_whole
    return Finding(name, "whole" if whole else "equal")


def _without_comparison(name: str, optimizer_class: type[Optimizer], matrices_only: bool) -> Finding:
    try:
        masters("stream", optimizer_class, matrices_only)
    except Exception as error:
        return Finding(name, "refused" if optimizer_class.__name__ in str(error) else "crashed", str(error))
    return Finding(name, "random")


def plain_masters(optimizer_class: type[Optimizer], matrices_only: bool, seed: int = SEED) -> list[Tensor]:
    """The masters after all steps of the plain loop; ``seed`` is that of random numbers in the update."""
    model = Model(matrices_only).to(DEVICE, torch.bfloat16)
    loop = ReferenceLoop([{"params": _trained(model)}], optimizer_class, max_norm=None, **arguments_of(optimizer_class))
    if hasattr(loop.optimizer, "train"):  # classes that average the weights ask for it (schedulefree)
        loop.optimizer.train()
    torch.manual_seed(seed)
    for step in range(STEPS):
        loop.backward(model.loss(step))
        loop.step()
    found = [loop.masters[parameter] for parameter in _trained(model)]
    assert loop.skipped_steps == 0 and all(master.isfinite().all() for master in found), "the plain loop diverges"
    return found


def masters(title: str, optimizer_class: type[Optimizer], matrices_only: bool) -> tuple[list[Tensor], bool]:
    """The masters after all steps under a strategy, and whether the class got whole tensors."""
    preset, overrides = STRATEGIES[title]
    strategy = Strategy.load(preset, overrides={"clipping.max_norm": None, **overrides})
    model = strategy.prepare_model(Model(matrices_only).to(torch.bfloat16))
    optimizer = strategy.create_optimizer(model, optimizer_class, **arguments_of(optimizer_class))
    torch.manual_seed(SEED)
    for step in range(STEPS):
        optimizer.backward(model.loss(step))
        optimizer.step()
    optimizer.synchronize()
    found = [optimizer.state[parameter]["master"].clone() for parameter in _trained(model)]
    return found, optimizer.has_whole_tensors


def arguments_of(optimizer_class: type[Optimizer]) -> dict[str, Any]:
    """A learning rate (some classes diverge with their own), and whatever else the constructor asks for."""
    parameters = list(inspect.signature(optimizer_class).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty or p.name == "lr"]
    return {name: ARGUMENTS[name] for name in needed if name in ARGUMENTS}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- packages


@functools.cache
def classes_of(package: str) -> dict[str, type[Optimizer]]:
    """The optimizer classes that ``package`` has, by name; those of its modules where it lists none itself."""
    module = importlib.import_module(package)
    found = dict(_own_classes(module, package))
    if not found and hasattr(module, "__path__"):
        for info in pkgutil.walk_packages(module.__path__, f"{package}."):
            try:
                found |= dict(_own_classes(importlib.import_module(info.name), package))
            except Exception:  # an optional dependency of that file
                continue
    return found


def _own_classes(module: Any, package: str) -> Iterator[tuple[str, type[Optimizer]]]:
    for name, value in vars(module).items():
        if not (isinstance(value, type) and issubclass(value, Optimizer)) or name.startswith("_"):
            continue
        if value is not Optimizer and value.__module__.startswith(package.partition(".")[0]):
            yield name, value


def is_importable(package: str) -> bool:
    """Whether the package and what it needs are installed; says so if not."""
    try:
        return bool(classes_of(package))
    except ImportError as error:
        sys.stdout.write(f"{package} is left out: {error}\n")
        return False


def examine_apart(package: str, name: str, device: str, seconds: float) -> Finding:
    """In a process of its own, which may hang or crash."""
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")  # a fork imports nothing again
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_examine_here, args=(theirs, package, name, device), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else Finding(name, "crashed", f"did not end within {seconds:g} s")
    except EOFError:
        return Finding(name, "crashed", "the process ended")
    finally:
        process.kill()
        process.join()


def _examine_here(pipe: Connection, package: str, name: str, device: str) -> None:
    global DEVICE
    DEVICE = device
    pipe.send(examine(name, classes_of(package)[name]))


# -- the page


def table(findings: Mapping[str, Sequence[Finding]]) -> str:
    """A Markdown table: a row for each package and outcome."""
    rows = ["| package | outcome | classes |", "|---|---|---|"]
    for package, own in findings.items():
        for outcome in dict.fromkeys(("equal", "whole", "refused", "random", *(f.outcome for f in own))):
            names = sorted(finding.name for finding in own if finding.outcome == outcome)
            if names:
                rows.append(f"| {package} | {outcome} ({len(names)}) | {', '.join(names)} |")
    return "\n".join(rows)


def write(page: Path, text: str) -> None:
    """Replace what stands between the page's markers."""
    content = page.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    assert pattern.search(content), f"{page} has no markers {BEGIN} and {END}"
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n{text}\n{END}", content))


@functools.cache
def titled(package: str) -> str:
    """The package with its version."""
    if package == "torch.optim":
        return f"torch.optim {torch.__version__.partition('+')[0]}"
    distributions = importlib.metadata.packages_distributions().get(package.partition(".")[0], [package])
    return f"{distributions[0]} {importlib.metadata.version(distributions[0])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", help="import names, such as torch.optim or pytorch_optimizer")
    parser.add_argument("--only", help="a regular expression for names of classes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one class")
    parser.add_argument("--write", type=Path, help="the page that gets the table")
    parser.add_argument("--json", type=Path, help="keeps all findings; what is in it is not run again")
    arguments = parser.parse_args()
    findings = read_findings(arguments.json)
    arguments.packages = [package for package in arguments.packages if is_importable(package)]
    for package, finding in examined(arguments, findings):
        findings.setdefault(package, []).append(finding)
        sys.stdout.write(f"{package}: {finding.name}: {finding.outcome} {textwrap.shorten(finding.reason, 300)}\n")
        sys.stdout.flush()
        if arguments.json:
            kept = {key: [asdict(each) for each in own] for key, own in findings.items()}
            arguments.json.write_text(json.dumps(kept, indent=1))
    if arguments.write:
        write(arguments.write, table(findings))


def read_findings(path: Path | None) -> dict[str, list[Finding]]:
    """What an earlier run has kept."""
    if path is None or not path.exists():
        return {}
    return {package: [Finding(**each) for each in own] for package, own in json.loads(path.read_text()).items()}


def examined(arguments: argparse.Namespace, known: Mapping[str, Sequence[Finding]]) -> Iterator[tuple[str, Finding]]:
    """Examine the chosen classes that are not known yet."""
    done = {(package, finding.name) for package, own in known.items() for finding in own}
    found = [(package, name) for package in arguments.packages for name in sorted(classes_of(package))]
    chosen = [
        item for item in found if re.search(arguments.only or "", item[1]) and (titled(item[0]), item[1]) not in done
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:  # each class is examined in a process
        pending = {pool.submit(examine_apart, *item, DEVICE, arguments.seconds): item[0] for item in chosen}
        for future in as_completed(pending):
            yield titled(pending[future]), future.result()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"


if __name__ == "__main__":
    main()
