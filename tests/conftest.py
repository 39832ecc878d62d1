"""What every test gets: one thread (bitwise repeatable sums, many workers on few cores) and a fixed seed."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator

import pytest

from tests.collector import collect_and_skip, collect_seldom
from tests.small_units import make_units_small

# By the one process that ranks and examples are forked from. (GPUs cannot be used after a fork: ranks that see some
# import these themselves.) Only the last list counts: no other module may set one.
multiprocessing.set_forkserver_preload(["tests.preload"])


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def collector_starts_afresh() -> Iterator[None]:
    """What a module leaves is not looked at in the next ones: transformers' Trainer, for one, collects in every run."""
    yield
    collect_and_skip()


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    make_units_small(monkeypatch)
    monkeypatch.setattr("lightstep.state.units.CUT_ELEMENTS", 64)  # not for 8-bit moments, whose blocks have 128


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors are cut as large ones are."""
    monkeypatch.setattr("lightstep.state.units.CUT_ELEMENTS", 64)


@pytest.fixture
def never_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are tried in every backward, clipped or not."""
    own = "lightstep.optimizer.overlap.SpeculativeUpdates._update_pause"
    monkeypatch.setattr(own, lambda updates: setattr(updates, "_pause", 0))


@pytest.fixture
def inputs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of recomputed blocks rest on the host, however small they are."""
    monkeypatch.setattr("lightstep.state.host_activations.HostActivations.SMALLEST", 1)


def pytest_configure(config: pytest.Config) -> None:
    """The collector takes a fifth of the time of imports, and finds nothing there."""
    gc.disable()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        prepare_torch()  # who hands out tests to workers begins sooner without it


def prepare_torch() -> None:
    import torch

    torch.set_num_threads(1)
    if not torch.accelerator.is_available():
        # torch.manual_seed would keep a stack for each kind of accelerator that may still come: a millisecond each.
        for module in (torch.cuda, torch.cuda.random, torch.xpu, torch.xpu.random, torch.mtia):
            module._lazy_call = lambda *_, **__: None  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """The collector, which some tests call, need not look at a million objects of imported modules each time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    collect_seldom()
