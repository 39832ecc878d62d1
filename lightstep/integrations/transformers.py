"""transformers' ``Trainer`` (5.x) with lightstep's optimizer, precision, clipping and sharding.

:class:`LightstepTrainer` is the Trainer with one more argument, ``strategy``. :class:`LightstepMixin` does the same to
any class made from the Trainer: ``class MyTrainer(LightstepMixin, SFTTrainer)``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightstep.extras import needs

with needs("train"):
    from transformers import Trainer, TrainingArguments
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from lightstep.checkpoint.export import full_weights
from lightstep.checkpoint.pretrained import load_pretrained
from lightstep.config import ConfigError, DDPSharding, FSDP2Sharding
from lightstep.integrations.accelerate import CHECKPOINT, LightstepOptimizer, connect
from lightstep.integrations.refusals import inner_optimizer
from lightstep.integrations.whole_state import fitted_to
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.result import StepResult
from lightstep.sharding.preparation import cast_parameters
from lightstep.strategy import Strategy

__all__ = ["LightstepMixin", "LightstepTrainer"]

logger = logging.getLogger(__name__)

_AnyTrainer: Any = object
"""What the mixin stands in front of."""


class LightstepMixin(_AnyTrainer):
    """In front of a class made from ``transformers.Trainer``: its optimizer becomes the strategy's.

    Args:
        strategy: a :class:`lightstep.Strategy`, or what ``Strategy.load`` takes: a name, a path, a mapping.

    Raises:
        ConfigError: ``args`` contradict the strategy.
        TypeError: ``optimizers`` holds another library's optimizer.
    """

    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, strategy: Strategy | str | Path | Mapping[str, Any], **kwargs: Any) -> None:
        self.strategy = strategy if isinstance(strategy, Strategy) else Strategy.load(strategy)
        super().__init__(*args, **kwargs)
        if self.optimizer is not None:
            self._refuse_foreign(self.optimizer)

    def create_accelerator_and_postprocess(self) -> None:
        _refuse_contradictions(self.args, self.strategy)
        super().create_accelerator_and_postprocess()
        connect(self.accelerator, self.strategy)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """In the strategy's dtype from the start. What the strategy shards comes to the device with its sharding."""
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"{self.strategy.name}: the model is wrapped in DistributedDataParallel already; hand over the module "
                "in it, the strategy wraps it"
            )
        cast_parameters(model, self.strategy.parameter_dtype)
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
        _refuse_class(optimizer_class, values, None if given else self.args.optim)

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
        self._refuse_foreign(optimizer)
        return optimizer

    def _refuse_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.strategy.trains(self.model, inner_optimizer(optimizer)):
            raise ValueError(
                f"{self.strategy.name}: the optimizer in optimizers=(...) was made by another strategy or for another "
                f"model; hand over both: strategy=strategy, optimizers=(strategy.create_optimizer(model, ...), None)"
            )

    @property
    def _lightstep_optimizer(self) -> BaseOptimizer:
        return inner_optimizer(self.optimizer)

    @property
    def _result(self) -> StepResult | None:
        """What the last step did."""
        return self.optimizer.result if isinstance(self.optimizer, LightstepOptimizer) else None

    # -- clipping and logs

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: the step clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing yet: the step measures."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        result = self._result
        super()._maybe_log_save_evaluate(tr_loss, None if result is None else result.grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        result = self._result
        if result is not None and "grad_norm" in logs:
            logs["loss_scale"] = result.loss_scale
        super().log(logs, *args, **kwargs)

    # -- weights and checkpoints

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Deferred updates land: callbacks at the end of training, and the caller behind it, may read parameters."""
        self._lightstep_optimizer.synchronize()
        return super()._finalize_training(*args, **kwargs)

    @property
    def _sharded_by_strategy(self) -> bool:
        return not self.is_fsdp_enabled and any(isinstance(module, FSDPModule) for module in self.model.modules())

    @property
    def _has_own_files(self) -> bool:
        """Whether one process holds the whole state on its device: the Trainer's ``optimizer.pt`` takes it then."""
        config = self.strategy.config
        return config.sharding.kind == "single" and config.optimizer_state.backend == "resident"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer, also where the strategy has sharded the model; every process calls it."""
        if not self._sharded_by_strategy:
            super().save_model(output_dir, _internal_call)
            return
        model = self.strategy.unwrap_model(self.model)
        self._save(output_dir, state_dict=full_weights(model, keep=self.args.should_save))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._has_own_files:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder = Path(output_dir) / CHECKPOINT
        self.strategy.save_checkpoint(folder, self.model, self._lightstep_optimizer, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is not None and (folder / CHECKPOINT).is_dir():
            optimizer = self._lightstep_optimizer
            self.strategy.load_checkpoint(folder / CHECKPOINT, self.model, optimizer, self.lr_scheduler)
        elif folder is not None and not self.is_fsdp_enabled and (folder / OPTIMIZER_NAME).is_file():
            with fitted_to(self.model, self._lightstep_optimizer, folder):
                # The Trainer would bring all of it to the device of each process.
                self.optimizer.load_state_dict(_loaded(folder / OPTIMIZER_NAME))
            self.lr_scheduler.load_state_dict(_loaded(folder / SCHEDULER_NAME))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled and (Path(resume_from_checkpoint) / CHECKPOINT).is_dir():
            return  # the weights come with the optimizer
        if self._sharded_by_strategy:
            load_pretrained(self.model, resume_from_checkpoint)
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        folder = None if best is None else Path(best) / CHECKPOINT
        if folder is not None and folder.is_dir():
            logger.info("loading the best model from %s (score: %s)", best, self.state.best_metric)
            self.strategy.load_checkpoint(folder, self.model)
        elif best is not None and self._sharded_by_strategy:
            load_pretrained(self.model, best)
        else:
            super()._load_best_model()


def _loaded(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


class LightstepTrainer(LightstepMixin, Trainer):
    """``transformers.Trainer`` under a lightstep strategy: ``LightstepTrainer(model, args, strategy="stream", ...)``.

    Every other argument is the Trainer's.
    """


# -- what does not go together -----------------------------------------------------------------------------------------

_OF_DDP = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_mib",
    "ddp_static_graph": "static_graph",
}
_OTHER_ARITHMETIC = ("bitsandbytes", "torchao", "galore_torch", "apollo_torch", "lomo_optim", "schedulefree", "apex")


def _refuse_contradictions(args: TrainingArguments, strategy: Strategy) -> None:
    name, config = strategy.name, strategy.config
    if args.fp16:
        raise ConfigError(
            f"{name}: fp16=True in TrainingArguments scales the loss with a GradScaler of its own, and lightstep with "
            f"precision.loss_scale ({config.precision.loss_scale.kind}); leave fp16 out, and choose a strategy with "
            "precision.parameters: float16 and a dynamic precision.loss_scale (preset 'fp16')"
        )
    if args.deepspeed:
        raise ConfigError(f"{name}: deepspeed in TrainingArguments brings an optimizer of its own; leave it out")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{name}: one process sees {args.n_gpu} GPUs, and the Trainer would use nn.DataParallel; start one process "
            "per GPU with torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.fsdp and not isinstance(config.sharding, FSDP2Sharding):
        raise ConfigError(
            f"{name}: fsdp in TrainingArguments shards the model, and the strategy's sharding.kind is "
            f"{config.sharding.kind}; choose a strategy of kind fsdp2 (fsdp2, fsdp2-stream), or leave fsdp out"
        )
    _refuse_other_clipping(args, strategy)
    _refuse_other_ddp(args, strategy)


def _refuse_other_clipping(args: TrainingArguments, strategy: Strategy) -> None:
    """The default of ``max_grad_norm`` cannot be told from a choice, and gives way to the strategy."""
    own = strategy.config.clipping.max_norm
    default = next(field.default for field in dataclasses.fields(args) if field.name == "max_grad_norm")
    given = args.max_grad_norm
    if given == (own or 0.0) or (given == own):
        return
    if given != default:
        raise ConfigError(
            f"{strategy.name}: max_grad_norm={given} in TrainingArguments, clipping.max_norm {own} in the strategy: "
            f"gradients are clipped once, in step(). Leave max_grad_norm out, and give the strategy "
            f"{{'clipping.max_norm': {given or None}}}: Strategy.load(name, overrides)"
        )
    logger.info("lightstep: clipping.max_norm %s of the strategy counts, not max_grad_norm %s", own, given)


def _refuse_other_ddp(args: TrainingArguments, strategy: Strategy) -> None:
    sharding = strategy.config.sharding
    for argument, key in _OF_DDP.items() if isinstance(sharding, DDPSharding) else ():
        given, own = getattr(args, argument), getattr(sharding, key)
        if given is not None and given != own:
            raise ConfigError(
                f"{strategy.name}: {argument}={given} in TrainingArguments, and sharding.{key} {own} in the strategy, "
                f"which wraps the model; leave {argument} out, and set sharding.{key}"
            )


def _refuse_class(optimizer_class: Any, values: Mapping[str, Any], optim: str | None) -> None:
    source = "optimizer_cls_and_kwargs" if optim is None else f"optim={str(optim)!r} in TrainingArguments"
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    wraps = is_class and issubclass(optimizer_class, BaseOptimizer)
    library = getattr(optimizer_class, "__module__", "").partition(".")[0]
    if not is_class or wraps or library in _OTHER_ARITHMETIC or {"model", "optimizer_dict"} & set(values):
        raise ConfigError(
            f"{source} is {getattr(optimizer_class, '__name__', optimizer_class)} of {library}, which does more than "
            "update one weight from its gradient; lightstep runs any element-wise torch.optim.Optimizer class on its "
            "masters: 'adamw_torch', 'adamw_torch_fused', 'sgd', 'adagrad', 'rmsprop', or a class of your own"
        )
