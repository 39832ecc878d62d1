"""Inputs of recomputed blocks that rest on the host, on several ranks: the plain loop's bits."""

from __future__ import annotations

from typing import Any

import pytest

from lightstep.state.host_activations import HostActivations
from tests.covering import every_value
from tests.distributed.ranks import on_ranks
from tests.distributed.test_exactness import CASES, OWN_BUCKETS, DistributedPair
from tests.unit.test_next_forward import host_activations_of
from tests.unit.test_stream import random_delays

SHARDINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2-kept-gathered": {"kind": "fsdp2", "reshard_after_forward": False},
    "ddp": {"kind": "ddp", "bucket_mib": OWN_BUCKETS, "find_unused_parameters": True},
}


@every_value(sharding=SHARDINGS, case=["bf16-shards", "fp16-shards-streamed"])
@on_ranks(2)
def test_the_same_bits(rank: int, world_size: int, case: str, sharding: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostActivations, "SMALLEST", 1)
        wanted = {**SHARDINGS[sharding], "activation_checkpointing": "host"}
        pair = DistributedPair(rank, world_size, {**CASES[case], "sharding": {}}, wanted)
        (keeper,) = host_activations_of(pair.model)
        random_delays(keeper.lanes, rank, 2e-3)
        pair.train(steps=3, micro_batches=2, overflow_at=(1,))
        assert keeper.sent >= 3 * 2 * 3 and keeper.brought > 0
