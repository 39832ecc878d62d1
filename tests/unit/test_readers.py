"""Readers that come half-way: in other threads, in signal handlers in the middle of a step, in forked processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightstep.optimizer.managed_parameters import ManagedParameters
from lightstep.sharding.parameter_reads import DeferredUpdates
from lightstep.state import host_fields, host_weights, versions
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.training import OnVectors, random_delays, random_sleeps

_STREAM: dict[str, Any] = {"backend": "stream", "ring_mib": 0.02}
DEFERRED = ["next_forward", "overlap", "in_backward"]
STATES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": _STREAM,
    **{update: {**_STREAM, "update": update} for update in DEFERRED},
    "on the host": {**_STREAM, "update": "overlap"},
}


calls: list[Callable[[], object]] = []  # made by the next update of AdamW


class AdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        while calls:
            calls.pop()()
        return super().step(closure)


class Run(OnVectors):
    """A small network; ``slowness`` is a seed of delays in its lanes."""

    rows, width, micro_batches = 4, 24, 1

    def __init__(
        self,
        name: str,
        delays: int | None = None,
        max_norm: float | None = None,
        layers: int = 5,
        weights: str = "device",
    ) -> None:
        super().__init__(
            STATES[name],
            make=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(layers))),
            optimizer_class=AdamW,
            clipping={"max_norm": max_norm},
            weights={"placement": "host" if name == "on the host" else weights},
        )
        self.slowness = delays

    def step(self) -> list[float]:
        losses = super().step()
        self.optimizer.zero_grad()
        backend = self.optimizer.engine.backend
        if self.slowness is not None and backend.supports_lanes:
            slow_down = random_sleeps if self.strategy.device.type == "cuda" else random_delays
            slow_down(backend.lanes, self.slowness + self.steps)
        return losses

    def ones(self) -> Tensor:
        return torch.ones(2, 24, dtype=torch.bfloat16, device=self.strategy.device)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self.model.parameters()]

    def state(self) -> list[Tensor]:
        return tensors_of(self.optimizer.state_dict())

    def everything(self) -> list[Tensor]:
        self.optimizer.synchronize()
        return [*self.weights(), *self.state()]


def tensors_of(state_dict: dict[str, Any]) -> list[Tensor]:
    entries = state_dict["state"]
    return [
        entries[index][key].cpu() for index in sorted(entries) for key in ("exp_avg", "exp_avg_sq", "master", "step")
    ]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.fixture(scope="module")
def history() -> list[tuple[list[Tensor], list[Tensor]]]:
    return undisturbed(42)


def undisturbed(steps: int, **options: Any) -> History:
    """Weights and state after each step of an undisturbed run."""
    run, found = Run("resident", **options), []
    for _ in range(steps):
        run.step()
        found.append((run.weights(), run.state()))
    return found


History = list[tuple[list[Tensor], list[Tensor]]]


def step_of(state: list[Tensor], history: History) -> int:
    """The step after which the state was this; -1: it never was."""
    return next((step for step, (_, known) in enumerate(history) if same(state, known)), -1)


def assert_ends_as(run: Run, history: History) -> None:
    weights, state = history[run.steps - 1]
    assert same(run.everything(), [*weights, *state])


# -- threads


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Do this again and again in a thread until the block is left; yields its errors."""
    stop, errors = threading.Event(), []

    def repeat() -> None:
        generator = random.Random(0)
        try:
            while not stop.is_set():
                work()
                time.sleep(generator.random() * 2e-3)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert not thread.is_alive(), "a deadlock"


def reload(run: Run) -> None:
    with run.optimizer.between_steps():
        run.optimizer.load_state_dict(run.optimizer.state_dict())


OTHERS: dict[str, Callable[[Run], object]] = {
    "entries": lambda run: [dict(run.optimizer.state[p]) for p in run.model.parameters()],
    "weights": lambda run: [parameter.sum() for parameter in run.model.parameters()],
    "dtypes": lambda run: {parameter.dtype for parameter in run.model.parameters()},
    "model": lambda run: run.model.state_dict(),
    "forward": lambda run: run.model(run.ones()),
    "report": lambda run: run.optimizer.memory_report(),
    "copy": lambda run: copy.deepcopy(run.optimizer),
    "synchronize": lambda run: run.optimizer.synchronize(),
    "load": reload,
}


