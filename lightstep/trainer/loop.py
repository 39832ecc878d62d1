"""The training loop: optimizer steps, and periodic logging, validation and saves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.checkpoint import CheckpointError, latest_checkpoint
from lightstep.checkpoint.background import PendingSave
from lightstep.chunked_loss import whole_loss
from lightstep.distributed import LostRankError, Ranks, is_failed_collective
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.update import StepResult
from lightstep.plan.report import peak_memory
from lightstep.sharding.weight_average import WeightAverage
from lightstep.strategy import Strategy
from lightstep.trainer.config import TrainConfig
from lightstep.trainer.data import Batches
from lightstep.trainer.output import TRAINING, VALIDATION, Display, Figures, Logs, move_incomplete


class Interrupt:
    """Within this context a signal is recorded instead of raised, so that steps and saves are not interrupted.

    A second signal ends the process at once, except under torchrun, which forwards signals its workers already got.
    So does a collective that fails after a signal: torchrun ends the ranks that are left when one is gone.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        try:
            self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, which alone receives signals
            self._previous = {}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore()
        if self._received and (isinstance(error, LostRankError) or (error is not None and is_failed_collective(error))):
            signal.raise_signal(self._received)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received and "RANK" not in os.environ:
            self._restore()
            signal.raise_signal(number)
        self._received = self._received or number

    def received(self) -> signal.Signals | None:
        """The signal that any rank has received. A collective: all ranks call it after every step."""
        number = max(Ranks().gather_integer(self._received))  # on the CPU: nothing here waits for a device
        return signal.Signals(number) if number else None


@dataclass
class Components:
    """Everything that is trained and saved, and the data."""

    strategy: Strategy
    model: nn.Module
    optimizer: BaseOptimizer
    scheduler: Any
    batches: Batches
    validation_rows: Tensor
    """This rank's held-out windows, int64 ``[rows, length]``."""
    bytes_per_token: tuple[float, float]
    """For the training text and for the validation text."""
    fingerprint: str
    """Identifies the text."""
    loss_of: Callable[[nn.Module, Tensor], Tensor] = whole_loss
    """The mean over the predicted tokens, nats; 0-dim fp32."""
    average: WeightAverage | None = None


@dataclass
class _Unlogged:
    """A step whose figures are still on the device."""

    step: int
    loss: Tensor
    learning_rate: float
    result: StepResult


