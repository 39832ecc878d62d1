"""Small runs that are saved and loaded, and faults at every moment of a save: what the tests of checkpoints share."""

from __future__ import annotations

import errno
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.checkpoint import CheckpointError, load, save
from lightstep.checkpoint.background import finish_pending
from tests.patience import PATIENCE
from tests.reference.pair import scale_for, strategy_values
from tests.reference.tiny_model import TinyModel, loss_of

OLD = Path(__file__).parent / "data" / "checkpoints"


def model_of(value: float, count: int = 1) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(3, 4) for _ in range(count)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values_of(model: nn.Module) -> set[float]:
    return {float(x) for parameter in model.parameters() for x in parameter.detach().flatten()}


class Run:
    """A small run under a strategy, whose steps are the same every time."""

    def __init__(
        self,
        backend: str = "resident",
        steps: int = 2,
        module: nn.Module | None = None,
        lr: float = 1e-2,
        **changes: Any,
    ) -> None:
        self.strategy = lightstep.Strategy.load({"optimizer_state": {"backend": backend}, **changes})
        torch.manual_seed(0)
        self.model = self.strategy.prepare_model(nn.Linear(5, 3) if module is None else module)
        self.optimizer: Any = self.make_optimizer(lr)
        self.steps = 0
        self.train(steps)

    def make_optimizer(self, lr: float) -> Any:
        return self.strategy.create_optimizer(self.model, torch.optim.AdamW, lr=lr)

    def backward(self) -> None:
        width, chance = next(self.model.parameters()).shape[-1], torch.Generator().manual_seed(10 + self.steps)
        rows = torch.randn(4, width, generator=chance).to(self.strategy.device, self.strategy.parameter_dtype)
        loss = self.model(rows).float().square().sum()
        self.optimizer.backward(loss) if hasattr(self.optimizer, "backward") else loss.backward()
        self.steps += 1

    def train(self, steps: int = 1) -> Run:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, path: Any, **options: Any) -> Any:
        return self.strategy.save_checkpoint(path, self.model, self.optimizer, **options)

    def load(self, path: Any, **options: Any) -> dict[str, Any]:
        return self.strategy.load_checkpoint(path, self.model, self.optimizer, **options)

    def content(self) -> dict[str, Tensor]:
        return content(self.model, self.optimizer)


class PlainRun(Run):
    """With an optimizer of torch."""

    def make_optimizer(self, lr: float) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)


def tiny_run(parameters: str = "bfloat16", steps: int = 3) -> tuple[Any, Any, Any]:
    """A strategy, and a :class:`TinyModel` and its optimizer, with two groups, after some steps."""
    strategy = lightstep.Strategy.load(strategy_values(parameters, **scale_for(parameters)))
    model = strategy.prepare_model(TinyModel())
    first, second = model.split()
    groups = [{"params": first, "lr": 3e-3}, {"params": second, "lr": 1e-3, "weight_decay": 0.0}]
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, param_groups=groups)
    for step in range(steps):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
    return strategy, model, optimizer


class PartlyFrozen(Run):
    """The first of two layers is frozen. Groups of the previous version held no frozen parameters."""

    def __init__(self, backend: str, steps: int, frozen_in_groups: bool) -> None:
        self.frozen_in_groups = frozen_in_groups
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        model[0].requires_grad_(False)
        super().__init__(backend, steps, model, lr=1e-2 / (1 + steps))

    def make_optimizer(self, lr: float) -> Any:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        groups = None if self.frozen_in_groups else [{"params": trainable}]
        return self.strategy.create_optimizer(self.model, torch.optim.AdamW, param_groups=groups, lr=lr)


