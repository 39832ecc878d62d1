"""ZeRO through a DeepSpeed engine, which is created together with the optimizer."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightstep.config import ConfigError, DeepSpeedSharding, StrategyConfig
from lightstep.deepspeed.checkpoint import EngineCheckpoints, is_partitioned
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer, EngineState
from lightstep.deepspeed.settings import deepspeed_config, engine_settings, refuse_contradictions
from lightstep.distributed import Replicas, is_divided, is_sharded
from lightstep.extras import needs
from lightstep.optimizer.base import BaseOptimizer
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.engine_model import EngineModel, tell_deepspeed_where_it_is
from lightstep.strategy.base import ModelSource
from lightstep.strategy.process_group import ProcessGroupStrategy, broadcast_from_first, refuse_experts


class DeepSpeedStrategy(ProcessGroupStrategy):
    """Optimizer state (stage 1), also gradients (stage 2), also weights (stage 3) partitioned by DeepSpeed.

    Communication is DeepSpeed's: gradients in the last micro-batch (stage 1) or in every one (stages 2 and 3); updated
    weights in each step (stages 1 and 2) or before each layer's forward and backward (stage 3).

    Raises:
        ConfigError: DeepSpeed cannot do what the strategy says, or ``sharding.config`` contradicts the strategy.
    """

    def __init__(self, config: StrategyConfig, name: str = "strategy") -> None:
        super().__init__(config, name)
        self.checkpoints = EngineCheckpoints(self.roles, self._optimizers_of, name)
        self.deepspeed_config = deepspeed_config(config, name)
        """The configuration for ``deepspeed.initialize``."""

    @property
    def _sharding(self) -> DeepSpeedSharding:
        return cast(DeepSpeedSharding, self.config.sharding)

    # -- the model

    def prepare_model(self, model: ModelSource, role: str = "trainer", weights: str | Path | None = None) -> nn.Module:
        """Prepare a model as every strategy does. At stage 3 a function is called under ``deepspeed.zero.Init``.

        Then no rank ever holds the whole model. A function for a transformers model must call ``from_config`` or
        ``from_pretrained``, which can handle partitioned weights.

        Raises:
            ConfigError: DeepSpeed is not installed, or does not support this model or this machine.
        """
        self._start_deepspeed()
        partitions = role == "trainer" and self._sharding.stage == 3
        if partitions and callable(model) and not isinstance(model, nn.Module):
            settings, dtype = self.deepspeed_config, self.parameter_dtype
            return super().prepare_model(lambda: construct_partitioned(model, settings, dtype), role, weights)
        return super().prepare_model(model, role, weights)

    def _start_deepspeed(self) -> None:
        """Check DeepSpeed, and have it use this process's group."""
        tell_deepspeed_where_it_is()
        try:
            with needs("deepspeed"):
                import deepspeed
        except ImportError as error:
            raise ConfigError(
                f"{self.name}: sharding.kind deepspeed needs DeepSpeed, which cannot be imported: {error}"
            ) from error
        accelerator = deepspeed.get_accelerator()
        if self.parameter_dtype not in accelerator.supported_dtypes():
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes())
            raise ConfigError(
                f"{self.name}: precision.parameters is {self.config.precision.parameters}, which DeepSpeed does not "
                f"support on this machine's {accelerator.device_name()}; allowed here: {allowed}"
            )
        self.start()
        join_process_group()

    def _prepare(self, model: nn.Module) -> nn.Module:
        self._refuse_wrapped(model)
        self._refuse_kept(model)
        if is_partitioned(model):
            self._refuse_other_dtype(model)
            return EngineModel(model, partitioned=True)
        placed = self._place_model(model)
        broadcast_from_first([*placed.parameters(), *placed.buffers()])
        return EngineModel(placed)

    def _refuse_wrapped(self, model: nn.Module) -> None:
        what = type(model).__name__
        if hasattr(model, "set_gradient_accumulation_boundary"):
            raise ConfigError(
                f"{self.name}: this {what} is a DeepSpeed engine already; pass it to strategy.adopt_engine(engine)"
            )
        if any(isinstance(module, EngineModel | DistributedDataParallel) for module in model.modules()):
            raise ConfigError(
                f"{self.name}: this {what} is wrapped already; prepare a model once, and use what the first call "
                "returned"
            )
        refuse_experts(self, dict(model.named_parameters()))
        sharded = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
        if sharded:
            raise ConfigError(
                f"{self.name}: {len(sharded)} parameters are DTensors (first: {sharded[0]}), and DeepSpeed partitions "
                "only plain ones; prepare the model before anything else shards it"
            )

    def _refuse_kept(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` if parameters must not be cast: DeepSpeed casts all that have 16 bits or more."""
        planned = planned_by_tensor(model, self.parameter_dtype)
        for name, parameter in model.named_parameters():
            castable = parameter.is_floating_point() and parameter.dtype.itemsize > 1
            if castable and planned.get(parameter) != self.parameter_dtype:
                why = "is quantised" if parameter not in planned else "is kept in float32 (_keep_in_fp32_modules)"
                raise ConfigError(
                    f"{self.name}: {name} of this {type(model).__name__} {why}, and DeepSpeed casts every parameter to "
                    f"{self.config.precision.parameters}; choose a strategy of kind single, ddp or fsdp2"
                )

    def _refuse_other_dtype(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` if parameters were partitioned in another dtype: they can no longer be cast."""
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != self.parameter_dtype:
                raise ConfigError(
                    f"{self.name}: {name} was partitioned in {parameter.dtype} (deepspeed.zero.Init), and "
                    f"precision.parameters is {self.config.precision.parameters}; pass the function that constructs "
                    "the model, or call zero.Init(config_dict_or_path=strategy.deepspeed_config)"
                )

    # -- the optimizer and its engine

    def _make_optimizer(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        groups: list[dict[str, Any]],
        hyperparameters: dict[str, Any],
    ) -> BaseOptimizer:
        """Create the engine, in which DeepSpeed runs ``optimizer_class`` on flat fp32 partitions.

        Raises:
            ConfigError: the groups name several classes.
            ValueError: the model has an engine already, or was not prepared by this strategy.
        """
        outer = self._engine_model(model)
        groups = [self._without_optimizer_class(group, optimizer_class) for group in groups]
        if outer.engine is not None:
            raise ValueError(
                f"{self.name}: this model has an optimizer already, and DeepSpeed has one engine per model; prepare "
                "another model for another optimizer"
            )
        trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        update_device = self.device if self._sharding.offload == "none" else torch.device("cpu")
        chosen = _fused_argument(optimizer_class, hyperparameters, update_device)
        client = optimizer_class([group for group in trained if group["params"]], **hyperparameters, **chosen)
        complete = [{**client.defaults, **group} for group in groups]
        return self._connect_engine(outer, self._initialise(outer.module, client), complete, client.defaults)

    def _without_optimizer_class(
        self, group: dict[str, Any], optimizer_class: type[torch.optim.Optimizer]
    ) -> dict[str, Any]:
        named = group.get("optimizer_class", optimizer_class)
        if named is not optimizer_class:
            raise ConfigError(
                f"{self.name}: DeepSpeed runs one optimizer class per engine, and the groups name "
                f"{optimizer_class.__name__} and {getattr(named, '__name__', named)}; use another sharding.kind"
            )
        return {key: value for key, value in group.items() if key != "optimizer_class"}

    def adopt_engine(self, engine: Any) -> tuple[nn.Module, DeepSpeedOptimizer]:
        """Model and optimizer over an engine that ``deepspeed.initialize`` created elsewhere.

        If the engine has a scheduler, it steps it in ``optimizer.step()``.

        Raises:
            ConfigError: the engine's configuration contradicts the strategy; the message has each key and both values.
        """
        self._start_deepspeed()
        refuse_contradictions(
            self.deepspeed_config,
            engine_settings(engine),
            f"{self.name}: the DeepSpeed engine contradicts the strategy",
        )
        outer = EngineModel(engine.module)
        groups = [
            {key: value for key, value in engine_group.items() if key != "param_names"} | {"params": members}
            for engine_group, members in zip(
                engine.optimizer.param_groups, EngineState(engine).model_groups, strict=True
            )
        ]
        optimizer = self._connect_engine(outer, engine, groups, engine.basic_optimizer.defaults)
        return outer, optimizer

    def _connect_engine(
        self, outer: EngineModel, engine: Any, groups: list[dict[str, Any]], defaults: Mapping[str, Any]
    ) -> DeepSpeedOptimizer:
        optimizer = DeepSpeedOptimizer(engine, groups, defaults)
        outer.attach(engine)
        self._register(outer, optimizer)
        return optimizer

    def _initialise(self, module: nn.Module, client: torch.optim.Optimizer) -> Any:
        import deepspeed

        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=client, config=copy.deepcopy(self.deepspeed_config), dist_init_required=False
        )
        if len(engine.optimizer.param_groups) != len(client.param_groups):
            raise ValueError(
                f"{self.name}: DeepSpeed joins the {len(client.param_groups)} parameter groups of "
                f"{type(client).__name__} into {len(engine.optimizer.param_groups)}; use one group, or another class"
            )
        return engine

    def _engine_model(self, model: nn.Module) -> EngineModel:
        """The :class:`EngineModel` that ``model`` is, or that ``torch.compile`` or Lightning Fabric has wrapped."""
        outer: Any = model
        while isinstance(outer, nn.Module) and not isinstance(outer, EngineModel):
            children = vars(outer).get("_modules", {})
            outer = children.get("_orig_mod", children.get("_forward_module"))
        if outer is None:
            raise ValueError(
                f"{self.name}: this {type(model).__name__} was not prepared by this strategy; pass what "
                "strategy.prepare_model returned"
            )
        return cast(EngineModel, outer)

    def _accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Tell DeepSpeed, before the forward, whether the micro-batch is the step's last one."""
        engine = self._engine_model(model).engine
        if engine is not None:
            engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def _replicas(self, model: nn.Module) -> Replicas | None:
        return None

    @property
    def _rounds_weights(self) -> bool:
        return False  # DeepSpeed initialises its masters from the weights that it gets


_joined_group: weakref.ref[Any] | None = None


def join_process_group() -> None:
    """Have DeepSpeed communicate over the current default process group, even if it used an earlier one before."""
    global _joined_group
    import deepspeed
    from deepspeed.utils import groups

    world = dist.group.WORLD
    if _joined_group is not None and _joined_group() is world:
        return
    if deepspeed.get_accelerator().device_name() == "cpu":
        # This shared-memory reduction for inference would be compiled now; training does not need it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if _joined_group is not None:
        groups._release_process_group_references()
    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)
    # torch 2.13 has renamed two collectives, and warns at each call of the old names.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
    _joined_group = weakref.ref(world)


