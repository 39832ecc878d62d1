"""How a strategy is written on the command line: a name or a path, and keys that are laid over it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from lightstep.config import ConfigError, StrategyConfig, merge_overrides, parse_config
from lightstep.strategy import Strategy
from lightstep.strategy.presets import read_source

_SEPARATOR = re.compile(r":(?=[^:=/]+=)")  # in front of a key=; other colons belong to a path


@dataclass(frozen=True)
class Source:
    """One entry of `--strategies`: `stream`, or `stream:optimizer_state.ring_mib=256:precision.reduce=parameters`."""

    text: str
    strategy: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Source:
        """Values are YAML.

        Raises:
            ConfigError: no name in front of the keys, or a value that is no YAML.
        """
        strategy, *assignments = _SEPARATOR.split(text)
        if not strategy or ("=" in strategy and not assignments):
            raise ConfigError(f"--strategies {text}: a strategy's name is needed in front, NAME:section.key=VALUE")
        return cls(text, strategy, dict(_assignment(text, assignment) for assignment in assignments))

    @property
    def label(self) -> str:
        """For tables: the strategy, and the last part of each key."""
        return " ".join([self.strategy, *(f"{key.split('.')[-1]}={value}" for key, value in self.overrides.items())])

    def config(self, settings: Mapping[str, Any]) -> StrategyConfig:
        """What it says under the bench's own `settings`, whether or not this version of lightstep can do it.

        Raises:
            ConfigError: an unknown strategy, key or value.
        """
        name, values = read_source(self.strategy)
        return parse_config(merge_overrides(values, self._over(settings)), name)

    def load(self, settings: Mapping[str, Any]) -> Strategy:
        """The strategy with the bench's own `settings`, and with its overrides over those."""
        return Strategy.load(self.strategy, overrides=self._over(settings))

    def _over(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings come last: an override of a `kind` would drop those of its section."""
        return {**self.overrides, **{key: value for key, value in settings.items() if key not in self.overrides}}


def _assignment(text: str, assignment: str) -> tuple[str, Any]:
    key, _, value = assignment.partition("=")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--strategies {text}: {value!r} is not a valid YAML value of {key}") from None
