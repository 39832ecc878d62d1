"""Killed trainers, killed servers and frozen ones, against stand-ins in processes of their own.

``ROLLOUT_FAULTS=50`` makes so many of each kind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.rollout_faults import Faults, StandIn, made_model

COUNT = int(os.environ.get("ROLLOUT_FAULTS", "1"))

pytestmark = pytest.mark.timeout(300 + 60 * COUNT)


@pytest.fixture(scope="module", params=["vllm", "vllm-deltas", "sglang"], name="faults")
def _faults(request: pytest.FixtureRequest) -> Iterator[Faults]:
    kind, _, deltas = request.param.partition("-")
    server = StandIn(kind)
    server.start()
    faults = Faults(server, made_model, deltas=bool(deltas))
    yield faults
    faults.close()
    server.kill()


@pytest.mark.parametrize("kind", ["of_trainers", "of_servers", "of_networks"])
def test_never_is_half_a_set_served(faults: Faults, kind: str) -> None:
    """A frozen server takes a time limit twice, so there are fewer of those."""
    outcome = getattr(faults, kind)(max(1, COUNT // 5) if kind == "of_networks" else COUNT)
    sys.stdout.write(f"{kind}: {outcome}\n")
