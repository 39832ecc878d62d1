"""One run of `lightstep train`, from the training file to the samples."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightstep.extras import needs

with needs("train"):
    import transformers
    from rich.console import Console
    from transformers import set_seed

from lightstep.checkpoint import CheckpointError
from lightstep.checkpoint.errors import is_damage
from lightstep.chunked_loss import ChunkedLoss, whole_loss
from lightstep.config import ConfigError
from lightstep.distributed import Ranks
from lightstep.optimizer.param_table import param_table
from lightstep.plan.memory import state_by_rules
from lightstep.plan.planning import Plan, plan_one
from lightstep.plan.report import measured_sentence, planned_sentence
from lightstep.sharding.weight_average import WeightAverage
from lightstep.strategy import Strategy
from lightstep.strategy.process_group import ProcessGroupStrategy
from lightstep.trainer.config import TrainConfig
from lightstep.trainer.data import Batches, Corpus, check_batch, load_corpus, validation_rows
from lightstep.trainer.loop import Components, Interrupt, Loop
from lightstep.trainer.model import (
    check_prompts,
    load_tokenizer,
    make_model,
    model_config,
    shardable_weights,
    write_samples,
)
from lightstep.trainer.optimization import apply_changes, check_optimization, make_optimizer, make_scheduler, rules_of
from lightstep.trainer.output import (
    TENSORBOARD,
    Display,
    Logs,
    check_trackers,
    errors_only,
    newest_checkpoint,
    newest_undamaged,
    start_run,
)

_CHANGED_SILENTLY = (
    {"steps", "log_every", "lines", "checkpoint", "strategy", "strategy_overrides", "output", "name", "sample"}
    | {"trackers"}
    | {"scheduler", "optimizer"}  # apply_changes reports these
)
"""Settings that a resumed run may change without a warning."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    step: int
    """Completed steps, including those before a resume."""
    losses: Mapping[int, float]
    """Training loss of each step of this run, nats per byte."""
    validation_before: float
    validation_after: float | None
    """``None`` when the run was interrupted."""
    checkpoint: Path | None
    stopped_by: signal.Signals | None = None
    samples: list[str] = field(default_factory=list)


def train(config: TrainConfig, resume: bool | Literal["auto"] = False, console: Console | None = None) -> Outcome:
    """Train as ``config`` says, and report on ``console``. Under torchrun, every rank calls it.

    Args:
        resume: continue from the newest complete checkpoint in the run's folder. ``"auto"``: from the newest
            undamaged one, which reads all its bytes; without any checkpoint, start from the beginning.

    Raises:
        ConfigError: a setting in the file is wrong.
        CheckpointError: a checkpoint could not be written; the one before it is kept.
    """
    _check_restarts(resume)
    with _quiet_transformers(), load_strategy(config) as strategy:
        join(strategy)
        ranks = Ranks()
        together = ranks.together  # an error on one rank is raised on all: none keeps waiting
        together(lambda: check_trackers(config.trackers), only_first=True)
        together(lambda: check_optimization(config, strategy.device))
        check_batch(config.batch, strategy.world_size)
        display = Display(console or Console(), strategy.is_main, config.lines.seconds, config.lines.steps)
        checkpoint = _checkpoint_to_resume(config.folder, resume, ranks)
        components, tokenizer = _assemble(config, strategy, display)
        start = 0 if checkpoint is None else _resume(config, components, checkpoint, display)
        moved = together(lambda: start_run(config, checkpoint is not None), only_first=True)
        if moved is not None:
            display.say(f"an earlier run was in {config.folder}; it is now {moved}")
        folder = config.folder if strategy.is_main else None
        with Logs(folder, start, config.trackers, config.model_dump(mode="json")) as logs:
            loop = Loop(config, components, logs, display, step=start, saved=checkpoint)
            return _run(loop, tokenizer)


def describe_params(config: TrainConfig) -> str:
    """The optimizer class and settings of each parameter: ``lightstep params``. No weights are loaded.

    Raises:
        ConfigError: as :func:`train` would.
    """
    tokenizer = load_tokenizer(config.model)
    model = make_model(config.model, model_config(config.model, tokenizer, config.batch.length), meta=True)
    with Strategy.load("fp32") as strategy:
        return param_table(model, make_optimizer(strategy, model, config.optimizer))


