"""The body of `lightstep plan`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lightstep.config import ConfigError, StrategyConfig, parse_config
from lightstep.extras import needs
from lightstep.plan.models import SHAPES, load_shape
from lightstep.plan.planning import Planner, Workload, plannable, plans
from lightstep.plan.profiles import Profile, find_profile, profile_of_device
from lightstep.plan.report import draw, report
from lightstep.strategy.presets import available_strategies, read_source

_LOSS_CHUNK = 1024
_DEFAULT = "H100"


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    model: str | None
    strategy: str | None
    gpus: int
    tokens: int
    sequence: int
    micro_batches: int
    no_checkpointing: bool
    fused_loss: bool
    gpu_memory: float | None
    host_memory: float | None
    profile: str | None
    measure: bool
    as_json: bool
    plot: Path | None
    against: Path | None


def plan_text(asked: Asked) -> str:
    """What the command prints.

    Raises:
        ConfigError: an option is wrong; with what is allowed.
        ValueError: the model cannot be planned.
    """
    with needs("train"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if asked.against is not None:
            from lightstep.bench.planned import as_markdown, compare

            return as_markdown(compare(asked.against))
        return _plan(asked)


def _plan(asked: Asked) -> str:
    if asked.model is None:
        raise ConfigError(f"MODEL is missing: a Hugging Face folder, a config.json, or one of {', '.join(SHAPES)}")
    configs = _strategies(asked)
    profile = _profile(asked)
    work = Workload(
        tokens=asked.tokens,
        sequence=min(asked.sequence, asked.tokens),
        micro_batches=asked.micro_batches,
        checkpointed=not asked.no_checkpointing,
        loss_chunk=_LOSS_CHUNK if asked.fused_loss else None,
    )
    of_device, of_host = (None if gb is None else gb * 1e9 for gb in (asked.gpu_memory, asked.host_memory))
    made = plans(Planner(load_shape(asked.model), work, profile, asked.gpus, of_device, of_host), configs)
    if asked.plot is not None:
        draw(asked.model, made, asked.plot)
    if asked.as_json:
        values = {"model": asked.model, "profile": asdict(profile), "plans": [plan.values() for plan in made]}
        return json.dumps(values, indent=2) + "\n"
    return report(asked.model, made, work, profile)


def _strategies(asked: Asked) -> Mapping[str, StrategyConfig]:
    if asked.strategy is None:
        every = {name: parse_config(read_source(name)[1], name) for name in available_strategies()}
        return {name: config for name, config in every.items() if plannable(config, asked.gpus)}
    names = [name.strip() for name in asked.strategy.split(",") if name.strip()]
    chosen = {name: parse_config(read_source(name)[1], name) for name in names}
    for name, config in chosen.items():
        if not plannable(config, asked.gpus):
            raise ConfigError(
                f"--strategy {name} has sharding.kind {config.sharding.kind} and cannot be planned for "
                f"--gpus {asked.gpus}; single is for one GPU, the other kinds are for more"
            )
    if not chosen:
        raise ConfigError("--strategy is empty; give names separated by commas, or leave it out")
    return chosen


def _profile(asked: Asked) -> Profile:
    from lightstep.bench.rates import kept_profile, measure_profile

    if asked.measure:
        return measure_profile()
    if asked.profile is not None:
        return find_profile(asked.profile)
    if torch.cuda.is_available():
        known = kept_profile() or profile_of_device(torch.cuda.get_device_name())
        if known is not None:
            return known
    taken = find_profile(_DEFAULT)
    return replace(taken, source=f"assumed, as no known GPU was found here (see --profile); {taken.source}")
