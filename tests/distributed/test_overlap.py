"""Updates that are tried in backward, on several ranks: shards as soon as their gradients are reduced."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightstep.distributed import local_tensor
from lightstep.optimizer.overlap import SpeculativeUpdates
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.test_next_forward import LAYOUTS, PRECISIONS, Training, check_same_bits
from tests.distributed.test_replicas import Run, same_runs
from tests.distributed.training import DDP
from tests.unit.test_stream import random_delays, random_sleeps

STATE: dict[str, Any] = {"backend": "stream", "update": "overlap", "ring_mib": 0.01}


def check_verdicts(rank: int, world_size: int, expected: list[str], **settings: Any) -> None:
    """The bits of updates in ``step()``, and what became of what was tried."""
    found: Counter[str] = Counter()
    apply_verdict, roll_back = SpeculativeUpdates._apply_verdict, SpeculativeUpdates._roll_back

    def applied(self: SpeculativeUpdates, speculation: Any, update: Any) -> None:
        found[self._verdict.read()] += bool(speculation.submitted)
        apply_verdict(self, speculation, update)

    def rolled_back(self: SpeculativeUpdates, reason: str) -> Any:
        found["rolled back"] += bool(self.speculation is not None and self.speculation.submitted)
        return roll_back(self, reason)

    def never_pauses(self: SpeculativeUpdates) -> None:
        self._pause = 0

    patches: Any = {"_apply_verdict": applied, "_roll_back": rolled_back, "_update_pause": never_pauses}
    with mock.patch.multiple(SpeculativeUpdates, **patches):
        check_same_bits(rank, world_size, **settings, state=STATE, compute="parameters", seed=1)
    assert [verdict for verdict, number in sorted(found.items()) if number] == expected, found


@pytest.mark.parametrize(
    ("layout", "precision", "max_norm", "expected"),
    [
        ("fsdp2-checkpointed", "bf16", 1e6, ["commit"]),
        ("fsdp2-named-units", "bf16-reduced-in-bf16", 0.05, ["redo"]),
        ("copies", "fp32", 0.05, ["redo"]),
        ("ddp", "bf16", 1e6, []),
        ("ddp-alone", "bf16", 1e6, []),
    ],
)
def test_what_becomes_of_updates(pool: Pool, layout: str, precision: str, max_norm: float, expected: list[str]) -> None:
    """DDP reduces at the end of backward: nothing is tried, and on one rank neither."""
    world_size, sharding = {**LAYOUTS, "ddp-alone": (1, DDP)}[layout]
    settings = {"sharding": sharding, "precision": PRECISIONS[precision], "clipping": {"max_norm": max_norm}}
    pool.run(check_verdicts, world_size, expected=expected, **settings)


@pytest.mark.parametrize("layout", ["fsdp2", "copies"])
def test_overflows(pool: Pool, layout: str) -> None:
    world_size, sharding = LAYOUTS[layout]
    settings = {"sharding": sharding, "clipping": {"max_norm": 1e6}}
    scale = {"kind": "dynamic", "init_scale": 2.0**17, "growth_interval": 1}
    precision = {"parameters": "float16", "loss_scale": scale}
    pool.run(check_verdicts, world_size, expected=["commit", "drop"], **settings, precision=precision)


class Wide(TinyTransformer):
    """Its matrices go through the ring in parts."""

    def __init__(self) -> None:
        super().__init__(width=40)


@on_ranks(2)
def test_parts_of_what_replicas_send(rank: int, world_size: int) -> None:
    """Each replica has room for other units; of a tensor whose last part was tried, the first may be left."""
    tested, expected = (Run(LAYOUTS["copies"][1], s, make_model=Wide) for s in (STATE, {"backend": "resident"}))
    tested.optimizer.max_norm = expected.optimizer.max_norm = 1e6
    tested.train(1)
    lanes = tested.backend.lanes
    (random_delays if lanes.device.type == "cpu" else random_sleeps)(lanes, rank)
    units, able, partly = list(tested.backend.units()), tested.backend.reserve_speculation, 0
    for step in range(4):
        chosen = {unit for number, unit in enumerate(units) if (number + step + rank) % 2}
        with mock.patch.object(
            tested.backend, "reserve_speculation", lambda units, chosen=chosen: able(chosen & {*units})
        ):
            tested.train(1)
        left = {owner for unit in units if unit not in chosen for owner, _, _ in unit.parts}
        partly += any(owner in left for unit in chosen for owner, _, _ in unit.parts)
    assert partly and tested.optimizer.engine.queue.redone == 0
    last = tested.optimizer.engine.queue.early._arrivals.last_in_backward()
    assert [record.unit for record in tested.backend._residency._preferred] == last != []
    expected.train(5)
    same_runs(f"rank {rank}", tested, expected)


def check_redone_twice(rank: int, world_size: int) -> None:
    """Once after a write through the gradients' ``.data``, and once because of clipping."""
    finals = []
    for state in (STATE, {"backend": "stream", "ring_mib": 0.01}):
        values = {"sharding": {"kind": "fsdp2"}, "clipping": {"max_norm": 1e6}, "optimizer_state": state}
        training = Training(rank, world_size, values)
        parameters = list(training.inner.parameters())
        for step in range(6):
            if step == 1:
                training.delay(rank)
            training.optimizer.max_norm = 0.05 if step == 4 else 1e6
            training.optimizer.backward(loss_of(training.model, step, 0, rank, training.device))
            if step == 2:
                for gradient in [p.grad for p in parameters if p.grad is not None]:
                    local_tensor(gradient).data.mul_(0.5)
            result = training.optimizer.step()
        finals.append(training.snapshot())
        redone = result.redone, result.rolled_back
        assert redone == ((2, 0) if state is STATE else (0, 0)), redone
        training.optimizer.close()
    assert finals[0].keys() == finals[1].keys()
    assert [name for name, value in finals[1].items() if not torch.equal(finals[0][name], value)] == []