def _fused_argument(
    optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """``fused=True`` if the class has it for this device and no implementation was chosen.

    Not for SGD on the CPU, where torch 2.13's result with momentum is wrong.
    """
    chosen = {"fused", "foreach", "differentiable"} & hyperparameters.keys()
    has_fused = "fused" in inspect.signature(optimizer_class.__init__).parameters
    unsupported = torch.optim.SGD if device.type == "cpu" else torch.optim.Adagrad
    return {"fused": True} if has_fused and not chosen and not issubclass(optimizer_class, unsupported) else {}


# -- models whose weights DeepSpeed partitions over the ranks while they are constructed (stage 3) ---------------------


def construct_partitioned(factory: Callable[[], nn.Module], settings: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Call ``factory``, and cast and partition each module's parameters as soon as the module has been constructed.

    Buffers keep their dtype. Initial weights are the first rank's.

    Args:
        settings: DeepSpeed's configuration.
        dtype: of the parameters.

    Raises:
        ConfigError: ``factory`` called the class of a transformers model, which cannot initialise partitioned weights.
    """
    announcement = _announce_to_transformers(settings)
    from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, Init

    class ParameterInit(Init):
        """Casts only parameters. DeepSpeed would create all tensors in ``dtype``, even rotary frequencies."""

        def _post_init_method(self, module: nn.Module) -> None:
            _refuse_uninitialised(module)
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and not is_divided(parameter):
                    parameter.data = parameter.data.to(dtype)
            super()._post_init_method(module)

    # Without dtype=...: if the accelerator has no fp16, DeepSpeed 0.19 ignores it and uses bf16.
    with ParameterInit(config_dict_or_path=settings, tensor_overrides=[DeepSpeedTensorOverride.device]):
        model = factory()
    del announcement
    return model


def _announce_to_transformers(settings: dict[str, Any]) -> Any:
    """While the returned object exists, transformers can initialise and load partitioned weights.

    ``None`` if transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    importlib.import_module("transformers.modeling_utils")  # now: it constructs modules, which must not be partitioned
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(settings)


def _refuse_uninitialised(module: nn.Module) -> None:
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    known = getattr(modeling, "_is_ds_init_called", True)
    if not known and isinstance(module, modeling.PreTrainedModel):
        what = type(module).__name__
        raise ConfigError(
            f"prepare_model(function): the function called {what}(...), and at sharding.stage 3 its weights are "
            "partitioned before transformers can initialise them; have it call "
            "AutoModelForCausalLM.from_config(config) or from_pretrained(folder)"
        )