def load_strategy(config: TrainConfig) -> Strategy:
    """The strategy for this machine's device type."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    source = config.strategy_for("cpu" if accelerator is None else accelerator.type)
    strategy = Strategy.load(source, config.strategy_overrides)
    if config.ema is not None and strategy.config.sharding.kind == "deepspeed":
        raise ConfigError(
            f"ema: strategy {strategy.name} leaves the weights to DeepSpeed's engine, which keeps no average; choose "
            "one with sharding.kind single, ddp or fsdp2, or leave ema out"
        )
    return strategy


def join(strategy: Strategy) -> None:
    """Start the process group if the strategy is for several ranks.

    Raises:
        ConfigError: torchrun's processes do not match the strategy, or it says who generates.
    """
    if strategy.roles.asynchronous:
        raise ConfigError(
            f"strategy {strategy.name}: roles.rollout.mode is async, and lightstep train has nothing to generate; "
            "leave roles out"
        )
    if strategy.config.roles.rollout.servers is not None:
        raise ConfigError(
            f"strategy {strategy.name}: roles.rollout.servers is set, and lightstep train publishes to nobody; leave "
            "roles out, or call strategy.publish_weights(model) in a loop of your own"
        )
    if isinstance(strategy, ProcessGroupStrategy):
        strategy.start()
    elif (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"torchrun started {started} processes, and strategy {strategy.name} is for one; "
            "choose a sharded strategy (sharding.kind ddp, fsdp2 or deepspeed) or start without torchrun"
        )


def _checkpoint_to_resume(folder: Path, resume: bool | Literal["auto"], ranks: Ranks) -> Path | None:
    if resume == "auto":
        return newest_undamaged(folder, ranks)
    return ranks.together(lambda: newest_checkpoint(folder), only_first=True) if resume else None


def _check_restarts(resume: bool | Literal["auto"]) -> None:
    """Refuse a run that would begin anew whenever torchrun starts it again."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and not resume:
        raise ConfigError(
            f"torchrun starts the ranks again if one fails (--max-restarts {restarts}), and the run would begin anew; "
            "add --resume auto to lightstep train, or leave --max-restarts out"
        )


def _assemble(config: TrainConfig, strategy: Strategy, display: Display) -> tuple[Components, Any]:
    together = Ranks().together
    tokenizer, architecture, corpus = together(lambda: _read_inputs(config, display))
    set_seed(config.seed)
    sharded, on_host = strategy.config.sharding.kind == "fsdp2", strategy.config.weights.placement == "host"
    reads = sharded or on_host  # from the folder, without a second copy of the model
    folder = together(lambda: shardable_weights(config.model, architecture), only_first=True) if reads else None
    empty = reads and (folder is not None or not strategy.is_main)  # other ranks get rank 0's weights
    made = together(lambda: make_model(config.model, architecture, meta=empty))
    model = strategy.prepare_model(made, weights=folder)
    set_seed(config.seed + strategy.rank)
    loss_of = _loss_of(config, strategy, model)
    display.say(_introduction(config, strategy, model, corpus))
    if strategy.is_main:
        display.say(expectation(config, strategy, architecture))
    optimizer = make_optimizer(strategy, model, config.optimizer)
    place = (strategy.rank, strategy.world_size)
    components = Components(
        strategy,
        model,
        optimizer,
        make_scheduler(optimizer, config.scheduler, config.steps),
        Batches(corpus.training, config.batch, config.seed, *place),
        validation_rows(corpus.validation, config.validation.sequences, *place),
        (corpus.training.bytes_per_token, corpus.validation.bytes_per_token),
        corpus.fingerprint,
        loss_of,
        None if config.ema is None else WeightAverage(model, config.ema.decay),
    )
    return components, tokenizer


