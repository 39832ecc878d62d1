"""The base class of all strategies: prepares models, creates optimizers, and saves and loads checkpoints."""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from lightstep.checkpoint.background import PendingSave, finish_pending
from lightstep.checkpoint.huggingface import load_pretrained, shards_with_other_dtypes
from lightstep.config import (
    ConfigError,
    StrategyConfig,
    merge_overrides,
    parse_config,
)
from lightstep.distributed import Replicas, initialized, let_gloo_finish_at_exit, name_lost_ranks
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import Place, check_param_groups, places
from lightstep.optimizer.queue import AT_STEP, UpdateTime
from lightstep.optimizer.rules import Rule, groups_by_rules, own_class, warn_of_muon_on_vocabularies
from lightstep.precision.gradients import ReducedGradients
from lightstep.presets import available_strategies, read_source
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.publishing import PublishedWeights
from lightstep.rollout.roles import ReinforcementLearning, Role, Roles, check_role, fsdp_version, prepare_inference
from lightstep.rollout.transport import WeightTransport
from lightstep.sharding.dtypes import planned_dtypes
from lightstep.sharding.fsdp_groups import sharded_modules, showing_shards
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.parameter_reads import called_modules
from lightstep.sharding.preparation import (
    cast_tensors,
    checkpoint_activations,
    hold_places,
    materialise,
    scripted_modules,
    unrounded_values,
)
from lightstep.sharding.prepared_model import PreparedModel, in_order_of_use
from lightstep.sharding.reduced_gradients import sharded_gradients
from lightstep.sharding.shard_visits import visits_of_sharded
from lightstep.sharding.weight_visits import WeightVisits, move_to_host
from lightstep.state.host_activations import HostActivations
from lightstep.state.host_weights import HostWeights
from lightstep.state.store import Store
from lightstep.strategy.checkpoints import Checkpoints
from lightstep.strategy.from_config import settings_of, store_of, update_time_of
from lightstep.strategy.launch import start_process_group

if TYPE_CHECKING:
    from lightstep.plan.planning import Plan

_KINDS = {
    "single": ("lightstep.strategy.single", "SingleDeviceStrategy"),
    "ddp": ("lightstep.strategy.ddp", "DDPStrategy"),
    "fsdp2": ("lightstep.strategy.fsdp2", "FSDP2Strategy"),
    "deepspeed": ("lightstep.deepspeed.strategy", "DeepSpeedStrategy"),
}

ModelSource = nn.Module | Callable[[], nn.Module]


