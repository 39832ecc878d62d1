"""lightstep's optimizer container in torchtitan's own trainer (0.3.0): put this file beside your config_registry.py.

    from torchtitan_config import optimizer_config

    def llama3_8b_streamed() -> Trainer.Config:
        config = llama3_8b()
        groups = default_adamw(lr=3e-4).param_groups
        config.optimizer = optimizer_config("fp32-stream", {"clipping.max_norm": None}, param_groups=groups)
        return config

``python examples/torchtitan_config.py`` builds both containers as the trainer does, and trains two stages of a small
model with each: every bit of the weights is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components import optimizer as titan

from lightstep import ConfigError, Strategy
from lightstep.integrations.torchtitan import OptimizersContainer


def optimizer_config(
    strategy: str, overrides: Mapping[str, Any] | None = None, **fields: Any
) -> titan.OptimizersContainer.Config:
    """The ``optimizer`` of a torchtitan ``Trainer.Config``.

    Args:
        strategy: a name or file. ``sharding.kind`` is ``single``, because torchtitan shards; ``clipping.max_norm`` and
            ``precision.loss_scale`` are off, because it clips (``training.max_norm``) and calls ``backward`` itself.
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


def refuse_what_torchtitan_does(strategy: Strategy) -> None:
    """Sharding, clipping and scaling are the trainer's."""
    config = strategy.config
    found = {
        "sharding.kind": (config.sharding.kind, "single", "torchtitan shards the model"),
        "clipping.max_norm": (config.clipping.max_norm, None, "torchtitan clips (training.max_norm)"),
        "precision.loss_scale": (config.precision.loss_scale.kind, "none", "torchtitan calls loss.backward()"),
    }
    for key, (value, needed, why) in found.items():
        if value != needed:
            raise ConfigError(f"{strategy.name}: {key} is {value!r}, and {why}: set it to {needed or 'null'}")


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


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = {str(number): nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for number in range(4)}
    return [nn.ModuleDict({name: layers[name] for name in names}) for names in ("01", "23")]


def train(container: Any, parts: list[nn.Module]) -> None:
    """In the order of torchtitan's ``train_step``: backward, one norm over all parts, step, schedule."""
    schedule = titan.LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=container, training_steps=9)
    for step in range(5):
        container.zero_grad()
        hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        for part in parts:
            for layer in part.children():
                hidden = hidden + layer(hidden)
        hidden.square().mean().backward()
        torch.nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], 0.1, foreach=True)
        container.step()
        schedule.step()


def main() -> None:
    groups = titan.default_adamw(lr=1e-2).param_groups
    streamed = optimizer_config("fp32-stream", {"clipping.max_norm": None}, param_groups=groups)
    own = titan.OptimizersContainer.Config(param_groups=groups)
    trained, states = [], []
    for config in (streamed, own):
        parts = stages()
        container = config.build(model_parts=parts)
        train(container, parts)
        trained.append([p for part in parts for p in part.parameters()])
        states.append({key: value for key, value in container.state_dict().items() if key.startswith("state.")})
    assert all(torch.equal(mine, theirs.to(mine.device)) for mine, theirs in zip(*trained, strict=True))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value.cpu(), states[1][key].cpu()) for key, value in states[0].items())
    print(f"5 steps: {len(trained[0])} parameters and {len(states[0])} entries of state, every bit equal")


if __name__ == "__main__":
    main()
