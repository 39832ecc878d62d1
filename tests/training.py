"""Training under a strategy, of tiny models on batches that depend on the step alone.

Two runs that may differ in the time and place of their updates, and in nothing else, have the same losses and the same
snapshot. (:mod:`tests.reference.pair` has a run beside the textbook loop.)
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lightstep
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_activations import HostActivations
from lightstep.state.lanes import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Lanes
from tests.distributed.models import CLASSES, VOCABULARY, TinyTransformer


def made(
    values: Any, model: nn.Module, optimizer_class: Any = torch.optim.AdamW, **settings: Any
) -> tuple[lightstep.Strategy, Any, Any]:
    """Strategy, prepared model and optimizer."""
    strategy = lightstep.Strategy.load(values)
    model = strategy.prepare_model(model)
    return strategy, model, strategy.create_optimizer(model, optimizer_class, **settings)


class Training:
    """A tiny transformer under one strategy; batches depend on the step alone.

    Args:
        groups: makes the optimizer's parameter groups of the model, which may have a ``split()`` of its own.
    """

    micro_batches = 2

    def __init__(
        self,
        state: dict[str, Any],
        parameters: str = "bfloat16",
        make: Callable[[], nn.Module] = TinyTransformer,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        clipping: dict[str, Any] | None = None,
        loss_scale: Any = None,
        weights: dict[str, Any] | None = None,
        recompute: bool | str = False,
        master_weights: bool | str = True,
        reduce: str = "float32",
        groups: Callable[[nn.Module], Any] | None = None,
        **hyperparameters: Any,
    ) -> None:
        torch.manual_seed(0)
        scale = {"kind": "dynamic", "init_scale": 2.0**10, "growth_interval": 3} if parameters == "float16" else "none"
        self.strategy = lightstep.Strategy.load(
            {
                "precision": {
                    "parameters": parameters,
                    "loss_scale": loss_scale or scale,
                    "master_weights": master_weights,
                    "reduce": reduce,
                },
                "clipping": clipping or {"max_norm": 0.5},
                "optimizer_state": state,
                "weights": weights or {},
                "sharding": {"kind": "single", "activation_checkpointing": recompute},
            }
        )
        self.model = self.strategy.prepare_model(make())
        made = groups(self.model) if groups else self.model.split() if hasattr(self.model, "split") else None
        self.optimizer: Any = self.strategy.create_optimizer(
            self.model, optimizer_class, param_groups=made, **{"lr": 1e-2, **hyperparameters}
        )
        self.steps = 0

    def loss(self, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + micro)
        tokens = torch.randint(VOCABULARY, (4, 6), generator=generator)
        targets = torch.randint(CLASSES, (24,), generator=generator)
        return nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1), targets)

    def step(self) -> list[float]:
        losses = []
        for micro in range(self.micro_batches):
            loss = self.loss(micro)
            losses.append(loss.item())
            with self.strategy.accumulate(self.model, last=micro == self.micro_batches - 1):
                self.optimizer.backward(loss / self.micro_batches)
        self.before_step()
        self.optimizer.step()
        self.steps += 1
        return losses

    def before_step(self) -> None:
        """Nothing."""

    def train(self, steps: int) -> list[list[float]]:
        return [self.step() for _ in range(steps)]

    def snapshot(self) -> dict[str, Tensor]:
        """Weights and all state by name."""
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            found.update({f"{name}/{key}": torch.as_tensor(v) for key, v in self.optimizer.state[parameter].items()})
        return {key: value.cpu().clone() for key, value in found.items()}

    def delays(self, seed: int, longest: float = 1e-3) -> None:
        for number, lanes in enumerate(self.lanes()):
            random_delays(lanes, seed + number, longest)

    def lanes(self) -> list[Lanes]:
        """Those of the state, and of weights and activations on the host."""
        visits = PreparedModel.of(self.model).weight_visits
        kept = [found.lanes for found in host_activations_of(self.model)]
        return [self.optimizer._backend.lanes, *([] if visits is None else [visits.weights.lanes]), *kept]


class OnVectors(Training):
    """Of a model that takes vectors, ``[rows, width]``; the loss is the mean of the squares of what it returns."""

    rows, width = 5, 6

    def loss(self, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + micro)
        inputs = torch.randn(self.rows, self.width, generator=generator)
        inputs = inputs.to(self.strategy.device, next(self.model.parameters()).dtype)
        return self.model(inputs).float().square().mean()


def host_activations_of(model: nn.Module) -> list[HostActivations]:
    """What keeps the inputs of its blocks on the host: at most one."""
    own = ("checkpoint_fn", "_gradient_checkpointing_func")
    calls = [vars(module)[name] for module in model.modules() for name in own if name in vars(module)]
    while any(isinstance(call, functools.partial) for call in calls):
        calls = [call.func if isinstance(call, functools.partial) else call for call in calls]
    return list(
        {owner: None for call in calls if isinstance(owner := getattr(call, "__self__", None), HostActivations)}
    )


def assert_same(tested: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tested.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(tested[key], expected[key])] == []


def random_delays(lanes: Lanes, seed: int, longest: float = 3e-4) -> None:
    """Sleep before half of the jobs of each lane, the caller's work included; some lanes are slower than others."""
    generator = random.Random(seed)
    slowness = {name: generator.choice([0.1, 0.3, 1.0]) for name in (HOST_TO_DEVICE, COMPUTE, DEVICE_TO_HOST)}

    def delay(lane: str) -> None:
        if generator.random() < 0.5:
            time.sleep(generator.random() * longest * slowness[lane])

    lanes.delay = delay


def random_sleeps(lanes: Lanes, seed: int, longest: int = 300_000) -> None:
    """The same with sleep kernels on a GPU; ``longest`` in clock cycles."""
    generator = random.Random(seed)
    slowness = {name: generator.choice([0.1, 0.5, 1.0]) for name in (HOST_TO_DEVICE, COMPUTE, DEVICE_TO_HOST)}

    def sleep(lane: str) -> None:
        if generator.random() < 0.5:
            torch.cuda._sleep(int(generator.random() * longest * slowness[lane]))

    lanes.delay = sleep
