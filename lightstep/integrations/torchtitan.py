"""torchtitan: its ``OptimizersContainer``, with one lightstep optimizer over all model parts.

The container works without torchtitan, in any loop of that shape; ``examples/torchtitan_config.py`` puts it into
torchtitan's own trainer. There is one optimizer for any number of model parts, because several could not share a global
norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from lightstep import BaseOptimizer, ConfigError, StepResult, Strategy
from lightstep.distributed import Ranks, is_sharded
from lightstep.optimizer.param_groups import clean_name
from lightstep.optimizer.rules import Rule, described_parameters, match_rules, own_class, refuse_unmatched
from lightstep.optimizer.update import settings_of

__all__ = ["ModelParts", "OptimizersContainer"]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelParts(nn.Module):
    """The parts of a model (pipeline stages) as one module without a forward."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(f"part{number}", part)


class OptimizersContainer(torch.optim.Optimizer, Stateful):
    """torchtitan's container of optimizers, with one optimizer in it.

    It has ``step``, ``zero_grad``, iteration, hooks, and a ``state_dict`` for ``torch.distributed.checkpoint``. That is
    flat, by parameter names (``state.layers.0.weight.exp_avg``), so that it loads into another division into parts.
    With fp32 weights it has the names and entries of torchtitan's own.

    Args:
        strategy: the one that prepared the parts; with ``sharding.kind: single`` if something else sharded them.
        model_parts: this rank's parts. All ranks create their container together.
        optimizer_class: any element-wise ``torch.optim.Optimizer`` subclass.
        param_groups: ``{"pattern": regex, ...hyper-parameters}``, with ``"optimizer_class"`` for another class. Each
            trainable parameter belongs to the first group whose pattern is found in its name. Default: one group.
        rules: instead of ``optimizer_class``, ``param_groups`` and ``hyperparameters``: a
            :class:`~lightstep.optimizer.rules.Rule` for each group, as for ``strategy.create_optimizer``. Names are
            those of the undivided model.
        hyperparameters: keyword arguments of ``optimizer_class``.

    Attributes:
        optimizers: a list with the one optimizer.
        model_parts: as given.
        model: the only part, or all of them as one module, for ``strategy.accumulate``.

    Raises:
        TypeError: not a strategy, not a list of modules, or rules together with what they replace.
        ConfigError: the strategy does not support several parts.
        HostMemoryError: with ``weights.placement: host``, the host has too little memory.
        ValueError: a pattern or rule matches nothing on any rank, a parameter is matched by none, or the ranks of a
            pipeline stage hold plain copies.
    """

    def __init__(
        self,
        strategy: Strategy,
        model_parts: Sequence[nn.Module],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        rules: Sequence[Rule] | Rule | None = None,
        **hyperparameters: Any,
    ) -> None:
        self.model_parts, self.strategy = _checked_parts(model_parts), strategy
        if not isinstance(strategy, Strategy):
            raise TypeError(f"the strategy is {strategy!r:.80}; one from Strategy.load(...) is needed")
        _check_for_parts(strategy, self.model_parts)
        self.model = self.model_parts[0] if len(self.model_parts) == 1 else ModelParts(self.model_parts)
        strategy.place_weights(self.model)
        _mark_pipeline_stages(_trainable_parameters(self.model_parts))
        if rules is None:
            groups = _groups_by_patterns(
                self.model, param_groups or [{"pattern": ""}], optimizer_class, hyperparameters
            )
        else:
            if optimizer_class is not torch.optim.AdamW or param_groups is not None or hyperparameters:
                raise TypeError("rules name their classes and hyper-parameters: leave all other arguments out")
            groups = _groups_by_rules(self.model, rules)
            optimizer_class, hyperparameters = own_class(groups)
        optimizer = strategy.create_optimizer(self.model, optimizer_class, param_groups=groups, **hyperparameters)
        self.optimizers: list[BaseOptimizer] = [optimizer]
        torch.optim.Optimizer.__init__(self, [p for group in optimizer.param_groups for p in group["params"]], {})

    @property
    def optimizer(self) -> BaseOptimizer:
        """The optimizer of all parts."""
        return self.optimizers[0]

    def __iter__(self) -> Iterator[BaseOptimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Scale ``loss`` and backpropagate. Without a loss scale, ``loss.backward()`` does the same."""
        self.optimizer.backward(loss, retain_graph)

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Take a step, with one norm over all parts of all pipeline stages."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter names, flat, with the loss scale if there is one. It exists before the first step."""
        flat = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
        scale = {} if self.optimizer.loss_scale.is_identity else self.optimizer.loss_scale.state_dict()
        several = len(self.model_parts) > 1  # the modules of a single part may be named part0, too
        named = {
            _without_part(key) if several else key: value
            for key, value in flat.items()
            if not key.endswith(".param_names")
        }
        return named | {f"loss_scale.{key}": value for key, value in scale.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. Entries of other ranks' parts are ignored.

        Raises:
            ValueError: hyper-parameters are missing, or shapes do not match. Nothing has been changed then.
        """
        found = _unflatten(state_dict)
        state: dict[str, dict[str, Any]] = {}
        groups = []
        for group in self.optimizer.param_groups:
            names = group["param_names"]
            settings = _common_hyperparameters(found["param_groups"], names) if names else settings_of(group)
            groups.append({**settings, "params": list(names)})
            state |= {name: found["state"].get(name, {}) for name in names}
        loaded: dict[str, Any] = {"state": state, "param_groups": groups}
        self.optimizer.load_state_dict(
            loaded | {"loss_scale": found["loss_scale"][""]} if found["loss_scale"] else loaded
        )

    def init_cache_state_dict(self) -> None:
        """Do nothing; torchtitan's fault-tolerant trainer calls it."""


def _checked_parts(model_parts: Sequence[nn.Module]) -> list[nn.Module]:
    parts = [] if isinstance(model_parts, nn.Module) else list(model_parts)
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        raise TypeError(f"model_parts is {model_parts!r:.80}; a list of one or more modules is needed")
    return parts


def _check_for_parts(strategy: Strategy, parts: Sequence[nn.Module]) -> None:
    if len(parts) < 2:
        return
    if strategy.config.sharding.kind == "ddp":
        raise ConfigError(
            f"{strategy.name}: sharding.kind ddp wraps one module, and there are {len(parts)} model parts; shard each "
            "with sharding.kind fsdp2 or fully_shard"
        )
    if strategy.config.optimizer_state.update != "at_step":
        raise ConfigError(
            f"{strategy.name}: optimizer_state.update is {strategy.config.optimizer_state.update!r}, which follows the "
            f"forward or backward of one module, and there are {len(parts)} model parts; set it to 'at_step'"
        )


def _trainable_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The trainable parameters of all parts, by their names in the undivided model."""
    named = [(clean_name(name), p) for part in parts for name, p in part.named_parameters() if p.requires_grad]
    found = dict(named)
    if len(found) < len({parameter for _, parameter in named}):
        repeated = next(name for index, (name, _) in enumerate(named) if name in {n for n, _ in named[:index]})
        raise ValueError(f"two model parts have a parameter {repeated!r}; parameter names must differ between parts")
    return found


def _without_part(key: str) -> str:
    """``state.part1.layers.3.weight.exp_avg`` without ``part1``."""
    return re.sub(r"^(state|param_groups)\.part\d+\.", r"\1.", key)


def _unflatten(flat: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Make ``state.layers.0.weight.exp_avg`` into ``["state"]["layers.0.weight"]["exp_avg"]``."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}, "loss_scale": {}}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        found.setdefault(kind, {}).setdefault(name, {})[entry] = value
    return found


def _common_hyperparameters(found: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, Any]:
    """The hyper-parameters of all these parameters.

    Raises:
        ValueError: they are missing, or differ.
    """
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"the state has no hyper-parameters of {len(missing)} parameters (first: {missing[0]}); it belongs to "
            "another model"
        )
    other = [name for name in names if found[name] != found[names[0]]]
    if other:
        raise ValueError(f"{names[0]} and {other[0]} are in one group, and were saved with different hyper-parameters")
    return found[names[0]]


def _groups_by_patterns(
    model: nn.Module,
    settings: Sequence[Mapping[str, Any]],
    optimizer_class: type[torch.optim.Optimizer],
    hyperparameters: Mapping[str, Any],
) -> list[dict[str, Any]]:
    rules, groups = [], [{key: value for key, value in given.items() if key != "pattern"} for given in settings]
    for given, group in zip(settings, groups, strict=True):
        own = {key: value for key, value in group.items() if key != "optimizer_class"}
        common = {} if "optimizer_class" in group else hyperparameters
        rules.append(Rule(group.get("optimizer_class", optimizer_class), names=given["pattern"], **{**common, **own}))
    matched = _match(rules, model, first=True)
    return [{**group, **_named(own)} for group, own in zip(groups, matched, strict=True)]


def _groups_by_rules(model: nn.Module, rules: Sequence[Rule] | Rule) -> list[dict[str, Any]]:
    listed = [rules] if isinstance(rules, Rule) else list(rules)
    matched = _match(listed, model)
    return [{**rule.group(), **_named(own)} for rule, own in zip(listed, matched, strict=True)]


def _named(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    return {"params": list(parameters.values()), "param_names": list(parameters)}


def _match(rules: Sequence[Rule], model: nn.Module, first: bool = False) -> list[dict[str, nn.Parameter]]:
    """The trainable parameters of each rule, by their names in the undivided model.

    A rule may match nothing here if it matches something on another rank.

    Raises:
        ValueError: on all ranks, if a rule matches nothing on any rank, or one rank's parameters cannot be divided.
    """
    described = [
        (_undivided(name, model), parameter, kind)
        for name, parameter, kind in described_parameters(model)
        if parameter.requires_grad
    ]
    try:
        outcome: Any = match_rules(rules, described, first=first)
    except ValueError as error:
        outcome = error
    names = [[*own] for own in outcome] if isinstance(outcome, list) else f"{outcome}"
    everywhere = Ranks().gather(names)
    for told in everywhere:
        if isinstance(told, str):
            raise ValueError(told)
    refuse_unmatched(rules, [[name for own in of_rule for name in own] for of_rule in zip(*everywhere, strict=True)])
    return cast(list[dict[str, nn.Parameter]], outcome)


def _undivided(name: str, model: nn.Module) -> str:
    return name.partition(".")[2] if isinstance(model, ModelParts) else name


def _mark_pipeline_stages(names: Mapping[str, nn.Parameter]) -> None:
    """Mark parameters that only some ranks have: their norms are summed over the ranks.

    Raises:
        ValueError: on all ranks, if several ranks hold a stage as plain tensors.
    """
    everywhere = Ranks().gather({name: is_sharded(parameter) for name, parameter in names.items()})
    for name in sorted({name for held in everywhere for name in held}):
        ranks = [rank for rank, held in enumerate(everywhere) if name in held]
        if len(ranks) == len(everywhere):
            continue
        if len(ranks) > 1 and not all(everywhere[rank][name] for rank in ranks):
            raise ValueError(
                f"{name} is on ranks {ranks} and on no others (a pipeline stage), as a plain tensor: these may be "
                "copies, or different tensors; apply fully_shard to the model parts (a mesh of its own replicates them)"
            )
        if name in names:
            names[name].differs_across_ranks = True  # type: ignore[attr-defined]
