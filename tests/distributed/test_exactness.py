"""FSDP2, HSDP and DDP against hand-written loops with the same sharding: weights, masters and state, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.distributed import local_tensor
from lightstep.state.host_activations import HostActivations
from tests.covering import every_value
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.sharded_reference import DistributedLoop, ReplicatedLoop, ShardedLoop, units_of
from tests.distributed.training import FSDP2, HSDP, LAYOUTS, SINGLE_BUCKETS, Training
from tests.reference.pair import FP16_SCALE, check_state
from tests.reference.tiny_model import representable
from tests.unit.test_next_forward import host_activations_of
from tests.unit.test_stream import random_delays

CASES: dict[str, dict[str, Any]] = {  # other homes and update times are equal to these: `test_update_times.py`
    "bf16-shards": {"precision": {"parameters": "bfloat16"}},
    "fp16-shards-streamed": {
        "precision": {"parameters": "float16", "loss_scale": FP16_SCALE},
        "optimizer_state": {"backend": "stream", "prefetch_layers": 0, "ring_mib": 0.01},
    },
    "bf16-shards-reduced-in-bf16": {"precision": {"parameters": "bfloat16", "reduce": "parameters"}},
    "fp32-shards-checkpointed": {
        "precision": {"parameters": "float32"},
        "sharding": {"activation_checkpointing": True},
    },
    "bf16-shards-sgd-inf-norm": {"optimizer": "SGD", "clipping": {"max_norm": 0.05, "norm_type": "inf"}},
}

HYPERPARAMETERS = {"AdamW": {"lr": 3e-3}, "SGD": {"lr": 0.05, "momentum": 0.9}}


def values_of(case: dict[str, Any], sharding: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in case.get("sharding", {}).items() if key in _keys(sharding["kind"])}
    return {
        "sharding": {**sharding, **own},
        "precision": case.get("precision", {}),
        "clipping": case.get("clipping", {"max_norm": 0.5}),
        "optimizer_state": case.get("optimizer_state", {}),
        "weights": case.get("weights", {}),
    }


def _keys(kind: str) -> set[str]:
    return {"activation_checkpointing"} | ({"reshard_after_forward", "wrap", "compute"} if kind == "fsdp2" else set())


class DistributedPair(Training):
    """A run under lightstep and ``reference``, by hand, trained on the same data on every rank."""

    def __init__(
        self, case: dict[str, Any], sharding: dict[str, Any], make: Callable[[], nn.Module] = TinyTransformer
    ) -> None:
        torch.manual_seed(0)
        self.values, replica = values_of(case, sharding), representable(make())
        optimizer_class = getattr(torch.optim, case.get("optimizer", "AdamW"))

        def groups(model: Any) -> list[dict[str, Any]]:
            own = model.split()
            return [{"params": g["params"]} for g in own] if optimizer_class is torch.optim.SGD else own

        common = HYPERPARAMETERS[optimizer_class.__name__]
        super().__init__(self.values, make, optimizer_class=optimizer_class, groups=groups, **common)
        self.replica: Any = replica.to(self.device, self.strategy.parameter_dtype)
        self.spoil(self.replica)
        self.reference = self._reference(groups(self.replica), optimizer_class, sharding, common)

    def prepare(self, model: nn.Module) -> nn.Module:
        model.get_submodule("frozen").register_full_backward_hook(lambda module, gradients, outputs: None)
        return super().prepare(representable(model))

    def _reference(self, groups: Any, optimizer_class: Any, sharding: dict[str, Any], common: Any) -> DistributedLoop:
        precision, clipping = self.values["precision"], self.values["clipping"]
        settings = {
            "units": units_of(self.replica),
            "loss_scale": precision.get("loss_scale", "none"),
            "reduce": precision.get("reduce", "float32"),
            "max_norm": clipping["max_norm"],
            "norm_type": float(clipping.get("norm_type", 2.0)),
            **common,
        }
        if sharding["kind"] == "ddp":
            return ReplicatedLoop(self.replica, groups, optimizer_class, **settings)
        shard = sharding.get("mesh", {}).get("shard")
        return ShardedLoop(self.replica, groups, optimizer_class, shard=shard, **settings)

    def backward(self, micro: int, micro_batches: int, last: bool) -> None:
        batch = (self.steps, micro, self.rank, self.device)
        with self.accumulate(last):
            self.optimizer.backward(loss_of(self.model, *batch) / micro_batches)
        self.reference.backward(loss_of(self.replica, *batch) / micro_batches)

    def train_beside(self, steps: int, micro_batches: int, overflow_at: tuple[int, ...] = ()) -> None:
        for step in range(steps):
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                self.overflow = last and step in overflow_at and self.rank == 1
                self.backward(micro, micro_batches, last)
            self.overflow = False
            result = self.optimizer.step()
            assert self.reference.step(result.grad_norm) is bool(result) is (step not in overflow_at)
            assert all(parameter.grad is None for parameter in self.model.parameters())
            self.check()
            self.steps += 1

    def named(self) -> list[tuple[str, Tensor, Tensor]]:
        pairs = zip(self.inner.named_parameters(), self.replica.parameters(), strict=True)
        return [(name, parameter, expected) for (name, parameter), expected in pairs]

    def check(self) -> None:
        self.optimizer.synchronize()
        for name, parameter, expected in self.named():
            where = f"rank {self.rank}, step {self.steps}: {name}"
            assert torch.equal(local_tensor(parameter), self.reference.part(expected)), f"{where} differs"
            found = dict(self.optimizer.state[parameter]) if parameter in self.optimizer.state else {}
            found = {key: local_tensor(value) if isinstance(value, Tensor) else value for key, value in found.items()}
            low = parameter.dtype != torch.float32
            check_state(where, found, self.reference.state(expected), self.reference.masters[expected] if low else None)


ROWS = [
    *((3 if case == "fp16-shards-streamed" else 2, case, FSDP2) for case in CASES),
    *((2, case, SINGLE_BUCKETS) for case in CASES),
    (4, "bf16-shards-reduced-in-bf16", HSDP),
]


@on_ranks(None, ("ranks", "case", "sharding"), ROWS)
def test_the_bits_of_loops_by_hand(case: str, sharding: dict[str, Any]) -> None:
    """On three ranks some shards are empty, and others have fewer rows.

    Other precisions of replicas of shards: ``test_branches.py``, ``test_programs.py``.
    """
    pair = DistributedPair(CASES[case], sharding)
    pair.train_beside(steps=2, micro_batches=2, overflow_at=(1,))
    pair.train_beside(steps=1, micro_batches=1)


@every_value(layout=["fsdp2", "fsdp2-kept-gathered", "ddp"], case=["bf16-shards", "fp16-shards-streamed"])
@on_ranks(LAYOUTS)
def test_inputs_of_recomputed_blocks_that_rest_on_the_host(rank: int, sharding: dict[str, Any], case: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostActivations, "SMALLEST", 1)
        pair = DistributedPair({**CASES[case], "sharding": {}}, {**sharding, "activation_checkpointing": "host"})
        (keeper,) = host_activations_of(pair.model)
        random_delays(keeper.lanes, rank, 2e-3)
        pair.train_beside(steps=3, micro_batches=2, overflow_at=(1,))
        assert keeper.sent >= 3 * 2 * 3 and keeper.brought > 0