def content(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights and state, whole, on the CPU."""
    getattr(optimizer, "synchronize", lambda: None)()
    found = {}
    for name, parameter in model.named_parameters():
        entries = {"weight": parameter.detach()}
        if parameter in optimizer.state:
            entries |= optimizer.state[parameter]
        for key, value in entries.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
            found[name if key == "weight" else f"{name}.{key}"] = whole.cpu().clone()
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    others = [n for n, value in expected.items() if found[n].dtype != value.dtype or not torch.equal(found[n], value)]
    assert not others


class Adapted(nn.Module):
    """A frozen base with an adapter, as PEFT leaves it."""

    def __init__(self, base: str = "org/base", seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.adapter = nn.Linear(6, 6, bias=False)
        if tied:
            self.again = self.base
        for parameter in (*self.base.parameters(), *self.norm.parameters()):
            parameter.requires_grad_(False)
        self.peft_config = {"default": type("Config", (), {"base_model_name_or_path": base})()}

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(self.base(rows)) + self.adapter(rows)


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def contents(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_user_files(folder: Path) -> None:
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    (folder / "eval" / "empty").mkdir(parents=True, exist_ok=True)
    for file in ("notes.txt", "templates/mine.jinja", "eval/model.safetensors"):
        (folder / file).write_text("mine")
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to(folder.parent, target_is_directory=True)


def has_user_files(folder: Path) -> bool:
    files = ("notes.txt", "templates/mine.jinja", "eval/model.safetensors")
    whole = all((folder / file).read_text() == "mine" for file in files)
    return whole and (folder / "eval" / "empty").is_dir() and (folder / "link").is_symlink()


# -- faults ------------------------------------------------------------------------------------------------------------


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))


class Unloadable:
    """What a weights-only load refuses."""


class Harmful:
    """Writes a file when it is unpickled, into the folder that is the current one then."""

    FILE = Path("harmed")

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.FILE}",)


@contextmanager
def at_read(call: int, fault: Callable[[], object]) -> Iterator[None]:
    """At the first read everything is only tried, at the second weights are loaded, at the third state."""
    read, calls = load.read_tensors, []

    def faulty(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == call:
            fault()
        read(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "read_tensors", faulty)
        yield


def broken_disk() -> Any:
    raise OSError(5, "Input/output error")


def dies_at(operation: int, where: Path, work: Callable[[], object]) -> str:
    """Do the work in a forked child that dies without a word at its n-th change of a file in ``where``.

    Returns:
        ``"died"``, or ``"ended"`` before it got that far.
    """
    child = os.fork()
    if child == 0:
        remaining = [operation]

        def watch(event: str, args: tuple[Any, ...]) -> None:
            changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
            writes = event == "open" and (args[1] != "rb" if args[1] else args[2] & (os.O_WRONLY | os.O_RDWR))
            if (event in changes or writes) and str(where) in f"{args[0]!r} {args[1:2]!r}":
                remaining[0] -= 1
                if remaining[0] == 0:
                    os._exit(9)

        sys.addaudithook(watch)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return {9: "died", 0: "ended"}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def fails_at(number: int, error: BaseException, work: Callable[[], object]) -> str:
    """Do the work, in which the n-th call that flushes, renames or makes a folder raises.

    Returns:
        ``"raised"``, ``"went on"`` without an error of its own, or ``"ended"`` before it got that far.
    """
    calls = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise error
            return call(*args, **kwargs)

        return failing

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "mkdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except (CheckpointError, KeyboardInterrupt) as caught:
            assert caught is error or str(caught).endswith(": No space left on device")
            return "raised"
    return "went on" if calls[0] >= number else "ended"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The writer waits until this is set."""
    write, go = save.write_tensors, threading.Event()

    def waits(*arguments: Any) -> Any:
        assert go.wait(PATIENCE)
        return write(*arguments)

    monkeypatch.setattr(save, "write_tensors", waits)
    yield go
    go.set()
    finish_pending()


DISK_IS_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk() -> Any:
    """No tensor is written in the block."""
    return mock.patch.object(save, "write_tensors", side_effect=DISK_IS_FULL)


@pytest.fixture
def place(tmp_path: Path, storage: str) -> Iterator[str]:
    """A run's folder, or a URL."""
    yield f"memory://{uuid.uuid4().hex}" if storage == "memory://" else f"{storage}{tmp_path}/run"
    fsspec.filesystem("memory").store.clear()
