"""Training on several ranks, and what two runs are compared by: for most tests of this folder.

:class:`Training` is one run under one strategy, and :func:`assert_same_bits` holds two of them side by side.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lightstep
from lightstep.distributed import local_tensor
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import device_of
from tests.reference.pair import FP16_SCALE
from tests.unit.test_stream import random_delays, random_sleeps

FSDP2: dict[str, Any] = {"kind": "fsdp2"}
HSDP: dict[str, Any] = {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": 2}}
COPIES: dict[str, Any] = {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": 1}}
UNITS: dict[str, Any] = {"kind": "fsdp2", "wrap": ["Block", "embed", "head"]}
DDP: dict[str, Any] = {"kind": "ddp", "find_unused_parameters": True}
SINGLE_BUCKETS: dict[str, Any] = {**DDP, "bucket_mib": 1e-6}
"""DDP reduces every parameter by itself, as the reference does."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, FSDP2),
    "fsdp2-kept-gathered": (2, {**FSDP2, "reshard_after_forward": False}),
    "fsdp2-checkpointed": (2, {**FSDP2, "activation_checkpointing": True}),
    "fsdp2-named-units": (2, UNITS),
    "ddp": (2, SINGLE_BUCKETS),
    "ddp-alone": (1, DDP),
    "hsdp": (4, HSDP),
    "copies": (2, COPIES),
}
"""Ranks, and their sharding."""

RESIDENT: dict[str, Any] = {"backend": "resident"}
STREAM: dict[str, Any] = {"backend": "stream", "ring_mib": 0.01}
DEFERRED: dict[str, Any] = {**STREAM, "update": "next_forward"}
OVERLAP: dict[str, Any] = {**STREAM, "update": "overlap"}

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"parameters": "bfloat16"},
    "bf16-reduced-in-bf16": {"parameters": "bfloat16", "reduce": "parameters"},
    "fp16": {"parameters": "float16", "loss_scale": FP16_SCALE},
    "fp32": {"parameters": "float32"},
}


class Training:
    """A tiny transformer under one strategy; batches depend on rank and step.

    Args:
        values: the strategy file.
        make: the model.
        groups: of its parameters.
        seed: of its weights.
        arguments: of ``create_optimizer``.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        make: Callable[[], nn.Module] = TinyTransformer,
        *,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        groups: Callable[[Any], Any] = lambda model: model.split(),
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device_of(self.rank, self.world_size)
        self.make, self.seed, self.groups = make, seed, groups
        self.arguments = {"optimizer_class": optimizer_class, "lr": 1e-2, **arguments}
        self.steps, self.overflow, self.norms = 0, False, list[Tensor]()
        self.begin(values)

    def begin(self, values: Mapping[str, Any]) -> None:
        """With a new model and optimizer."""
        self.strategy = lightstep.Strategy.load(values)
        torch.manual_seed(self.seed)
        self.model: Any = self.prepare(self.make())
        self.inner: Any = self.strategy.unwrap_model(self.model)  # once: this waits for updates
        groups = self.groups(self.inner)
        self.optimizer: Any = self.strategy.create_optimizer(self.model, param_groups=groups, **self.arguments)
        self.spoil(self.inner)

    def spoil(self, model: nn.Module) -> None:
        """An inf is in this rank's gradients of what ``model`` returns while :attr:`overflow` is set."""
        run = weakref.proxy(self)  # who gives up a run gives up its model
        model.register_forward_hook(
            lambda module, inputs, output: output + 0 * output * float("inf") if run.overflow else None
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        return self.strategy.prepare_model(model)

    @property
    def backend(self) -> Any:
        return self.optimizer._backend

    def loss(self, micro: int = 0) -> Tensor:
        return loss_of(self.model, self.steps, micro, self.rank, self.device)

    def micro_batches(self) -> int:
        return 1 + self.steps % 2

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        return self.strategy.accumulate(self.model, last=last)

    def step(self, overflow: bool = False) -> list[float]:
        """:meth:`backward` and :meth:`update`."""
        losses = self.backward(overflow)
        self.update()
        return losses

    def backward(self, overflow: bool = False) -> list[float]:
        """Losses of a step's micro-batches.

        Args:
            overflow: in the last micro-batch of rank 1.
        """
        losses, last = [], self.micro_batches() - 1
        for micro in range(last + 1):
            self.overflow = overflow and micro == last and self.rank == 1
            with self.accumulate(last=micro == last):
                loss = self.loss(micro) / 2
                losses.append(loss.item())
                self.optimizer.backward(loss)
        self.overflow = False
        return losses

    def update(self) -> None:
        self.result = self.optimizer.step()
        self.norms.append(self.result.grad_norm)
        self.steps += 1

    def train(self, steps: int) -> list[list[float]]:
        return [self.step() for _ in range(steps)]

    def evaluate(self) -> float:
        with torch.no_grad():
            return loss_of(self.model, 0, 0, self.rank, self.device).item()

    def snapshot(self) -> dict[str, Tensor]:
        """This rank's weights and state by name."""
        self.optimizer.synchronize()
        found = self.weights()
        for name, parameter in self.inner.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}/{key}"] = local_tensor(torch.as_tensor(value)).cpu().clone()
        return found

    def weights(self) -> dict[str, Tensor]:
        """This rank's."""
        return {name: local_tensor(p).detach().cpu().clone() for name, p in self.inner.named_parameters()}

    def delay(self, seed: int, longest: float = 2e-3) -> None:
        slow_lanes(self.optimizer, seed, longest)


