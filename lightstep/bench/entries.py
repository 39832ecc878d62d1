"""Parses `--strategies` and `--peers` into entries, which build their contenders later."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from lightstep.bench.contender import Contender, Skipped, Task
from lightstep.bench.strategies import StrategyContender
from lightstep.config import ConfigError, merge_overrides, parse_config, read_yaml
from lightstep.presets import read_source
from lightstep.strategy import Strategy

_SEPARATOR = re.compile(r":(?=[^:=/]+=)")  # a colon before key=; other colons belong to a path


@dataclass(frozen=True)
class Entry:
    """One contender before it is built.

    Attributes:
        name: as on the command line.
        label: as shown in tables and charts.
        build: makes the contender, or raises.
        resident: whether it is a strategy that keeps all state on the device; others are compared with it.
        needs_group: whether it needs a process group even on one rank.
    """

    name: str
    label: str
    kind: str
    about: str
    build: Callable[[Any], Contender]
    resident: bool = False
    needs_group: bool = False

    @classmethod
    def from_class(cls, contender: type[Contender]) -> Entry:
        def build(task: Task) -> Contender:
            if task.optimizer not in contender.optimizers:
                raise Skipped(f"supports --optimizer {', '.join(contender.optimizers)} only, not {task.optimizer}")
            return contender(task)  # type: ignore[call-arg]

        kind, about = contender.kind, contender.about
        return cls(contender.name, contender.name, kind, about, build, needs_group=contender.needs_group)


def parse_strategies(text: str, task: Task, ranks: int = 1) -> list[Entry]:
    """The entries of `--strategies`. Wrong names and keys raise here; unsupported combinations raise when built.

    Raises:
        ConfigError: an unknown strategy, key or value.
    """
    names = task.default_strategies(ranks) if text == "default" else _split(text)
    return [_strategy(name, task.settings) for name in names]


def _strategy(text: str, settings: Mapping[str, Any]) -> Entry:
    strategy, overrides = parse_overrides(text, settings)
    name, values = read_source(strategy)
    config = parse_config(merge_overrides(values, overrides), name)

    def build(task: Task) -> Contender:
        return StrategyContender(task, Strategy.load(strategy, overrides=overrides), text)

    keys = (assignment.rpartition("=")[0].split(".")[-1] for assignment in _SEPARATOR.split(text)[1:])
    label = " ".join([strategy, *(f"{key}={value}" for key, value in zip(keys, overrides.values(), strict=False))])
    resident = config.optimizer_state.backend == "resident"
    return Entry(text, label, "lightstep", config.description or text, build, resident=resident)


def parse_overrides(text: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split `stream:optimizer_state.ring_mib=256:precision.reduce=parameters` into the strategy and its overrides.

    Args:
        settings: the bench's own overrides; the text wins. They come last, because overriding a section's `kind`
            drops the section's other keys.

    Raises:
        ConfigError: the strategy's name is missing, or a value is not valid YAML.
    """
    strategy, *assignments = _SEPARATOR.split(text)
    if not strategy or ("=" in strategy and not assignments):
        raise ConfigError(f"--strategies {text}: the strategy's name is missing; write NAME:section.key=VALUE")
    own: dict[str, Any] = {}
    for key, _, value in (assignment.partition("=") for assignment in assignments):
        try:
            own[key] = read_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(f"--strategies {text}: {value!r} is not a valid YAML value of {key}") from None
    return strategy, {**own, **{key: value for key, value in settings.items() if key not in own}}


def parse_peers(text: str | None, task: Task) -> list[Entry]:
    """The entries of `--peers`: names separated by commas, `all` or `none`.

    Raises:
        ValueError: an unknown peer.
    """
    text = text or task.default_peers
    known = {peer.name: peer for peer in task.peers}
    names = list(known) if text == "all" else _split(text)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"--peers {name}: no such peer{hint}; allowed are all, none and {', '.join(known)}")
    return [Entry.from_class(known[name]) for name in names]


def _split(text: str) -> list[str]:
    """Names separated by commas, without duplicates; `none` gives an empty list."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [] if names == ["none"] else list(dict.fromkeys(names))