@pytest.mark.parametrize("name", ["stream", "next_forward", "overlap", "in_backward"])
def test_what_another_thread_reads_is_of_one_step(name: str, history: History) -> None:
    run, states, pairs = Run(name, delays=1), [], []
    run.step()

    def read() -> None:
        states.append(run.state())
        with run.optimizer.between_steps():
            pairs.append((run.weights(), run.state()))

    with in_thread(read) as errors:
        while run.steps < 6 or (len(states) < 4 and run.steps < 40 and not errors):
            run.step()
    assert not errors
    assert_ends_as(run, history)
    steps = [step_of(state, history) for state in states]
    assert len(steps) > 3 and steps[0] >= 0 and steps == sorted(steps)
    assert all(same(weights, history[step_of(state, history)][0]) for weights, state in pairs)


@every_value(name=STATES, read=OTHERS)
def test_other_readers_change_nothing(name: str, read: str, history: History) -> None:
    run = Run(name, delays=2)
    run.step()
    with in_thread(lambda: OTHERS[read](run)) as errors:
        run.train(5)
    assert not errors
    assert_ends_as(run, history)


@every_value(asynchronous=[False, True], name=["resident", "overlap", "in_backward"])
def test_a_thread_saves_checkpoints(name: str, asynchronous: bool, tmp_path: Path, history: History) -> None:
    run, saved = Run(name, delays=3), []
    run.step()

    def save() -> None:
        folder = tmp_path / f"save-{len(saved)}"
        handle: Any = run.strategy.save_checkpoint(folder, run.model, run.optimizer, asynchronous=asynchronous)
        if handle is not None:
            handle.result()
        saved.append(folder)

    with in_thread(save) as errors:
        while len(saved) < 2 and run.steps < 40 and not errors:
            run.step()
    assert not errors
    assert_ends_as(run, history)
    for folder in saved:
        loaded = Run("resident")
        loaded.strategy.load_checkpoint(folder, loaded.model, loaded.optimizer)
        step = step_of(loaded.state(), history)
        assert step >= 0 and same(loaded.weights(), history[step][0])


def test_a_thread_trains_another_optimizer(history: History) -> None:
    one, other = Run("overlap", delays=4), Run("overlap", delays=5)
    with in_thread(lambda: other.steps < 40 and other.step()) as errors:
        one.train(5)
    assert not errors
    assert_ends_as(one, history)
    assert_ends_as(other, history)


@pytest.mark.parametrize("name", ["overlap", "in_backward"])
def test_threads_of_autograd_are_not_kept_out(name: str, history: History) -> None:
    """On an accelerator they run the very backward that keeps other threads out."""
    run, seen = Run(name, delays=6), []
    run.step()
    run.optimizer.synchronize()

    def read_in_backward(*_: Any) -> None:
        seen.append(run.model[4][0].weight.sum())

    def of_a_device() -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(read_in_backward)
        leaf.sum().backward()

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=of_a_device)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a deadlock"

    handle = run.model[1].register_full_backward_hook(hook)
    run.train(3)
    handle.remove()
    assert len(seen) == 3
    assert_ends_as(run, history)


def test_a_step_that_begins_is_told_to_readers_in_other_threads() -> None:
    """They may have waited for a module, and would not wait for it again until the step ends."""
    run = Run("next_forward")
    run.step()
    run.optimizer.synchronize()
    before, start, seen = DeferredUpdates.steps, run.optimizer.engine.queue.start, []
    run.optimizer.engine.queue.start = lambda update: (seen.append(DeferredUpdates.steps), start(update))
    run.step()
    assert seen == [before + 1]


