"""transformers' ``Trainer`` (5.13 or later) with lightstep's optimizer, precision, clipping and sharding.

:class:`LightstepTrainer` is the Trainer with the argument ``strategy``. :class:`LightstepMixin` adds it to any class
made from the Trainer: ``class MyTrainer(LightstepMixin, SFTTrainer)``.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from lightstep.extras import needs

with needs("train"):
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

from lightstep.config import ConfigError
from lightstep.integrations.accelerate import LightstepOptimizer, connect
from lightstep.integrations.checks import unwrap_optimizer
from lightstep.integrations.gradient_callbacks import ClippedGradients, check_gradients_are_kept
from lightstep.integrations.step_report import StepReport
from lightstep.integrations.trainer_checkpoints import TrainerCheckpoints
from lightstep.integrations.trainer_rules import GivenRules, make_rules, read_rules, split_optim_args
from lightstep.integrations.training_arguments import (
    check_arguments,
    check_asynchronous_saves,
    check_groups,
    check_optimizer_class,
    is_max_norm_chosen,
    max_norm,
)
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.result import StepResult
from lightstep.optimizer.rules import Rule
from lightstep.strategy import Strategy

__all__ = ["LightstepMixin", "LightstepTrainer"]

logger = logging.getLogger(__name__)


class SynchronizedCallbackHandler(CallbackHandler):
    """Waits for deferred updates before a callback runs, which may have kept parameters since training began (EMA).

    transformers' own callbacks read no weights and no gradients. If there are no others, nothing waits. If another one
    defines an event around the step, it gets the clipped gradients.
    """

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        optimizer = self.optimizer
        if not isinstance(optimizer, LightstepOptimizer):
            return super().call_event(event, args, state, control, **kwargs)
        if self._others(event):
            optimizer.wait_for_update()
        if event in ("on_train_begin", "on_pre_optimizer_step"):
            readers = self._others("on_pre_optimizer_step", "on_optimizer_step")
            check_gradients_are_kept(optimizer.optimizer, readers)
            if readers and event == "on_pre_optimizer_step":
                optimizer.clipped = ClippedGradients(optimizer.optimizer, self.model.parameters())
        if event == "on_optimizer_step" and optimizer.clipped is not None:
            optimizer.clipped.restore()
            optimizer.clipped = None
        return super().call_event(event, args, state, control, **kwargs)

    def _others(self, *events: str) -> list[str]:
        """The classes of callbacks that define one of the events and are not transformers' own."""
        return [type(callback).__name__ for callback in self.callbacks if any(_is_other(callback, e) for e in events)]


def _is_other(callback: Any, event: str) -> bool:
    return not str(getattr(callback, event).__module__).startswith("transformers.")


