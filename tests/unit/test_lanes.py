"""The lanes' ordering rules, as threads: the same rules that streams keep on an accelerator."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightstep.state.lanes import LaneError, Lanes
from tests.patience import PATIENCE
from tests.python import python

CPU = torch.device("cpu")


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(CPU)
    yield made
    if made.failed:
        made.reset()
    made.close()


def test_a_lane_keeps_the_order_it_was_given_and_is_closed_with_all_done(lanes: Lanes) -> None:
    done: list[int] = []
    for i in range(100):
        lanes.compute.run(lambda i=i: done.append(i))
    lanes.compute.run(lambda: time.sleep(0.02))
    lanes.close()
    assert done == list(range(100))
    assert not any(lane._thread.is_alive() for lane in lanes._all())
    lanes.close()


def test_lanes_run_beside_each_other_and_beside_the_caller(lanes: Lanes) -> None:
    """Each of three jobs needs the other two to be running: in one thread they would wait for ever."""
    meeting = threading.Barrier(4, timeout=PATIENCE)
    for lane in (lanes.host_to_device, lanes.compute, lanes.device_to_host):
        lane.run(meeting.wait)
    meeting.wait()
    lanes.synchronize()


def test_a_lane_computes_with_as_many_threads_as_its_maker() -> None:
    """The bits of a decomposition depend on their number."""
    before, found = torch.get_num_threads(), list[torch.Tensor]()
    matrix = torch.randn(160, 4) @ torch.randn(4, 32)
    torch.set_num_threads(before + 1)
    lanes = Lanes(CPU)
    try:
        lanes.compute.run(lambda: found.append(torch.linalg.svd(matrix, full_matrices=False).U))
        lanes.synchronize()
        assert torch.equal(found[0], torch.linalg.svd(matrix, full_matrices=False).U)
    finally:
        torch.set_num_threads(before)
        lanes.close()


def test_a_wait_is_not_for_records_after_it(lanes: Lanes) -> None:
    event, late, gate, done = lanes.event(), threading.Event(), threading.Event(), threading.Event()
    lanes.compute.run(late.wait)  # comes to its wait when the event has been recorded again
    lanes.host_to_device.record(event)
    lanes.compute.wait(event)
    lanes.compute.run(done.set)
    lanes.host_to_device.run(gate.wait)
    lanes.host_to_device.record(event)
    late.set()
    try:
        assert done.wait(30)
    finally:
        gate.set()
    lanes.synchronize()


def fail() -> None:
    raise ValueError("no such page")


def test_a_failure_is_raised_once_with_its_name_and_stops_all_lanes(lanes: Lanes) -> None:
    event, gate, done = lanes.event(), threading.Event(), []
    lanes.host_to_device.run(gate.wait)  # whoever queues first would be told of it
    lanes.host_to_device.run(fail, label="fetching layers.3")
    lanes.host_to_device.record(event)
    lanes.compute.wait(event)  # never reached; must not hang
    lanes.compute.run(lambda: done.append(1))
    gate.set()
    with pytest.raises(
        LaneError, match=r"fetching layers\.3 failed in the host_to_device lane: ValueError: no such page"
    ) as raised:
        lanes.synchronize()
    assert isinstance(raised.value.__cause__, ValueError)
    assert lanes.failed
    assert done == []
    for use in (lanes.synchronize, lambda: lanes.compute.run(fail), lambda: lanes.caller().wait(event)):
        with pytest.raises(LaneError, match=r"the lanes stopped because fetching layers\.3 failed.*load a checkpoint"):
            use()


def test_a_caller_that_waits_for_a_failed_lane_is_woken(lanes: Lanes) -> None:
    event, gate = lanes.event(), threading.Event()
    lanes.host_to_device.run(gate.wait)
    lanes.host_to_device.run(fail)
    lanes.host_to_device.record(event)
    threading.Timer(0.02, gate.set).start()
    with pytest.raises(LaneError, match="a job failed in the host_to_device lane"):
        lanes.caller().wait(event)


def test_lanes_work_again_after_a_reset(lanes: Lanes) -> None:
    event, done = lanes.event(), []
    lanes.host_to_device.run(fail)
    lanes.host_to_device.record(event)
    lanes.host_to_device.synchronize()
    lanes.reset()
    assert not lanes.failed
    lanes.caller().wait(event)  # the record behind the failure was dropped; it must not hold anybody back now
    lanes.compute.wait(event)
    lanes.compute.run(lambda: done.append(1))
    lanes.synchronize()
    assert done == [1]


def test_forgotten_lanes_end_their_threads() -> None:
    lanes = Lanes(CPU)
    lanes.compute.run(lambda: None)
    lanes.synchronize()
    threads = [lane._thread for lane in lanes._all()]
    gone = weakref.ref(lanes)
    del lanes
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive()


def test_a_process_ends_well_while_lanes_are_busy() -> None:
    """Python aborts a process that ends while a daemon thread is in a torch operation."""
    program = """
import atexit, os, torch

@atexit.register  # called after all that is registered later
def at_the_end():
    lanes.compute.run(lambda: os.write(1, b"late job\\n"))
    lanes.synchronize()

from lightstep.state.lanes import Lanes

lanes, dropped = Lanes(torch.device("cpu")), Lanes(torch.device("cpu"))

def work():
    for _ in range(200):
        torch.randn(200, 200) @ torch.randn(200, 200)

for each in (lanes, dropped):
    done = each.event()
    each.compute.run(work)
    each.compute.record(done)
    each.device_to_host.wait(done)
    each.device_to_host.run(lambda: os.write(1, b"done\\n"))
del each, dropped
"""
    ended = python("-c", program, cwd=Path.cwd())
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["done", "done", "late job"]
