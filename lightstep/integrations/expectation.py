"""What the Trainer says of its steps on a GPU: what they are planned to take, and in the end what they took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightstep.plan.planning import plan_one
from lightstep.plan.report import measured_sentence, planned_sentence
from lightstep.sharding.model_names import unwrap_model
from lightstep.strategy import Strategy


class Expectation:
    """One training run's.

    Args:
        strategy: whose device tells whether anything is said: a plan is about GPUs.
        args: the Trainer's.
    """

    def __init__(self, strategy: Strategy, args: Any) -> None:
        self._strategy, self._args = strategy, args
        self._wanted = self._is_for()
        self._begun: float | None = None
        self._seconds: dict[int, float] = {}

    def _is_for(self) -> bool:
        return bool(self._args.should_log) and self._strategy.device.type == "cuda"

    def batch(self, model: Any, inputs: Any) -> None:
        """A micro-batch: the first one's size is what is planned with."""
        if self._begun is None:
            if self._wanted:
                tqdm.write(self._planned(model, inputs))
            self.step_begins()

    def _planned(self, model: Any, inputs: Any) -> str:
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None  # TRL's may be a list of prompts
        args = self._args
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return "no plan: the batches have no input_ids of two dimensions"
        work = {
            "sequence": tokens.shape[1],
            "micro_batches": args.gradient_accumulation_steps,
            "checkpointed": args.gradient_checkpointing or None,
        }
        named, inner = (self._strategy.name, self._strategy.config), unwrap_model(model)
        return planned_sentence(lambda: plan_one(*named, inner, tokens.numel(), work, args.world_size))

    def step_begins(self) -> None:
        """What came between steps (logs, evaluation, saving) is over."""
        self._begun = time.perf_counter()

    def step_ends(self, step: int) -> None:
        """The optimizer step of this number; the end of an epoch is its last step's."""
        if self._begun is not None:
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - self._begun

    def end(self) -> None:
        """Training is over. The first step, which sets things up, does not count if there are others."""
        every = list(self._seconds.values())
        seconds = every[1:] or every
        if self._wanted and seconds:
            tqdm.write(measured_sentence(torch.cuda.max_memory_allocated() / 1e9, 1e3 * sum(seconds) / len(seconds)))
