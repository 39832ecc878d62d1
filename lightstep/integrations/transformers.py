"""transformers' ``Trainer`` (5.x) with lightstep's optimizer, precision, clipping and sharding.

:class:`LightstepTrainer` is the Trainer with one more argument, ``strategy``. :class:`LightstepMixin` does the same to
any class made from the Trainer: ``class MyTrainer(LightstepMixin, SFTTrainer)``.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from lightstep.extras import needs

with needs("train"):
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
    from transformers.trainer_callback import CallbackHandler

from lightstep import CheckpointError
from lightstep.checkpoint.export import full_weights
from lightstep.checkpoint.layout import holds_checkpoint
from lightstep.checkpoint.pretrained import load_pretrained
from lightstep.config import ConfigError
from lightstep.integrations import adapters
from lightstep.integrations.accelerate import CHECKPOINT, LightstepOptimizer, connect
from lightstep.integrations.expectation import Expectation
from lightstep.integrations.refusals import inner_optimizer
from lightstep.integrations.training_arguments import max_norm, norm_is_told, refuse_class, refuse_contradictions
from lightstep.integrations.whole_state import fitted_to
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.result import StepResult
from lightstep.strategy import Strategy

__all__ = ["LightstepMixin", "LightstepTrainer"]

logger = logging.getLogger(__name__)

_AnyTrainer: Any = object
"""What the mixin stands in front of."""


class UpToDateCallbacks(CallbackHandler):
    """Callbacks see the weights after the last step, those too that keep parameters since training began (EMA).

    transformers' own callbacks read none: with them alone nothing waits.
    """

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        handlers = [getattr(callback, event) for callback in self.callbacks]
        others = any(not str(handler.__module__).startswith("transformers.") for handler in handlers)
        if others and isinstance(self.optimizer, LightstepOptimizer):
            self.optimizer.wait_for_update()
        return super().call_event(event, args, state, control, **kwargs)


class LightstepMixin(_AnyTrainer):
    """In front of a class made from ``transformers.Trainer``: its optimizer becomes the strategy's.

    Args:
        strategy: a :class:`lightstep.Strategy`, or what ``Strategy.load`` takes: a name, a path, a mapping.

    Raises:
        ConfigError: ``args`` contradict the strategy.
        TypeError: ``optimizers`` holds another library's optimizer.
    """

    optimizer_cls_and_kwargs: Any
    _expectation: Expectation

    def __init__(self, *args: Any, strategy: Strategy | str | Path | Mapping[str, Any], **kwargs: Any) -> None:
        self.strategy = strategy if isinstance(strategy, Strategy) else Strategy.load(strategy)
        super().__init__(*args, **kwargs)
        self.callback_handler.__class__ = UpToDateCallbacks
        if self.optimizer is not None:
            self._adopt(self.optimizer)

    def create_accelerator_and_postprocess(self) -> None:
        refuse_contradictions(self.args, self.strategy)
        super().create_accelerator_and_postprocess()
        connect(self.accelerator, self.strategy).trainer = weakref.ref(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """In the strategy's dtype from the start. What the strategy shards comes to the device with its sharding."""
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"{self.strategy.name}: the model is wrapped in DistributedDataParallel already; hand over the module "
                "in it, the strategy wraps it"
            )
        self.strategy.cast_parameters(model)
        if self.strategy.config.sharding.kind != "fsdp2":
            super()._move_model_to_device(model, device)

    # -- the optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """What the Trainer would build, of the same class and groups, made by the strategy."""
        if self.optimizer is not None:
            return self.optimizer
        trained = self.model if model is None else model
        given = self.optimizer_cls_and_kwargs
        optimizer_class, values = given or self.get_optimizer_cls_and_kwargs(self.args, trained)
        refuse_class(optimizer_class, values, None if given else self.args.optim)

        def create(groups: Any, **hyperparameters: Any) -> BaseOptimizer:
            return self.strategy.create_optimizer(trained, optimizer_class, param_groups=groups, **hyperparameters)

        # The Trainer calls a class with groups and values: what stands in its place has to be one.
        made_here = {"__new__": lambda _, groups, **hyperparameters: create(groups, **hyperparameters)}
        stand_in = type(optimizer_class.__name__, (torch.optim.Optimizer,), made_here)
        self.optimizer_cls_and_kwargs = (stand_in, values)
        try:
            super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given
        optimizer = cast(torch.optim.Optimizer, self.optimizer)
        self._adopt(optimizer)
        return optimizer

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """It was made for this, and clips as ``max_grad_norm`` says where the strategy leaves it open."""
        inner: Any = inner_optimizer(optimizer)
        if not self.strategy.trains(self.model, inner):
            raise ValueError(
                f"{self.strategy.name}: the optimizer in optimizers=(...) was made by another strategy or for another "
                f"model; hand over both: strategy=strategy, optimizers=(strategy.create_optimizer(model, ...), None)"
            )
        if norm_is_told(self.args):
            inner.max_norm = max_norm(self.args.max_grad_norm)

    @property
    def _lightstep_optimizer(self) -> BaseOptimizer:
        return inner_optimizer(self.optimizer)

    @property
    def _result(self) -> StepResult | None:
        """What the last step did."""
        return self.optimizer.result if isinstance(self.optimizer, LightstepOptimizer) else None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._expectation = Expectation(self.strategy, self.args)
        if isinstance(self.model, FSDPModule) and hasattr(self.model, "generate"):
            _generate_from_shards(self.model, self.strategy)
        return prepared

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._expectation.batch(model, inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    # -- clipping and logs

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: the step clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing yet: the step measures."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        result = self._result
        self._expectation.step_ends(self.state.global_step)
        super()._maybe_log_save_evaluate(tr_loss, None if result is None else result.grad_norm, *args, **kwargs)
        self._expectation.step_begins()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        result = self._result
        if result is not None and "grad_norm" in logs:
            logs["loss_scale"] = result.loss_scale
        super().log(logs, *args, **kwargs)

    # -- weights and checkpoints

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Deferred updates land: callbacks at the end of training, and the caller behind it, may read parameters."""
        self._lightstep_optimizer.synchronize()
        self._expectation.end()
        return super()._finalize_training(*args, **kwargs)

    @property
    def _sharded_by_strategy(self) -> bool:
        return not self.is_fsdp_enabled and any(isinstance(module, FSDPModule) for module in self.model.modules())

    @property
    def _has_own_files(self) -> bool:
        """Whether one process holds the whole state on its device: the Trainer's ``optimizer.pt`` takes it then."""
        config = self.strategy.config
        return config.sharding.kind == "single" and config.optimizer_state.backend == "resident"

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As the Trainer, also where the strategy has sharded the model; every process calls it."""
        if state_dict is None and self._sharded_by_strategy:
            state_dict = full_weights(self.strategy.unwrap_model(self.model), keep=self.args.should_save)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._has_own_files:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder = Path(output_dir) / CHECKPOINT
        self.strategy.save_checkpoint(folder, self.model, self._lightstep_optimizer, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """
        Raises:
            CheckpointError: there is no optimizer's state to continue from.
        """
        if checkpoint is None:
            return
        folder, optimizer = Path(checkpoint), self._lightstep_optimizer
        if holds_checkpoint(folder / CHECKPOINT):
            self.strategy.load_checkpoint(folder / CHECKPOINT, self.model, optimizer, self.lr_scheduler)
        elif not self.is_fsdp_enabled and (folder / OPTIMIZER_NAME).is_file():
            with fitted_to(self.model, optimizer, folder):
                # The Trainer would bring all of it to the device of each process.
                self.optimizer.load_state_dict(_loaded(folder / OPTIMIZER_NAME))
            self.lr_scheduler.load_state_dict(_loaded(folder / SCHEDULER_NAME))
        else:
            raise CheckpointError(
                f"{folder} has no optimizer state ({CHECKPOINT}/, or {OPTIMIZER_NAME} of a model that accelerate does "
                "not shard), and resuming from it would start a new optimizer in the middle of a run. Resume from "
                "another checkpoint, or start a new run from its weights (save_only_model=True saves no more)"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self.is_fsdp_enabled and holds_checkpoint(folder / CHECKPOINT):
            return  # the weights come with the optimizer
        if not self._load_in_place(folder):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best, score = self.state.best_model_checkpoint, self.state.best_metric
        logger.info("loading the best model from %s (score: %s)", best, score)
        if holds_checkpoint(Path(best) / CHECKPOINT):
            self.strategy.load_checkpoint(Path(best) / CHECKPOINT, self.model)
        elif not self._load_in_place(Path(best)):
            super()._load_best_model()

    def _load_in_place(self, folder: Path) -> bool:
        """Whether the weights were loaded where the Trainer would exchange parameters, or knows no shards."""
        if not self.is_fsdp_enabled and adapters.are_saved_in(folder, self.model):
            adapters.load_adapters(self.model, folder)
        elif self._sharded_by_strategy:
            load_pretrained(self.model, folder)
        else:
            return False
        return True


def _generate_from_shards(model: Any, strategy: Strategy) -> None:
    """``generate`` calls parts of the model (an encoder), or reads weights: FSDP2 gathers them as for a forward."""
    model.generate = type(model).generate.__get__(model)
    register_fsdp_forward_method(model, "generate")
    gathered = model.generate

    @functools.wraps(gathered)
    def generate(*args: Any, **kwargs: Any) -> Any:
        strategy.unwrap_model(model)  # deferred updates: FSDP2 gathers before any module is called
        return gathered(*args, **kwargs)

    model.generate = generate


def _loaded(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


class LightstepTrainer(LightstepMixin, Trainer):
    """``transformers.Trainer`` under a lightstep strategy: ``LightstepTrainer(model, args, strategy="stream", ...)``.

    Every other argument is the Trainer's.
    """