@dataclass
class Loop:
    """Trains from ``step`` to ``config.steps``."""

    config: TrainConfig
    components: Components
    logs: Logs
    display: Display
    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    """Mean loss over the ranks, nats per byte, by step (from 1)."""
    saved: Path | None = None
    _saving: tuple[Path | None, PendingSave] | None = None
    """The pending save, and the path of its checkpoint; ``None`` if it saves weights alone."""
    _last_result: StepResult | None = None
    _average_is_due: bool = False
    """The average does not include the last step's weights yet."""
    _unlogged: list[_Unlogged] = field(default_factory=list)
    _skipped: int = 0
    _timed: list[tuple[int, float]] = field(default_factory=list)
    _clock: float = 0.0
    _seen: int = 0

    def run(self, interrupt: Interrupt) -> signal.Signals | None:
        """Train until the last step or a signal. On a signal, finish the step, save, and return the signal."""
        config, stopped = self.config, None
        self._restart_clock()
        with self.display.training(self.step, config.steps), self._finishing_saves():
            while self.step < config.steps and stopped is None:
                self._train_step()
                self.display.advance(self.step, saving=self._saving is not None and not self._saving[1].done())
                stopped = interrupt.received()
                ends = stopped is not None or self.step == config.steps
                saves = ends or self._due(config.checkpoint.every)
                if saves or self._due(config.log_every):  # a resumed run does not log earlier steps again
                    self._log_steps()
                if not ends and self._due(config.validation.every):
                    self._untimed(self._validate_and_show)
                if self._due(
                    config.checkpoint.weights_every
                ):  # first: a save waits for the one before, and weights are smaller
                    self._untimed(self.save_weights)
                if saves:
                    self._untimed(self.save)
        return stopped

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    # -- one step

    def _train_step(self) -> None:
        optimizer = self.components.optimizer
        loss = self._accumulate(self.components.batches.step(self.step))
        learning_rate = float(optimizer.param_groups[0]["lr"])
        result = optimizer.step()
        self.step += 1
        self._last_result = result
        self._average_is_due = self.config.ema is not None and self._due(self.config.ema.every)
        self._unlogged.append(_Unlogged(self.step, loss, learning_rate, result))

    def _accumulate(self, micro_batches: Tensor) -> Tensor:
        """Forward and backward of ``[accumulation, rows, length]``; the mean loss, still on the device."""
        components = self.components
        components.model.train()
        total = torch.zeros((), device=components.strategy.device)
        for index, tokens in enumerate(micro_batches):
            with components.strategy.accumulate(components.model, last=index == len(micro_batches) - 1):
                loss = components.loss_of(components.model, tokens.to(components.strategy.device)) / len(micro_batches)
                self._update_average()
                self._advance_scheduler()
                components.optimizer.backward(loss)
            total += loss.detach()
        return total

    def _advance_scheduler(self) -> None:
        """Advance the scheduler if the last step was applied, before the next one, which may begin in backward.

        The result is read while the device runs the forward that follows it.
        """
        result, self._last_result = self._last_result, None
        if result is None:
            return
        if result:
            self.components.scheduler.step()
        else:
            self._skipped += 1

    def _update_average(self) -> None:
        """Update the average with the last step's weights, before the next step, which may begin in backward.

        The forward has already waited for those weights, so the average adds no wait.
        """
        if self._average_is_due and self.components.average is not None:
            self.components.average.update()
        self._average_is_due = False

    # -- every so often

    def _log_steps(self) -> None:
        """Log the figures of all steps since the last call. Only here does training wait for the device."""
        self._advance_scheduler()
        unlogged, self._unlogged = self._unlogged, []
        losses = _mean_over_ranks(
            [loss / self.components.bytes_per_token[0] for loss in _read([u.loss for u in unlogged])]
        )
        norms = _read([u.result.grad_norm for u in unlogged])
        rate, memory = self._tokens_per_second(), peak_memory(self.components.strategy.device)
        for seen, loss, norm in zip(unlogged, losses, norms, strict=True):
            self.losses[seen.step] = loss
            scalars = {TRAINING: loss, "step/gradient_norm": norm, "step/learning_rate": seen.learning_rate}
            self.logs.write(seen.step, scalars | {"step/loss_scale": seen.result.loss_scale})
        self.logs.write(self.step, {"speed/tokens_per_second": rate, "speed/memory_gib": memory / 2**30})
        scale = unlogged[-1].result.loss_scale
        self.display.show(self.step, Figures(losses, norms, scale, rate, memory, self._skipped))

    def _validate_and_show(self) -> None:
        loss = self.validate()
        self.display.say(f"step {self.step}/{self.config.steps}  validation loss {loss:.3f}")

    def validate(self) -> float:
        """Mean loss over the held-out windows in nats per byte; with averaged weights if the file says so."""
        self._update_average()
        averaged = self.config.ema is not None and self.config.ema.validation
        components, rows = self.components, self.components.validation_rows
        size = max(self.config.batch.sequences // (self.config.batch.accumulation * components.strategy.world_size), 1)
        parts = [part.to(components.strategy.device) for part in rows.split(size)]
        with components.average.applied() if averaged and components.average else nullcontext(), torch.no_grad():
            components.model.eval()
            losses = _read([components.loss_of(components.model, part) * len(part) for part in parts])
        [mean] = _mean_over_ranks([sum(losses) / len(rows)])
        total = mean / components.bytes_per_token[1]
        self.logs.write(self.step, {VALIDATION: total})
        return total

    def save(self) -> None:
        """Start a checkpoint of this step; older ones are removed as the settings say."""
        self._advance_scheduler()
        self._update_average()
        path = self.config.folder / f"checkpoint-{self.step}"
        moved = Ranks().together(lambda: move_incomplete(path), only_first=True)
        if moved is not None:
            self.display.say(f"{path} was not a whole checkpoint; it is now {moved}")
        extra = {
            "step": self.step,
            "config": self.config.model_dump(mode="json"),
            "text": self.components.fingerprint,
        }
        settings = self.config.checkpoint
        kept = {"keep_last": settings.keep, "keep_every": settings.keep_every}
        self._start_save(path, whole=True, scheduler=self.components.scheduler, extra=extra, **kept)

    def save_weights(self) -> None:
        """Start to save only the weights of this step."""
        path = self.config.folder / f"weights-{self.step}"
        self._start_save(path, whole=False, extra={"step": self.step}, weights_only=True)

    def _start_save(self, path: Path, whole: bool, **options: Any) -> None:
        """Start a save after the previous one has finished."""
        self._finish_save()
        components = self.components
        if self.config.checkpoint.asynchronous and components.strategy.config.sharding.kind != "deepspeed":
            options["asynchronous"] = True
        pending = components.strategy.save_checkpoint(path, components.model, components.optimizer, **options)
        if pending is not None:
            self._saving = (path if whole else None), pending
        elif whole:
            self.saved = path

    def _finish_save(self) -> None:
        if self._saving is not None:
            (path, pending), self._saving = self._saving, None
            Ranks().together(pending.result)
            self.saved = path or self.saved

    @contextmanager
    def _finishing_saves(self) -> Iterator[None]:
        """Finish the last save at the end of the block. A failed save raises and names the checkpoint that is kept."""
        try:
            yield
            self._finish_save()
        except CheckpointError as error:
            before = latest_checkpoint(self.config.folder)
            raise CheckpointError(f"{error}; {f'{before} is kept' if before else 'there is no earlier one'}") from error

    # -- speed and memory

    def _untimed(self, action: Callable[[], Any]) -> None:
        started = time.perf_counter()
        action()
        self._clock += time.perf_counter() - started

    def _restart_clock(self) -> None:
        self._clock, self._seen = time.perf_counter(), self.step

    def _tokens_per_second(self) -> float:
        """Over all ranks, since the last call."""
        batch = self.config.batch
        steps, seconds = self.step - self._seen, max(time.perf_counter() - self._clock, 1e-9)
        self._timed.append((steps, seconds))
        self._restart_clock()
        return steps * batch.sequences * batch.length / seconds

    @property
    def step_ms(self) -> float:
        """Mean time of a step without validation and saves, or the first logged steps, which include set-up."""
        timed = self._timed[1:] or self._timed
        steps = sum(count for count, _ in timed)
        return 1e3 * sum(seconds for _, seconds in timed) / steps if steps else 0.0


def _mean_over_ranks(values: list[float]) -> list[float]:
    return [fmean(of_ranks) for of_ranks in zip(*Ranks().gather(values), strict=True)]


def _read(values: list[Tensor]) -> list[float]:
    """Read many 0-dim tensors in one transfer."""
    return torch.stack([value.float() for value in values]).tolist() if values else []
