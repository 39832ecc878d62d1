"""Parameter-group rules of the Trainer: ``rules=`` of ``LightstepTrainer``, or ``optim_args="rules=FILE"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainingArguments

from lightstep.config import ConfigError, read_yaml
from lightstep.config_errors import suggest
from lightstep.optimizer.rules import Rule
from lightstep.optimizer_class import optimizer_class

__all__ = ["GivenRules", "make_rules", "read_rules", "split_optim_args"]

GivenRules = str | Path | Rule | Sequence[Rule | Mapping[str, Any]]
"""What ``LightstepTrainer(rules=...)`` takes: a YAML file, or rules, as objects or as such a file has them."""

_KEYS = ("names", "kinds", "dims", "name", "lr", "weight_decay", "arguments")


def read_rules(given: GivenRules | None, args: TrainingArguments) -> Sequence[Rule | Mapping[str, Any]] | None:
    """The rules, from the argument or from the file that ``optim_args`` names; ``None`` if there are none.

    Raises:
        ConfigError: both name some, or the file has none.
    """
    file, _ = split_optim_args(args.optim_args)
    if file is not None and given is not None:
        raise ConfigError(f"rules are given twice: as rules= and as optim_args='rules={file}'; leave one out")
    given = file if given is None else given
    if isinstance(given, str | Path):
        return _read_file(Path(given).expanduser())
    return [given] if isinstance(given, Rule) else given


def split_optim_args(optim_args: str | None) -> tuple[str | None, str | None]:
    """The file in ``rules=FILE``, and ``optim_args`` without it."""
    file, others = None, []
    for part in (optim_args or "").split(","):
        key, _, value = part.partition("=")
        if key.strip() == "rules":
            file = value.strip()
        elif part.strip():
            others.append(part)
    return file, ",".join(others) or None


def _read_file(file: Path) -> list[Any]:
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"rules={file} cannot be read: {error}") from error
    rules = content.get("rules") if isinstance(content, dict) and set(content) == {"rules"} else None
    if not isinstance(rules, list):
        raise ConfigError(f"rules={file}: one key is needed, rules, with a list: rules: [{{kinds: rest, lr: 0.001}}]")
    return rules


def make_rules(
    given: Sequence[Rule | Mapping[str, Any]],
    default_class: type[torch.optim.Optimizer],
    values: Mapping[str, Any],
    args: TrainingArguments,
) -> list[Rule]:
    """Rules with all of their hyper-parameters.

    A rule that names no class is for ``default_class``. One that has no ``lr`` gets the Trainer's ``learning_rate``;
    those for ``default_class`` get the Trainer's other values too, ``weight_decay`` among them.

    Args:
        default_class: what ``args.optim`` chooses.
        values: its keyword arguments, as the Trainer would pass them.

    Raises:
        ConfigError: a rule has a key, a class or a value that does not exist.
    """
    rules = []
    for number, rule in enumerate(given):
        try:
            where, kind, own = _parts(rule, default_class, f"rules[{number}]")
            defaults = {"weight_decay": args.weight_decay, **values} if kind is default_class else {}
            rules.append(Rule(kind, **where, **({"lr": args.learning_rate} | defaults | own)))
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"rules[{number}]: {error}") from error
    return rules


def _parts(
    rule: Rule | Mapping[str, Any], default_class: type[torch.optim.Optimizer], label: str
) -> tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]:
    """Which parameters, which class, and the hyper-parameters that the rule itself has."""
    if isinstance(rule, Rule):
        where = {"names": rule.names, "kinds": rule.kinds, "dims": rule.dims}
        return where, rule.optimizer_class, rule.hyperparameters
    if not isinstance(rule, Mapping):
        raise ConfigError(
            f"{label} is {rule!r:.80}; a lightstep.Rule or a mapping such as {{'kinds': 'rest'}} is needed"
        )
    for key in rule:
        if key not in _KEYS:
            raise ConfigError(f"{label} has {key!r}{suggest(str(key), list(_KEYS))}; allowed: {', '.join(_KEYS)}")
    where = {key: rule.get(key) for key in ("names", "kinds", "dims")}
    kind = default_class if rule.get("name") is None else optimizer_class(rule["name"], f"{label}.name")
    own = {key: float(rule[key]) for key in ("lr", "weight_decay") if rule.get(key) is not None}
    return where, kind, {**own, **(rule.get("arguments") or {})}
