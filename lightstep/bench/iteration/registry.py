"""Who takes part: `--strategies` and `--peers` of whole iterations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightstep.bench.iteration.contender import SETTINGS, Task, Training
from lightstep.bench.iteration.peers import OffloadTraining
from lightstep.bench.iteration.strategies import StrategyTraining, WithoutOptimizer
from lightstep.bench.registry import peer_names, split
from lightstep.bench.sources import Source
from lightstep.strategy import available_strategies

_DEFAULT = ("resident", "stream", "stream-overlap", "stream-overlap:optimizer_state.resident_gib=8")
_DEFAULT_SHARDED = ("fsdp2", "fsdp2-stream", "fsdp2-stream-overlap")
_PEERS = {OffloadTraining.name: OffloadTraining}


@dataclass(frozen=True)
class Entry:
    """One contender before it is built.

    Attributes:
        name: as on the command line.
        label: for people.
        build: makes it, or raises.
        resident: whether it is one that keeps all state on the device, which the others are compared with.
    """

    name: str
    label: str
    kind: str
    about: str
    build: Callable[[Task], Training]
    resident: bool = False


def baseline() -> Entry:
    """Forward and backward alone."""
    return Entry(WithoutOptimizer.name, WithoutOptimizer.name, "baseline", WithoutOptimizer.about, WithoutOptimizer)


def chosen_strategies(text: str, sharded: bool) -> list[Entry]:
    """From `--strategies`. Mistakes show at once; what this version cannot do fails when it is built.

    Args:
        sharded: whether `default` means those for several ranks.

    Raises:
        ConfigError: an unknown strategy, key or value.
    """
    names = _default(sharded) if text == "default" else split(text)
    return [_strategy(Source.parse(name)) for name in names]


def chosen_peers(text: str) -> list[Entry]:
    """From `--peers`: names, `all` or `none`.

    Raises:
        ValueError: an unknown peer.
    """
    return [Entry(name, name, "peer", _PEERS[name].about, _PEERS[name]) for name in peer_names(text, _PEERS)]


def _default(sharded: bool) -> list[str]:
    known = available_strategies()
    return [name for name in (_DEFAULT_SHARDED if sharded else _DEFAULT) if name.split(":")[0] in known]


def _strategy(source: Source) -> Entry:
    config = source.config(SETTINGS)
    resident = config.optimizer_state.backend == "resident"
    about = config.description or source.text
    return Entry(
        source.text, source.label, "lightstep", about, lambda task: StrategyTraining(task, source), resident=resident
    )
