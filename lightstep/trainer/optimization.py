"""Makes the optimizer and the scheduler of a training file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from lightstep.config import ConfigError
from lightstep.config_errors import suggest
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.rules import Rule
from lightstep.optimizer_class import optimizer_class
from lightstep.strategy import Strategy
from lightstep.trainer import config as settings

_SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
"""Names of transformers, except schedulers that need a metric at every step."""


def check_optimization(config: settings.TrainConfig, device: torch.device) -> None:
    """Check names and arguments with one small matrix, before the text is read.

    Raises:
        ConfigError: as :func:`make_optimizer` and :func:`make_scheduler` do.
    """
    _make_rules(config.optimizer)
    _refuse_unused(config.optimizer)
    for wanted in _resolved_rules(config.optimizer) or [config.optimizer]:
        with _config_errors("optimizer", wanted.arguments):
            optimizer = _small_optimizer(wanted, device)
    make_scheduler(optimizer, config.scheduler, config.steps)


def _refuse_unused(wanted: settings.Optimizer) -> None:
    """Raise :class:`ConfigError` if settings are for a class that no rule has."""
    given = [f"optimizer.{key}" for key in ("weight_decay", "arguments") if getattr(wanted, key) not in (None, {})]
    own = optimizer_class(wanted.name)
    if given and wanted.rules and all(optimizer_class(rule.name) is not own for rule in _resolved_rules(wanted)):
        raise ConfigError(
            f"{' and '.join(given)}: for {wanted.name}, and each of optimizer.rules has another class; give them there"
        )


def _small_optimizer(wanted: settings.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """The class itself over one small matrix."""
    weight = nn.Parameter(torch.zeros(2, 2, device=device))
    return optimizer_class(wanted.name)([weight], **_arguments(wanted))


def _resolved_rules(wanted: settings.Optimizer) -> list[settings.Optimizer]:
    """The complete optimizer settings of each rule; one for the same class, by whatever name, takes those it omits."""
    default, found = optimizer_class(wanted.name), []
    for number, rule in enumerate(wanted.rules):
        name = wanted.name if rule.name is None else rule.name
        own = optimizer_class(name, f"optimizer.rules[{number}].name") is default
        decay = wanted.weight_decay if own and rule.weight_decay is None else rule.weight_decay
        arguments = {**(wanted.arguments if own else {}), **rule.arguments}
        changes = {"name": name, "lr": rule.lr or wanted.lr, "weight_decay": decay, "arguments": arguments, "rules": []}
        found.append(wanted.model_copy(update=changes))
    return found


def _make_rules(wanted: settings.Optimizer) -> list[Rule]:
    found = []
    for number, (rule, own) in enumerate(zip(wanted.rules, _resolved_rules(wanted), strict=True)):
        with _config_errors(f"optimizer.rules[{number}]", own.arguments):
            meant = {"names": rule.names, "kinds": rule.kinds, "dims": rule.dims}
            found.append(Rule(optimizer_class(own.name), **meant, **_arguments(own)))  # type: ignore[arg-type]
    return found


def rules_of(wanted: settings.Optimizer) -> list[Rule]:
    """The optimizer's rules; one for all parameters if the file has none."""
    return _make_rules(wanted) if wanted.rules else [Rule(optimizer_class(wanted.name), **_arguments(wanted))]


def _arguments(wanted: settings.Optimizer) -> dict[str, Any]:
    arguments = {"lr": wanted.lr, **wanted.arguments}
    if wanted.weight_decay is not None:
        arguments["weight_decay"] = wanted.weight_decay
    return arguments


