"""An optimizer that goes away: its memory is free at once, its hooks are off, and an interrupt then is not lost.

That its last update is in the weights is a program of ``test_programs.py``.
"""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.covering import every_value
from tests.python import python
from tests.reference.pair import EVERY_TIME, IN_BACKWARD
from tests.unit.test_edits import Setup

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


@every_value(scale=["none", {"kind": "constant", "scale": 1024.0}], parameters=["bfloat16", "float32"], kind=EVERY)
def test_everything_is_freed_at_once(kind: str, parameters: str, scale: Any) -> None:
    run = Setup(parameters=parameters, loss_scale=scale, state=EVERY[kind])
    model, optimizer = run.model, run.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(2):
        run.step()
        scheduler.step()
    held = optimizer.state[model[0].weight]
    gone = [weakref.ref(thing) for thing in (optimizer, optimizer.engine, optimizer._backend, *optimizer.managed())]
    masters = [weakref.ref(piece.master) for piece in getattr(optimizer._backend, "_pieces", {}).values()]
    gone += [] if parameters == "float32" else masters
    del scheduler, optimizer, held, run
    assert [reference() for reference in gone if reference() is not None] == []
    assert hooks_on(model) == 0


def test_an_entry_that_somebody_keeps_keeps_nothing_else() -> None:
    setup = Setup("resident").train(0)
    entries, engine = setup.optimizer.state[setup.model[0].weight], weakref.ref(setup.optimizer.engine)
    before = entries["exp_avg"].clone()
    del setup.optimizer
    assert engine() is None
    assert torch.equal(entries["exp_avg"], before)


OF_A_STEP = "torch._dynamo"
"""Imported by the first step of an optimizer, which takes as long as all that these programs do."""

UNDER_WAY = """
import os, signal, sys, threading, time, weakref, torch, lightstep
from torch import nn
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
strategy = lightstep.Strategy.load({"optimizer_state": {"backend": "stream", "update": "next_forward"}})
model = strategy.prepare_model(nn.Linear(8, 8))
optimizer = strategy.create_optimizer(model, lr=1e-2)
def train(delay=None):
    optimizer.backward(model(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
    if delay is not None:
        optimizer._backend.lanes.delay = delay
    optimizer.step()
train()
train()
"""


def test_a_program_ends_while_an_update_is_under_way(tmp_path: Path) -> None:
    stuck = "from lightstep.state import lanes; lanes._LONGEST_EXIT = 1.0\n"
    stuck += UNDER_WAY + "train(delay=lambda lane: time.sleep(600))"
    run = python("-c", stuck, cwd=tmp_path, imported=OF_A_STEP)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr


IN_THE_FINALIZER = """
class Slow:  # its end takes longer than the interrupt waits before it is tried again
    def __del__(self):
        time.sleep(0.1)

def slow(_):
    time.sleep(0.1)

def functions():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back

def interrupt(lane):
    while not was_interrupted.is_set():
        if "uninterrupted" in functions():
            was_interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)

was_interrupted = threading.Event()
optimizer.engine.slow = Slow(), torch.ones(1)
also_slow = weakref.ref(optimizer.engine.slow[1], slow)
train(delay=interrupt)
"""
IN_SUBMISSION = """
from lightstep.optimizer import queue
queue.SUBMIT_IN_STEP = 0
weight = model.weight
train()
old, compute = weight.detach().clone(), optimizer._backend.lanes.compute
submit = compute.run
compute.run = lambda *job: (signal.raise_signal(signal.SIGINT), submit(*job))
"""
AND_GOES_ON = """
try:
    del optimizer
    threading.Event().wait(60)
    print("was not interrupted")
except KeyboardInterrupt:
    sys.exit(130)
"""
INTERRUPTED = {
    "the submission of the last update": IN_SUBMISSION
    + AND_GOES_ON.replace("130", "130 if not torch.equal(weight, old) else 'the update is lost'"),
    "the optimizer's end, behind which there is nothing": IN_THE_FINALIZER + "del optimizer",
    "the end of page-locking": """
import contextlib, weakref
from lightstep.state import host_memory
torch.cuda.device = contextlib.nullcontext
torch.cuda.synchronize = lambda device: signal.raise_signal(signal.SIGINT)
slab = host_memory.HostSlab(8)
weakref.finalize(slab, host_memory._unlock, 0, torch.device("cuda"), host_memory.os.getpid())
""",
}


@pytest.mark.parametrize("where", list(INTERRUPTED))
def test_an_interrupt_in_a_finalizer_is_not_lost(where: str, tmp_path: Path) -> None:
    run = python("-c", UNDER_WAY + INTERRUPTED[where], cwd=tmp_path, imported=OF_A_STEP)
    assert run.returncode in (130, -signal.SIGINT), run.stderr
    assert "Traceback" not in run.stderr
