"""Ctrl-C in the middle of a step: nothing is lost, or the optimizer says that it needs a checkpoint.

Python raises ``KeyboardInterrupt`` as a function begins or ends, among other moments. So here the code that queues
updates is interrupted at each of its calls of the library, before and after one of them, in a run of its own. Who goes
on afterwards, as in a notebook, gets the weights and the state of one step, or an error.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

import lightstep
from lightstep.state import versions
from lightstep.state.schema import Managed
from tests.patience import PATIENCE
from tests.unit.test_readers import History, Run, assert_ends_as, same, step_of, undisturbed

LIBRARY = Path(lightstep.__file__).parent
CALLERS = {str(LIBRARY / file) for file in ("optimizer/arrivals.py", "optimizer/overlap.py", "state/lanes.py")}
LAYERS = 2
"""More of them would only let the same moments come more often."""
LOCKS = {"complete", "wait"}  # an interrupt there may leave a lock of the standard library's conditions


class Moment(NamedTuple):
    """``event`` (call, return) of a function that was called in a line of another."""

    caller: CodeType
    line: int
    function: CodeType
    event: str


@contextmanager
def at_moments(handle: Callable[[Moment], None]) -> Iterator[None]:
    """In the body, call ``handle`` as a function of the library begins or ends that one of the callers has called."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event not in ("call", "return") or caller is None or caller.f_code.co_filename not in CALLERS:
            return
        is_resumed = code.co_flags & inspect.CO_GENERATOR  # one also begins and ends when it is deleted
        if code.co_filename.startswith(str(LIBRARY)) and code.co_name not in LOCKS and not is_resumed:
            handle(Moment(caller.f_code, caller.f_lineno, code, event))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def moments_of_two_steps(max_norm: float | None) -> Counter[Moment]:
    run, found = Run("overlap", max_norm=max_norm, layers=LAYERS), Counter[Moment]()
    run.step()
    with at_moments(lambda moment: found.update([moment])):
        run.train(2)
    return found


def interrupt(run: Run, where: Moment, number: int) -> None:
    """Two steps, interrupted when this moment comes for the ``number``-th time."""
    left = number

    def count(moment: Moment) -> None:
        nonlocal left
        left -= moment == where
        if moment == where and left == 0:
            raise KeyboardInterrupt

    with at_moments(count):
        run.train(2)


def go_on(run: Run, history: History) -> None:
    """Go on with the next step that has not been done; it is known from the state."""
    run.optimizer.zero_grad()
    run.optimizer.synchronize()
    weights, state = run.weights(), run.state()
    step = step_of(state, history)
    assert step >= 0, "the state of no step"
    assert same(weights, history[step][0]), "weights and state are of two steps"
    run.steps = step + 1
    run.train(2)
    assert_ends_as(run, history)


@pytest.mark.parametrize("clipped", [False, True])
def test_an_interrupt_loses_nothing_or_is_told(clipped: bool) -> None:
    max_norm = 0.01 if clipped else None
    history, numbers = undisturbed(6, max_norm=max_norm, layers=LAYERS), random.Random(0)
    moments = moments_of_two_steps(max_norm)
    known = moments_of_two_steps(None) if clipped else Counter[Moment]()
    own = {
        moment: times for moment, times in moments.items() if moment not in known
    }  # the other of these tests has them
    interrupted = went_on = 0
    for moment, times in own.items():
        number = numbers.randint(1, times)
        run = Run("overlap", delays=number, max_norm=max_norm, layers=LAYERS)
        run.step()
        try:
            interrupt(run, moment, number)
        except KeyboardInterrupt:
            interrupted += 1
            try:
                go_on(run, history)
                went_on += 1
            except RuntimeError as error:
                assert "half updated" in str(error), (moment, number)
            except AssertionError as error:
                raise AssertionError(f"{moment}, the {number}th time") from error
    assert interrupted > 0.9 * len(own), "the moments of this run are not those of the first"
    assert clipped or went_on > 0.5 * interrupted, "a checkpoint is needed too often"


def test_weights_are_compared_when_updates_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both gather weights in the same memory. Here an interrupt comes when updates in backward are queued, and the
    weights that they will replace are being kept."""
    run, history = Run("overlap"), undisturbed(6)
    run.train(2)
    run.optimizer.synchronize()
    engine, keeps, compared = run.optimizer.engine, threading.Event(), threading.Event()
    compute, find_written, copy = engine.backend.lanes.compute, engine.managed.find_written, versions._copy
    copied: list[Any] = []

    def copy_late(*arguments: Any) -> None:
        copied.append(arguments)
        if len(copied) == 2:
            keeps.set()
            compared.wait(0.2)
        copy(*arguments)

    def compare(items: Iterable[Managed]) -> list[Managed]:
        found = find_written(items)
        if keeps.is_set():
            compared.set()
        return found

    def interrupted(event: object) -> object:
        record = type(compute).record
        if not engine.queue.pending:  # backward begins with a comparison, too
            return record(compute, event)
        del compute.record
        assert keeps.wait(PATIENCE)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_copy", copy_late)
        patch.setattr(engine.managed, "find_written", compare)
        compute.record = interrupted
        with pytest.raises(KeyboardInterrupt):
            run.step()
    go_on(run, history)


def test_a_step_that_ends_between_two_units_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("resident", layers=LAYERS)
    run.step()

    def interrupted(items: Iterable[Managed]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.optimizer.engine.updater, "_record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    with pytest.raises(RuntimeError, match="half updated"):
        run.step()