def test_the_host_waits_for_devices_in_other_threads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their streams may be others than those of the thread that trains."""
    run, waits = Run("resident"), []
    run.step()
    monkeypatch.setattr(ManagedParameters, "devices", {torch.device("cuda")})
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    run.optimizer.state_dict()
    assert not waits
    thread = threading.Thread(target=run.optimizer.state_dict)
    thread.start()
    thread.join()
    assert len(waits) >= 2


# -- signal handlers and finalizers


@contextmanager
def handling(handler: Callable[[], object]) -> Iterator[None]:
    """Handle SIGALRM in the block."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Reader:
    """Reads like a careless handler, and keeps what it got or was told."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder, self.working = run, folder, False
        self.states: list[list[Tensor]] = []
        self.said: list[str] = []

    def __call__(self) -> None:
        if self.working:
            return
        self.working = True
        for read in (self.read_state, self.save, lambda: [p.sum() for p in self.run.model.parameters()]):
            try:
                read()
            except Exception as error:
                self.said.append(str(error))
        self.working = False

    def read_state(self) -> None:
        self.states.append(self.run.state())

    def save(self) -> None:
        if len(self.states) < 3:
            self.run.strategy.save_checkpoint(self.folder / "save", self.run.model, self.run.optimizer)

    def check(self, history: History, *also_said: str) -> None:
        """It has read states of single steps, was refused the others with a reason, and changed nothing."""
        assert all(step_of(state, history) >= 0 for state in self.states)
        reasons = "in the middle of", "has begun to update", *also_said
        assert [said for said in self.said if not any(reason in said for reason in reasons)] == []
        assert_ends_as(self.run, history)


@pytest.mark.parametrize("name", ["resident", "stream"])
def test_a_handler_in_the_middle_of_an_update_is_told(name: str, history: History, tmp_path: Path) -> None:
    run = Run(name)
    run.step()
    reader = Reader(run, tmp_path)
    with handling(reader):
        for _ in range(3):
            calls.append(lambda: signal.raise_signal(signal.SIGALRM))
            run.step()
            run.optimizer.synchronize()
    assert reader.said
    reader.check(history)


@pytest.mark.parametrize("name", ["stream", "next_forward", "overlap", "in_backward"])
def test_handlers_at_any_moment_leave_the_run_as_it_is(name: str, history: History, tmp_path: Path) -> None:
    run = Run(name, delays=7)
    run.step()
    reader = Reader(run, tmp_path)
    with handling(reader):
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0137)
        run.train(12)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(signal.SIGALRM)  # one comes between two steps, however long a step takes here
    assert reader.states
    reader.check(history)


@pytest.mark.parametrize("verdict", ["commit", "redo"])
def test_a_handler_is_told_between_the_verdict_and_what_follows_from_it(
    verdict: str, history: History, tmp_path: Path
) -> None:
    """Nothing is committed yet, or nothing is speculative any more and the updates by the true factor are not there."""
    run = Run("overlap")
    run.train(3)
    queue, reader = run.optimizer.engine.queue, Reader(run, tmp_path)
    early, compute = queue.early, queue.backend.lanes.compute

    def first_told(owner: Any, method: str) -> Any:
        real = getattr(owner, method)
        return mock.patch.object(owner, method, lambda *arguments: (reader.said or reader(), real(*arguments)))

    assert queue.pending
    follows = first_told(compute, "run") if verdict == "commit" else first_told(queue, "begin")
    with mock.patch.object(early._verdict, "read", return_value=verdict), follows:
        run.model(run.ones())
    assert len(reader.said) == 3 and all("in the middle of" in said for said in reader.said)
    run.train(2)
    assert_ends_as(run, history)


@contextmanager
def at_each_line(modules: Sequence[ModuleType], handle: Callable[[], object]) -> Iterator[None]:
    """In the body, call ``handle`` before each line of these modules runs, the first time that it does."""
    files, lines = {module.__file__ for module in modules}, set[tuple[str, int]]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in lines:
            lines.add(line)
            handle()
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def test_a_handler_may_save_while_memory_is_shared_out(tmp_path: Path) -> None:
    """It waits for the thread that writes, which gives memory back. (Two layers: it saves dozens of times.)"""
    run = Run("overlap", layers=2)
    run.step()
    reader = Reader(run, tmp_path)
    reader.save = lambda: run.strategy.save_checkpoint(tmp_path / "save", run.model, run.optimizer)
    with at_each_line([versions], reader):
        run.train(2)
    assert len(reader.states) > 10
    reader.check(undisturbed(3, layers=2))


def test_a_handler_is_told_while_weights_move(history: History, tmp_path: Path) -> None:
    """Updates in the lanes wait for that: who waited for them in a handler would wait for ever."""
    run = Run("overlap", weights="host")
    run.step()
    reader = Reader(run, tmp_path)
    with at_each_line([host_weights, host_fields], reader):
        run.train(2)
    assert sum("copy of weights from or to the host" in said for said in reader.said) > 10
    reader.check(history, "copy of weights from or to the host")


@pytest.mark.parametrize("name", ["stream", "overlap"])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_handler_may_save_while_the_model_works_with_weights_that_rest_on_the_host(
    name: str, moment: str, history: History, tmp_path: Path
) -> None:
    """Their memory on the device is emptied and filled again afterwards."""
    run, resumed = Run(name, weights="host"), Run(name, weights="host")
    run.train(2)
    saved: list[Path] = []

    def save(*_: Any) -> None:
        if not saved:
            saved.append(tmp_path / "save")
            run.strategy.save_checkpoint(saved[0], run.model, run.optimizer)

    def reach(module: nn.Module, inputs: Any, output: Tensor) -> None:
        save() if moment == "forward" else output.register_hook(save)

    run.model[-1].register_forward_hook(reach)
    run.train(2)
    assert_ends_as(run, history)
    resumed.strategy.load_checkpoint(saved[0], resumed.model, resumed.optimizer)
    resumed.steps = 2
    resumed.train(2)
    assert_ends_as(resumed, history)


def test_a_refusal_that_nobody_catches_ends_the_step_as_an_interrupt_does(history: History) -> None:
    run = Run("stream")
    run.train(2)
    before = run.optimizer.state_dict()
    calls.append(run.optimizer.state_dict)
    with pytest.raises(RuntimeError, match=r"state_dict\(\) in the middle of step\(\) .* set a flag in the handler"):
        run.step()
    with pytest.raises(RuntimeError, match="may be half updated"):
        run.optimizer.step()
    run.optimizer.load_state_dict(before)
    with torch.no_grad():
        for parameter, weight in zip(run.model.parameters(), history[1][0], strict=True):
            parameter.copy_(weight)
    run.train(1)
    assert_ends_as(run, history)


def test_an_optimizer_class_that_reads_the_model_is_told() -> None:
    """In a lane's own thread the read would wait for that thread."""
    run = Run("next_forward")
    run.train(2)
    run.optimizer.synchronize()
    calls.append(run.optimizer.state_dict)
    with pytest.raises(RuntimeError, match=r"failed .*in the middle of"):  # noqa: PT012  (either of them may meet it)
        run.step()
        run.optimizer.synchronize()


