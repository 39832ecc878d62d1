"""The body of `lightstep plan`."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightstep.config import ConfigError, FSDP2Sharding, StrategyConfig, parse_config
from lightstep.extras import needs
from lightstep.optimizer_class import optimizer_class
from lightstep.paths import local_path
from lightstep.plan.cost import with_settings
from lightstep.plan.memory import rules_for, state_by_rules
from lightstep.plan.model import LOSS_CHUNK, SHAPES, load_shape
from lightstep.plan.planning import Plan, Planner, Workload, first_that_fits, is_plannable, not_planned, plans, reliefs
from lightstep.plan.report import draw, report
from lightstep.plan.timing import (
    Network,
    Profile,
    find_profile,
    measure_profile,
    profile_here,
    with_own_memory,
)
from lightstep.presets import available_strategies, read_source

_DEFAULT = "H100"
_PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command."""

    model: str | None
    strategy: str | None
    gpus: int
    gpus_per_node: int | None
    network: float | None
    tokens: int
    sequence: int
    micro_batches: int
    optimizer: str
    no_checkpointing: bool
    fused_loss: bool
    gpu_memory: float | None
    host_memory: float | None
    profile: str | None
    measure: bool
    as_json: bool
    plot: Path | None


def plan_text(options: PlanOptions) -> str:
    """The output of `lightstep plan`.

    Raises:
        ConfigError: an option is wrong; the message says what is allowed.
        ValueError: the model cannot be planned.
    """
    with needs("train"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        plot = options.plot and local_path(options.plot, "--plot is a local file")
        return _plan(replace(options, plot=plot))


def _plan(options: PlanOptions) -> str:
    if options.model is None:
        raise ConfigError(f"MODEL is missing: a Hugging Face folder, a config.json, or one of {', '.join(SHAPES)}")
    _check_sizes(options)
    configs = _strategies(options)
    rules = rules_for(optimizer_class(options.optimizer, "--optimizer"))
    find_profile(options.profile or _DEFAULT)
    model = load_shape(options.model)
    optimizer = state_by_rules(model, rules)
    profile = _profile(options)

    def planner(changed: PlanOptions) -> Planner:
        of_device, of_host = (None if gb is None else gb * 1e9 for gb in (options.gpu_memory, options.host_memory))
        nodes = _network(changed)
        return Planner(model, _workload(changed), profile, changed.gpus, of_device, of_host, optimizer, network=nodes)

    chosen = planner(options)
    made = plans(chosen, configs, both=True)
    first = first_that_fits(made)
    relief = [] if first is None else reliefs(first.strategy, configs[first.strategy], first, chosen)
    title = options.model if options.optimizer == "AdamW" else f"{options.model} with {options.optimizer}"
    if options.plot is not None:
        draw(title, made, options.plot)
    if options.as_json:
        given = {"model": options.model, "optimizer": options.optimizer, "profile": asdict(profile)}
        changes = [{"change": change, **plan.values()} for change, plan in relief]
        values = {**given, "plans": [plan.values() for plan in made], "relief": changes}
        return json.dumps(values, indent=2) + "\n"
    remedies = [] if any(plan.fits for plan in made) else _remedies(options, configs, planner)
    return report(title, made, _workload(options), profile, remedies, relief)


def _network(options: PlanOptions) -> Network | None:
    """``None`` if all GPUs are on one node.

    Raises:
        ConfigError: the number of nodes is not whole, or their network is not given.
    """
    gpus, per_node, rate = options.gpus, options.gpus_per_node or options.gpus, options.network
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"--network is {rate:g}; a positive number of GB/s is needed")
    if gpus <= per_node:
        if rate is not None:
            raise ConfigError(f"--network is between nodes, and all --gpus {gpus} are on one; give --gpus-per-node")
        return None
    if gpus % per_node:
        raise ConfigError(f"--gpus is {gpus}, no multiple of --gpus-per-node {per_node}; whole nodes are planned")
    if rate is None:
        raise ConfigError(
            f"--network is missing, for collectives between {gpus // per_node} nodes: GB/s each way of each GPU's "
            "network interface (50 is 400 Gb/s)"
        )
    return Network(per_node, rate)


def _workload(options: PlanOptions) -> Workload:
    return Workload(
        tokens=options.tokens,
        sequence=min(options.sequence, options.tokens),
        micro_batches=options.micro_batches,
        checkpointed=not options.no_checkpointing,
        loss_chunk=LOSS_CHUNK if options.fused_loss else None,
    )


