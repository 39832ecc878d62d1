"""accelerate (1.15 and later): an ``Accelerator`` whose backward, clipping, step and checkpoints are lightstep's.

``prepare(accelerator, model, optimizer, ...)`` stands in place of ``accelerator.prepare(model, optimizer, ...)``, and
the training loop stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from lightstep.extras import needs

with needs("train"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin, broadcast, gather_object

from lightstep.checkpoint import CheckpointError
from lightstep.checkpoint.export import full_weights
from lightstep.checkpoint.layout import holds_checkpoint, is_whole
from lightstep.config import ConfigError, FSDP2Sharding
from lightstep.distributed import local_tensor
from lightstep.integrations.pending_folder import CHECKPOINT, PendingFolder, folder_kind, newest_whole
from lightstep.integrations.refusals import (
    inner_optimizer,
    refuse_contradictions,
    refuse_other_norm,
    refuse_part,
    refuse_stranger,
)
from lightstep.integrations.whole_state import fitted_to, part_of
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import clean_name
from lightstep.optimizer.result import StepResult
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.strategy import Strategy

__all__ = ["LightstepAccelerator", "LightstepOptimizer", "connect", "prepare"]

logger = logging.getLogger(__name__)

_KIND = folder_kind(
    "a state that save_state wrote",
    patterns=("*.bin", "*.pkl", "*.safetensors", "*.safetensors.index.json", "scaler.pt"),
    is_ours=lambda path: (path / CHECKPOINT).is_dir() or any(path.glob("random_states_*.pkl")),
)


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: BaseOptimizer, *others: Any, strategy: Strategy
) -> tuple[Any, ...]:
    """``accelerator.prepare(model, optimizer, *others)``, with ``strategy`` deciding.

    The model is cast, placed and sharded as the strategy says; where the accelerator has an FSDP2 plugin, accelerate
    shards it, under a mixed-precision policy that follows ``precision``. From then on ``accelerator.backward``,
    ``accumulate``, ``clip_grad_norm_``, ``save_state`` and ``load_state`` are lightstep's for this model.

    Args:
        accelerator: becomes a :class:`LightstepAccelerator`; one model and optimizer each.
        model: the module that ``optimizer`` was made for.
        optimizer: what ``strategy.create_optimizer(model, ...)`` returned. It may be made before this call.
        others: dataloaders and schedulers, prepared by accelerate.
        strategy: the one that made the optimizer.

    Returns:
        Model, optimizer and the others, prepared, in the order in which they were given.

    Raises:
        TypeError: the optimizer is not lightstep's, or the strategy is none.
        ConfigError: what the accelerator was told contradicts the strategy.
    """
    return cast(tuple[Any, ...], connect(accelerator, strategy).prepare(model, optimizer, *others))


def connect(accelerator: Accelerator, strategy: Strategy) -> LightstepAccelerator:
    """The same accelerator, whose ``prepare`` knows optimizers that ``strategy`` made.

    Raises:
        TypeError: ``accelerator`` is no ``Accelerator``, or ``strategy`` no :class:`Strategy`.
        ConfigError: what the accelerator was told contradicts the strategy.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator is of type {type(accelerator).__name__}; an accelerate.Accelerator is needed")
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy is {strategy!r:.80}; the Strategy that made the optimizer is needed: strategy = "
            "Strategy.load('stream'), optimizer = strategy.create_optimizer(model, ...)"
        )
    refuse_contradictions(accelerator, strategy)
    if not isinstance(accelerator, LightstepAccelerator):
        accelerator.__class__ = _connected_class(type(accelerator))
    connected = cast(LightstepAccelerator, accelerator)
    connected.strategy = strategy
    if connected._strategy_shards:
        connected.state.__class__ = _ShardedByStrategy
    return connected


class _ShardedByStrategy(AcceleratorState):
    """accelerate's state where the strategy shards: who asks for an FSDP plugin (TRL does) learns that it is FSDP2.

    A class, because accelerate's states share their attributes: what is set here, every later Accelerator would have.
    """

    fsdp_plugin = property(lambda _: FullyShardedDataParallelPlugin(fsdp_version=2))


class LightstepOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper around a lightstep optimizer; what it does not know is asked of ``.optimizer``.

    Attributes:
        optimizer: what ``strategy.create_optimizer`` returned.
        result: the :class:`StepResult` of the last step; ``None`` before the first.
    """

    optimizer: Any

    def __init__(self, optimizer: BaseOptimizer) -> None:
        # The state stays where the strategy keeps it, and is not loaded back: the model may not be sharded yet.
        super().__init__(optimizer, device_placement=False)
        self.result: StepResult | None = None
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> StepResult | None:
        """One step where an accumulation is complete, else nothing (``None``)."""
        if not self.gradient_state.sync_gradients:
            return None
        self.result = self.optimizer.step(closure)
        return self.result

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step found gradients that are not finite; reading it waits for the device."""
        return self.result is not None and not self.result

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class LightstepAccelerator(Accelerator):
    """An ``Accelerator`` that leaves one model and its optimizer to a strategy; made by :func:`connect`."""

    strategy: Strategy
    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]
    _model: weakref.ref[nn.Module] | None = None
    trainer: weakref.ref[Any] | None = None
    """The transformers Trainer whose accelerator this is."""
    _save_under_way: PendingFolder | None = None

    def __reduce__(self) -> Any:
        """The class was made by :func:`connect`. Weak references and a save under way are left out."""
        left_out = ("_model", "trainer", "_save_under_way")
        state = {key: value for key, value in vars(self).items() if key not in left_out}
        return _unpickled, (type(self).__bases__[1],), state

    # -- prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        optimizers = [given for given in args if isinstance(given, torch.optim.Optimizer)]
        if not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        models = [given for given in args if isinstance(given, nn.Module)]
        inner = self._checked(optimizers, models)
        prepared: dict[int, Any] = {}
        wrapped = optimizers[0] if isinstance(optimizers[0], LightstepOptimizer) else LightstepOptimizer(inner)
        prepared[id(optimizers[0])] = wrapped
        if models:
            refuse_stranger(self.strategy, inner, models[0])
            prepared[id(models[0])] = self._prepare_trained(models[0], inner)
            self._model = weakref.ref(unwrap_model(models[0]))
        if wrapped not in self._optimizers:
            self._optimizers.append(wrapped)
        rest = [given for given in args if id(given) not in prepared]
        prepared |= {id(given): super(LightstepAccelerator, self).prepare(given) for given in rest}
        result = tuple(prepared[id(given)] for given in args)
        return result if len(result) > 1 else result[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """What is only evaluated (TRL's reference models) is sharded as a reference where the strategy shards."""
        own = self.trainer() if self.trainer is not None else None
        trained = self._is_trained(model) or getattr(own, "model", None) is model
        reference = evaluation_mode and device_placement is None and not trained
        if reference and self._strategy_shards and not _is_sharded(model):
            model = self.strategy.prepare_model(model, role="reference")
        return cast(nn.Module, super().prepare_model(model, device_placement, evaluation_mode))

    @property
    def _strategy_shards(self) -> bool:
        return self.strategy.config.sharding.kind == "fsdp2" and not self.is_fsdp2

    def _checked(self, optimizers: list[torch.optim.Optimizer], models: list[nn.Module]) -> BaseOptimizer:
        if len(optimizers) > 1 or len(models) > 1:
            raise ValueError(
                f"prepare got {len(models)} models and {len(optimizers)} optimizers; with lightstep an Accelerator "
                "trains one model with one optimizer: prepare models that are not trained in a call of their own, "
                "without an optimizer"
            )
        inner = inner_optimizer(optimizers[0])
        others = [held for held in self._optimizers if held is not optimizers[0] and inner_optimizer(held) is not inner]
        if others:
            raise ValueError(
                f"this Accelerator has an optimizer already ({type(others[0]).__name__}), and trains one model with "
                "one optimizer under lightstep; call accelerator.free_memory() first, or make another Accelerator"
            )
        return inner

    def _prepare_trained(self, model: nn.Module, optimizer: BaseOptimizer) -> nn.Module:
        wrapped = any(isinstance(module, FSDPModule | DistributedDataParallel) for module in model.modules())
        again = self._is_trained(model) and self.strategy.config.sharding.kind == "single"
        if self.is_fsdp2 and not wrapped:
            return self._shard(model, optimizer)
        if not wrapped and not again:
            model = self.strategy.prepare_model(model)
        # With this flag accelerate adds autocast and torch.compile, and neither wraps nor moves anything.
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def _shard(self, model: nn.Module, optimizer: BaseOptimizer) -> nn.Module:
        """By accelerate, as its FSDP2 plugin says, under a policy that follows ``precision``."""
        strategy = self.strategy
        with strategy.preparing(model), self._own_precision():
            strategy.cast_parameters(model)
            unrounded = {clean_name(name): value for name, (_, value) in PreparedModel.of(model).kept_masters(model)}
            sharded, _ = super().prepare(model, LightstepOptimizer(optimizer))
            _keep_masters(sharded, unrounded)
        self._optimizers = [held for held in self._optimizers if inner_optimizer(held) is not optimizer]
        return cast(nn.Module, sharded)

    @contextlib.contextmanager
    def _own_precision(self) -> Iterator[None]:
        """accelerate's own policy reduces in the dtype of compute, and ``mixed_precision`` makes fp32 shards."""
        precision, asked = self.strategy.config.precision, self.mixed_precision
        compute = cast(FSDP2Sharding, self.strategy.config.sharding).compute
        param_dtype = None if compute == "parameters" else getattr(torch, compute)
        if asked == "bf16" and precision.parameters == "float32":
            param_dtype = torch.bfloat16
        elif asked == "bf16" and self.is_main_process:
            logger.warning(
                "lightstep: with mixed_precision 'bf16' accelerate would make fp32 shards; they are %s, as %s says: it "
                "shards as with mixed_precision 'no'",
                precision.parameters,
                self.strategy.name,
            )
        reduce_dtype = torch.float32 if precision.reduce == "float32" else self.strategy.parameter_dtype
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        self.state.fsdp_plugin.mixed_precision_policy = policy
        logger.info("lightstep: accelerate shards %s weights under %s", precision.parameters, policy)
        self.state._mixed_precision = "no"
        try:
            yield
        finally:  # accelerate compares it when another Accelerator is made
            self.state._mixed_precision = asked

    # -- one iteration

    @property
    def _trained(self) -> LightstepOptimizer | None:
        """The optimizer that :meth:`prepare` was given last, if it is still in use."""
        return next((held for held in self._optimizers if isinstance(held, LightstepOptimizer)), None)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``optimizer.backward``: scaled by the strategy's loss scale, after division by the micro-batches."""
        trained = self._trained
        if trained is None:
            super().backward(loss, **kwargs)
            return
        optimizer = trained.optimizer
        optimizer.accumulating = not self.sync_gradients
        try:
            optimizer.backward(loss / self.gradient_accumulation_steps, **kwargs)
        finally:
            optimizer.accumulating = False

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A micro-batch whose gradients are not communicated: ``strategy.accumulate(model, last=False)``."""
        ours = self._trained is not None and self._is_trained(model)
        with self.strategy.accumulate(model, last=False) if ours else super().no_sync(model):
            yield

    def _is_trained(self, model: nn.Module) -> bool:
        return self._model is not None and self._model() is unwrap_model(model)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The global norm, unscaled and before clipping; the step that follows clips, once.

        Args:
            parameters: all of the model's.
            max_norm: the strategy's ``clipping.max_norm``, or ``inf`` to measure only.

        Raises:
            ConfigError: another norm than the strategy's.
            ValueError: not all parameters.
            RuntimeError: more micro-batches are to come.
        """
        trained = self._trained
        if trained is None:
            return cast(Tensor, super().clip_grad_norm_(parameters, max_norm, norm_type))
        optimizer = trained.optimizer
        refuse_other_norm(optimizer, max_norm, norm_type)
        refuse_part(optimizer, [parameters] if isinstance(parameters, Tensor) else list(parameters))
        if not self.sync_gradients:
            raise RuntimeError(
                "clip_grad_norm_ in the middle of an accumulation: write `if accelerator.sync_gradients:` in front"
            )
        return optimizer.grad_norm()

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """accelerate's, for models that are not trained.

        Raises:
            ConfigError: processes that have run out of batches would be missing in the others' steps.
        """
        uneven = not (self.even_batches if even_batches is None else even_batches)
        trained = any(isinstance(joined, nn.Module) and self._is_trained(joined) for joined in joinables)
        if uneven and trained and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs with even_batches=False: every step of lightstep is one of all processes, and "
                "waits for those that have run out of batches; leave even_batches at True (then some rows come twice)"
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self._trained is not None:
            raise ConfigError(
                f"clip_grad_value_({clip_value}): lightstep adds gradients up outside of p.grad and clips by norm; set "
                "clipping.max_norm in the strategy, or drop this call"
            )
        super().clip_grad_value_(parameters, clip_value)

    # -- weights and checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole weights; of a sharded model on the first process only, and every process calls it."""
        if not _is_sharded(model) or self.is_fsdp2:
            return cast(dict[str, Any], super().get_state_dict(model, unwrap=unwrap))
        return full_weights(self.strategy.unwrap_model(model), keep=self.is_main_process)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, *, asynchronous: bool = False, **kwargs: Any
    ) -> Any:
        """accelerate's files, and the trained model with its optimizer as a lightstep checkpoint in ``lightstep/``.

        Args:
            asynchronous: train on while the checkpoint is written. The folder appears when it is whole. The next
                ``save_state``, ``load_state`` and ``end_training`` wait for it.

        Returns:
            The folder's path; with ``asynchronous`` a handle with ``done()`` and ``result(timeout=None)``, the path.

        Raises:
            RuntimeError: ``asynchronous``, and no model and optimizer have been prepared.
        """
        self._finish_save()
        pair = self._pair()
        if asynchronous:
            return self._save_state_asynchronously(pair, output_dir, safe_serialization, **kwargs)
        with self._removing_old_ones_last(), self._without(pair):
            location = super().save_state(output_dir, safe_serialization, **kwargs)
            if pair is not None:
                model, optimizer = pair
                self.wait_for_everyone()
                self.strategy.save_checkpoint(Path(location) / CHECKPOINT, model, optimizer.optimizer)
        return location

    def _save_state_asynchronously(
        self, pair: tuple[nn.Module, LightstepOptimizer] | None, output_dir: Any, *args: Any, **kwargs: Any
    ) -> PendingFolder:
        if pair is None:
            raise RuntimeError("save_state(asynchronous=True) without a model and an optimizer: prepare them first")
        project = self.project_configuration
        naming, limit = project.automatic_checkpoint_naming, None
        if naming:
            path, limit = self._states_folder / f"checkpoint_{self.save_iteration}", project.total_limit
            if path.exists():
                raise ValueError(f"{path} exists; set accelerator.project_configuration.iteration to a free number")
        elif output_dir is None:
            raise ValueError(
                "save_state() needs output_dir, or a ProjectConfiguration with automatic_checkpoint_naming"
            )
        else:
            path = Path(os.path.expanduser(output_dir))
        with PendingFolder(path, _KIND, lambda: self._remove_old_states(limit)) as pending, self._without(pair):
            project.automatic_checkpoint_naming = False  # the folder is given
            try:
                super().save_state(str(pending.folder), *args, **kwargs)
            finally:
                project.automatic_checkpoint_naming = naming
            pending.checkpoint = self.strategy.save_checkpoint(
                pending.folder / CHECKPOINT, pair[0], pair[1].optimizer, asynchronous=True
            )
        self._save_under_way = pending
        return pending

    def _finish_save(self) -> None:
        """Wait for the asynchronous save that is under way, and raise its error."""
        pending, self._save_under_way = self._save_under_way, None
        if pending is not None:
            pending.finish()

    def end_training(self) -> None:
        """accelerate's, after a save that is under way."""
        self._finish_save()
        super().end_training()

    @contextlib.contextmanager
    def _removing_old_ones_last(self) -> Iterator[None]:
        """``total_limit`` counts when the new state is whole; accelerate removes before it writes, down to nothing."""
        project = self.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        if limit is None:
            yield
            return
        project.total_limit = None
        try:
            yield
        finally:
            project.total_limit = limit
        self.wait_for_everyone()
        if self.is_main_process:
            self._remove_old_states(limit)

    def _remove_old_states(self, limit: int | None) -> None:
        for folder in [] if limit is None else self._saved_states()[: -max(limit, 1)]:
            shutil.rmtree(folder)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Continue from :meth:`save_state`, on any number of processes.

        Without ``input_dir`` (automatic naming), from the newest state that is whole.
        """
        if self._save_under_way is not None:
            self._save_under_way.exception()  # the next save_state or end_training raises it
            self.wait_for_everyone()
        pair = self._pair()
        if pair is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        input_dir = self._newest() if input_dir is None else os.path.expanduser(input_dir)
        if not holds_checkpoint(Path(input_dir) / CHECKPOINT):
            with self._loading_plain_state(pair, Path(input_dir)):
                super().load_state(input_dir, load_kwargs, **kwargs)
            return
        with self._without(pair):
            super().load_state(input_dir, load_kwargs, **kwargs)
        self.strategy.load_checkpoint(Path(input_dir) / CHECKPOINT, pair[0], pair[1].optimizer)

    def _pair(self) -> tuple[nn.Module, LightstepOptimizer] | None:
        trained = self._trained
        models = [model for model in self._models if self._is_trained(model)]
        return (models[0], trained) if trained is not None and models else None

    @contextlib.contextmanager
    def _loading_plain_state(self, pair: tuple[nn.Module, LightstepOptimizer], folder: Path) -> Iterator[None]:
        """Of a run without lightstep: weights under the names of the module inside, and the optimizer's state."""
        inner, models = unwrap_model(pair[0]), self._models
        if self.is_fsdp2:
            yield
            return
        if _is_sharded(inner):
            raise ConfigError(
                f"{self.strategy.name}: {folder} was saved without lightstep, and whole weights do not go into the "
                "shards of sharding.kind fsdp2; load it once under a strategy of kind ddp or single and save_state "
                "again: any number of processes and any strategy load that"
            )
        self._models = [inner if model is pair[0] else model for model in models]
        try:
            with fitted_to(inner, pair[1].optimizer, folder):
                yield
        finally:
            self._models = models

    @contextlib.contextmanager
    def _without(self, pair: tuple[nn.Module, LightstepOptimizer] | None) -> Iterator[None]:
        """accelerate does not see these two in here."""
        models, optimizers = self._models, self._optimizers
        if pair is not None:
            self._models = [model for model in models if model is not pair[0]]
            self._optimizers = [optimizer for optimizer in optimizers if optimizer is not pair[1]]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _newest(self) -> str:
        """What ``load_state()`` loads with automatic checkpoint naming."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state() needs input_dir, or a ProjectConfiguration with automatic_checkpoint_naming")
        states = self._saved_states()
        newest = newest_whole(states, _is_complete)
        if newest is None:
            raise CheckpointError(f"{self._states_folder} holds no whole state among {len(states)}")
        return str(newest)

    @property
    def _states_folder(self) -> Path:
        """Of automatic checkpoint naming."""
        return Path(self.project_dir) / "checkpoints"

    def _saved_states(self) -> list[Path]:
        """Under automatic checkpoint naming, the oldest first."""
        folders = self._states_folder.glob("checkpoint_*")
        return sorted(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))


def _is_complete(folder: Path) -> bool:
    """Whether ``save_state`` has ended, with lightstep or without."""
    if holds_checkpoint(folder / CHECKPOINT):
        return is_whole(folder / CHECKPOINT)
    return any(folder.glob("random_states_*.pkl")) and any(folder.glob("optimizer*"))


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _keep_masters(sharded: nn.Module, unrounded: Mapping[str, Tensor]) -> None:
    """Masters start from this process's parts of the fp32 values.

    With ``cpu_ram_efficient_loading`` accelerate has sent the first process's weights around: then these follow.
    """
    named = {clean_name(name): parameter for name, parameter in unwrap_model(sharded).named_parameters()}
    parts = {name: part_of(named[name], value).cpu() for name, value in unrounded.items()}
    if not _are_what_was_rounded(parts, named):
        given = gather_object([[(name, tuple(value.shape)) for name, value in unrounded.items()]])
        if any(one != given[0] for one in given):
            parts = {}
        for name in parts:
            whole = unrounded[name].to(local_tensor(named[name]).device)
            parts[name] = part_of(named[name], broadcast(whole)).cpu()
    if parts and _are_what_was_rounded(parts, named):
        PreparedModel.of(sharded).keep_masters((named[name], part) for name, part in parts.items())
    elif unrounded:
        logger.warning(
            "lightstep: the fp32 values of the sharded weights are not to be had, and masters start from the rounded "
            "ones; with fsdp_cpu_ram_efficient_loading: false they start from fp32"
        )


def _are_what_was_rounded(parts: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> bool:
    """On all processes."""
    found = ((part, local_tensor(named[name]).detach().cpu()) for name, part in parts.items())
    return all(gather_object([all(torch.equal(part.to(local.dtype), local) for part, local in found)]))


def _connected_class(kind: type[Accelerator]) -> type[LightstepAccelerator]:
    return type(f"Lightstep{kind.__name__}", (LightstepAccelerator, kind), {})


def _unpickled(kind: type[Accelerator]) -> LightstepAccelerator:
    return object.__new__(_connected_class(kind))
