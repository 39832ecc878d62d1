"""accelerate (1.15 and later): an ``Accelerator`` whose backward, clipping, step and checkpoints are lightstep's.

``prepare(accelerator, model, optimizer, ...)`` replaces ``accelerator.prepare(model, optimizer, ...)``. The training
loop stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
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

from lightstep.checkpoint.background import PendingSave
from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.huggingface import full_weights
from lightstep.checkpoint.layout import holds_checkpoint
from lightstep.checkpoint.run_state import refuse_partly_loaded
from lightstep.checkpoint.saved import CHECKPOINT, FILE_LIST, write_file_list
from lightstep.checkpoint.storage import recover_interrupted
from lightstep.config import ConfigError, FSDP2Sharding
from lightstep.distributed import Ranks, local_tensor
from lightstep.integrations.checks import (
    check_accelerator,
    check_clipping,
    check_made_by_strategy,
    check_one_dtype,
    unwrap_optimizer,
)
from lightstep.integrations.folders import (
    PendingFolder,
    SavedFolders,
    SavesFolders,
    check_before_load,
    local_part,
    sharding_full_state,
)
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import clean_name
from lightstep.optimizer.update import StepResult
from lightstep.sharding.fsdp_groups import sharded_modules
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.strategy import Strategy

__all__ = ["LightstepAccelerator", "LightstepOptimizer", "connect", "prepare"]

logger = logging.getLogger(__name__)

STATES = SavedFolders(
    "a state that save_state wrote",
    prefix="checkpoint_",
    patterns=("*.bin", "*.pkl", "*.safetensors", "*.safetensors.index.json", "scaler.pt"),
    is_ours=lambda path: (path / CHECKPOINT).is_dir() or any(path.glob("random_states_*.pkl")),
    has_files=lambda path: (
        (path / CHECKPOINT).is_dir() or (any(path.glob("random_states_*.pkl")) and any(path.glob("optimizer*")))
    ),
)
"""What ``save_state`` of lightstep or of plain accelerate writes."""


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: BaseOptimizer, *others: Any, strategy: Strategy
) -> tuple[Any, ...]:
    """``accelerator.prepare(model, optimizer, *others)`` under a strategy.

    The model is cast, placed and sharded as the strategy says. If the accelerator has an FSDP2 plugin, accelerate
    shards the model, under a mixed-precision policy that follows ``precision``. From then on ``accelerator.backward``,
    ``accumulate``, ``clip_grad_norm_``, ``save_state`` and ``load_state`` are lightstep's for this model.

    Args:
        accelerator: becomes a :class:`LightstepAccelerator`, which trains one model with one optimizer.
        model: the module that ``optimizer`` was created for.
        optimizer: the result of ``strategy.create_optimizer(model, ...)``.
        others: dataloaders and schedulers, prepared by accelerate.
        strategy: the one that created the optimizer.

    Returns:
        Model, optimizer and the others, prepared, in the order of the arguments.

    Raises:
        TypeError: the optimizer is not lightstep's, or ``strategy`` is no :class:`Strategy`.
        ConfigError: settings of the accelerator contradict the strategy.
    """
    return cast(tuple[Any, ...], connect(accelerator, strategy).prepare(model, optimizer, *others))


def connect(accelerator: Accelerator, strategy: Strategy) -> LightstepAccelerator:
    """Make ``accelerator`` a :class:`LightstepAccelerator` for optimizers of ``strategy``, and return it.

    Raises:
        TypeError: ``accelerator`` is no ``Accelerator``, or ``strategy`` no :class:`Strategy`.
        ConfigError: settings of the accelerator contradict the strategy.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator is of type {type(accelerator).__name__}; an accelerate.Accelerator is needed")
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy is {strategy!r:.80}; the Strategy that made the optimizer is needed: strategy = "
            "Strategy.load('stream'), optimizer = strategy.create_optimizer(model, ...)"
        )
    check_accelerator(accelerator, strategy)
    if not isinstance(accelerator, LightstepAccelerator):
        accelerator.__class__ = _connected_class(type(accelerator))
    connected = cast(LightstepAccelerator, accelerator)
    connected.strategy = strategy
    if connected._strategy_shards:
        connected.state.__class__ = _StateWithFSDP2Plugin
    return connected


class _StateWithFSDP2Plugin(AcceleratorState):
    """accelerate's state if the strategy shards: ``fsdp_plugin``, which TRL reads, says FSDP2.

    This is a class because all of accelerate's states share their attributes: an attribute that is set on one of them
    appears on every later Accelerator.
    """

    fsdp_plugin = property(lambda _: FullyShardedDataParallelPlugin(fsdp_version=2))


class LightstepOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper around a lightstep optimizer. Attributes that it does not have are those of ``.optimizer``.

    Attributes:
        optimizer: the result of ``strategy.create_optimizer``.
        result: the :class:`StepResult` of the last step; ``None`` before the first.
        clipped: takes the next step in place of ``optimizer``, if gradients have been clipped before it.
    """

    optimizer: Any
    clipped: Any = None

    def __init__(self, optimizer: BaseOptimizer) -> None:
        # With device_placement accelerate would load the state onto the device; the model may not be sharded yet.
        super().__init__(optimizer, device_placement=False)
        self.result: StepResult | None = None
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> StepResult | None:
        """Take a step at the end of an accumulation; before that do nothing and return ``None``."""
        if not self.gradient_state.sync_gradients:
            return None
        steps = self.optimizer if self.clipped is None else self.clipped
        self.result = steps.step(closure)
        return self.result

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite. Waits for the device."""
        return self.result is not None and not self.result

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class LightstepAccelerator(SavesFolders, Accelerator):
    """An ``Accelerator`` that trains one model with one optimizer under a strategy. :func:`connect` makes it."""

    strategy: Strategy
    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]
    _model: weakref.ref[nn.Module] | None = None
    trainer: weakref.ref[Any] | None = None
    """The transformers Trainer whose accelerator this is."""

    def __reduce__(self) -> Any:
        """Pickle without weak references and without a pending save; :func:`connect` created the class."""
        left_out = ("_model", "trainer", "_pending_save")
        state = {key: value for key, value in vars(self).items() if key not in left_out}
        return _unpickle, (type(self).__bases__[1],), state

    # -- prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        optimizers = [given for given in args if isinstance(given, torch.optim.Optimizer)]
        if not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        models = [given for given in args if isinstance(given, nn.Module)]
        inner = self._check_prepared(optimizers, models)
        prepared: dict[int, Any] = {}
        wrapped = optimizers[0] if isinstance(optimizers[0], LightstepOptimizer) else LightstepOptimizer(inner)
        prepared[id(optimizers[0])] = wrapped
        if models:
            check_made_by_strategy(self.strategy, inner, models[0])
            prepared[id(models[0])] = self._prepare_trained_model(models[0], inner)
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
        """As accelerate's. A model that is only evaluated (TRL's reference) is sharded if the strategy shards.

        The trained model stays on the host if its weights rest there.
        """
        trainer = self.trainer() if self.trainer is not None else None
        trained = self._is_trained(model) or getattr(trainer, "model", None) is model
        reference = evaluation_mode and device_placement is None and not trained
        if reference and self._strategy_shards and not sharded_modules(model):
            model = self.strategy.prepare_model(model, role="reference")
        if trained and self.strategy.config.weights.placement == "host":
            if PreparedModel.of(model).weight_visits is None and not self.is_fsdp2:  # else accelerate shards it later
                model = self.strategy.prepare_model(model)
            device_placement = False
        return cast(nn.Module, super().prepare_model(model, device_placement, evaluation_mode))

    @property
    def _strategy_shards(self) -> bool:
        return self.strategy.config.sharding.kind == "fsdp2" and not self.is_fsdp2

    def _check_prepared(self, optimizers: list[torch.optim.Optimizer], models: list[nn.Module]) -> BaseOptimizer:
        if len(optimizers) > 1 or len(models) > 1:
            raise ValueError(
                f"prepare got {len(models)} models and {len(optimizers)} optimizers; under "
                "lightstep an Accelerator trains one model with one optimizer; prepare other models in a separate "
                "call, without an optimizer"
            )
        inner = unwrap_optimizer(optimizers[0])
        others = [one for one in self._optimizers if one is not optimizers[0] and unwrap_optimizer(one) is not inner]
        if others:
            raise ValueError(
                f"this Accelerator has an optimizer already ({type(others[0]).__name__}); under lightstep it trains "
                "one model with one optimizer: call accelerator.free_memory() first, or make another Accelerator"
            )
        return inner

    def _prepare_trained_model(self, model: nn.Module, optimizer: BaseOptimizer) -> nn.Module:
        wrapped = any(isinstance(module, FSDPModule | DistributedDataParallel) for module in model.modules())
        rests_on_host = PreparedModel.of(model).weight_visits is not None
        again = rests_on_host or (self._is_trained(model) and self.strategy.config.sharding.kind == "single")
        if self.is_fsdp2 and not wrapped:
            return self._shard(model, optimizer)
        if not wrapped and not again:
            model = self.strategy.prepare_model(model)
        self.strategy.place_weights(model)
        # In evaluation mode accelerate adds autocast and torch.compile, but does not wrap or move the model.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _shard(self, model: nn.Module, optimizer: BaseOptimizer) -> nn.Module:
        """Let accelerate's FSDP2 plugin shard the model, under a policy that follows ``precision``."""
        strategy = self.strategy
        with strategy.preparing(model), self._strategy_precision():
            strategy.cast_parameters(model)
            check_one_dtype(strategy, model)
            unrounded = {clean_name(name): value for name, (_, value) in PreparedModel.of(model).kept_masters(model)}
            sharded, _ = super().prepare(model, LightstepOptimizer(optimizer))
            _keep_fp32_masters(sharded, unrounded)
        self._optimizers = [one for one in self._optimizers if unwrap_optimizer(one) is not optimizer]
        return cast(nn.Module, sharded)

    @contextlib.contextmanager
    def _strategy_precision(self) -> Iterator[None]:
        """Give accelerate's FSDP2 plugin the strategy's precision.

        By itself accelerate reduces gradients in the compute dtype, and with ``mixed_precision`` it makes fp32 shards.
        """
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
        finally:  # the next Accelerator compares its own setting with this one
            self.state._mixed_precision = asked

    # -- one iteration

    @property
    def _prepared_optimizer(self) -> LightstepOptimizer | None:
        """The optimizer of the last :meth:`prepare`; ``None`` after ``free_memory``."""
        return next((one for one in self._optimizers if isinstance(one, LightstepOptimizer)), None)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``optimizer.backward`` of the loss divided by the number of micro-batches; it applies the loss scale."""
        trained = self._prepared_optimizer
        if trained is None:
            super().backward(loss, **kwargs)
            return
        optimizer = trained.optimizer
        in_no_sync = optimizer.accumulating is True
        optimizer.accumulating = in_no_sync or not self.sync_gradients
        try:
            optimizer.backward(loss / self.gradient_accumulation_steps, **kwargs)
        finally:
            optimizer.accumulating = in_no_sync

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Run a micro-batch without communication: ``strategy.accumulate(model, last=False)``."""
        trained = self._prepared_optimizer is not None and self._is_trained(model)
        with self.strategy.accumulate(model, last=False) if trained else super().no_sync(model):
            yield

    def _is_trained(self, model: nn.Module) -> bool:
        return self._model is not None and self._model() is unwrap_model(model)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the global norm, unscaled and before clipping. The next step clips.

        Args:
            parameters: all parameters of the model.
            max_norm: the strategy's ``clipping.max_norm``, or ``inf`` to measure only.

        Raises:
            ConfigError: the strategy clips by another norm.
            ValueError: parameters are missing.
            RuntimeError: called before the last micro-batch.
        """
        trained = self._prepared_optimizer
        if trained is None:
            return cast(Tensor, super().clip_grad_norm_(parameters, max_norm, norm_type))
        optimizer = trained.optimizer
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        check_clipping(optimizer, given, max_norm, norm_type)
        if not self.sync_gradients:
            raise RuntimeError(
                "clip_grad_norm_ in the middle of an accumulation: call it under `if accelerator.sync_gradients:`"
            )
        return optimizer.grad_norm()

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """As accelerate's.

        Raises:
            ConfigError: uneven inputs for the trained model: its steps need all processes.
        """
        uneven = not (self.even_batches if even_batches is None else even_batches)
        trained = any(isinstance(joined, nn.Module) and self._is_trained(joined) for joined in joinables)
        if uneven and trained and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs with even_batches=False: every step needs all processes, and would wait for those "
                "that have run out of batches; leave even_batches at True (some rows are then used twice)"
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self._prepared_optimizer is not None:
            raise ConfigError(
                f"clip_grad_value_({clip_value}): lightstep sums gradients outside of p.grad and clips by norm; set "
                "clipping.max_norm in the strategy, or remove this call"
            )
        super().clip_grad_value_(parameters, clip_value)

    # -- weights and checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full weights. Every process calls it; a sharded model is gathered on the first process only.

        Raises:
            CheckpointError: a failed load left a part of the weights.
            RuntimeError: a failed step did.
        """
        refuse_partly_loaded(model, "saving its weights")
        if not sharded_modules(model) or self.is_fsdp2:
            return cast(dict[str, Any], super().get_state_dict(model, unwrap=unwrap))
        return full_weights(self.strategy.unwrap_model(model), keep=self.is_main_process)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, *, asynchronous: bool = False, **kwargs: Any
    ) -> Any:
        """Save accelerate's files, and the trained model and its optimizer as a checkpoint in ``lightstep/``.

        Args:
            asynchronous: return while a thread writes the checkpoint. The folder appears when all of it is whole. The
                next ``save_state``, ``load_state`` and ``end_training`` wait for that.

        Returns:
            The folder's path. With ``asynchronous``, a handle with ``done()`` and ``result(timeout=None)``, the path.

        Raises:
            RuntimeError: ``asynchronous`` without a prepared model and optimizer.
            CheckpointError: the save failed, or the asynchronous save before it did. The folder that was there stays.
        """
        self._finish_save()
        trained = self._model_and_optimizer()
        if trained is None:
            if asynchronous:
                raise RuntimeError("save_state(asynchronous=True) without a model and an optimizer: prepare them first")
            return super().save_state(output_dir, safe_serialization, **kwargs)
        path, limit = self._next_state(output_dir)
        write = partial(self._write_state, trained=trained, safe_serialization=safe_serialization, kwargs=kwargs)
        # before the first rank changes anything
        if not asynchronous and any(Ranks().agree(lambda: int(_is_written_in_place(path)))):
            others = Ranks().together(lambda: _user_files(path), only_first=True)
            write(path)
            Ranks().together(lambda: write_file_list(path, _files_beside(path) - others), only_first=True)
            return path
        with PendingFolder(path, STATES, lambda: self._remove_old_states(limit, path)) as pending:
            pending.checkpoint = write(pending.folder, asynchronous=asynchronous)
        if not asynchronous:
            return path
        self._pending_save = pending
        return pending

    def _next_state(self, output_dir: Any) -> tuple[Path, int | None]:
        """Where the next state goes, and how many states are kept; ``None``: all."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            path = self._states_folder / f"{STATES.prefix}{self.save_iteration}"
            if path.exists():
                raise ValueError(f"{path} exists; set accelerator.project_configuration.iteration to a free number")
            return path, project.total_limit
        if output_dir is None:
            raise ValueError(
                "save_state() needs output_dir, or a ProjectConfiguration with automatic_checkpoint_naming"
            )
        return Path(os.path.expanduser(output_dir)), None

    def _write_state(
        self,
        folder: Path,
        trained: tuple[nn.Module, LightstepOptimizer],
        safe_serialization: bool,
        kwargs: dict[str, Any],
        asynchronous: bool = False,
    ) -> PendingSave | None:
        project = self.project_configuration
        naming, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False  # else another folder
        write = super().save_state
        try:
            with checkpoint_errors(f"{folder.name} was not saved"), self._hiding(trained):
                Ranks().together(lambda: write(str(folder), safe_serialization, **kwargs))
        finally:
            project.automatic_checkpoint_naming = naming
        model, optimizer = trained
        return self.strategy.save_checkpoint(folder / CHECKPOINT, model, optimizer.optimizer, asynchronous=asynchronous)

    def end_training(self) -> None:
        """As accelerate's, after waiting for the pending save."""
        self._finish_save()
        super().end_training()

    def _remove_old_states(self, limit: int | None, saved: Path) -> None:
        if limit is not None:
            STATES.remove_leftovers(saved.parent, besides=saved.name)
            STATES.rotate(saved, max(limit, 1))

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load what :meth:`save_state` wrote, on any number of processes.

        Without ``input_dir`` (automatic naming), load the newest state that is whole.
        """
        if self._pending_save is not None:
            self._pending_save.exception()  # the next save_state or end_training raises it
            self.wait_for_everyone()
        trained = self._model_and_optimizer()
        if trained is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        input_dir = self._newest_state() if input_dir is None else os.path.expanduser(input_dir)
        path = Path(os.path.abspath(input_dir))
        Ranks().together(lambda: recover_interrupted(path.parent, STATES.kind, path.name.__eq__), only_first=True)
        if not holds_checkpoint(Path(input_dir) / CHECKPOINT):
            with self._loading_accelerate_state(trained, Path(input_dir)):
                super().load_state(input_dir, load_kwargs, **kwargs)
            return
        check_before_load(Path(input_dir))
        with self._hiding(trained):
            super().load_state(input_dir, load_kwargs, **kwargs)
        self.strategy.load_checkpoint(Path(input_dir) / CHECKPOINT, trained[0], trained[1].optimizer)

    def _model_and_optimizer(self) -> tuple[nn.Module, LightstepOptimizer] | None:
        trained = self._prepared_optimizer
        models = [model for model in self._models if self._is_trained(model)]
        return (models[0], trained) if trained is not None and models else None

    @contextlib.contextmanager
    def _loading_accelerate_state(self, trained: tuple[nn.Module, LightstepOptimizer], folder: Path) -> Iterator[None]:
        """Let accelerate load a state that it saved without lightstep: the names are those of the unwrapped model."""
        inner = unwrap_model(trained[0])
        if self.is_fsdp2:
            yield
            return
        if sharded_modules(inner):
            raise ConfigError(
                f"{self.strategy.name}: {folder} was saved without lightstep, and whole weights do not go into the "
                "shards of sharding.kind fsdp2; load it under a strategy of kind ddp or single, and call save_state: "
                "any number of processes and any strategy load that"
            )
        models = [inner if model is trained[0] else model for model in self._models]
        with self._showing(models, self._optimizers), sharding_full_state(inner, trained[1].optimizer, folder):
            yield

    def _hiding(self, trained: tuple[nn.Module, LightstepOptimizer]) -> AbstractContextManager[None]:
        """Hide the trained model and its optimizer from accelerate's own saving and loading."""
        models = [model for model in self._models if model is not trained[0]]
        return self._showing(models, [optimizer for optimizer in self._optimizers if optimizer is not trained[1]])

    @contextlib.contextmanager
    def _showing(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
        """Have accelerate's own saving and loading see these models and optimizers."""
        before = self._models, self._optimizers
        self._models, self._optimizers = models, optimizers
        try:
            yield
        finally:
            self._models, self._optimizers = before

    def _newest_state(self) -> str:
        """The newest whole state, with automatic checkpoint naming."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state() needs input_dir, or a ProjectConfiguration with automatic_checkpoint_naming")
        newest = STATES.newest(self._states_folder)
        if newest is None:
            saved = len(STATES.numbered(self._states_folder))
            raise CheckpointError(f"{self._states_folder} holds no whole state among {saved}")
        return str(newest)

    @property
    def _states_folder(self) -> Path:
        """Where automatic checkpoint naming puts states."""
        return Path(self.project_dir) / "checkpoints"


def _files_beside(path: Path) -> set[str]:
    """The files of a save in ``path``, but for the checkpoint's."""
    own = {name for name in STATES.own_files(path) if name != FILE_LIST and not name.startswith(f"{CHECKPOINT}/")}
    return {name for name in own if (path / name).is_file()}


def _user_files(path: Path) -> set[str]:
    """The files in ``path`` that no save wrote."""
    own = STATES.own_files(path)
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    return files - own


def _is_written_in_place(path: Path) -> bool:
    """Whether the folder cannot be replaced, or programs may be using it: it has files that no save wrote."""
    if not path.is_dir():
        return False
    if path.is_mount() or Path.cwd().is_relative_to(path.resolve()) or not os.access(path.resolve().parent, os.W_OK):
        return True
    return bool(_user_files(path))


def _keep_fp32_masters(sharded: nn.Module, unrounded: Mapping[str, Tensor]) -> None:
    """Start the masters of sharded weights from the fp32 values, ``unrounded``, by name.

    With ``cpu_ram_efficient_loading`` accelerate has broadcast the first process's weights. If this process's values do
    not round to its shards, the first process's values are broadcast too.
    """
    named = {clean_name(name): parameter for name, parameter in unwrap_model(sharded).named_parameters()}
    parts = {name: local_part(named[name], value).cpu() for name, value in unrounded.items()}
    if not _round_to_weights(parts, named):
        given = gather_object([[(name, tuple(value.shape)) for name, value in unrounded.items()]])
        if any(one != given[0] for one in given):
            parts = {}
        for name in parts:
            whole = unrounded[name].to(local_tensor(named[name]).device)
            parts[name] = local_part(named[name], broadcast(whole)).cpu()
    if parts and _round_to_weights(parts, named):
        PreparedModel.of(sharded).keep_masters((named[name], part) for name, part in parts.items())
    elif unrounded:
        logger.warning(
            "lightstep: the fp32 values of the sharded weights are not available, and masters start from the rounded "
            "weights; with fsdp_cpu_ram_efficient_loading: false they start from fp32"
        )


def _round_to_weights(parts: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> bool:
    """Whether the fp32 parts round to these weights, on all processes."""
    found = ((part, local_tensor(named[name]).detach().cpu()) for name, part in parts.items())
    return all(gather_object([all(torch.equal(part.to(local.dtype), local) for part, local in found)]))


def _connected_class(kind: type[Accelerator]) -> type[LightstepAccelerator]:
    return type(f"Lightstep{kind.__name__}", (LightstepAccelerator, kind), {})


def _unpickle(kind: type[Accelerator]) -> LightstepAccelerator:
    return object.__new__(_connected_class(kind))