# -- forks


def in_fork(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child, or its error as text."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send(work())
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=child)
    process.start()
    try:
        assert mine.poll(PATIENCE), "the child hangs"
        return mine.recv()
    finally:
        process.kill()
        process.join()


def told(*works: Callable[[], Any]) -> list[str]:
    """What each of them says in one forked child."""

    def say(work: Callable[[], Any]) -> str:
        try:
            return repr(work())
        except Exception as error:
            return str(error)

    found: list[str] = in_fork(lambda: [say(work) for work in works])
    return found


def slow(run: Run) -> None:
    """From here on updates are pending for some time."""
    run.optimizer.synchronize()
    run.optimizer.engine.backend.lanes.delay = lambda lane: time.sleep(0.02)


@pytest.mark.parametrize("name", ["next_forward", "overlap"])
def test_a_fork_reads_settings_while_updates_are_pending_and_no_stale_weights(name: str, history: History) -> None:
    run = Run(name)
    run.train(2)
    slow(run)
    run.step()
    weight, refused = run.model[4][0].weight, "which was forked while the parameter was being updated"

    def settings() -> Any:
        return (
            str(next(run.model.parameters()).dtype),
            [(*parameter.shape, parameter.numel(), str(parameter.device)) for parameter in run.model.parameters()],
            [group["lr"] for group in run.optimizer.param_groups],
            [type(parameter).__name__ for parameter in run.model.parameters()],
            weight.requires_grad and weight.is_floating_point() and weight.grad is None and len(weight),
        )

    assert in_fork(settings) == settings()
    run.step()
    reads: list[Callable[[], Any]] = [
        lambda: weight.sum().item(),
        lambda: weight.data.tolist(),
        lambda: weight.detach().tolist(),
        lambda: weight.tolist(),
        lambda: run.model(run.ones()).tolist(),
        lambda: copy.deepcopy(run.model) and 0,
        lambda: weight.data_ptr(),
        lambda: [value.tolist() for value in run.model.state_dict().values()],
    ]
    assert [said for said in told(*reads) if refused not in said] == []
    assert_ends_as(run, history)


