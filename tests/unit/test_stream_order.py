"""What one device's lanes do is ordered by events, whatever the home of the state and the time of the updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lightstep
from lightstep.optimizer.overlap import SpeculativeUpdates
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.test_stream_order import HOST, STAYING, check_order
from tests.stream_order import Accesses, Event, Stream, ordered_streams, wait_on_host

SINGLE = {"kind": "single"}
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": {},
    "weights on the host": {"weights": HOST},
    "gradients stay for a while": {"weights": STAYING, "evicts": True},
    "all but moments on the host": {"backend": "bulk", "weights": HOST},
}
UPDATES = {
    "resident": ["in_backward"],
    "bulk": ["next_forward", "overlap"],
    "stream": ["at_step", "next_forward", "overlap", "in_backward"],
    "weights on the host": ["at_step", "next_forward", "overlap", "in_backward"],
    "gradients stay for a while": ["at_step", "overlap"],
    "all but moments on the host": ["overlap"],
}


@pytest.mark.parametrize(
    ("home", "update"), [(home, update) for home, updates in UPDATES.items() for update in updates]
)
def test_everything_is_ordered(home: str, update: str) -> None:
    check_order(0, 1, SINGLE, update, **HOMES[home])


USES = ["reads state", "writes", "evaluates", "saves"]


@pytest.mark.parametrize(("update", "weights"), [("next_forward", {}), ("overlap", HOST)], ids=["device", "host"])
def test_users_between_backward_and_step_and_after_it(
    update: str, weights: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculativeUpdates, "_update_pause", lambda self: setattr(self, "_pause", 0))
    state = {"backend": "stream", "ring_mib": 0.01, "update": update}
    with ordered_streams() as accesses:
        strategy = lightstep.Strategy.load(
            {"optimizer_state": state, "clipping": {"max_norm": 0.5}, "weights": weights}
        )
        torch.manual_seed(0)
        model: Any = TinyTransformer()
        model.blocks = model.blocks[:2]
        model = strategy.prepare_model(model)
        optimizer: Any = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
        wait_on_host()

        def use(how: str, before_step: bool) -> None:
            if how == "reads state":
                optimizer.state_dict()
            elif how == "writes":
                if not before_step or update == "next_forward":  # the other has begun to update them
                    for parameter in model.parameters():
                        parameter.data.mul_(0.5)
            elif how == "evaluates":
                with torch.no_grad():
                    loss_of(model, 9, 0, 0, torch.device("cpu"))
            elif how == "saves":
                strategy.save_checkpoint(tmp_path / "saved", model, optimizer)

        for step, how in enumerate(["", "", *USES]):
            optimizer.backward(loss_of(model, step, 0, 0, torch.device("cpu")))
            use(how, before_step=True)
            optimizer.step()
            use(how, before_step=False)
        strategy.close()
    assert not accesses.conflicts, "\n".join(accesses.conflicts)


def accesses_of(*steps: str) -> Accesses:
    """Of two streams, ``a`` and ``b``: ``aw`` writes, ``br`` reads, ``a>b`` makes b wait for a."""
    with ordered_streams() as accesses:
        memory, streams = torch.zeros(8), {name: Stream(name=name) for name in "ab"}
        event = streams["a"].record_event()
        accesses.forget(memory.untyped_storage().data_ptr())
        for step in steps:
            first, last = step[0], step[-1]
            if ">" in step:
                streams[last].wait_event(streams[first].record_event(event))
                continue
            with streams[first]:
                memory[4:].add_(1.0) if last == "w" else memory[3:5].clone()
    return accesses


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["aw", "br"], True),
        (["aw", "a>b", "br"], False),
        (["ar", "bw"], True),
        (["ar", "a>b", "bw"], False),
        (["ar", "br"], False),
        (["a>b", "aw", "br"], True),
        (["aw", "a>b", "br", "aw"], True),
        (["aw", "a>b", "br", "b>a", "aw"], False),
    ],
)
def test_a_conflict_is_what_no_event_orders(steps: list[str], expected: bool) -> None:
    assert bool(accesses_of(*steps).conflicts) is expected


def test_what_the_host_has_waited_for_is_in_front_of_all_that_it_submits_later() -> None:
    with ordered_streams() as accesses:
        memory, first, second, event = torch.zeros(8), Stream(), Stream(), Event()
        first.wait_stream(torch.cpu.current_stream())
        with first:
            memory.add_(1.0)
            event.record()
        event.synchronize()
        with second:
            memory.add_(1.0)
    assert not accesses.conflicts
