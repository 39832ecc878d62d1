"""transformers' ``Trainer`` (5.x) with lightstep's optimizer, precision, clipping and sharding.

:class:`LightstepTrainer` is the Trainer with one more argument, ``strategy``. :class:`LightstepMixin` does the same to
any class made from the Trainer: ``class MyTrainer(LightstepMixin, SFTTrainer)``.
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
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
    from transformers.trainer_callback import CallbackHandler
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from lightstep import CheckpointError
from lightstep.checkpoint.errors import DamagedError, is_damage
from lightstep.checkpoint.export import full_weights
from lightstep.checkpoint.layout import holds_checkpoint
from lightstep.checkpoint.pretrained import load_pretrained
from lightstep.checkpoint.ranks import Ranks
from lightstep.config import ConfigError
from lightstep.integrations import adapters
from lightstep.integrations.accelerate import LightstepOptimizer, connect
from lightstep.integrations.expectation import Expectation
from lightstep.integrations.pending_folder import CHECKPOINT, PendingFolder
from lightstep.integrations.refusals import inner_optimizer
from lightstep.integrations.trainer_folders import KIND, is_read_on_save, newest_checkpoint, remove_leftovers
from lightstep.integrations.trainer_rules import GivenRules, make_rules, read_rules, split_optim_args
from lightstep.integrations.training_arguments import (
    max_norm,
    norm_is_told,
    refuse_asynchronous_saves,
    refuse_class,
    refuse_contradictions,
)
from lightstep.integrations.whole_state import fitted_to
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.result import StepResult
from lightstep.optimizer.rules import Rule
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
        rules: which optimizer class and hyper-parameters each parameter gets: :class:`lightstep.Rule` objects, or
            mappings or a YAML file as in ``lightstep train``. ``optim_args="rules=FILE"`` names such a file too. What
            a rule leaves out is the Trainer's.
        asynchronous_saves: train on while a checkpoint is written. ``checkpoint-N`` appears when it is whole.

    Raises:
        ConfigError: ``args`` contradict the strategy, the rules or ``asynchronous_saves``; the rules cannot be used.
        TypeError: ``optimizers`` holds another library's optimizer.
    """

    optimizer: Any
    optimizer_cls_and_kwargs: Any
    rules: Sequence[Rule | Mapping[str, Any]] | None = None
    _expectation: Expectation
    _save_under_way: PendingFolder | None = None
    _folder_being_made: PendingFolder | None = None
    """While the Trainer writes its own files of an asynchronous save."""

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
            refuse_asynchronous_saves(self.args)
        self.rules = read_rules(rules, self.args)
        if self.rules is not None and self.optimizer is not None:
            raise ConfigError("rules and optimizers=(optimizer, ...) both choose the optimizer; leave one out")
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
        """What the Trainer would build, of the same class and groups, made by the strategy; or what the rules say."""
        if self.optimizer is not None:
            return self.optimizer
        trained = self.model if model is None else model
        given = self.optimizer_cls_and_kwargs
        args = copy.copy(self.args)
        _, args.optim_args = split_optim_args(args.optim_args)
        optimizer_class, values = given or self.get_optimizer_cls_and_kwargs(args, trained)
        refuse_class(optimizer_class, values, None if given else args.optim)
        if self.rules is not None:
            rules = make_rules(self.rules, optimizer_class, values, args)
            self.optimizer = self.strategy.create_optimizer(trained, rules=rules)
            self.optimizer.defaults["lr"] = args.learning_rate  # schedules with a lowest rate divide it by this one
            self._adopt(self.optimizer)
            return cast(torch.optim.Optimizer, self.optimizer)

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

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; ``resume_from_checkpoint=True`` continues from the newest checkpoint that is whole."""
        if self._save_under_way is not None:  # of a call that an error has ended, and which raised it
            self._save_under_way.exception()
        folder = Path(self.args.output_dir)
        Ranks().together(lambda: remove_leftovers(folder), only_first=True)
        if resume_from_checkpoint is True:
            newest = Ranks().together(lambda: newest_checkpoint(folder), only_first=True)
            resume_from_checkpoint = True if newest is None else str(newest)
        return super().train(resume_from_checkpoint, *args, **kwargs)

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
        """Deferred updates and a save under way end first: callbacks and the caller may read weights and folders."""
        self._lightstep_optimizer.synchronize()
        self._finish_save()
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.asynchronous_saves:
            super()._save_checkpoint(model, trial)
            return
        self._finish_save()
        run_dir, limit = super()._get_output_dir(trial), self.args.save_total_limit

        def rotate() -> None:
            """The best checkpoint stays the same until the next save, which waits for this one."""
            rotate_checkpoints(run_dir, limit, self.state.best_model_checkpoint, use_mtime=True)

        path = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with PendingFolder(path, KIND, rotate) as pending:
            self._folder_being_made = pending
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._folder_being_made = None
        self._save_under_way = pending
        readers = [type(one).__name__ for one in self.callback_handler.callbacks if is_read_on_save(one)]
        if any(Ranks().gather(bool(readers))):
            self._finish_save()

    def _get_output_dir(self, trial: Any) -> str:
        made = self._folder_being_made
        return cast(str, super()._get_output_dir(trial)) if made is None else str(made.folder.parent)

    def _finish_save(self) -> None:
        """Wait for the save that is under way, on every rank, and raise its error."""
        pending, self._save_under_way = self._save_under_way, None
        if pending is not None:
            pending.finish()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pending = self._folder_being_made
        if self._has_own_files and pending is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if pending is not None and self.state.best_model_checkpoint == output_dir:  # where it is now
            self.state.best_model_checkpoint = str(pending.path)
        handle = self.strategy.save_checkpoint(
            Path(output_dir) / CHECKPOINT,
            self.model,
            self._lightstep_optimizer,
            self.lr_scheduler,
            asynchronous=pending is not None,
        )
        if pending is not None:
            pending.checkpoint = handle

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """
        Raises:
            CheckpointError: there is no optimizer's state to continue from.
        """
        if checkpoint is None:
            return
        try:
            self._load_whole_state(Path(checkpoint))
        except CheckpointError as error:
            folder = Path(checkpoint).resolve()
            older = newest_checkpoint(folder.parent, below=folder) if is_damage(error) else None
            if older is None:
                raise
            text = str(error).removesuffix("; no older one beside it is whole")
            raise type(error)(f"{text}; {older} is whole: resume_from_checkpoint={str(older)!r}") from error

    def _load_whole_state(self, folder: Path) -> None:
        optimizer = self._lightstep_optimizer
        if holds_checkpoint(folder / CHECKPOINT):
            self.strategy.load_checkpoint(folder / CHECKPOINT, self.model, optimizer, self.lr_scheduler)
        elif not self.is_fsdp_enabled and (folder / OPTIMIZER_NAME).is_file():
            with fitted_to(self.model, optimizer, folder):
                # The Trainer would bring all of it to the device of each process.
                self.optimizer.load_state_dict(_loaded(folder / OPTIMIZER_NAME))
            self.lr_scheduler.load_state_dict(_loaded(folder / SCHEDULER_NAME))
        else:
            raise DamagedError(
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
