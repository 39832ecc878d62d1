"""lightstep's optimizer container in torchtitan's own trainer (0.3.0): put this file beside your config_registry.py.

    from torchtitan_config import optimizer_config

    def llama3_8b_streamed() -> Trainer.Config:
        config = llama3_8b()
        groups = default_adamw(lr=3e-4).param_groups
        config.optimizer = optimizer_config("fp32-stream", {"clipping.max_norm": None}, param_groups=groups)
        return config

``python examples/torchtitan_config.py`` builds torchtitan's container and two of lightstep's (state on the host, all on
the host) as the trainer does, and trains two stages of a small model with each: every bit of the weights is the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components import optimizer as titan
from torchtitan.distributed import utils as dist_utils

from lightstep import ConfigError, Strategy
from lightstep.integrations.torchtitan import OptimizersContainer


def optimizer_config(
    strategy: str, overrides: Mapping[str, Any] | None = None, **fields: Any
) -> titan.OptimizersContainer.Config:
    """The ``optimizer`` of a torchtitan ``Trainer.Config``.

    Args:
        strategy: a name or file. ``sharding.kind`` is ``single``, because torchtitan shards; ``clipping.max_norm`` and
            ``precision.loss_scale`` are off, because it clips (``training.max_norm``) and calls ``backward`` itself.
            With ``weights.placement: host`` the step clips, and ``clipping.max_norm`` is ``training.max_norm``.
        overrides: for the strategy.
        fields: of torchtitan's own ``Config``: ``param_groups``, ``implementation``.
    """
    return LightstepContainer.Config(strategy=strategy, overrides=dict(overrides or {}), **fields)


class LightstepContainer(OptimizersContainer, titan.OptimizersContainer):
    """lightstep's container as one of torchtitan's, with the ``Config`` that its trainer builds.

    Raises:
        ConfigError: the strategy shards, clips or scales the loss, or the config asks for what lightstep does not have.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.OptimizersContainer.Config):
        strategy: str = "fp32-stream"
        """Name or file of a lightstep strategy."""

        overrides: dict[str, Any] = field(default_factory=dict)
        """Dotted keys laid over the strategy."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        strategy = Strategy.load(config.strategy, config.overrides)
        refuse_what_torchtitan_does(strategy)
        optimizer_class, groups = class_and_groups(config)
        OptimizersContainer.__init__(self, strategy, model_parts, optimizer_class, param_groups=groups)
        if strategy.config.weights.placement == "host":
            let_the_step_clip(self)


def refuse_what_torchtitan_does(strategy: Strategy) -> None:
    """Sharding, clipping and scaling are the trainer's; clipping is the step's if gradients leave in backward."""
    config = strategy.config
    found = {
        "sharding.kind": (config.sharding.kind, "single", "torchtitan shards the model"),
        "clipping.max_norm": (config.clipping.max_norm, None, "torchtitan clips (training.max_norm)"),
        "precision.loss_scale": (config.precision.loss_scale.kind, "none", "torchtitan calls loss.backward()"),
    }
    if config.weights.placement == "host":
        del found["clipping.max_norm"]
        if config.clipping.max_norm is None:
            raise ConfigError(
                f"{strategy.name}: clipping.max_norm is None, and weights.placement host takes gradients to the host "
                "before torchtitan can clip them: set it to the value of training.max_norm"
            )
        if config.optimizer_state.update == "in_backward":
            raise ConfigError(
                f"{strategy.name}: optimizer_state.update is 'in_backward', with weights.placement host: torchtitan "
                "asks for the norm before the step; set update to 'at_step', 'next_forward' or 'overlap'"
            )
    for key, (value, needed, why) in found.items():
        if value != needed:
            raise ConfigError(f"{strategy.name}: {key} is {value!r}, and {why}: set it to {needed or 'null'}")


def let_the_step_clip(container: LightstepContainer) -> None:
    """Have ``clip_grad_norm_``, which the trainer calls, return the norm by which the container's step clips.

    The gradients have left for the host in backward, and ``p.grad`` is ``None``: torchtitan would clip nothing, and log
    a norm of 0.
    """
    plain, reference = dist_utils.clip_grad_norm_, weakref.ref(container)

    @functools.wraps(plain)
    def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float, *others: Any, **named: Any) -> Any:
        given, own = list(parameters), reference()
        if own is None or {p for group in own.param_groups for p in group["params"]}.isdisjoint(given):
            return plain(given, max_norm, *others, **named)
        if max_norm != own.optimizer.max_norm:
            raise ConfigError(
                f"training.max_norm is {max_norm}, and {own.strategy.name} has clipping.max_norm "
                f"{own.optimizer.max_norm}: with weights.placement host the step clips; set both to one value"
            )
        return own.optimizer.grad_norm()

    dist_utils.clip_grad_norm_ = clip_grad_norm_


def class_and_groups(config: Any) -> tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]:
    """The class of the first group, and the groups, with their classes if these differ."""
    names = list(dict.fromkeys(group.optimizer_name for group in config.param_groups))
    unknown = [name for name in names if name not in ("Adam", "AdamW", "Muon")]
    if unknown or not names:
        raise ConfigError(f"optimizer.param_groups name {unknown or 'nothing'}; Adam, AdamW and Muon are known")
    if config.implementation == "fused_opt_states_bf16":
        raise ConfigError(
            "optimizer.implementation is 'fused_opt_states_bf16'; leave it out, and for moments in bf16 set "
            "optimizer_state.moments: bfloat16 in the strategy"
        )
    if config.optimizer_factory_kwargs_by_name:
        raise ConfigError("optimizer.optimizer_factory_kwargs_by_name is for torchtitan's DistMuon; leave it out")
    how = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
    groups = []
    for group in config.param_groups:
        chosen = getattr(torch.optim, group.optimizer_name)
        asked = {} if chosen is torch.optim.Muon else how  # torch's Muon has one implementation
        named = {"optimizer_class": chosen} if len(names) > 1 else {}
        groups.append({"pattern": group.pattern, **named, **asked, **group.optimizer_kwargs})
    return getattr(torch.optim, names[0]), groups


# -- the same weights as with torchtitan's own container

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = {str(number): nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for number in range(4)}
    return [nn.ModuleDict({name: layers[name] for name in names}) for names in ("01", "23")]


def train(container: Any, parts: list[nn.Module]) -> list[float]:
    """In the order of torchtitan's ``train_step``: backward, one norm over all parts, step, schedule. The norms."""
    schedule = titan.LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=container, training_steps=9)
    norms = []
    for step in range(5):
        container.zero_grad()
        hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        for part in parts:
            for layer in part.children():
                hidden = hidden + layer(hidden)
        hidden.square().mean().backward()
        parameters = [p for part in parts for p in part.parameters()]
        norms.append(float(dist_utils.clip_grad_norm_(parameters, 0.1, foreach=True)))
        container.step()
        schedule.step()
    return norms


def main() -> None:
    groups = titan.default_adamw(lr=1e-2).param_groups
    on_host = {"clipping.max_norm": 0.1, "weights.placement": "host"}
    configs = [
        titan.OptimizersContainer.Config(param_groups=groups),
        optimizer_config("fp32-stream", {"clipping.max_norm": None}, param_groups=groups),
        optimizer_config("fp32-stream", on_host, param_groups=groups),
    ]
    (norms, weights, state), *others = [train_with(config) for config in configs]
    assert all(norm > 0.1 for norm in norms)
    for other_norms, other_weights, other_state in others:
        assert other_norms == norms
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other_weights, weights, strict=True))
        assert other_state.keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in other_state.items())
    print(f"5 steps: {len(weights)} parameters and {len(state)} entries of state, every bit equal")


def train_with(config: Any) -> tuple[list[float], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Norms, weights and state."""
    parts = [part.to(DEVICE) for part in stages()]
    container = config.build(model_parts=parts)
    norms = train(container, parts)
    state = {key: value.cpu() for key, value in container.state_dict().items() if key.startswith("state.")}
    return norms, [p.detach().cpu() for part in parts for p in part.parameters()], state


if __name__ == "__main__":
    main()