def _remedies(
    options: PlanOptions, configs: Mapping[str, StrategyConfig], planner: Callable[[PlanOptions], Planner]
) -> list[str]:
    """The smallest single changes of the command or of the strategy with which one fits."""
    own = planner(options)

    def by_command(**changes: Any) -> Plan | None:
        changed = replace(options, **changes)
        tried = configs if changed.gpus == options.gpus else _strategies(replace(changed, strategy=None))
        return first_that_fits(plans(planner(changed), tried))

    def in_file(section: str, key: str, *values: str) -> Iterator[tuple[str, Plan | None]]:
        for value in values:
            tried = {name: with_settings(config, section, **{key: value}) for name, config in configs.items()}
            yield f"{section}.{key}: {value} in the strategy file", first_that_fits(plans(own, tried))

    def smallest(tried: Iterable[tuple[str, Plan | None]]) -> list[str]:
        return next(([f"{said}: {plan.strategy}"] for said, plan in tried if plan is not None), [])

    sequence = min(options.sequence, options.tokens)
    tokens = [sequence * 2**power for power in reversed(range((options.tokens // sequence).bit_length()))]
    gpus = [count for count in (2, 4, 8) if count > options.gpus]
    remedies: list[str] = []
    if options.no_checkpointing:
        remedies += smallest([("without --no-checkpointing", by_command(no_checkpointing=False))])
    else:
        remedies += smallest(in_file("sharding", "activation_checkpointing", "host"))
    if not options.fused_loss:
        remedies += smallest([("--fused-loss", by_command(fused_loss=True))])
    remedies += smallest((f"--tokens {n}", by_command(tokens=n)) for n in tokens if n < options.tokens)
    remedies += smallest(in_file("optimizer_state", "update", "next_forward"))
    remedies += smallest(in_file("precision", "reduce", "parameters"))
    remedies += smallest(in_file("optimizer_state", "moments", "bfloat16", "int8"))
    remedies += smallest((f"--gpus {n}", by_command(gpus=n)) for n in gpus)
    if remedies:
        return remedies
    least: dict[str, Any] = {"tokens": sequence, "fused_loss": True, "no_checkpointing": False}
    said = f"--tokens {sequence} --fused-loss, with checkpointing"
    return smallest((f"--gpus {n} {said}", by_command(gpus=n, **least)) for n in [options.gpus, *gpus])


def _check_sizes(options: PlanOptions) -> None:
    for name, given in (("--gpu-memory", options.gpu_memory), ("--host-memory", options.host_memory)):
        if given is not None and not 0 < given < math.inf:
            raise ConfigError(f"{name} is {given:g}; a positive number of GB is needed")
    _network(options)
    if options.tokens > options.sequence and options.tokens % options.sequence:
        raise ConfigError(
            f"--tokens is {options.tokens}, which is no multiple of --sequence {options.sequence}; a micro-batch "
            "consists of whole sequences"
        )
    if options.measure and options.profile is not None:
        raise ConfigError(f"--measure takes this machine's rates, and --profile those of {options.profile}; give one")
    if options.plot is not None:
        if options.plot.suffix.lower() not in _PICTURES:
            raise ConfigError(f"--plot is {options.plot}; a file that ends in {' or '.join(_PICTURES)} is needed")
        if not options.plot.absolute().parent.is_dir():
            raise ConfigError(f"--plot is {options.plot}, in a folder that does not exist")


def _strategies(options: PlanOptions) -> Mapping[str, StrategyConfig]:
    if options.strategy is None:
        every = {name: parse_config(read_source(name)[1], name) for name in available_strategies()}
        chosen = {name: config for name, config in every.items() if is_plannable(config, options.gpus)}
        network = _network(options)
        return dict(_on_nodes(name, config, network, options.gpus) for name, config in chosen.items())
    names = [name.strip() for name in options.strategy.split(",") if name.strip()]
    chosen = {name: parse_config(read_source(name)[1], name) for name in names}
    for name, config in chosen.items():
        if config.sharding.kind == "deepspeed":
            raise ConfigError(f"--strategy {name}: {not_planned(name)}")
        if not is_plannable(config, options.gpus):
            raise ConfigError(
                f"--strategy {name} has sharding.kind {config.sharding.kind} and cannot be planned for "
                f"--gpus {options.gpus}; single is for one GPU, ddp and fsdp2 are for more"
            )
    if not chosen:
        raise ConfigError("--strategy is empty; give names separated by commas, or leave it out")
    return chosen


def _on_nodes(name: str, config: StrategyConfig, network: Network | None, gpus: int) -> tuple[str, StrategyConfig]:
    """A preset with replicas has one on each node, as its file advises."""
    sharding = config.sharding
    if network is None or not isinstance(sharding, FSDP2Sharding) or sharding.mesh.replicate == 1:
        return name, config
    nodes = gpus // network.gpus_per_node
    mesh = sharding.mesh.model_copy(update={"replicate": nodes, "shard": "auto"})
    return f"{name}, replicate: {nodes}", with_settings(config, "sharding", mesh=mesh)


def _profile(options: PlanOptions) -> Profile:
    if options.measure:
        return measure_profile()
    if options.profile is not None:
        return find_profile(options.profile)
    if (known := profile_here()) is not None:
        return known
    taken = with_own_memory(find_profile(_DEFAULT))
    return replace(taken, source=f"assumed, because no known GPU was found here (see --profile); {taken.source}")