@contextmanager
def _config_errors(key: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Say which setting a class refuses."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        quoted = [name for name, value in arguments.items() if _is_quoted_number(value)]
        hint = f"; {', '.join(quoted)} in arguments: text; numbers are written without quotes" if quoted else ""
        raise ConfigError(f"{key}: {str(error).replace('.__init__()', '')}{hint}") from error


def _is_quoted_number(value: Any) -> bool:
    """Whether the value, or an entry of a list, is the text of a number."""
    if isinstance(value, list):
        return any(map(_is_quoted_number, value))
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def make_optimizer(strategy: Strategy, model: nn.Module, wanted: settings.Optimizer) -> BaseOptimizer:
    """Raises :class:`ConfigError` for an unknown class, or arguments that it refuses."""
    with _config_errors("optimizer", wanted.arguments):
        if wanted.rules:
            return strategy.create_optimizer(model, rules=_make_rules(wanted))
        return strategy.create_optimizer(model, optimizer_class(wanted.name), **_arguments(wanted))


def make_scheduler(optimizer: torch.optim.Optimizer, wanted: settings.Scheduler, steps: int) -> Any:
    """Raises :class:`ConfigError` for an unknown schedule, or arguments that it refuses."""
    if wanted.name not in _SCHEDULERS:
        raise ConfigError(
            f"scheduler.name is {wanted.name!r}{suggest(wanted.name, list(_SCHEDULERS))}; "
            f"allowed: {', '.join(_SCHEDULERS)}"
        )
    with _config_errors("scheduler", wanted.arguments):
        return get_scheduler(
            wanted.name,
            optimizer,
            num_warmup_steps=wanted.warmup_steps,
            num_training_steps=steps,
            scheduler_specific_kwargs=wanted.arguments or None,
        )


def apply_changes(
    optimizer: BaseOptimizer, scheduler: Any, before: Mapping[str, Any], config: settings.TrainConfig
) -> Iterator[str]:
    """After a resume, apply changes of the optimizer and scheduler settings. Yields a sentence for each change.

    Args:
        before: the settings that the checkpoint was written with.
    """
    if before.get("optimizer") is None:  # unknown
        return
    old, new = settings.Optimizer.model_validate(before["optimizer"]), config.optimizer
    meant = [[(rule.names, rule.kinds, rule.dims) for rule in one.rules] for one in (old, new)]
    if meant[0] != meant[1]:
        yield "optimizer: the rules stay as in the checkpoint; other rules need a new run"
        return
    groups = zip(optimizer.param_groups, _resolved_rules(old) or [old], _resolved_rules(new) or [new], strict=True)
    learning_rates = False
    for number, (group, was, now) in enumerate(groups):
        label = f"optimizer.rules[{number}]" if new.rules else "optimizer"
        defaults = _small_optimizer(now, group["params"][0].device).defaults
        yield from _change_group(group, defaults, label, _arguments(was), _arguments(now))
        if was.lr != now.lr:
            learning_rates = True
            group["initial_lr"] = scheduler.base_lrs[number] = now.lr
    earlier, later = before.get("scheduler") or {}, config.scheduler.model_dump(mode="json")
    schedule = [key for key in dict.fromkeys((*earlier, *later)) if earlier.get(key) != later.get(key)]
    if schedule:
        changes = (f"{key} {earlier.get(key)} → {later.get(key)}" for key in schedule)
        yield "scheduler, from here on: " + ", ".join(changes)
    if learning_rates or schedule or before.get("steps") != config.steps:
        _set_learning_rate(optimizer, scheduler)


def _change_group(
    group: dict[str, Any], defaults: Mapping[str, Any], label: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    for key in dict.fromkeys((*was, *now)):
        old, new = was.get(key), now.get(key)
        value = defaults.get(key) if new is None else new
        if not _is_number(value):
            # Compared with the group: the file of an earlier resume may have asked for what the checkpoint overruled.
            if (old, new) != (None, None) and (kept := group.get(key, value)) != value:
                yield f"{label}: {key} stays {kept}, as in the checkpoint; {value} needs a new run"
        elif old != new:
            before = group.get(key) if old is None else old
            group[key] = tuple(value) if isinstance(value, list) else value
            yield f"{label}: {key} is {value} from here on; until the checkpoint it was {before}"


def _is_number(value: Any) -> bool:
    """Whether a value is a number or a list of numbers, which alone can change during a run."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _set_learning_rate(optimizer: BaseOptimizer, scheduler: Any) -> None:
    """Set the learning rates of the next step."""
    factors = (factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas)
    for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, factors, strict=True):
        group["lr"] = base * factor
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