@pytest.mark.parametrize("name", ["resident", "in_backward"])
def test_a_fork_neither_trains_nor_reads_state(name: str, history: History) -> None:
    run = Run(name)
    run.train(2)
    run.optimizer.synchronize()
    works: list[Callable[[], Any]] = [
        run.step,
        lambda: run.optimizer.backward(run.model(run.ones()).float().sum()),
        run.optimizer.step,
        run.optimizer.state_dict,
        run.optimizer.synchronize,
        run.optimizer.memory_report,
        run.optimizer.refresh_master_weights,
        lambda: run.optimizer.load_state_dict({}),
        lambda: run.optimizer.state[run.model[0][0].weight],
        lambda: run.strategy.save_checkpoint("/nowhere", run.model, run.optimizer),
        lambda: copy.deepcopy(run.optimizer),
    ]
    expected = repr(run.model(run.ones()).tolist())
    *said, found = told(*works, lambda: run.model(run.ones()).tolist())
    assert [each for each in said if f"a fork of process {os.getpid()}" not in each] == []
    assert found == expected  # as in plain torch
    run.step()
    assert_ends_as(run, history)


@pytest.mark.parametrize(("name", "persistent"), [("overlap", True)])
def test_workers_of_a_data_loader_read_the_dtype(name: str, persistent: bool, history: History) -> None:
    run = Run(name)
    run.train(2)

    def collate(rows: list[Tensor]) -> Tensor:
        return torch.stack(rows).to(next(run.model.parameters()).dtype)

    loader: Any = torch.utils.data.DataLoader(
        list(torch.randn(8, 24)),
        4,
        num_workers=2,
        collate_fn=collate,
        timeout=PATIENCE,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    for _ in range(2):
        slow(run)
        run.step()
        for batch in loader:
            assert batch.dtype == torch.bfloat16
            run.optimizer.engine.backend.lanes.delay = None  # the workers have been forked
            run.step()
    assert_ends_as(run, history)


def test_a_fork_while_another_thread_runs_a_step(history: History) -> None:
    run = Run("next_forward")
    run.train(2)
    run.optimizer.synchronize()
    begun, free = threading.Event(), threading.Event()
    calls.append(lambda: (begun.set(), free.wait(PATIENCE)))
    thread = threading.Thread(target=run.step)
    thread.start()
    assert begun.wait(PATIENCE)
    weight = run.model._modules["4"]._modules["0"]._parameters
    assert in_fork(lambda: str(weight["weight"].dtype)) == "torch.bfloat16"
    assert "was forked while the parameter" in in_fork(lambda: weight["weight"].tolist())
    assert "a fork of process" in in_fork(run.optimizer.state_dict)
    free.set()
    thread.join()
    assert_ends_as(run, history)


def test_a_child_ends_by_itself_and_ends_nothing_of_its_parent(history: History) -> None:
    """It collects its copy of the optimizer, and exits as a script does."""
    run = Run("next_forward")
    run.train(2)
    slow(run)
    run.step()
    child = os.fork()
    if child == 0:
        try:
            run.optimizer = run.model = None
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    run.step()
    assert_ends_as(run, history)
