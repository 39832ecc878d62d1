"""A strategy: from one file to a prepared model, its optimizer and their checkpoints."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import nn

from lightstep.checkpoint.pending import PendingSave, finish_pending
from lightstep.checkpoint.pretrained import load_pretrained, parts_of_other_dtypes
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
from lightstep.distributed import end_process_group, initialized
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.in_backward import InBackward
from lightstep.optimizer.moments import Moments
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.overlap import Overlap
from lightstep.optimizer.param_groups import Place, check_param_groups, places
from lightstep.optimizer.rules import Rule, groups_by_rules, own_class, warn_of_muon_on_vocabularies
from lightstep.optimizer.schedule import AtStep, NextForward, Schedule
from lightstep.precision.gradients import ReducedGradients
from lightstep.precision.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from lightstep.precision.split import Splitter
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.reinforcement_learning import ReinforcementLearning
from lightstep.rollout.roles import Role, Roles, fsdp_version, known_role, prepare_inference
from lightstep.rollout.transport import WeightTransport
from lightstep.sharding.forward_gates import in_order_of_use
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.preparation import cast_parameters, checkpoint_activations, materialise, unrounded_values
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.backend import StateBackend
from lightstep.state.bulk import BulkBackend
from lightstep.state.resident import ResidentBackend
from lightstep.state.stream import StreamBackend
from lightstep.strategy.checkpoints import Checkpoints
from lightstep.strategy.launch import start_process_group
from lightstep.strategy.presets import available_strategies, read_source

if TYPE_CHECKING:
    from lightstep.plan.planning import Plan

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
    "overlap": Overlap,
}

ModelSource = nn.Module | Callable[[], nn.Module]


class Strategy(ABC):
    """Sharding, precision, clipping and the place of optimizer state, as one object.

    Make one with :meth:`load`. It holds no settings of any particular optimizer: several models and optimizers may be
    prepared by one strategy. Usable as a context manager that calls :meth:`close`.

    Attributes:
        config: the validated, frozen configuration.
        name: the preset's name, the file's path, or ``"strategy"`` for a mapping.
        chosen: the keys that the caller chose: the file's or mapping's, and the overrides; of a preset the overrides.
        roles: which ranks train and which generate.
        rollout: this process's part in publishing and receiving weights.
        checkpoints: what saves and loads.
    """

    chosen: Mapping[str, Any] = {}

    _overflow_everywhere: ClassVar[bool | None] = None

    def __init__(self, config: StrategyConfig, name: str = "strategy") -> None:
        self.config = config
        self.name = name
        self.roles = Roles(config.roles.rollout, name)
        self._started = False
        self.rollout = ReinforcementLearning(config.roles.rollout, self.roles, self._reshard)
        self.checkpoints = Checkpoints(self.roles)
        self._made: weakref.WeakKeyDictionary[BaseOptimizer, nn.Module] = weakref.WeakKeyDictionary()
        """This strategy's optimizers, each with the model that it trains: it keeps what is wrapped around it, too."""

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
        strategy = cast(Strategy, getattr(importlib.import_module(module), class_name)(config, name))
        strategy.chosen = merge_overrides({} if name in available_strategies() else values, overrides)
        return strategy

    def __reduce__(self) -> Any:
        """A copy has the same settings, and no models or optimizers."""
        return type(self), (self.config, self.name), {"chosen": self.chosen}

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
        return self.roles.rank if self.roles.asynchronous else 0

    @property
    def world_size(self) -> int:
        """How many processes have this one's role: how many train together, or generate."""
        return len(self.roles.ranks) if self.roles.asynchronous else 1

    @property
    def role(self) -> Role:
        """``"rollout"`` on a rank that only generates (``roles.rollout.mode: async``), elsewhere ``"trainer"``."""
        return self.roles.mine

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
            self.rollout.open()

    @property
    def _needs_process_group(self) -> str | None:
        """What needs several processes; ``None`` where one will do."""
        return "roles.rollout.mode async needs a process for each worker" if self.roles.asynchronous else None

    def _refuse_ranks(self) -> None:  # noqa: B027  (most can train on any number)
        """Raise ``ConfigError`` where so many ranks cannot train."""

    def prepare_model(self, model: ModelSource, role: str = "trainer", weights: str | Path | None = None) -> nn.Module:
        """The model on this strategy's devices, in its dtype, sharded as it says.

        The work is done in place. Parameters are cast to ``precision.parameters``; buffers keep their dtype. The fp32
        values of trainable parameters are kept until masters start from them. Optimizers that were made for the model
        before get its new parameters. Under ``ddp`` a wrapper is returned; a loop that goes on with the module itself
        is right too, if ``create_optimizer`` is given that module.

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
        record = PreparedModel.of(prepared)
        record.role = known
        if weights is not None:
            self._load_weights(prepared, weights)
            if known == "trainer" and self._rounds:
                record.keep_masters(_fp32_weights(unwrap_model(prepared), weights))
        for optimizer in self._optimizers_of(prepared):
            if optimizer in self._made:
                self._made[optimizer] = prepared
            self._connect(prepared, optimizer)
        return prepared

    @contextlib.contextmanager
    def preparing(self, model: nn.Module) -> Iterator[None]:
        """The body moves, casts, wraps or shards ``model`` in place: its optimizers follow, if they have not begun.

        For code that does what :meth:`prepare_model` does (accelerate shards models itself).
        """
        inner = unwrap_model(model)
        record = PreparedModel.of(inner)
        with record.exchanging_parameters(inner) as optimizers:
            yield
        record.role = "trainer"
        for optimizer in optimizers:
            optimizer.start_over(self._make_backend(inner))
            self._connect(inner, optimizer)

    def _prepare_as(self, role: Role, model: nn.Module) -> nn.Module:
        if role == "trainer":
            return self._prepare(model)
        if role == "reference" and self.role == "trainer":
            return self._prepare_reference(model.requires_grad_(False)).eval()
        dtype = self.parameter_dtype if role == "reference" else self.rollout_dtype
        return prepare_inference(model, self.device, dtype)

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
        with self._keeping_masters(model):
            model = materialise(model, self.device)
            cast_parameters(model, self.parameter_dtype)
        if getattr(self.config.sharding, "activation_checkpointing", False):
            checkpoint_activations(model)
        return model

    def cast_parameters(self, model: nn.Module) -> None:
        """Cast to ``precision.parameters``, in place; masters will start from the fp32 values all the same.

        For code that wants them cast before it calls :meth:`prepare_model`.
        """
        with self._keeping_masters(model):
            cast_parameters(model, self.parameter_dtype)

    @contextlib.contextmanager
    def _keeping_masters(self, model: nn.Module) -> Iterator[None]:
        """The body rounds. Values are kept after it: torch casts no DTensor that somebody refers to weakly."""
        values = unrounded_values(model) if self._rounds else []
        yield
        PreparedModel.of(model).keep_masters(values)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """``precision.parameters`` as a torch dtype."""
        return cast(torch.dtype, getattr(torch, self.config.precision.parameters))

    @property
    def rollout_dtype(self) -> torch.dtype:
        """``roles.rollout.parameters`` as a torch dtype; without it that of the trained parameters."""
        asked = self.config.roles.rollout.parameters or self.config.precision.parameters
        return cast(torch.dtype, getattr(torch, asked))

    @property
    def _rounds(self) -> bool:
        """Whether fp32 weights are rounded to 16 bits for training, and their masters are not."""
        return self.config.precision.master_weights and self.parameter_dtype != torch.float32

    def create_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        param_groups: Any = None,
        rules: Sequence[Rule] | Rule | None = None,
        **hyperparameters: Any,
    ) -> BaseOptimizer:
        """``optimizer_class`` over the model's trainable parameters, under this strategy's precision and placement.

        Args:
            model: what :meth:`prepare_model` returned.
            optimizer_class: a ``torch.optim.Optimizer`` subclass. One that is not element-wise gets whole tensors,
                which ranks bring together where they are sharded (docs/optimizers.md says which).
            param_groups: groups of the model's parameters with their own hyper-parameters; default: one of all of them
                (frozen ones are trained once they are thawed). A group with ``"optimizer_class"`` is updated by that
                class, with its defaults.
            rules: in the place of ``optimizer_class``, ``param_groups`` and ``hyperparameters``:
                :class:`~lightstep.optimizer.rules.Rule` for each class and setting, a group each.
            hyperparameters: keyword arguments of ``optimizer_class``.

        Raises:
            ConfigError: the model is not there to be trained (a rollout or reference model).
            TypeError: not an optimizer class, malformed groups, or rules together with what they replace.
            ValueError: no trainable parameter, a parameter twice or foreign, or a refused hyper-parameter; a rule that
                means nothing, or a parameter that no rule means, or two.
        """
        self.roles.refuse("create_optimizer", "create it on the ranks that train, for the model that they train", model)
        model = self._wrapped(model)
        self._reshard(model)
        if rules is not None:
            if optimizer_class is not torch.optim.AdamW or param_groups is not None or hyperparameters:
                raise TypeError("rules name their classes and hyper-parameters: leave all other arguments out")
            param_groups = groups_by_rules(rules, unwrap_model(model))
            optimizer_class, hyperparameters = own_class(param_groups)
        groups = check_param_groups(param_groups, unwrap_model(model))
        warn_of_muon_on_vocabularies(groups, optimizer_class, unwrap_model(model))
        return self._make_optimizer(model, optimizer_class, groups, hyperparameters)

    def _make_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        hyperparameters: dict[str, Any],
    ) -> BaseOptimizer:
        config = self.config
        optimizer = MixedPrecisionOptimizer(
            groups,
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
            initial_masters=PreparedModel.of(model).initial_master,
            moments=Moments(config.optimizer_state.moments, config.optimizer_state.moments_rounding),
        )
        self._register(model, optimizer)
        self._connect(model, optimizer)
        return optimizer

    def _register(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        PreparedModel.of(model).optimizers.add(optimizer)
        self._made[optimizer] = model
        optimizer.accumulating = False

    @property
    def _update_time(self) -> type[Schedule]:
        return _UPDATE_TIMES[self.config.optimizer_state.update]

    def _wrapped(self, model: nn.Module) -> nn.Module:
        """The model with what :meth:`prepare_model` wrapped around it, should the caller have kept the inside only."""
        return model

    def _reshard(self, model: nn.Module) -> None:  # noqa: B027  (only FSDP2 has something to do)
        """Put the model's own parameters into their places, where a forward has left others."""

    def _gradients(self, model: nn.Module) -> ReducedGradients | None:
        """What takes this model's gradients out of the reduction; ``None`` where ``p.grad`` is what it should be."""
        return None

    def _connect(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        """Gradients reach the optimizer as ``precision.reduce`` says; readers wait for updates that it defers."""
        gradients = self._gradients(model)
        if gradients is not None and isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer.gradients.comes_from(gradients)
        if self._update_time is not AtStep:
            inner = unwrap_model(model)
            PreparedModel.of(inner).gates.guard(inner, optimizer, self._update_time.in_backward)

    def _optimizers_of(self, model: nn.Module) -> list[BaseOptimizer]:
        """What :meth:`create_optimizer` made for this model and is still in use."""
        return list(PreparedModel.of(model).optimizers)

    def trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether :meth:`create_optimizer` made this optimizer for this model."""
        return optimizer in self._made and optimizer in PreparedModel.of(model).optimizers

    def _make_backend(self, model: nn.Module) -> StateBackend:
        """Where a new optimizer of this model keeps its state."""
        return make_backend(self.config.optimizer_state)

    def _places(self, model: nn.Module) -> Mapping[torch.Tensor, Place]:
        self._reshard(model)
        self._refuse_unprepared(model)
        for optimizer in self._optimizers_of(model):  # the model may have been sharded since
            self._connect(model, optimizer)
        inner = unwrap_model(model)
        return in_order_of_use(inner, places(inner))

    def _refuse_unprepared(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` before the first step if the model is not what this strategy trains."""
        trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
        others = {p.dtype for p in trained} - {self.parameter_dtype}
        if PreparedModel.of(model).role is None and others:
            raise ConfigError(
                f"{self.name}: this {type(unwrap_model(model)).__name__} was never prepared: its weights are "
                f"{', '.join(map(str, others))}, and precision.parameters is {self.config.precision.parameters}; "
                "call model = strategy.prepare_model(model) before the first step"
            )

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
                if last:
                    optimizer.unreduced = False
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
        PreparedModel.of(model).wait_for_updates()
        return unwrap_model(model)

    # -- planning

    def plan(
        self,
        model: nn.Module,
        tokens: int,
        *,
        sequence: int = 4096,
        micro_batches: int = 1,
        gpus: int = 1,
        gpu_memory: float | None = None,
        profile: str | None = None,
        loss_chunk: int | None = None,
    ) -> Plan:
        """What a step takes, told from shapes: the model is run on the meta device, and is left alone.

        Args:
            model: a causal language model of transformers, on any device; meta will do.
            tokens: of one micro-batch on one device, in sequences of ``sequence``.
            gpu_memory: bytes of one device; default: the profile's.
            profile: of the machine, ``"H100"`` or ``"A100+pcie5"``; default: this machine's GPU if it is known, else
                no times. DeepSpeed's strategies get no times.
            loss_chunk: tokens whose logits are held at a time, where the loss is fused; default: all.

        Raises:
            ConfigError: the profile is not known.
            ValueError: the model cannot be run on the meta device.
        """
        from lightstep.plan.planning import plan_one

        work = {"sequence": min(sequence, tokens), "micro_batches": micro_batches, "loss_chunk": loss_chunk}
        return plan_one(self.name, self.config, unwrap_model(model), tokens, work, gpus, gpu_memory, profile)

    # -- checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: BaseOptimizer | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        *,
        trainable_only: bool | None = None,
        weights_only: bool = False,
        keep_last: int | None = None,
        keep_every: int = 0,
        asynchronous: bool = False,
    ) -> PendingSave | None:
        """Write model, optimizer, scheduler, random states and ``extra`` to the directory ``path``, or to a URL.

        Called by all ranks that train, and by none that only generate. ``trainable_only`` leaves out the frozen base;
        it is the default for models with adapters of PEFT. ``weights_only`` leaves out optimizer and scheduler.

        With ``keep_last``, older checkpoints ``step-<number>`` beside ``path`` are removed, but for the newest ones
        that are whole and those whose number is a multiple of ``keep_every``.

        ``asynchronous`` returns at once a handle with ``done()`` and ``result(timeout=None)``, the folder. A thread
        writes the run as it is now; the next save, :meth:`close` and the end of the process wait for it.
        """
        options: dict[str, Any] = {"trainable_only": trainable_only, "weights_only": weights_only}
        options |= {"keep_last": keep_last, "keep_every": keep_every, "asynchronous": asynchronous}
        return self.checkpoints.save(path, model, optimizer, scheduler, extra, **options)

    def load_checkpoint(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: BaseOptimizer | None = None,
        scheduler: Any = None,
        *,
        trainable_only: bool | None = None,
    ) -> dict[str, Any]:
        """Continue from :meth:`save_checkpoint`; returns its ``extra``.

        Without ``optimizer`` only the weights are loaded, and the masters of the model's optimizers are rebuilt from
        them. ``trainable_only=True`` leaves the frozen base alone, which happens anyway if it was not saved.
        """
        return self.checkpoints.load(path, model, optimizer, scheduler, trainable_only)

    def export_model(self, path: str | Path, model: nn.Module, tokenizer: Any = None) -> None:
        """Write the weights as one Hugging Face folder (``save_pretrained``), in the model's dtype."""
        self.checkpoints.export(path, model, tokenizer)

    # -- reinforcement learning

    def publish_weights(
        self, model: nn.Module, to: RolloutEngine | WeightTransport | None = None, version: int | None = None
    ) -> int:
        """Send the model's weights as they are after the last step to what generates with them; returns their version.

        See :meth:`ReinforcementLearning.publish
        <lightstep.rollout.reinforcement_learning.ReinforcementLearning.publish>`.
        """
        return self.rollout.publish(model, self.rollout_dtype, to, version)

    def receive_weights(self, engine: RolloutEngine, wait: bool = True, timeout: float | None = None) -> int | None:
        """Take the newest published weights into the engine, on a rank whose role is ``"rollout"``.

        See :meth:`ReinforcementLearning.receive
        <lightstep.rollout.reinforcement_learning.ReinforcementLearning.receive>`.
        """
        return self.rollout.receive(engine, wait, timeout)

    def drop_rollout_workers(self, ranks: Iterable[int]) -> None:
        """Publish without these (``WeightTransferError.ranks``) from now on. Called by all ranks that train."""
        self.rollout.drop(ranks)

    @staticmethod
    def fsdp_version(model: nn.Module) -> int:
        """2 for a model sharded by ``fully_shard``, 1 by ``FullyShardedDataParallel``, 0 where nothing is sharded."""
        return fsdp_version(model)

    def release_device_memory(self) -> AbstractContextManager[None]:
        """Give back what this strategy's optimizers hold on the device, and gathered weights, for another to use.

        It happens at once, and the memory comes back by itself with the next step. As a context manager it also empties
        the allocator's cache at the end. Weights and gradients stay. On a rank that only generates nothing happens.

        Raises:
            HostMemoryError: the host has no room for state that lives on the device; nothing of it was moved then.
        """
        for optimizer, model in list(self._made.items()):
            self._reshard(model)
            optimizer.release_device_memory()
        return _emptying_cache(self.device)

    # -- end

    def close(self) -> None:
        """End what this strategy started (its process group, if it started one), and tell the rollout workers.

        A checkpoint that is being written is finished first.
        """
        finish_pending()
        self.rollout.close()
        if self._started and initialized():
            end_process_group()
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
            spare_host_gib=config.spare_host_gib,
            previous_weights=config.previous_weights,
        )
    return ResidentBackend(Splitter) if config.backend == "resident" else BulkBackend()


@contextlib.contextmanager
def _emptying_cache(device: torch.device) -> Iterator[None]:
    try:
        yield
    finally:
        if device.type != "cpu":
            torch.accelerator.memory.empty_cache()


def _fp32_weights(model: nn.Module, folder: str | Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Trainable parameters that were rounded when they were read, with this rank's part of the folder's fp32 values."""
    for tensor, part in parts_of_other_dtypes(model, folder):
        if tensor.requires_grad and part.dtype == torch.float32:
            yield tensor, part


def _finite(max_norm: float | None) -> float | None:
    return None if max_norm is None or math.isinf(max_norm) else max_norm
