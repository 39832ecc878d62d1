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

from lightstep.config import (
    ConfigError,
    ConstantScale,
    DynamicScale,
    LossScaleConfig,
    OptimizerState,
    StrategyConfig,
    merge_overrides,
    parse_config,
)
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.in_backward import InBackward
from lightstep.optimizer.mixed_precision import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import Place, check_param_groups, places
from lightstep.optimizer.updates import AtStep, NextForward, Updates
from lightstep.precision.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from lightstep.precision.split import Splitter
from lightstep.state.backend import StateBackend
from lightstep.state.bulk import BulkBackend
from lightstep.state.resident import ResidentBackend
from lightstep.state.stream import StreamBackend
from lightstep.strategy import checkpoint
from lightstep.strategy.forward_gates import gate_forwards, in_order_of_use
from lightstep.strategy.model_names import unwrap_model
from lightstep.strategy.model_setup import cast_parameters, checkpoint_activations, materialise
from lightstep.strategy.presets import read_source
from lightstep.strategy.pretrained import load_pretrained

_KINDS = {
    "single": ("lightstep.strategy.single", "SingleDeviceStrategy"),
    "ddp": ("lightstep.strategy.ddp", "DDPStrategy"),
    "fsdp2": ("lightstep.strategy.fsdp2", "FSDP2Strategy"),
    "deepspeed": ("lightstep.strategy.deepspeed", "DeepSpeedStrategy"),
}

_UPDATE_TIMES: dict[str, type[Updates]] = {
    "at_step": AtStep,
    "next_forward": NextForward,
    "in_backward": InBackward,
}

ModelSource = nn.Module | Callable[[], nn.Module]


class Strategy(ABC):
    """Sharding, precision, clipping and the place of optimizer state, as one object.

    Make one with :meth:`load`. It holds no settings of any particular optimizer: several models and optimizers may be
    prepared by one strategy. Usable as a context manager that calls :meth:`close`.

    Attributes:
        config: the validated, frozen configuration.
        name: the preset's name, the file's path, or ``"strategy"`` for a mapping.
    """

    _overflow_everywhere: ClassVar[bool | None] = None

    def __init__(self, config: StrategyConfig, name: str = "strategy") -> None:
        self.config = config
        self.name = name
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
        return torch.device(
            accelerator.type, int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
        )

    @property
    def rank(self) -> int:
        """This process's number among :attr:`world_size`."""
        return 0

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that logs and reports."""
        return self.rank == 0

    # -- model and optimizer

    def prepare_model(self, model: ModelSource, role: str = "trainer", weights: str | Path | None = None) -> nn.Module:
        """The model on this strategy's devices, in its dtype, sharded as it says.

        Parameters are cast to ``precision.parameters``; buffers keep their dtype.

        Args:
            model: a module, a module on the meta device (its weights are then initialised here), or a function that
                makes one.
            role: ``"trainer"``; other roles are refused by this build.
            weights: a Hugging Face folder whose safetensors are read into the prepared model, each rank its own part:
                with a model made on the meta device no rank ever holds the whole model.

        Raises:
            ConfigError: an unknown role.
            ValueError: ``weights`` does not fit the model.
            TypeError: ``model`` is neither a module nor a function that returns one.
        """
        if role != "trainer":
            raise ConfigError(f"role is {role!r}; allowed: 'trainer'")
        made = model if isinstance(model, nn.Module) else model() if callable(model) else model
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"prepare_model needs a torch.nn.Module or a function that returns one; got {type(made).__name__}"
            )
        prepared = self._prepare(made)
        if weights is not None:
            self._load_weights(prepared, weights)
        return prepared

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
            TypeError: not an optimizer class, or malformed groups.
            ValueError: no trainable parameter, a parameter twice or foreign, or a refused hyper-parameter.
        """
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

    @property
    def _update_time(self) -> type[Updates]:
        return _UPDATE_TIMES[self.config.optimizer_state.update]

    def _settle(self, model: nn.Module) -> None:  # noqa: B027  (most need nothing)
        """Put the model's own parameters into their places, where a forward has left others."""

    def _connect(self, model: nn.Module, optimizer: BaseOptimizer) -> None:  # noqa: B027  (most need nothing)
        """Have the model's gradients delivered to the optimizer as ``precision.reduce`` says."""

    def _gate(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        """Have forwards wait for updates that may still be under way."""
        if self._update_time is not AtStep:
            gate_forwards(unwrap_model(model), optimizer)

    def _optimizers_of(self, model: nn.Module) -> list[BaseOptimizer]:
        """What :meth:`create_optimizer` made for this model and is still in use."""
        return list(self._optimizers.get(unwrap_model(model), ()))

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
        """Write model, optimizer, scheduler, random states and ``extra`` to the directory ``path``."""
        self._land(model)
        checkpoint.save_checkpoint(path, model, optimizer, scheduler, extra)

    def load_checkpoint(
        self, path: str | Path, model: nn.Module, optimizer: BaseOptimizer | None = None, scheduler: Any = None
    ) -> dict[str, Any]:
        """Continue from :meth:`save_checkpoint`; returns its ``extra``.

        Without ``optimizer`` only the weights are loaded, and the masters of the model's optimizers are rebuilt from
        them.
        """
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

    def close(self) -> None:  # noqa: B027  (most strategies start nothing)
        """End what this strategy started (its process group, if it started one)."""

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
