"""FSDP2, HSDP and DDP against hand-written loops with the same sharding: weights, masters and state, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.distributed import local_tensor
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, device_of
from tests.distributed.sharded_reference import DistributedLoop, ReplicatedLoop, ShardedLoop
from tests.reference.pair import FP16_SCALE, check_state
from tests.reference.tiny_model import representable

OWN_BUCKETS = 1e-6
"""``bucket_mib`` under which DDP reduces every parameter by itself, as the reference does."""

CASES: dict[str, dict[str, Any]] = {  # other homes and update times are equal to these: `test_homes_and_times.py`
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
    }


def _keys(kind: str) -> set[str]:
    return {"activation_checkpointing"} | ({"reshard_after_forward", "wrap", "compute"} if kind == "fsdp2" else set())


class DistributedPair:
    """``tested`` (lightstep) and ``reference`` (by hand), trained on the same data on every rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        case: dict[str, Any],
        sharding: dict[str, Any],
        make_model: Callable[[], nn.Module] = TinyTransformer,
    ) -> None:
        self.rank, self.device = rank, device_of(rank, world_size)
        self.values = values_of(case, sharding)
        self.strategy = lightstep.Strategy.load(self.values)
        torch.manual_seed(0)
        model = representable(make_model())
        self.replica = copy.deepcopy(model).to(self.device, self.strategy.parameter_dtype)
        self.model = self.strategy.prepare_model(model)
        inner = self.strategy.unwrap_model(self.model)
        name = case.get("optimizer", "AdamW")
        groups, reference_groups = inner.split(), self.replica.split()
        if name == "SGD":
            groups, reference_groups = (
                [{"params": g["params"]} for g in listed] for listed in (groups, reference_groups)
            )
        optimizer_class = getattr(torch.optim, name)
        self.optimizer = self.strategy.create_optimizer(
            self.model, optimizer_class, param_groups=groups, **HYPERPARAMETERS[name]
        )
        self.reference = self._reference(reference_groups, optimizer_class, sharding, HYPERPARAMETERS[name])
        self.overflow = False
        self._arm(self.replica)
        self._arm(inner)

    def _reference(self, groups: Any, optimizer_class: Any, sharding: dict[str, Any], common: Any) -> DistributedLoop:
        precision, clipping = self.values["precision"], self.values["clipping"]
        blocks = [list(block.parameters()) for block in self.replica.blocks]
        inside = {id(parameter) for block in blocks for parameter in block}
        rest = [parameter for parameter in self.replica.parameters() if id(parameter) not in inside]
        settings = {
            "units": [*blocks, rest],
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

    def _arm(self, model: nn.Module) -> None:
        """An inf in this rank's gradient of an activation while ``overflow`` is set."""
        model.frozen.register_full_backward_hook(lambda module, gradients, outputs: None)
        model.blocks[0].register_forward_hook(
            lambda module, inputs, output: output + 0 * output * (float("inf") if self.overflow else 0.0)
        )

    def train(self, steps: int, micro_batches: int, overflow_at: tuple[int, ...] = ()) -> None:
        for step in range(steps):
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                self.overflow = last and step in overflow_at and self.rank == 1
                with self.strategy.accumulate(self.model, last=last):
                    loss = loss_of(self.model, step, micro, self.rank, self.device) / micro_batches
                    self.optimizer.backward(loss)
                self.reference.backward(loss_of(self.replica, step, micro, self.rank, self.device) / micro_batches)
            self.overflow = False
            result = self.optimizer.step()
            assert self.reference.step(result.grad_norm) is bool(result) is (step not in overflow_at)
            assert all(parameter.grad is None for parameter in self.model.parameters())
            self.check(step)

    def named(self) -> list[tuple[str, Tensor, Tensor]]:
        inner = self.strategy.unwrap_model(self.model)
        return [
            (name, parameter, expected)
            for (name, parameter), expected in zip(inner.named_parameters(), self.replica.parameters(), strict=True)
        ]

    def check(self, step: int) -> None:
        self.optimizer.synchronize()
        for name, parameter, expected in self.named():
            where = f"rank {self.rank}, step {step}: {name}"
            assert torch.equal(local_tensor(parameter), self.reference.part(expected)), f"{where} differs"
            found = dict(self.optimizer.state[parameter]) if parameter in self.optimizer.state else {}
            found = {key: local_tensor(value) if isinstance(value, Tensor) else value for key, value in found.items()}
            low = parameter.dtype != torch.float32
            check_state(where, found, self.reference.state(expected), self.reference.masters[expected] if low else None)


def check_exact(rank: int, world_size: int, case: str, sharding: dict[str, Any]) -> None:
    pair = DistributedPair(rank, world_size, CASES[case], sharding)
    pair.train(steps=2, micro_batches=2, overflow_at=(1,))
    pair.train(steps=1, micro_batches=1)


@pytest.mark.parametrize("case", CASES)
def test_fsdp2(pool: Pool, case: str) -> None:
    """On three ranks some shards are empty, and others have fewer rows."""
    pool.run(check_exact, 3 if case == "fp16-shards-streamed" else 2, case=case, sharding={"kind": "fsdp2"})


def test_hsdp(pool: Pool) -> None:
    """Other precisions: ``test_branches.py``, ``test_programs.py``."""
    sharding = {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": 2}}
    pool.run(check_exact, 4, case="bf16-shards-reduced-in-bf16", sharding=sharding)


@pytest.mark.parametrize("case", CASES)
def test_ddp(pool: Pool, case: str) -> None:
    sharding = {"kind": "ddp", "bucket_mib": OWN_BUCKETS, "find_unused_parameters": True}
    pool.run(check_exact, 2, case=case, sharding=sharding)
