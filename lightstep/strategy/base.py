"""A strategy: from one file to a prepared model, its optimizer and their checkpoints."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn

from lightstep.checkpoint import checkpoint
from lightstep.checkpoint.pretrained import load_pretrained
from lightstep.config import (
    ConstantScale,
    DynamicScale,
    LossScaleConfig,
    OptimizerState,
    StrategyConfig,
    merge_overrides,
    parse_config,
)
from lightstep.distributed import end_process_group, initialized
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.in_backward import InBackward
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import Place, check_param_groups, places
from lightstep.optimizer.schedule import AtStep, NextForward, Schedule
from lightstep.precision.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from lightstep.precision.split import Splitter
from lightstep.rollout.exchange import WeightExchange
from lightstep.rollout.reinforcement_learning import ReinforcementLearning
from lightstep.rollout.roles import Role, Roles, known_role, prepare_inference
from lightstep.sharding.exchanged_parameters import following
from lightstep.sharding.forward_gates import gate_forwards, in_order_of_use
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.preparation import cast_parameters, checkpoint_activations, materialise
from lightstep.state.backend import StateBackend
from lightstep.state.bulk import BulkBackend
from lightstep.state.resident import ResidentBackend
from lightstep.state.stream import StreamBackend
from lightstep.strategy.launch import start_process_group
from lightstep.strategy.presets import read_source

_KINDS = {
    "single": ("lightstep.strategy.single", "SingleDeviceStrategy"),
    "ddp": ("lightstep.strategy.ddp", "DDPStrategy"),
    "fsdp2": ("lightstep.strategy.fsdp2", "FSDP2Strategy"),
    "deepspeed": ("lightstep.deepspeed.strategy", "DeepSpeedStrategy"),
}

_UPDATE_TIMES: dict[str, type[Schedule]] = {
    "at_step": AtStep,
    "next_forward": NextForward,
    "in_backward": InBackward,
}

_SAVED_BY_TRAINERS = "a checkpoint is saved by the ranks that train (export_model writes these weights alone)"

ModelSource = nn.Module | Callable[[], nn.Module]


class Strategy(ReinforcementLearning, ABC):
    """Sharding, precision, clipping and the place of optimizer state, as one object.

    Make one with :meth:`load`. It holds no settings of any particular optimizer: several models and optimizers may be
    prepared by one strategy. Usable as a context manager that calls :meth:`close`.

    Attributes:
        config: the validated, frozen configuration.
        name: the preset's name, the file's path, or ``"strategy"`` for a mapping.
        roles: which ranks train and which generate.
    """

    _overflow_everywhere: ClassVar[bool | None] = None

    def __init__(self, config: StrategyConfig, name: str = "strategy") -> None:
        self.config = config
        self.name = name
        self.roles = Roles(config.roles.rollout, name)
        self._started = False
        self._weights = WeightExchange(self.roles, config.roles.rollout)
        self._optimizers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[BaseOptimizer]] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Strategy:
        """A strategy from a preset's name, a YAML file's path or a mapping.

        Args:
            source: see :func:`lightstep.available_strategies` for the names.
            overrides: dotted keys or nested mappings laid over it, for example ``{"clipping.max_norm": 0.5}``.

        Raises:
            ConfigError: an unknown name, key or value, or a combination this build cannot do; with what is allowed.
        """
        name, values = read_source(source)
        config = parse_config(merge_overrides(values, overrides), name)
        module, class_name = _KINDS[config.sharding.kind]
        return cast(Strategy, getattr(importlib.import_module(module), class_name)(config, name))

    # -- where this process stands

    @property
    def device(self) -> torch.device:
        """The device this process works on: its accelerator if there is one, else the CPU."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        here = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
        return torch.device(accelerator.type, here % torch.accelerator.device_count())

    @property
    def rank(self) -> int:
        """This process's number among :attr:`world_size`."""
        return self.roles.place if self.roles.asynchronous else 0

    @property
    def world_size(self) -> int:
        """How many processes have this one's role: how many train together, or generate."""
        return len(self.roles.alike) if self.roles.asynchronous else 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that logs and reports: the first one that trains."""
        return self.role == "trainer" and self.rank == 0

    # -- model and optimizer

    def start(self) -> None:
        """Have the processes find each other: the default process group, and the ranks of each role among them.

        :meth:`prepare_model` does so too. One process alone needs nothing.

        Raises:
            ConfigError: there is no process group and this process was not started by torchrun, or the ranks do not
                suffice for the roles.
        """
        needs = self._needs_process_group
        if needs is not None and not initialized():
            start_process_group(f"{self.name}: {needs}")
            self._started = True
        if self.roles.asynchronous:
            self._refuse_ranks()
            self.roles.form_group()
            self._weights.open()

    @property
    def _needs_process_group(self) -> str | None:
        """What needs several processes; ``None`` where one will do."""
        return "roles.rollout.mode async needs a process for each worker" if self.roles.asynchronous else None

    def _refuse_ranks(self) -> None:
        """Raise ``ConfigError`` where so many ranks cannot train."""

    def prepare_model(self, model: ModelSource, role: str = "trainer", weights: str | Path | None = None) -> nn.Module:
        """The model on this strategy's devices, in its dtype, sharded as it says.

        Parameters are cast to ``precision.parameters``; buffers keep their dtype. Optimizers that were made for the
        model before get its new parameters.

        Args:
            model: a module, a module on the meta device (its weights are then initialised here), or a function that
                makes one.
            role: ``"trainer"``: sharded, to be trained. ``"rollout"``: to generate with; whole on this device, in
                ``roles.rollout.parameters``, without gradients, in evaluation mode. ``"reference"``: placed as a
                trainer's, without gradients, in evaluation mode; whole on a rank that only generates.
            weights: a Hugging Face folder whose safetensors are read into the prepared model, each rank its own part:
                with a model made on the meta device no rank ever holds the whole model.

        Raises:
            ConfigError: an unknown role, or another rank's (:attr:`role`).
            ValueError: ``weights`` does not fit the model.
            TypeError: ``model`` is neither a module nor a function that returns one.
        """
        known = known_role(role)
        self.start()
        self.roles.check(known)
        made = model if isinstance(model, nn.Module) else model() if callable(model) else model
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"prepare_model needs a torch.nn.Module or a function that returns one; got {type(made).__name__}"
            )
        with self.preparing(made):
            prepared = self._prepare_as(known, made)
        self.roles.give(prepared, known)
        if weights is not None:
            self._load_weights(prepared, weights)
        return prepared

    @contextlib.contextmanager
    def preparing(self, model: nn.Module) -> Iterator[None]:
        """The body moves, casts, wraps or shards ``model`` in place: its optimizers follow, if they have not begun.

        For code that does what :meth:`prepare_model` does (accelerate shards models itself).
        """
        inner = unwrap_model(model)
        with following(inner, self._optimizers_of(inner)) as optimizers:
            yield
        for optimizer in optimizers:
            optimizer.start_over(self._make_backend(inner))
            self._connect(inner, optimizer)
            self._gate(inner, optimizer)

    def _prepare_as(self, role: Role, model: nn.Module) -> nn.Module:
        if role == "trainer":
            return self._prepare_trained(model)
        if role == "reference" and self.role == "trainer":
            return self._prepare_reference(model.requires_grad_(False)).eval()
        dtype = self.parameter_dtype if role == "reference" else self.rollout_dtype
        return prepare_inference(model, self.device, dtype)

    def _prepare_trained(self, model: nn.Module) -> nn.Module:
        return self._prepare(model)

    def _prepare_reference(self, model: nn.Module) -> nn.Module:
        """Placed as what is trained, for forwards alone."""
        return prepare_inference(model, self.device, self.parameter_dtype)

    def _load_weights(self, prepared: nn.Module, folder: str | Path) -> None:
        """Each rank reads its own part of the folder's safetensors."""
        load_pretrained(unwrap_model(prepared), folder)

    @abstractmethod
    def _prepare(self, model: nn.Module) -> nn.Module:
        """Shard, move and cast."""

    def _placed(self, model: nn.Module) -> nn.Module:
        """The whole model on this process's device in its dtype, with activation checkpointing if asked for."""
        model = materialise(model, self.device)
        cast_parameters(model, self.parameter_dtype)
        if getattr(self.config.sharding, "activation_checkpointing", False):
            checkpoint_activations(model)
        return model

    @property
    def parameter_dtype(self) -> torch.dtype:
        """``precision.parameters`` as a torch dtype."""
        return cast(torch.dtype, getattr(torch, self.config.precision.parameters))

    def create_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        param_groups: Any = None,
        **hyperparameters: Any,
    ) -> BaseOptimizer:
        """``optimizer_class`` over the model's trainable parameters, under this strategy's precision and placement.

        Args:
            model: what :meth:`prepare_model` returned.
            optimizer_class: any element-wise ``torch.optim.Optimizer`` subclass.
            param_groups: groups of the model's parameters with their own hyper-parameters; default: all trainable ones.
            hyperparameters: keyword arguments of ``optimizer_class``.

        Raises:
            ConfigError: the model is not there to be trained (a rollout or reference model).
            TypeError: not an optimizer class, or malformed groups.
            ValueError: no trainable parameter, a parameter twice or foreign, or a refused hyper-parameter.
        """
        self._refuse_untrained(model)
        config = self.config
        self._settle(model)
        optimizer = MixedPrecisionOptimizer(
            check_param_groups(param_groups, unwrap_model(model)),
            optimizer_class,
            hyperparameters,
            master_weights=config.precision.master_weights,
            reduce_float32=config.precision.reduce == "float32",
            loss_scale=make_loss_scale(config.precision.loss_scale),
            max_norm=_finite(config.clipping.max_norm),
            norm_type=config.clipping.norm_type,
            backend=self._make_backend(model),
            places=lambda: self._places(model),
            overflow_everywhere=self._overflow_everywhere,
            update_time=self._update_time,
            clip_layers=config.clipping.scope == "unit",
        )
        self._optimizers.setdefault(unwrap_model(model), weakref.WeakSet()).add(optimizer)
        optimizer.accumulating = False
        self._connect(model, optimizer)
        self._gate(model, optimizer)
        return optimizer

    def _refuse_untrained(self, model: nn.Module) -> None:
        self.roles.refuse("create_optimizer", "create it on the ranks that train, for the model that they train", model)

    @property
    def _update_time(self) -> type[Schedule]:
        return _UPDATE_TIMES[self.config.optimizer_state.update]

    def _settle(self, model: nn.Module) -> None:
        """Put the model's own parameters into their places, where a forward has left others."""

    def _connect(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        """Have the model's gradients delivered to the optimizer as ``precision.reduce`` says."""

    def _gate(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        """Have forwards wait for updates that may still be under way."""
        if self._update_time is not AtStep:
            gate_forwards(unwrap_model(model), optimizer)

    def _optimizers_of(self, model: nn.Module) -> list[BaseOptimizer]:
        """What :meth:`create_optimizer` made for this model and is still in use."""
        return list(self._optimizers.get(unwrap_model(model), ()))

    def trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether :meth:`create_optimizer` made this optimizer for this model."""
        return any(made is optimizer for made in self._optimizers_of(model))

    def _land(self, model: nn.Module) -> None:
        """Updates that are still under way come first."""
        for optimizer in self._optimizers_of(model):
            optimizer.land()

    def _make_backend(self, model: nn.Module) -> StateBackend:
        """Where a new optimizer of this model keeps its state."""
        return make_backend(self.config.optimizer_state)

    def _places(self, model: nn.Module) -> Mapping[torch.Tensor, Place]:
        self._settle(model)
        for optimizer in self._optimizers_of(model):  # the model may have been sharded since
            self._gate(model, optimizer)
        inner = unwrap_model(model)
        return in_order_of_use(inner, places(inner))

    def accumulate(self, model: nn.Module, last: bool = True) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward and backward; with ``last=False`` no gradient is communicated.

        Updates in backward begin with the last one: without this context every micro-batch is.
        """
        self.roles.refuse("accumulate", "accumulate over the model that is trained", model)
        return self._micro_batch(self._accumulate(model, last), self._optimizers_of(model), last)

    @staticmethod
    @contextlib.contextmanager
    def _micro_batch(
        context: AbstractContextManager[None], optimizers: Sequence[BaseOptimizer], last: bool
    ) -> Iterator[None]:
        with context:
            for optimizer in optimizers:
                optimizer.accumulating = not last
            try:
                yield
            finally:
                for optimizer in optimizers:
                    optimizer.accumulating = False

    def _accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of the model's sharding."""
        return contextlib.nullcontext()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The module the user made, without what this strategy and ``torch.compile`` wrapped around it, up to date."""
        self._land(model)
        return unwrap_model(model)

    # -- checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: BaseOptimizer | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write model, optimizer, scheduler, random states and ``extra`` to the directory ``path``.

        Called by all ranks that train, and by none that only generate.
        """
        self.roles.refuse("save_checkpoint", _SAVED_BY_TRAINERS, model, but=("reference",))
        self._land(model)
        checkpoint.save_checkpoint(path, model, optimizer, scheduler, extra)

    def load_checkpoint(
        self, path: str | Path, model: nn.Module, optimizer: BaseOptimizer | None = None, scheduler: Any = None
    ) -> dict[str, Any]:
        """Continue from :meth:`save_checkpoint`; returns its ``extra``.

        Without ``optimizer`` only the weights are loaded, and the masters of the model's optimizers are rebuilt from
        them.
        """
        but: tuple[Role, ...] = ("reference", "rollout") if optimizer is None else ()
        self.roles.refuse("load_checkpoint with an optimizer", "leave the optimizer out", model, but)
        self._land(model)
        extra = checkpoint.load_checkpoint(path, model, optimizer, scheduler)
        for follower in self._optimizers_of(model) if optimizer is None else ():
            follower.refresh_master_weights()
        return extra

    def export_model(self, path: str | Path, model: nn.Module, tokenizer: Any = None) -> None:
        """Write the weights as one Hugging Face folder (``save_pretrained``), in the model's dtype."""
        self._land(model)
        checkpoint.export_model(path, unwrap_model(model), tokenizer)

    # -- end

    def close(self) -> None:
        """End what this strategy started (its process group, if it started one), and tell the rollout workers."""
        self._weights.close()
        if self._started and initialized():
            end_process_group()
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def make_loss_scale(config: LossScaleConfig) -> LossScale:
    """A new scale for one optimizer."""
    if isinstance(config, DynamicScale):
        return DynamicLossScale(**config.model_dump(exclude={"kind"}))
    return ConstantLossScale(config.scale if isinstance(config, ConstantScale) else 1.0)


def make_backend(config: OptimizerState) -> StateBackend:
    """A new state backend for one optimizer."""
    if config.backend == "stream":
        return StreamBackend(
            Splitter,
            prefetch_layers=config.prefetch_layers,
            ring_mib=config.ring_mib,
            resident_gib=config.resident_gib,
        )
    return ResidentBackend() if config.backend == "resident" else BulkBackend()


def _finite(max_norm: float | None) -> float | None:
    return None if max_norm is None or math.isinf(max_norm) else max_norm
