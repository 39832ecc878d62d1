"""verl (0.9): its FSDP engine, with model, optimizer, steps, checkpoints and device memory from a lightstep strategy.

verl prepares micro-batches, runs forwards and computes losses as it does with its own engine. Importing this registers
the engine for language models under the name ``lightstep``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from verl.workers.config import FSDPEngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead

from lightstep.config import ConfigError, FSDP2Sharding
from lightstep.optimizer.base import BaseOptimizer
from lightstep.strategy import Strategy

__all__ = ["LightstepEngine", "LightstepEngineConfig"]

logger = logging.getLogger(__name__)


@dataclass
class LightstepEngineConfig(FSDPEngineConfig):
    """verl's settings of its FSDP engine, and the strategy.

    The strategy decides about sharding, precision and the place of the state. ``fsdp_size``, micro-batches, sequence
    parallelism and what concerns the loss are verl's. The state leaves the device between updates if
    ``optimizer_offload`` is set.

    Attributes:
        lightstep: a preset's name, a file's path or a mapping, with ``sharding.kind: fsdp2``.
        overrides: of the strategy's values, such as ``{"optimizer_state.ring_mib": 256}``.
    """

    strategy: str = "lightstep"
    lightstep: Any = "fsdp2"
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Unlike verl's, this allows other names than those of its engines."""


@EngineRegistry.register(model_type="language_model", backend="lightstep", device=["cuda", "cpu"])
class LightstepEngine(FSDPEngineWithLMHead):
    """Trains an actor, or evaluates a reference (``forward_only``), with a strategy.

    Raises:
        ConfigError: the strategy does not shard by ``fsdp2``, or verl's settings ask for what is not supported.

    Attributes:
        lightstep: the strategy.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        _refuse_unsupported(model_config, engine_config)
        self.lightstep = _strategy(engine_config, optimizer_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    # -- model and optimizer

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        sharding = self.lightstep.config.sharding
        assert isinstance(sharding, FSDP2Sharding)
        in_parameters = sharding.compute == "parameters"
        self._autocast_dtype = self.lightstep.parameter_dtype if in_parameters else getattr(torch, sharding.compute)
        return self.lightstep.prepare_model(module, "reference" if self.engine_config.forward_only else "trainer")

    def _build_optimizer(self, module: nn.Module) -> BaseOptimizer:
        named = build_optimizer([nn.Parameter(torch.zeros(1, device="cpu"))], self.optimizer_config)
        settings = {key: named.defaults[key] for key in signature(type(named)).parameters if key in named.defaults}
        optimizer = self.lightstep.create_optimizer(module, type(named), **settings)
        self.scaler = None if optimizer.loss_scale.is_identity else _Scaler(optimizer)
        return optimizer

    # -- steps

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        if is_last_micro_batch or self.engine_config.use_no_sync_for_gradient_accumulation:
            with self.lightstep.accumulate(self.module, last=is_last_micro_batch):
                yield
        else:
            self.optimizer.accumulating = True  # reduced, and updated in the last micro-batch
            yield

    def optimizer_step(self) -> float:
        """Clip, and step, or skip the step if the norm is not finite. Returns the norm before clipping."""
        result = self.optimizer.step()
        if not result.applied:
            logger.warning("a step was skipped: the norm of its gradients is %s", result.grad_norm.item())
        return float(result.grad_norm)

    # -- between rollout and update

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Free the device memory of the optimizer's state and of gathered weights (``"cpu"``).

        The shards of the weights stay. Nothing is loaded for another device: the next step allocates what it needs.
        """
        BaseEngine.to(self, device, model, optimizer, grad)
        if device != "cpu":
            return
        if optimizer and self.optimizer is not None:
            self.lightstep.release_device_memory()
        elif model:
            self.module.reshard()

    def get_per_tensor_param(self, *args: Any, **settings: Any) -> Any:
        """verl's weights for rollout, after pending updates."""
        self.lightstep.unwrap_model(self.module)
        return super().get_per_tensor_param(*args, **settings)

    def get_per_tensor_param_shard(self, **settings: Any) -> Any:
        """verl's shards of the weights, after pending updates."""
        self.lightstep.unwrap_model(self.module)
        return super().get_per_tensor_param_shard(**settings)

    # -- checkpoints

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Save to the folder ``lightstep`` in ``local_path``, and with ``hf_model`` to ``huggingface`` beside it."""
        if local_path is None:
            return
        manager = self.checkpoint_manager
        manager.previous_global_step = global_step
        if self.rank == 0:
            manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        self.lightstep.save_checkpoint(
            Path(local_path, "lightstep"),
            self.module,
            self.optimizer if manager.should_save_optimizer else None,
            self.lr_scheduler if manager.should_save_extra else None,
            {"global_step": global_step},
            weights_only=not manager.should_save_optimizer,
        )
        if manager.should_save_hf_model:
            self.lightstep.export_model(Path(local_path, "huggingface"), self.module, manager.processing_class)
        if self.rank == 0:
            manager.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Load what :meth:`save_checkpoint` wrote; the number of ranks may be another one."""
        if local_path is None:
            return
        manager = self.checkpoint_manager
        self.lightstep.load_checkpoint(
            Path(local_path, "lightstep"),
            self.module,
            self.optimizer if manager.should_load_optimizer else None,
            self.lr_scheduler if manager.should_load_extra else None,
        )
        if self.is_optimizer_offload_enabled:
            self.lightstep.release_device_memory()


class _Scaler:
    """The part of a gradient scaler that verl uses before a step: the loss goes to the optimizer's backward."""

    def __init__(self, optimizer: BaseOptimizer) -> None:
        self._optimizer = optimizer

    def scale(self, loss: Tensor) -> SimpleNamespace:
        return SimpleNamespace(backward=partial(self._optimizer.backward, loss))


def _strategy(engine_config: Any, optimizer_config: Any) -> Strategy:
    """The strategy, which clips as verl's optimizer settings say, and shards over ``fsdp_size`` ranks."""
    overrides = dict(_plain(getattr(engine_config, "overrides", {})))
    if optimizer_config is not None:
        overrides["clipping.max_norm"] = optimizer_config.clip_grad
    if 0 < engine_config.fsdp_size < torch.distributed.get_world_size():
        overrides["sharding.mesh"] = {"replicate": "auto", "shard": engine_config.fsdp_size}
    strategy = Strategy.load(_plain(getattr(engine_config, "lightstep", "fsdp2")), overrides)
    if not isinstance(strategy.config.sharding, FSDP2Sharding):
        raise ConfigError(
            f"{strategy.name}: sharding.kind is {strategy.config.sharding.kind!r}; verl's engine needs 'fsdp2', also "
            "on one GPU"
        )
    return strategy


def _plain(value: Any) -> Any:
    """Without the types of hydra's files."""
    return {str(key): _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _refuse_unsupported(model_config: Any, engine_config: Any) -> None:
    asked = {
        "offload_policy": (engine_config.offload_policy, "take a strategy with optimizer_state.backend: stream"),
        "qat.enable": (getattr(engine_config.qat, "enable", False), "use verl's engine, strategy: fsdp2"),
        "enable_activation_offload": (model_config.enable_activation_offload, "use enable_gradient_checkpointing"),
    }
    for name, (is_set, instead) in asked.items():
        if is_set:
            raise ConfigError(f"{name} is set, which lightstep's engine for verl does not have; {instead}")