def _loss_of(config: TrainConfig, strategy: Strategy, model: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    if config.loss_chunk is None:
        return whole_loss
    loss = ChunkedLoss(strategy.unwrap_model(model), config.loss_chunk)
    loss.check(model, config.batch.length)
    return loss


def _read_inputs(config: TrainConfig, display: Display) -> tuple[Any, Any, Corpus]:
    """Tokenizer, model configuration and text."""
    tokenizer = load_tokenizer(config.model)
    check_prompts(config.sample, tokenizer)
    architecture = model_config(config.model, tokenizer, config.batch.length)
    display.say(f"reading {config.data.path}")
    return tokenizer, architecture, load_corpus(config.data, tokenizer, config.batch.length)


def _introduction(config: TrainConfig, strategy: Strategy, model: nn.Module, corpus: Corpus) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    where = f"{strategy.world_size} × {strategy.device.type}" if strategy.world_size > 1 else str(strategy.device)
    return (
        f"{parameters:,} parameters, strategy {strategy.name} on {where}; {corpus.training.tokens.size:,} tokens to "
        f"train on, {corpus.validation.tokens.size:,} to validate with"
    )


def expectation(config: TrainConfig, strategy: Strategy, architecture: Any, profile: str | None = None) -> str:
    """A sentence with the planned memory and time of a step."""
    batch = config.batch
    sequences = max(batch.sequences // (batch.accumulation * strategy.world_size), 1)
    work = {"sequence": batch.length, "micro_batches": batch.accumulation, "loss_chunk": config.loss_chunk}
    on_cpu = strategy.device.type == "cpu" and profile is None

    def plan() -> Plan:
        shape = make_model(config.model, architecture, meta=True)
        tokens, ranks = sequences * batch.length, strategy.world_size
        optimizer = state_by_rules(shape, rules_of(config.optimizer))
        return plan_one(strategy.name, strategy.config, shape, tokens, work, ranks, None, profile, optimizer, on_cpu)

    return planned_sentence(plan, on_cpu)


def _resume(config: TrainConfig, components: Components, checkpoint: Path, display: Display) -> int:
    """Load the checkpoint. Returns the step to continue from."""
    try:
        extra = components.strategy.load_checkpoint(
            checkpoint, components.model, components.optimizer, components.scheduler
        )
    except CheckpointError as error:
        advice = "; --resume auto continues from the newest one that is whole" if is_damage(error) else ""
        raise ConfigError(f"--resume: {error}{advice}") from error
    if not isinstance(extra.get("step"), int):
        raise ConfigError(f"--resume: {checkpoint} was not written by lightstep train: it has no step number")
    display.say(f"continuing from {checkpoint}")
    if extra.get("text") != components.fingerprint:
        display.say("warning: the text differs from the one that the checkpoint was trained on, so batches will differ")
    if changed := _changes(extra.get("config") or {}, config.model_dump(mode="json")):
        display.say(f"warning: settings differ from the checkpoint's: {', '.join(changed)}")
    for sentence in apply_changes(components.optimizer, components.scheduler, extra.get("config") or {}, config):
        display.say(sentence)
    return int(extra["step"])


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``key (old → new)`` for every setting that differs."""
    changed: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old == new or (not prefix and key in _CHANGED_SILENTLY):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += _changes(old, new, f"{prefix}{key}.")
        else:
            changed.append(f"{prefix}{key} ({old} → {new})")
    return changed


def _run(loop: Loop, tokenizer: Any) -> Outcome:
    config, display = loop.config, loop.display
    with Interrupt() as interrupt:
        before = loop.validate()
        display.say(f"validation loss before: {before:.3f} nats per byte")
        if loop.step >= config.steps:
            display.say(f"{loop.saved} is at step {loop.step} of {config.steps} (steps): nothing left to train")
        stopped = loop.run(interrupt)
    if stopped is not None:
        display.say(f"{stopped.name}: stopped after step {loop.step}; continue from {loop.saved} with --resume")
        return Outcome(loop.step, loop.losses, before, None, loop.saved, stopped)
    if loop.step_ms:
        display.say(measured_sentence(loop.components.strategy.device, loop.step_ms))
    after = loop.validate()
    display.say(f"validation loss after: {after:.3f} nats per byte (before: {before:.3f})")
    samples = _finish(loop, tokenizer)
    return Outcome(loop.step, loop.losses, before, after, loop.saved, None, samples)


def _finish(loop: Loop, tokenizer: Any) -> list[str]:
    """Export the model and its average, and generate samples."""
    config, strategy, model = loop.config, loop.components.strategy, loop.components.model
    strategy.export_model(config.folder / "model", model, tokenizer)
    if loop.components.average is not None:
        with loop.components.average.applied():
            strategy.export_model(config.folder / "model-ema", model, tokenizer)
    samples: list[str] = []
    if config.sample is not None:
        samples = write_samples(strategy.unwrap_model(model), tokenizer, config.sample, config.seed)
        for number, text in enumerate(samples, 1):
            loop.display.say(f"--- sample {number} of {len(samples)}\n{text}")
    logs = "tensorboard, loss.png" if TENSORBOARD in config.trackers else ", ".join(config.trackers)
    models = "model" if loop.components.average is None else "model, model-ema"
    loop.display.say(f"--- {config.folder}: {loop.saved and loop.saved.name}, {models}, {logs}")
    return samples


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide messages and progress bars of transformers, which would break ours."""
    log = transformers.utils.logging
    bars = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        with errors_only("transformers"):
            yield
    finally:
        if bars:
            log.enable_progress_bar()
