"""Tables that one stream makes and others read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightstep.precision.adam_batch import corrections
from lightstep.precision.shared_tables import SharedTable


class Streams:
    """A device whose events are complete when a test says so."""

    def __init__(self) -> None:
        self.current, self.waits, self.complete = "maker", list[tuple[str, str]](), False

    def current_stream(self, _: Any) -> Any:
        name = self.current
        return SimpleNamespace(name=name, wait_event=lambda event: self.waits.append((name, event.of)))

    def event(self, _: Any) -> Any:
        event = SimpleNamespace(of="", query=lambda: self.complete)
        event.record = lambda stream: setattr(event, "of", stream.name)
        return event


def test_other_streams_wait_until_a_table_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr("torch.accelerator.current_stream", streams.current_stream)
    monkeypatch.setattr("torch.Event", streams.event)
    tensor = torch.empty(2, device="meta")
    table = SharedTable(tensor)
    streams.current = "another"
    assert table.read() is tensor and streams.waits == [("another", "maker")]
    streams.complete = True
    assert table.read() is tensor and table.read() is tensor
    assert len(streams.waits) == 1


def test_on_the_cpu_nobody_waits() -> None:
    table = corrections(0.9, 0.999, torch.device("cpu"))
    assert table is corrections(0.9, 0.999, torch.device("cpu")) and table is not None