class Strategy(ABC):
    """Sharding, precision, clipping and the placement of optimizer state, as one object.

    Create one with :meth:`load`. One strategy may prepare several models and create several optimizers. As a context
    manager it calls :meth:`close` at the end.

    Attributes:
        config: the validated, frozen configuration.
        name: the preset's name, the file's path, or ``"strategy"`` for a mapping.
        chosen: the keys that the caller set: for a preset the overrides, else also those of the file or mapping.
        roles: which ranks train and which generate.
        rollout: publishes and receives weights.
        checkpoints: saves and loads.
    """

    chosen: Mapping[str, Any] = {}

    _overflow_everywhere: ClassVar[bool | None] = None

    def __init__(self, config: StrategyConfig, name: str = "strategy") -> None:
        self.config = config
        self.name = name
        self.roles = Roles(config.roles.rollout, name)
        self._owns_process_group = False
        self.rollout = ReinforcementLearning(config.roles.rollout, self.roles, self._reshard)
        self.checkpoints = Checkpoints(self.roles)
        self._models: weakref.WeakKeyDictionary[BaseOptimizer, nn.Module] = weakref.WeakKeyDictionary()
        """This strategy's optimizers -> the models that they train, with their wrappers, which this keeps alive."""

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Strategy:
        """Create a strategy from a preset's name, a YAML file's path or a mapping.

        Args:
            source: a name in :func:`lightstep.available_strategies`, a path or a mapping.
            overrides: dotted keys or nested mappings that replace values, for example ``{"clipping.max_norm": 0.5}``.

        Raises:
            ConfigError: an unknown name, key or value, or an unsupported combination; the message says what is allowed.
        """
        name, values = read_source(source)
        config = parse_config(merge_overrides(values, overrides), name)
        module, class_name = _KINDS[config.sharding.kind]
        strategy = cast(Strategy, getattr(importlib.import_module(module), class_name)(config, name))
        strategy.chosen = merge_overrides({} if name in available_strategies() else values, overrides)
        return strategy

    def __reduce__(self) -> Any:
        """Copies and pickles have the same configuration, and no models or optimizers."""
        return type(self), (self.config, self.name), {"chosen": self.chosen}

    # -- this process

    @property
    def device(self) -> torch.device:
        """This process's device: its accelerator if there is one, else the CPU."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        index = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
        return torch.device(accelerator.type, index % torch.accelerator.device_count())

    @property
    def rank(self) -> int:
        """This process's rank among the :attr:`world_size` processes of its role."""
        return self.roles.rank if self.roles.asynchronous else 0

    @property
    def world_size(self) -> int:
        """How many processes have this process's role."""
        return len(self.roles.ranks) if self.roles.asynchronous else 1

    @property
    def role(self) -> Role:
        """``"rollout"`` on a rank that only generates (``roles.rollout.mode: async``), else ``"trainer"``."""
        return self.roles.own_role

    @property
    def is_main(self) -> bool:
        """Whether this is the first process that trains, which logs and reports."""
        return self.role == "trainer" and self.rank == 0

    # -- model and optimizer

    def start(self) -> None:
        """Initialise the default process group if the strategy needs it, and the group of each role.

        :meth:`prepare_model` calls this too. A strategy for a single process does nothing.

        Raises:
            ConfigError: there is no process group and torchrun did not start this process, or there are not enough
                ranks for the roles.
        """
        reason = self._process_group_reason
        if reason is not None and not initialized():
            start_process_group(f"{self.name}: {reason}")
            self._owns_process_group = True
        if initialized():
            let_gloo_finish_at_exit()
            name_lost_ranks()
        if self.roles.asynchronous:
            self.roles.form_group()
            self.rollout.open()

    @property
    def _process_group_reason(self) -> str | None:
        """Why the strategy needs a process group; ``None`` if it does not."""
        return "roles.rollout.mode async needs a process for each worker" if self.roles.asynchronous else None

    def prepare_model(self, model: ModelSource, role: str = "trainer", weights: str | Path | None = None) -> nn.Module:
        """Move the model to this strategy's devices, cast it, and shard it.

        The model is changed in place. Parameters and buffers are cast to ``precision.parameters``, as by
        ``model.to(dtype)``; what the model keeps in fp32 stays fp32, and quantised storage is not touched
        (docs/strategy-files.md). The fp32 values of trainable parameters are kept until the masters are initialised
        from them. Optimizers that were created for the model before get its new parameters. Under ``ddp`` a wrapper is
        returned. A loop may also use the module itself, if ``create_optimizer`` was given that module.

        Args:
            model: a module, a module on the meta device (its weights are then initialised here), or a function that
                returns one.
            role: ``"trainer"``: to be trained, sharded. ``"rollout"``: to generate with; whole on this device, in
                ``roles.rollout.parameters``, without gradients, in evaluation mode. ``"reference"``: sharded as for
                training, without gradients, in evaluation mode; on a rank that only generates it is whole.
            weights: a Hugging Face folder whose safetensors are loaded into the prepared model. Each rank reads its own
                shards, so with a model on the meta device no rank ever holds the whole model.

        Raises:
            ConfigError: the role is unknown, or this rank does not have it (:attr:`role`).
            ValueError: ``weights`` does not fit the model.
            TypeError: ``model`` is neither a module nor a function that returns one.
        """
        checked_role = check_role(role)
        self.start()
        self.roles.check(checked_role)
        module = model if isinstance(model, nn.Module) else model() if callable(model) else model
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"prepare_model needs a torch.nn.Module or a function that returns one; got {type(module).__name__}"
            )
        PreparedModel.of(module).loaded_next = weights is not None
        with self._exchanging_parameters(module):
            prepared = self._prepare_for_role(checked_role, module)
        record = PreparedModel.of(prepared)
        record.role = checked_role
        if weights is not None:
            self._load_weights(prepared, weights)
            if checked_role == "trainer" and self._rounds_weights:
                record.keep_masters(_fp32_weights(unwrap_model(prepared), weights))
        for optimizer in self._optimizers_of(prepared):
            if optimizer in self._models:
                self._models[optimizer] = prepared
            self._connect(prepared, optimizer)
        return prepared

    @contextlib.contextmanager
    def preparing(self, model: nn.Module) -> Iterator[None]:
        """The block moves, casts, wraps or shards ``model`` in place. Optimizers without steps get its new parameters.

        For code that does what :meth:`prepare_model` does: accelerate shards models itself. At the end of the block
        :meth:`place_weights` is called.
        """
        inner = unwrap_model(model)
        with self._exchanging_parameters(inner):
            yield
            self._place_weights(inner)
        PreparedModel.of(inner).role = "trainer"

    def place_weights(self, model: nn.Module) -> None:
        """Move the weights to the host if ``weights.placement`` says so, and they are not there yet.

        For models that something else has placed, or sharded by ``fully_shard``: :meth:`prepare_model` and
        :meth:`preparing` do this by themselves. A module without a forward stands for its children, the parts of one
        model. Called before the first step, and before state is loaded.

        Raises:
            HostMemoryError: the host has too little memory.
            ValueError: these weights cannot rest there; the message says why. Nothing has been moved.
        """
        inner = unwrap_model(model)
        if self.config.weights.placement == "host" and self._host_weights(inner) is None:
            with self._exchanging_parameters(inner):
                self._place_weights(inner)

    def _place_weights(self, model: nn.Module) -> None:
        record = PreparedModel.of(model)
        if self.config.weights.placement == "device" or record.weight_visits is not None:
            return
        called = called_modules(model)
        found = {PreparedModel.of(module).weight_visits for module in called}
        if len(found) == 1 and None not in found:  # another module has held the same parts together
            (record.weight_visits,) = found
            return
        if found - {None}:
            raise ConfigError(
                f"{self.name}: parts of this {type(model).__name__} rest on the host already, each by itself "
                "(prepare_model was called for a part), and one optimizer needs them together: leave prepare_model "
                "out, cast the parts with strategy.cast_parameters(part), and shard them with fully_shard if at all"
            )
        weights = self._new_host_weights()
        if sharded_modules(model):
            record.weight_visits = visits_of_sharded(model, weights)
        else:
            move_to_host(model, weights)
            record.weight_visits = WeightVisits(model, weights)
        for module in called:  # each of them may outlive the module that holds them together
            PreparedModel.of(module).weight_visits = record.weight_visits

    def _new_host_weights(self) -> HostWeights:
        settings = self.config.weights
        return HostWeights(self.device, int(settings.device_mib * 2**20), settings.gradients_gib)

    @contextlib.contextmanager
    def _exchanging_parameters(self, model: nn.Module) -> Iterator[None]:
        """The block may replace the model's parameters. Optimizers without steps get the new ones."""
        inner = unwrap_model(model)
        record = PreparedModel.of(inner)
        with record.exchanging_parameters(inner) as optimizers:
            yield
        record.forget_replaced(inner)
        for optimizer in optimizers:
            optimizer.start_over(self._make_backend(inner), self._host_weights(inner))
            self._connect(inner, optimizer)

    def _prepare_for_role(self, role: Role, model: nn.Module) -> nn.Module:
        if role == "trainer":
            self._refuse_scripted(unwrap_model(model))
            return self._prepare(model)
        if role == "reference" and self.role == "trainer":
            return self._prepare_reference(model.requires_grad_(False)).eval()
        dtype = self.parameter_dtype if role == "reference" else self.rollout_dtype
        return prepare_inference(model, self.device, dtype)

    def _prepare_reference(self, model: nn.Module) -> nn.Module:
        """Place the model as for training, for forwards only."""
        return prepare_inference(model, self.device, self.parameter_dtype)

    def _load_weights(self, prepared: nn.Module, folder: str | Path) -> None:
        """Load the folder's safetensors; each rank reads its own shards."""
        load_pretrained(unwrap_model(prepared), folder)

    @abstractmethod
    def _prepare(self, model: nn.Module) -> nn.Module:
        """Shard, move and cast."""

    def _place_model(self, model: nn.Module) -> nn.Module:
        """Move the whole model to this process's device, cast it, and set up activation checkpointing."""
        on_host = self.config.weights.placement == "host"
        if on_host and PreparedModel.of(model).loaded_next:
            hold_places(unwrap_model(model), self.parameter_dtype)
        with self._keeping_fp32_values(model):
            model = materialise(model, torch.device("cpu") if on_host else self.device)
            cast_tensors(model, planned_dtypes(model, self.parameter_dtype))
        self._checkpoint_activations(model)
        self._place_weights(model)
        return model

    def _checkpoint_activations(self, model: nn.Module) -> None:
        """Set up activation checkpointing if configured."""
        wanted = self.config.sharding.activation_checkpointing
        if wanted:
            checkpoint_activations(model, HostActivations(self.device) if wanted == "host" else None)

    def cast_parameters(self, model: nn.Module) -> None:
        """Cast to ``precision.parameters`` in place. The masters will still be initialised from the fp32 values.

        :meth:`prepare_model` does this; for code that has to cast before it. What is not cast: docs/strategy-files.md.
        """
        with self._keeping_fp32_values(model):
            cast_tensors(model, planned_dtypes(model, self.parameter_dtype))

    @contextlib.contextmanager
    def _keeping_fp32_values(self, model: nn.Module) -> Iterator[None]:
        """Keep the fp32 values of the weights that the block rounds, for the masters. They stay where they are: on the
        host, if the block moves the weights to a device."""
        values = unrounded_values(model) if self._rounds_weights else []
        yield
        PreparedModel.of(model).keep_masters((p, value) for p, value in values if p.dtype != torch.float32)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """``precision.parameters`` as a torch dtype."""
        return cast(torch.dtype, getattr(torch, self.config.precision.parameters))

    @property
    def rollout_dtype(self) -> torch.dtype:
        """``roles.rollout.parameters`` as a torch dtype; default: ``precision.parameters``."""
        dtype = self.config.roles.rollout.parameters or self.config.precision.parameters
        return cast(torch.dtype, getattr(torch, dtype))

    @property
    def _rounds_weights(self) -> bool:
        """Whether weights are rounded to 16 bits for training while their masters stay fp32."""
        return self.config.precision.master_weights is True and self.parameter_dtype != torch.float32

    def create_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        param_groups: Any = None,
        rules: Sequence[Rule] | Rule | None = None,
        **hyperparameters: Any,
    ) -> BaseOptimizer:
        """Create an optimizer over the model's trainable parameters, with this strategy's precision and state backend.

        Args:
            model: what :meth:`prepare_model` returned.
            optimizer_class: a ``torch.optim.Optimizer`` subclass. A class that is not element-wise gets whole tensors,
                which are gathered if they are sharded (docs/optimizers.md says for which classes).
            param_groups: groups of the model's parameters with their own hyper-parameters. Default: one group of all
                parameters; frozen ones are updated once they are unfrozen. A group with ``"optimizer_class"`` is
                updated by that class, with its defaults.
            rules: instead of ``optimizer_class``, ``param_groups`` and ``hyperparameters``: a
                :class:`~lightstep.optimizer.rules.Rule` for each group.
            hyperparameters: keyword arguments of ``optimizer_class``.

        Raises:
            ConfigError: the model is a rollout or reference model, which is not trained.
            TypeError: not an optimizer class, malformed groups, or rules together with what they replace.
            ValueError: there is no trainable parameter, a parameter is in two groups or not the model's, a
                hyper-parameter is refused, a rule matches nothing, or a parameter matches no rule or two.
        """
        self.roles.require_trainer(
            "create_optimizer", "create it on the ranks that train, for the model that they train", model
        )
        if self.roles.asynchronous:  # a model that something else has sharded need not have been prepared
            self.start()
        model = self._with_wrapper(model)
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
        optimizer = MixedPrecisionOptimizer(
            groups,
            optimizer_class,
            hyperparameters,
            backend=self._make_backend(model),
            places=lambda: self._places(model),
            overflow_everywhere=self._overflow_everywhere,
            update_time=self._update_time,
            initial_masters=PreparedModel.of(model).initial_master,
            host_weights=self._host_weights(model),
            **settings_of(self.config),
        )
        optimizer.check_shapes({parameter: place.name for parameter, place in places(unwrap_model(model)).items()})
        self._register(model, optimizer)
        self._connect(model, optimizer)
        return optimizer

    @staticmethod
    def _host_weights(model: nn.Module) -> HostWeights | None:
        """The model's weights that rest on the host; ``None`` if they do not, or if it has not been prepared yet."""
        visits = PreparedModel.of(model).weight_visits
        return None if visits is None else visits.weights

    def _register(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        PreparedModel.of(model).optimizers.add(optimizer)
        self._models[optimizer] = model
        optimizer.accumulating = False

    @property
    def _update_time(self) -> UpdateTime:
        return update_time_of(self.config.optimizer_state)

    def _with_wrapper(self, model: nn.Module) -> nn.Module:
        """The wrapper that :meth:`prepare_model` returned, if ``model`` is the module inside it."""
        return model

    def _reshard(self, model: nn.Module) -> None:  # noqa: B027  (only FSDP2 has something to do)
        """Reshard what a forward has left unsharded."""

    def _reduced_gradients(self, model: nn.Module) -> ReducedGradients | None:
        """How the model's gradients are reduced over ranks; ``None``: the optimizer need not know."""
        return sharded_gradients.add_model(unwrap_model(model)) if initialized() else None

    def _connect(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        """Connect the optimizer to the model's gradients, and the model's forward to deferred updates."""
        gradients = self._reduced_gradients(model)
        if gradients is not None and isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer.gradients.set_reduction(gradients)
        visits = PreparedModel.of(model).weight_visits
        if visits is not None and isinstance(optimizer, MixedPrecisionOptimizer):
            assert optimizer.engine.host_gradients is not None
            visits.takers.add(optimizer.engine.host_gradients)
        if self._update_time is not AT_STEP:
            inner = unwrap_model(model)
            self._refuse_scripted(inner)
            PreparedModel.of(inner).gates.guard(inner, optimizer, self._update_time.in_backward)

    def _refuse_scripted(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` if scripted or traced modules are trained, and updates are deferred."""
        found = {} if self._update_time is AT_STEP else scripted_modules(model)
        if found:
            names = ", ".join(f"{name or 'the model'} ({type(module).__name__})" for name, module in found.items())
            raise ConfigError(
                f"{self.name}: these modules are scripted or traced by torch.jit: {names}. Reads of their "
                f"weights cannot wait for updates, and optimizer_state.update is {self.config.optimizer_state.update}: "
                "set it to at_step, freeze them, or train them without torch.jit (torch.compile works)"
            )

    def _optimizers_of(self, model: nn.Module) -> list[BaseOptimizer]:
        """The optimizers of this model that are still referenced."""
        return list(PreparedModel.of(model).optimizers)

    def trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this strategy created the optimizer for this model."""
        return optimizer in self._models and optimizer in PreparedModel.of(model).optimizers

    def _make_backend(self, model: nn.Module) -> Store:
        """The store for a new optimizer of this model."""
        on_host = self.config.weights.placement == "host"
        return store_of(self.config.optimizer_state, self._sharing_replicas(model), on_host)

    def _sharing_replicas(self, model: nn.Module) -> Replicas | None:
        """The ranks that hold the same part of the model and share the updates; ``None``: there are no others."""
        return None

    def _places(self, model: nn.Module) -> Mapping[torch.Tensor, Place]:
        """Each parameter's position in the model, in the order of use. Called when an optimizer sets up its state."""
        inner = unwrap_model(model)
        with showing_shards(inner):
            self._check_prepared(model)
            for optimizer in self._optimizers_of(model):  # again: the model may have been sharded in the meantime
                self._connect(model, optimizer)
            return in_order_of_use(inner, places(inner))

    def _check_prepared(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` if the model is not prepared for training by this strategy."""
        trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
        other_dtypes = {p.dtype for p in trained} - {self.parameter_dtype}
        if PreparedModel.of(model).role is None and other_dtypes:
            raise ConfigError(
                f"{self.name}: this {type(unwrap_model(model)).__name__} was never prepared: its weights are "
                f"{', '.join(map(str, other_dtypes))}, and precision.parameters is {self.config.precision.parameters}; "
                "call model = strategy.prepare_model(model) before the first step"
            )
        if self.config.weights.placement == "host" and self._host_weights(model) is None:
            raise ConfigError(
                f"{self.name}: weights.placement is host, and the weights of {type(unwrap_model(model)).__name__} are "
                "elsewhere: call model = strategy.prepare_model(model) before the first step, or "
                "strategy.place_weights(model) if something else has placed or sharded the model"
            )

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module, last: bool = True) -> Iterator[None]:
        """Context for one micro-batch's forward and backward. With ``last=False`` no gradient is communicated.

        Updates in backward start in the last micro-batch. Without this context every micro-batch is the last one.
        """
        optimizers = list(PreparedModel.of(model).optimizers)
        if not optimizers:  # a model that has one is trained
            self.roles.require_trainer("accumulate", "accumulate over the model that is trained", model)
        with self._accumulate(model, last):
            for optimizer in optimizers:
                optimizer.accumulating = not last
            try:
                yield
            finally:
                for optimizer in optimizers:
                    optimizer.accumulating = False
                    if not last:
                        optimizer.expect_unreduced()
                    elif optimizer.unreduced:
                        optimizer.expect_reduction()

    def _accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context in which the sharding reduces gradients, or with ``last=False`` does not."""
        return contextlib.nullcontext()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The user's module without the wrappers of this strategy and ``torch.compile``, after pending updates."""
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
        rules: Sequence[Rule] | Rule | None = None,
    ) -> Plan:
        """Estimate a step's memory and time from shapes. The model is run on the meta device, and is not changed.

        Args:
            model: a causal language model of transformers, on any device, also meta.
            tokens: tokens of one micro-batch on one device, in sequences of ``sequence``.
            sequence: tokens of one sequence.
            micro_batches: per step.
            gpus: the number of devices.
            gpu_memory: bytes of one device; default: the profile's.
            profile: the machine's, for example ``"H100"`` or ``"A100+pcie5"``. Default: this machine's GPU if it has a
                profile, or ``lightstep plan --measure`` has saved one; otherwise no times are estimated.
            loss_chunk: tokens whose logits are in memory at a time, if the loss is fused; default: all.
            rules: of the optimizer, as in :meth:`create_optimizer`. Default: AdamW. Times are estimated for Adam and
                AdamW only.

        Raises:
            ConfigError: the profile is not known, or the strategy is DeepSpeed's, which is not planned.
            ValueError: the model cannot be run on the meta device, or the rules do not match it.
        """
        from lightstep.plan.memory import state_by_rules
        from lightstep.plan.planning import plan_one

        inner = unwrap_model(model)
        optimizer = state_by_rules(inner, Rule(torch.optim.AdamW) if rules is None else rules)
        work = {"sequence": min(sequence, tokens), "micro_batches": micro_batches, "loss_chunk": loss_chunk}
        return plan_one(self.name, self.config, inner, tokens, work, gpus, gpu_memory, profile, optimizer)

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
        """Write model, optimizer, scheduler, random states and ``extra`` to the folder ``path``, or to a URL.

        Called by all ranks that train. ``trainable_only`` leaves out the frozen base; it is the default for models with
        PEFT adapters. ``weights_only`` leaves out optimizer and scheduler.

        With ``keep_last``, older checkpoints ``step-<number>`` next to ``path`` are removed, except for the newest
        complete ones (``keep_last`` with the new one) and those whose number is a multiple of ``keep_every``.

        With ``asynchronous`` a thread writes the run as it is now. A handle is returned at once: ``done()``, and
        ``result(timeout=None)``, which returns the folder. The next save, :meth:`close` and the end of the process wait
        for the thread. :func:`lightstep.checkpoint.save_checkpoint` describes every argument.

        Raises:
            TypeError: something in ``scheduler`` or ``extra`` could not be loaded again. Nothing has been written.
            CheckpointError: the disk is full, something else is at ``path``, ... What was at ``path`` is still there.
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
        """Load what :meth:`save_checkpoint` wrote, and return its ``extra``.

        Without ``optimizer`` only the weights are loaded, and the masters of the model's optimizers are rebuilt from
        them. With ``trainable_only=True`` the frozen base is not loaded even if it was saved.

        Raises:
            CheckpointError: the checkpoint cannot be used; the message names the path and what differs. Nothing has
                been changed.
        """
        return self.checkpoints.load(path, model, optimizer, scheduler, trainable_only)

    def export_model(self, path: str | Path, model: nn.Module, tokenizer: Any = None) -> None:
        """Write the weights to a Hugging Face folder (``save_pretrained``), in the model's dtype."""
        self.checkpoints.export(path, model, tokenizer)

    # -- reinforcement learning

    def publish_weights(
        self,
        model: nn.Module,
        to: RolloutEngine | WeightTransport | None = None,
        version: int | None = None,
        *,
        wait: bool = True,
        replace: bool = False,
    ) -> int:
        """Send the model's weights after the last step to the rollout workers or an engine; returns their version.

        Called by all ranks that train. Waits for deferred updates first. Weights are sent layer by layer: a device
        needs memory for one bucket (``roles.rollout.bucket_mib``, or one larger tensor) and one gathered tensor. The
        training state never changes. Floating-point weights are cast to ``roles.rollout.parameters``.

        Args:
            model: what :meth:`prepare_model` returned for the role ``"trainer"``.
            to: ``None``: the ranks whose role is ``"rollout"``, which call :meth:`receive_weights`. An engine: every
                rank that trains passes the one in its own process. A transport: used by the first rank.
            version: sent with the weights. Default: one more than the last version, beginning with 1.
            wait: return when the weights have been sent. Without it they are copied to host memory, each rank's own
                shards, and a thread sends the copies while training goes on. If other weights are still on their way,
                the call waits for them before it copies anything. Not for an engine.
            replace: with ``wait=False``, do not wait for weights that are still on their way. These weights wait for
                their turn in host memory of their own, and replace others that wait there.

        Raises:
            WeightTransferError: a receiver died, did not answer in ``roles.rollout.timeout_s`` seconds, or cannot load
                these weights. All ranks that train raise. Training can continue, and the weights can be published
                again. With ``wait=False`` the next call, :meth:`wait_for_publication` or :meth:`close` raises it.
            HostMemoryError: with ``wait=False``, the host has too little memory for the copy.
            ConfigError: there are no receivers.
            RuntimeError: layers are updated in backward and ``step()`` has not been called, or a step failed.
        """
        return self.rollout.publish(model, self.rollout_dtype, to, version, wait, replace)

    def wait_for_publication(self) -> PublishedWeights | None:
        """Wait for all weights that are on their way, and return what was sent last; ``None`` if nothing was.

        Called by all ranks that train.

        Raises:
            WeightTransferError: weights that were published with ``wait=False`` did not arrive. It is raised once.
        """
        return self.rollout.wait()

    def receive_weights(self, engine: RolloutEngine, wait: bool = True, timeout: float | None = None) -> int | None:
        """Load the newest published weights into the engine, on a rank whose role is ``"rollout"``.

        Args:
            engine: its ``version`` is the returned one afterwards.
            wait: wait until weights are published. Without it, only weights that are offered now are received.
            timeout: seconds to wait; default: ``roles.rollout.timeout_s``.

        Returns:
            The version received; ``None`` if nothing is offered and ``wait`` is ``False``.

        Raises:
            TrainingEnded: the trainers have closed their strategy or died. No further weights will be published.
            WeightTransferError: names, shapes or dtypes do not fit, or nothing was published in time; the engine still
                has its previous weights. Or the transfer failed; the engine then refuses to generate until it has
                received a complete set.
            ConfigError: this process is not a rollout worker.
        """
        return self.rollout.receive(engine, wait, timeout)

    def drop_rollout_workers(self, ranks: Iterable[int]) -> None:
        """Publish without these ranks (``WeightTransferError.ranks``) from now on. Called by all ranks that train."""
        self.rollout.drop(ranks)

    @staticmethod
    def fsdp_version(model: nn.Module) -> int:
        """2 for a model sharded by ``fully_shard``, 1 by ``FullyShardedDataParallel``, 0 for an unsharded one."""
        return fsdp_version(model)

    def release_device_memory(self) -> AbstractContextManager[None]:
        """Free the device memory of this strategy's optimizers and of unsharded weights, for another use.

        It is freed at once, and allocated again by the next step. As a context manager this also empties the
        allocator's cache at the end. Weights and gradients stay. Does nothing on a rank that only generates.

        Raises:
            HostMemoryError: the host has not enough memory for the state on the device. None of it was moved.
        """
        for optimizer, model in list(self._models.items()):
            self._reshard(model)
            optimizer.release_device_memory()
        return _empty_cache_at_exit(self.device)

    # -- closing

    def close(self) -> None:
        """End the process group if this strategy started it, and tell rollout workers that training has ended.

        A pending save is finished first, and weights that are on their way arrive.

        Raises:
            WeightTransferError: weights did not arrive that were published with ``wait=False``. Everything is closed.
        """
        finish_pending()
        try:
            self.rollout.close()
        finally:
            if self._owns_process_group and initialized():
                dist.destroy_process_group()
            self._owns_process_group = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@contextlib.contextmanager
def _empty_cache_at_exit(device: torch.device) -> Iterator[None]:
    try:
        yield
    finally:
        if device.type != "cpu":
            torch.accelerator.memory.empty_cache()


def _fp32_weights(model: nn.Module, folder: str | Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Trainable parameters that were rounded when they were loaded, with this rank's shards of the fp32 values."""
    for tensor, shard in shards_with_other_dtypes(model, folder):
        if tensor.requires_grad and shard.dtype == torch.float32:
            yield tensor, shard