class LightstepMixin(TrainerCheckpoints):
    """Put in front of a class made from ``transformers.Trainer``, it trains under a strategy.

    Args:
        strategy: a :class:`lightstep.Strategy`, or what ``Strategy.load`` takes: a name, a path, a mapping.
        rules: which optimizer class and hyper-parameters each parameter gets: :class:`lightstep.Rule` objects, or
            mappings or a YAML file as in ``lightstep train``. ``optim_args="rules=FILE"`` names such a file too. What
            a rule leaves out is the Trainer's.
        asynchronous_saves: train on while a checkpoint is written. ``checkpoint-N`` appears when it is whole.

    Raises:
        ConfigError: ``args`` contradict the strategy, the rules or ``asynchronous_saves``; the rules cannot be used.
        TypeError: ``optimizers`` holds another library's optimizer.
    """

    optimizer_cls_and_kwargs: Any
    rules: Sequence[Rule | Mapping[str, Any]] | None = None
    _step_report: StepReport

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | str | Path | Mapping[str, Any],
        rules: GivenRules | None = None,
        asynchronous_saves: bool = False,
        **kwargs: Any,
    ) -> None:
        self.strategy = strategy if isinstance(strategy, Strategy) else Strategy.load(strategy)
        self.asynchronous_saves = asynchronous_saves
        super().__init__(*args, **kwargs)
        if asynchronous_saves:
            check_asynchronous_saves(self.args)
        self.rules = read_rules(rules, self.args)
        if self.rules is not None and self.optimizer is not None:
            raise ConfigError("rules and optimizers=(optimizer, ...) both choose the optimizer; leave one out")
        self.callback_handler.__class__ = SynchronizedCallbackHandler
        if self.optimizer is not None:
            self._check_and_configure(self.optimizer)

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args, self.strategy)
        super().create_accelerator_and_postprocess()
        connect(self.accelerator, self.strategy).trainer = weakref.ref(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Cast the model to the strategy's dtype, and move it. A model that is to be sharded stays on the host."""
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"{self.strategy.name}: the model is already wrapped in DistributedDataParallel; pass model.module, "
                "which the strategy wraps"
            )
        self.strategy.cast_parameters(model)
        if self.strategy.config.sharding.kind != "fsdp2":
            super()._move_model_to_device(model, device)

    # -- the optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create what the rules say, or an optimizer of the Trainer's class and groups, by the strategy."""
        if self.optimizer is not None:
            return self.optimizer
        trained = self.model if model is None else model
        given = self.optimizer_cls_and_kwargs
        args = copy.copy(self.args)
        _, args.optim_args = split_optim_args(args.optim_args)
        optimizer_class, values = given or self.get_optimizer_cls_and_kwargs(args, trained)
        check_optimizer_class(optimizer_class, values, None if given else args.optim)
        check_groups(trained, getattr(self, "loss", None), values)
        if self.rules is not None:
            values = {key: value for key, value in values.items() if key not in ("params", "optimizer_dict")}
            rules = make_rules(self.rules, optimizer_class, values, args)
            self.optimizer = self.strategy.create_optimizer(trained, rules=rules)
            self.optimizer.defaults["lr"] = args.learning_rate  # what min_lr and lr_end of schedules are relative to
            self._check_and_configure(self.optimizer)
            return cast(torch.optim.Optimizer, self.optimizer)

        def create(groups: Any, **hyperparameters: Any) -> BaseOptimizer:
            return self.strategy.create_optimizer(trained, optimizer_class, param_groups=groups, **hyperparameters)

        # The Trainer calls a class, and checks that it is one, with its groups.
        constructor = {"__new__": lambda _, groups, **hyperparameters: create(groups, **hyperparameters)}
        placeholder = type(optimizer_class.__name__, (torch.optim.Optimizer,), constructor)
        self.optimizer_cls_and_kwargs = (placeholder, values)
        try:
            super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given
        optimizer = cast(torch.optim.Optimizer, self.optimizer)
        self._check_and_configure(optimizer)
        return optimizer

    def _check_and_configure(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the strategy created it for this model, and apply ``max_grad_norm``."""
        inner: Any = unwrap_optimizer(optimizer)
        if not self.strategy.trains(self.model, inner):
            raise ValueError(
                f"{self.strategy.name}: the optimizer in optimizers=(...) was made by another strategy or for another "
                f"model; pass both: strategy=strategy, optimizers=(strategy.create_optimizer(model, ...), None)"
            )
        if is_max_norm_chosen(self.args):
            inner.max_norm = max_norm(self.args.max_grad_norm)

    @property
    def _last_result(self) -> StepResult | None:
        """The result of the last step; ``None`` before the first."""
        return self.optimizer.result if isinstance(self.optimizer, LightstepOptimizer) else None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._step_report = StepReport(self.strategy, self.args)
        if isinstance(self.model, FSDPModule) and hasattr(self.model, "generate"):
            _gather_for_generate(self.model, self.strategy)
        return prepared

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._step_report.on_batch(model, inputs, self._lightstep_optimizer)
        return super().training_step(model, inputs, *args, **kwargs)

    # -- clipping and logs

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the step clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return nothing: the step computes the norm."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        result = self._last_result
        self._step_report.end_step(self.state.global_step)
        super()._maybe_log_save_evaluate(tr_loss, None if result is None else result.grad_norm, *args, **kwargs)
        self._step_report.begin_step()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        result = self._last_result
        if result is not None and "grad_norm" in logs:
            logs["loss_scale"] = result.loss_scale
        super().log(logs, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for deferred updates and the pending save: callbacks and the caller may read weights and folders."""
        self._lightstep_optimizer.synchronize()
        self._finish_save()
        self._step_report.print_measured()
        return super()._finalize_training(*args, **kwargs)


def _gather_for_generate(model: Any, strategy: Strategy) -> None:
    """Make ``generate``, which may call a part of the model (an encoder), gather weights as ``forward`` does."""
    model.generate = type(model).generate.__get__(model)
    register_fsdp_forward_method(model, "generate")
    gathered = model.generate

    @functools.wraps(gathered)
    def generate(*args: Any, **kwargs: Any) -> Any:
        strategy.unwrap_model(model)  # waits for deferred updates: FSDP2 gathers before it calls any module
        return gathered(*args, **kwargs)

    model.generate = generate


class LightstepTrainer(LightstepMixin, Trainer):
    """``transformers.Trainer`` under a lightstep strategy: ``LightstepTrainer(model, args, strategy="stream", ...)``.

    ``strategy``, ``rules`` and ``asynchronous_saves`` are those of :class:`LightstepMixin`; the other arguments are the
    Trainer's.
    """