def test_writes_to_gradients_and_clipping_are_redone(pool: Pool) -> None:
    pool.run(check_redone_twice, 2)


def check_resumed(rank: int, world_size: int, sharding: dict[str, Any], folder: Path, seed: int) -> None:
    """Steps that are clipped, overflow or do neither, at random, with slow lanes and a resume in the middle."""
    scale = {"kind": "dynamic", "init_scale": 2.0**8, "growth_interval": 3}
    values = {"sharding": sharding, "precision": {"parameters": "float16", "loss_scale": scale}}

    def new(state: dict[str, Any]) -> Training:
        return Training(rank, world_size, {**values, "clipping": {"max_norm": 1e6}, "optimizer_state": state})

    choose = random.Random(seed)  # the same on all ranks
    where = {"previous_weights": choose.choice(["device", "host"])}
    tested, expected = new({**STATE, **where}), new({"backend": "resident"})
    resumes_at = choose.randrange(5, 7)
    forced = {2: (1e6, 1.0), 3: (0.05, 1.0), 4: (1e6, float("inf")), 9: (0.05, 1.0)}
    with mock.patch.object(SpeculativeUpdates, "_update_pause", lambda self: setattr(self, "_pause", 0)):
        for step in range(10):
            if step == resumes_at:
                tested.strategy.save_checkpoint(folder, tested.model, tested.optimizer)
                redone = tested.optimizer.engine.queue.redone
                tested.optimizer.close()
                tested = new({**STATE, **where})
                tested.strategy.load_checkpoint(folder, tested.model, tested.optimizer)
                tested.steps = step
            if step in (1, resumes_at):
                tested.delay(world_size * step + rank)
            max_norm, factor = choose.choice([1e6, 1e6, 0.05]), choose.choice([1.0, 1.0, 1.0, float("inf")])
            max_norm, factor = forced.get(step, (max_norm, factor))
            for run in (tested, expected):
                run.optimizer.max_norm = max_norm
                run.optimizer.backward(factor * loss_of(run.model, step, 0, rank, run.device))
                run.optimizer.step()
                run.steps += 1
    found, wanted = tested.snapshot(), expected.snapshot()
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    assert redone and tested.optimizer.engine.queue.redone, "some steps before the resume, and some after it"
    tested.optimizer.close()


def test_random_verdicts_and_a_resume(pool: Pool, tmp_path: Path) -> None:
    world_size, sharding = LAYOUTS["fsdp2-named-units"]
    pool.run(check_resumed, world_size, sharding=sharding, folder=tmp_path / "half", seed=0)
