"""Small runs that are saved and loaded, and faults at every moment of a save: what the tests of checkpoints share."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.checkpoint import save
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


def trained(backend: str, steps: int = 2, **changes: Any) -> tuple[Any, nn.Module, Any]:
    strategy = lightstep.Strategy.load({"optimizer_state": {"backend": backend}, **changes})
    torch.manual_seed(0)
    model = strategy.prepare_model(nn.Linear(5, 3))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(steps):
        torch.manual_seed(10 + step)
        optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().square().sum())
        optimizer.step()
    return strategy, model, optimizer


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


def partly_frozen(backend: str, steps: int, frozen_in_groups: bool) -> tuple[Any, nn.Module, Any]:
    """The first of two layers is frozen. Groups of the previous version held no frozen parameters."""
    strategy = lightstep.Strategy.load({"optimizer_state": {"backend": backend}})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model = strategy.prepare_model(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = None if frozen_in_groups else [{"params": trainable}]
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, param_groups=groups, lr=1e-2 / (1 + steps))
    for step in range(steps):
        torch.manual_seed(10 + step)
        optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().square().sum())
        optimizer.step()
    return strategy, model, optimizer


def content(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    optimizer.synchronize()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{k}": torch.as_tensor(v).clone() for k, v in optimizer.state.get(parameter, {}).items()}
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items())


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


def adapted(steps: int, backend: str = "resident", **arguments: Any) -> tuple[Any, Adapted, Any]:
    strategy = lightstep.Strategy.load({"optimizer_state": {"backend": backend}})
    model = strategy.prepare_model(Adapted(**arguments))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.backward(model(torch.randn(4, 6, dtype=torch.bfloat16)).float().square().sum())
        optimizer.step()
    return strategy, model, optimizer


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


# -- faults ------------------------------------------------------------------------------------------------------------


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))


class Unloadable:
    """What a weights-only load refuses."""


class limited_file_size:
    """A disk on which no file can be larger than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def dies_at(operation: int, where: Path, work: Callable[[], object]) -> bool:
    """Do the work in a forked child that dies without a word at its n-th file operation in ``where``.

    Returns whether it got that far.
    """
    child = os.fork()
    if child == 0:
        remaining = [operation]

        def watch(event: str, args: tuple[Any, ...]) -> None:
            changes = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
            if event in changes and str(where) in f"{args[0]!r} {args[1:2]!r}":
                remaining[0] -= 1
                if remaining[0] == 0:
                    os._exit(9)

        sys.addaudithook(watch)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


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


def failing_calls(name: str, error: BaseException = DISK_IS_FULL) -> Iterator[Any]:
    """Patches of ``os.name`` whose n-th call raises, for every n that the work in the block reaches."""
    real = getattr(os, name)
    for number in range(50):
        calls = [0]

        def failing(*args: Any, number: int = number, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number + 1:
                raise error
            return real(*args, **kwargs)

        yield mock.patch.object(os, name, failing)
        if calls[0] <= number:
            assert number > 0, f"{name} was never called"
            return
