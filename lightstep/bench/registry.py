"""The names that `--strategies` and `--peers` take, and what they build."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection

from lightstep.bench.contender import Contender, Setup
from lightstep.bench.layer_stream import LayerStream
from lightstep.bench.libraries import DeepSpeedCpuAdam, Fsdp2Offload, TorchaoOffload
from lightstep.bench.peers import CpuAdamW, TorchFsdp2, TorchResident, TorchResidentFloatGradients
from lightstep.bench.strategies import StrategyContender, default_strategies, load

Build = Callable[[Setup], Contender]

PEERS: dict[str, type[Contender]] = {
    peer.name: peer
    for peer in (
        TorchResident,
        TorchResidentFloatGradients,
        TorchFsdp2,
        LayerStream,
        CpuAdamW,
        Fsdp2Offload,
        TorchaoOffload,
        DeepSpeedCpuAdam,
    )
}
"""Peers by name, in the table's order. Each builds from a `Setup` or raises `Skipped`."""

NEEDS_GROUP = frozenset({Fsdp2Offload.name})
"""Peers that shard, and so need a process group even when they are alone."""


def chosen_strategies(text: str) -> dict[str, Build]:
    """From `--strategies`: names or paths, `default` or `none`. Loaded once here: mistakes show at once."""
    names = default_strategies() if text == "default" else split(text)
    for name in names:
        load(name)
    return {name: _strategy(name) for name in names}


def _strategy(source: str) -> Build:
    return lambda setup: StrategyContender(setup, source)


def chosen_peers(text: str) -> dict[str, Build]:
    """From `--peers`: names separated by commas, `all` or `none`."""
    return {name: PEERS[name] for name in peer_names(text, PEERS)}


def peer_names(text: str, known: Collection[str]) -> list[str]:
    """The names in `--peers`, all of them `known`."""
    names = list(known) if text == "all" else split(text)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"--peers {name}: no such peer{hint}; allowed are all, none and {', '.join(known)}")
    return names


def split(text: str) -> list[str]:
    """Names separated by commas, each once; `none` is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [] if names == ["none"] else list(dict.fromkeys(names))
