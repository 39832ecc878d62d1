"""An optimizer that goes away: its last update is in the weights, its memory is free at once and its hooks are off."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.optimizer.schedule import NextForward
from tests.reference.pair import EVERY_TIME, IN_BACKWARD
from tests.unit.test_edits import Setup
from tests.unit.test_stream import random_delays

EVERY = {**EVERY_TIME, **IN_BACKWARD}


@pytest.fixture(autouse=True, scope="module")
def no_cyclic_collector() -> Iterator[None]:
    torch.optim.SGD([torch.ones(1)])  # torch's first one imports torch._dynamo, and failures in there keep their frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def hooks_on(model: nn.Module) -> int:
    found = [
        hooks
        for parameter in model.parameters()
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    ]
    return sum(len(hooks) for hooks in found if hooks)


@pytest.mark.parametrize("scale", ["none", {"kind": "constant", "scale": 1024.0}])
@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", list(EVERY))
def test_everything_is_freed_at_once(kind: str, parameters: str, scale: Any) -> None:
    strategy = lightstep.Strategy.load(
        {
            "precision": {"parameters": parameters, "loss_scale": scale},
            "clipping": {"max_norm": None},
            "optimizer_state": EVERY[kind],
        }
    )
    model = strategy.prepare_model(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)))
    optimizer: Any = strategy.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for micro in (0, 1, 1):
        with strategy.accumulate(model, last=micro == 1):
            optimizer.backward(model(torch.ones(2, 6, dtype=model[0].weight.dtype)).float().sum())
        if micro:
            optimizer.step()
            scheduler.step()
    held = optimizer.state[model[0].weight]
    gone = [weakref.ref(thing) for thing in (optimizer, optimizer.engine, optimizer._backend, *optimizer.managed())]
    masters = [weakref.ref(piece.master) for piece in getattr(optimizer._backend, "_pieces", {}).values()]
    gone += [] if parameters == "float32" else masters
    del scheduler, optimizer, held
    assert [reference() for reference in gone if reference() is not None] == []
    assert hooks_on(model) == 0


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(40)))


def trained(state: dict[str, Any], phases: int, seed: int | None = None) -> dict[str, Tensor]:
    """The weights after functions that each made an optimizer of their own, and let it go."""
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": 0.5}, "optimizer_state": state})
    model = strategy.prepare_model(deep())

    def train() -> None:
        optimizer: Any = strategy.create_optimizer(model, lr=1e-2)
        for step in range(3):
            if step == 2 and seed is not None:
                random_delays(optimizer._backend.lanes, seed, 1e-3)
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.backward(model(inputs).float().square().mean() * 1e3)
            optimizer.step()

    for _ in range(phases):
        train()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("phases", [1, 2])
def test_the_last_update_is_in_the_weights(phases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NextForward, "at_once", 10)
    expected = trained({"backend": "stream", "ring_mib": 0.01}, phases)
    for seed in range(2):
        found = trained({"backend": "stream", "ring_mib": 0.01, "update": "next_forward"}, phases, seed)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_an_entry_that_somebody_keeps_keeps_nothing_else() -> None:
    setup = Setup("resident").train(0)
    entries, engine = setup.optimizer.state[setup.model[0].weight], weakref.ref(setup.optimizer.engine)
    before = entries["exp_avg"].clone()
    del setup.optimizer
    assert engine() is None
    assert torch.equal(entries["exp_avg"], before)


INTERRUPTED = """
import atexit, sys, time, torch, lightstep
from torch import nn
strategy = lightstep.Strategy.load({"optimizer_state": {"backend": "stream", "update": "next_forward"}})
model = strategy.prepare_model(nn.Linear(8, 8))
optimizer = strategy.create_optimizer(model, lr=1e-2)
for _ in range(2):
    optimizer.backward(model(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
    optimizer.step()
optimizer._backend.lanes.delay = lambda lane: time.sleep(2)
optimizer.backward(model(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
print("at the end", flush=True)
optimizer.step()
"""


def test_an_interrupt_at_the_end_is_pythons_own() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline() == "at the end\n"
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    code, said = run.wait(60), run.stderr.read()
    assert code in (0, 130, -signal.SIGINT), said
    assert code != 0 or "Traceback" not in said, said


IN_A_FINALIZER = {
    "the optimizer's end": """
try:
    del optimizer
    time.sleep(10)
    print("was not interrupted")
except KeyboardInterrupt:
    optimizer = None
    sys.exit(130)
""",
    "the optimizer's end, behind which there is nothing": "del optimizer",
    "the end of page-locking": """
import contextlib, weakref
from lightstep.state import host_memory
torch.cuda.device, torch.cuda.synchronize = contextlib.nullcontext, lambda device: time.sleep(3)
slab = host_memory.HostSlab(8)
weakref.finalize(slab, host_memory._unlock, 0, torch.device("cuda"), host_memory.os.getpid())
""",
}


@pytest.mark.parametrize("where", list(IN_A_FINALIZER))
def test_an_interrupt_in_a_finalizer_is_not_lost(where: str) -> None:
    script = INTERRUPTED.replace('print("at the end", flush=True)\noptimizer.step()\n', "optimizer.step()\n")
    script += 'print("at the end", flush=True)\n' + IN_A_FINALIZER[where]
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline() == "at the end\n"
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    code, said = run.wait(60), run.stderr.read()
    assert code in (130, -signal.SIGINT), said
    assert "Traceback" not in said
