"""Planned and measured time and memory of the Trainer's steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightstep.plan.optimizer_state import state_of
from lightstep.plan.planning import plan_one
from lightstep.plan.report import measured_sentence, planned_sentence
from lightstep.sharding.model_names import unwrap_model
from lightstep.strategy import Strategy


class StepReport:
    """Prints the plan at the first batch of a run, and the measurement at its end.

    Args:
        args: the Trainer's.
    """

    def __init__(self, strategy: Strategy, args: Any) -> None:
        self._strategy, self._args = strategy, args
        self._enabled = self._is_enabled()
        self._started: float | None = None
        self._seconds: dict[int, float] = {}

    def _is_enabled(self) -> bool:
        return bool(self._args.should_log)

    def on_batch(self, model: Any, inputs: Any, optimizer: torch.optim.Optimizer) -> None:
        """Called before each micro-batch. The plan is for the size of the first one."""
        if self._started is None:
            if self._enabled:
                tqdm.write(self._plan_sentence(model, inputs, optimizer))
            self.begin_step()

    def _plan_sentence(self, model: Any, inputs: Any, optimizer: torch.optim.Optimizer) -> str:
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None  # TRL's GRPO: a list of prompts
        args = self._args
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return "no plan: the batches have no input_ids of two dimensions"
        work = {
            "sequence": tokens.shape[1],
            "micro_batches": args.gradient_accumulation_steps,
            "checkpointed": args.gradient_checkpointing or None,
        }
        given = self._strategy.name, self._strategy.config, unwrap_model(model), tokens.numel(), work, args.world_size
        on_cpu, state = self._strategy.device.type == "cpu", state_of(optimizer)
        return planned_sentence(lambda: plan_one(*given, optimizer=state, on_cpu=on_cpu), on_cpu)

    def begin_step(self) -> None:
        """Start the clock, after logging, evaluation and saving."""
        self._started = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Stop the clock; may be called twice for a step, at its end and at the end of the epoch."""
        if self._started is not None:
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - self._started

    def print_measured(self) -> None:
        """Print the mean step time. The first step, which includes set-up, is left out if there are others."""
        every = list(self._seconds.values())
        seconds = every[1:] or every
        if self._enabled and seconds:
            tqdm.write(measured_sentence(self._strategy.device, 1e3 * sum(seconds) / len(seconds)))