def slow_lanes(optimizer: Any, seed: int, longest: float = 2e-3) -> None:
    """In the lanes of the state, and of weights that rest on the host, threads sleep; on a GPU sleep kernels run."""
    weights = optimizer.engine._host_weights
    for lanes in (optimizer._backend.lanes, None if weights is None else weights.lanes):
        if lanes is not None and lanes.device.type == "cpu":
            random_delays(lanes, seed, longest)
        elif lanes is not None:
            random_sleeps(lanes, seed, int(longest * 2e9))


def same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: object = "") -> None:
    assert found.keys() == wanted.keys(), where
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == [], where


def assert_same_bits(
    tested: Any, expected: Any, *does: str, seed: int = 0, longest: float = 2e-3, before_slow: int = 1
) -> None:
    """What both do returns the same, and leaves the same weights and state.

    Args:
        does: methods of both.
        seed: of the delays of ``tested``, whose lanes are slow after so many of the methods as ``before_slow``.
    """
    wanted = [getattr(expected, name)() for name in does], expected.snapshot()
    found = [getattr(tested, name)() for name in does[:before_slow]]
    tested.delay(seed, longest)
    found += [getattr(tested, name)() for name in does[before_slow:]]
    assert found == wanted[0], f"seed {seed}"
    same_tensors(tested.snapshot(), wanted[1], f"seed {seed}")


# -- one call each, for tests whose model or loop is their own


def load(sharding: dict[str, Any], **sections: Any) -> lightstep.Strategy:
    return lightstep.Strategy.load({"sharding": sharding, **sections})


def made(
    sharding: dict[str, Any],
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    lr: float = 1e-2,
    sections: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[lightstep.Strategy, Any, Any]:
    """Strategy, prepared model and optimizer."""
    strategy = load(sharding, **(sections or {}))
    prepared = strategy.prepare_model(model)
    return strategy, prepared, strategy.create_optimizer(prepared, optimizer_class, lr=lr, **settings)


def train(
    strategy: lightstep.Strategy, model: nn.Module, optimizer: Any, steps: int = 2, micro_batches: int = 2
) -> list[Any]:
    results = []
    for step in range(steps):
        for micro in range(micro_batches):
            with strategy.accumulate(model, last=micro == micro_batches - 1):
                optimizer.backward(loss_of(model, step, micro, strategy.rank, strategy.device) / micro_batches)
        results.append(optimizer.step())
    return results


def full(parameter: Tensor) -> Tensor:
    whole = parameter.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole.clone()


def weights_of(strategy: lightstep.Strategy, model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in strategy.unwrap_model(model).named_parameters()}


def same_on_all_ranks(model: nn.Module) -> bool:
    flat = torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return all(torch.equal(flat, other) for other in everybody)


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Fills a counter, when the block ends, with the c10d operations that this process started in it, by name.

    Those of FSDP, DDP and DTensor are among them.
    """
    counted: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield counted
    for event in profile.events():
        namespace, _, name = event.name.partition("::")
        if namespace == "c10d":
            counted[name] += 1
