"""Updates that are tried in backward, on several ranks: shards as soon as their gradients are reduced."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lightstep.optimizer.overlap import Overlap
from tests.distributed.ranks import Pool
from tests.distributed.test_next_forward import LAYOUTS, PRECISIONS, check_same_bits

STATE: dict[str, Any] = {"backend": "stream", "update": "overlap", "ring_mib": 0.01}


def check_verdicts(rank: int, world_size: int, expected: list[str], **settings: Any) -> None:
    """The bits of updates in ``step()``, and what became of what was tried."""
    found: Counter[str] = Counter()
    decide, withdraw, count = Overlap._decide, Overlap.withdraw, Overlap._count_verdict

    def decided(self: Overlap, trial: Any, update: Any) -> None:
        found[self._verdict.read()] += bool(trial.units)
        decide(self, trial, update)

    def withdrawn(self: Overlap) -> None:
        found["withdrawn"] += bool(self._trial is not None and self._trial.units)
        withdraw(self)

    def never_pauses(self: Overlap) -> None:
        self._pause = 0

    Overlap._decide, Overlap.withdraw, Overlap._count_verdict = decided, withdrawn, never_pauses  # type: ignore[method-assign]
    try:
        check_same_bits(rank, world_size, **settings, state=STATE, compute="parameters", seeds=[1])
    finally:
        Overlap._decide, Overlap.withdraw, Overlap._count_verdict = decide, withdraw, count  # type: ignore[method-assign]
    assert [verdict for verdict, number in sorted(found.items()) if number] == expected, found


@pytest.mark.parametrize(
    ("layout", "precision", "max_norm", "expected"),
    [
        ("fsdp2", "bf16", 1e6, ["commit"]),
        ("fsdp2", "bf16", 0.05, ["redo"]),
        ("fsdp2", "bf16-reduced-in-bf16", 0.05, ["redo"]),
        ("fsdp2", "fp32", 1e6, ["commit"]),
        ("fsdp2-kept-gathered", "bf16", 1e6, ["commit"]),
        ("fsdp2-checkpointed", "bf16", 1e6, ["commit"]),
        ("fsdp2-named-units", "fp32", 0.05, ["redo"]),
        ("ddp", "bf16", 1e6, []),
        ("hsdp", "bf16", 1e6, []),
    ],
)
def test_slow_lanes(pool: Pool, layout: str, precision: str, max_norm: float, expected: list[str]) -> None:
    """Replicas that share the work try nothing."""
    world_size, sharding = LAYOUTS[layout]
    settings = {"sharding": sharding, "precision": PRECISIONS[precision], "clipping": {"max_norm": max_norm}}
    pool.run(check_verdicts, world_size, expected=expected, **settings)


def test_overflows(pool: Pool) -> None:
    settings = {"sharding": LAYOUTS["fsdp2"][1], "clipping": {"max_norm": 1e6}}
    scale = {"kind": "dynamic", "init_scale": 2.0**16, "growth_interval": 1}
    precision = {"parameters": "float16", "loss_scale": scale}
    pool.run(check_verdicts, 2, expected=["commit", "drop"], **settings, precision=precision)
