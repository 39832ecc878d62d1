"""A run as a checkpoint has it: the model's tensors and their averages by name, and of adapters what is trained and the
base's name; the optimizer's parameters by name, and their state entry by entry.

A model that a failed load left half changed is marked here. It cannot be saved until a load succeeds.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.tensors import Shard, Source, full_shard, shard_of
from lightstep.distributed import Ranks, like, local_tensor
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.sharding.model_names import NamedTensor, holders, named_tensors, numbered, several_holders, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

logger = logging.getLogger(__name__)

# -- the model ---------------------------------------------------------------------------------------------------------


def live_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks, for_load: bool = False
) -> list[NamedTensor]:
    """The model's tensors after all pending updates. Different tensors have different names on all ranks.

    Called by all ranks.

    Args:
        for_load: they will be replaced, so a step that has failed does not matter.

    Raises:
        CheckpointError: tensors are on the meta device.
    """
    tensors = ranks.together(lambda: _updated_tensors(model, optimizer, for_load))
    return numbered(tensors, several_holders(ranks.gather(holders(tensors))))


def _updated_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, for_load: bool) -> list[NamedTensor]:
    is_replaced = for_load and getattr(optimizer, "half_updated", False)
    if optimizer is not None and hasattr(optimizer, "synchronize") and not is_replaced:
        optimizer.synchronize()
    tensors = named_tensors(model)
    empty = [named.name for named in tensors if named.tensor.is_meta]
    if empty:
        raise CheckpointError(f"{len(empty)} tensors of the model are on the meta device ({', '.join(empty[:3])})")
    return tensors


def averaged_weights(model: nn.Module, tensors: Iterable[NamedTensor]) -> list[tuple[NamedTensor, Tensor]]:
    """Each of the model's ``tensors`` that has an average, and the average."""
    average = PreparedModel.of(model).average
    averages = {} if average is None else average.tensors
    return [(named, averages[named.model_name]) for named in tensors if named.model_name in averages]


def average_key(name: str) -> str:
    """The key of a weight's average in the checkpoint."""
    return f"average.{name}"


# -- adapters ----------------------------------------------------------------------------------------------------------


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has PEFT adapters."""
    return bool(getattr(unwrap_model(model), "peft_config", None))


def without_base(
    model: nn.Module, tensors: Sequence[NamedTensor], optimizer: torch.optim.Optimizer | None
) -> list[NamedTensor]:
    """All buffers, and the parameters that are trainable or have optimizer state.

    Args:
        optimizer: counts beside the optimizers that a strategy made for the model.
    """
    optimizers = [*PreparedModel.of(model).optimizers, *([] if optimizer is None else [optimizer])]
    return [
        named
        for named in tensors
        if not isinstance(named.tensor, nn.Parameter)
        or named.tensor.requires_grad
        or any(named.tensor in one.state for one in optimizers)
    ]


def describe_base(model: nn.Module, tensors: Sequence[NamedTensor], saved: Sequence[NamedTensor]) -> dict[str, Any]:
    """The base's name, as PEFT knows it, and the shapes of the tensors that are not saved."""
    saved_names = {named.name for named in saved}
    shapes = {named.name: list(named.tensor.shape) for named in tensors if named.name not in saved_names}
    return {"name": _base_name(model), "shapes": shapes}


def warn_if_other_base(model: nn.Module, base: Mapping[str, Any]) -> None:
    """Log a warning if the adapters were trained on a base of another name. (Its weights may be the same.)"""
    name = _base_name(model)
    if base["name"] != name:
        logger.warning(
            "the checkpoint holds what was trained on %r, and the model's base is %r; the base is left as it is",
            base["name"],
            name,
        )


def _base_name(model: nn.Module) -> str | None:
    """The base's name or path for ``from_pretrained``; ``None`` if neither PEFT nor the model's config has one."""
    inner = unwrap_model(model)
    configs = getattr(inner, "peft_config", None) or {}
    names = [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    return next((str(name) for name in names if name), getattr(getattr(inner, "config", None), "_name_or_path", None))


# -- loads that failed -------------------------------------------------------------------------------------------------

_half_loaded: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Models that a load has changed in part -> what failed."""

_refusing: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[RemovableHandle, bool]] = weakref.WeakKeyDictionary()
"""torch's own optimizers after a load that broke off -> the hook by which ``step()`` raises, and whether it was loading
state."""


@contextmanager
def loading(model: nn.Module, optimizers: Iterable[Any], path: Any, weights_only: bool = False) -> Iterator[None]:
    """The block loads the model. If it fails, saves of the model and ``step()`` raise until a load succeeds.

    Args:
        optimizers: the ones that are loaded too or, with ``weights_only``, whose masters are rebuilt.
        path: where the model is loaded from, for the errors.
    """
    reason = f"loading {path} failed after a part of it had been loaded"
    inner = unwrap_model(model)
    _half_loaded[inner] = reason
    optimizers = list(optimizers)
    try:
        yield
    except BaseException:
        for optimizer in optimizers:
            if hasattr(optimizer, "refuse_until_loaded"):
                optimizer.refuse_until_loaded(reason, weights_only=weights_only)
            else:
                with_state = not weights_only or _refusing.get(optimizer, (None, False))[1]
                _allow_steps(optimizer)
                _refusing[optimizer] = optimizer.register_step_pre_hook(partial(_refuse_step, reason)), with_state
        raise
    del _half_loaded[inner]
    for optimizer in optimizers:
        if not (weights_only and _refusing.get(optimizer, (None, False))[1]):
            _allow_steps(optimizer)


def _refuse_step(reason: str, *_: Any) -> None:
    raise RuntimeError(f"{reason}; weights and state may be half loaded. Load a checkpoint before the next step")


def _allow_steps(optimizer: Any) -> None:
    if (refusal := _refusing.pop(optimizer, None)) is not None:
        refusal[0].remove()


def refuse_partly_loaded(model: nn.Module, doing: str = "saving one") -> None:
    """Raise if the last load of this model, or a step of one of its optimizers, failed after it had changed something.

    Args:
        doing: what needs whole weights, as the end of a sentence.

    Raises:
        CheckpointError, RuntimeError: with what failed.
    """
    reason = _half_loaded.get(unwrap_model(model))
    if reason is not None:
        raise CheckpointError(f"{reason}; load a checkpoint before {doing}")
    for optimizer in PreparedModel.of(model).optimizers:
        if isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer.refuse_half_updated(f"Load a checkpoint before {doing}")


# -- the optimizer -----------------------------------------------------------------------------------------------------

_RUNTIME_OPTIONS = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Group keys that say how to compute, not what. They are not loaded: the optimizer keeps its own."""


class OptimizerContent:
    """The parameters of any ``torch.optim.Optimizer`` by name, and their state entry by entry.

    An optimizer with the method ``load_parameter_state`` places loaded state itself. One with ``kept_state`` and
    ``keeps_state`` may divide its state among replicas: each rank saves and loads the state that it keeps.

    Raises:
        CheckpointError: the optimizer has parameters that the model does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: Iterable[NamedTensor]) -> None:
        self.optimizer = optimizer
        names = {id(named.tensor): named.name for named in model}
        self.groups: list[list[str]] = []
        self.parameters: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            foreign = [tuple(p.shape) for p in group["params"] if id(p) not in names]
            if foreign:
                raise CheckpointError(
                    f"{len(foreign)} parameters of the optimizer (shapes {foreign[:3]}) are not the model's; "
                    "pass the model that the optimizer was built from"
                )
            self.groups.append([names[id(p)] for p in group["params"]])
            self.parameters.update(zip(self.groups[-1], group["params"], strict=True))
        self._cached: tuple[str, dict[str, Any]] = ("", {})

    @property
    def class_name(self) -> str | None:
        """The class that computes the updates, if known; with ``" + "`` between them if groups have several."""
        inner = getattr(self.optimizer, "optimizer_class", None if self.keeps_masters else type(self.optimizer))
        if inner is None:
            return None
        named = (group.get("optimizer_class", inner.__name__) for group in self.optimizer.param_groups)
        return " + ".join(sorted({name.rpartition(".")[2] for name in named}))

    @property
    def keeps_masters(self) -> bool:
        """Whether the optimizer keeps fp32 masters of low-precision parameters."""
        return hasattr(self.optimizer, "load_parameter_state")

    def keeps_state(self, name: str) -> bool:
        """Whether this rank keeps the parameter's state, and not a replica of this rank."""
        return not hasattr(self.optimizer, "keeps_state") or self.optimizer.keeps_state(self.parameters[name])

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Each group's hyper-parameters, ``initial_lr`` and tensor learning rates included."""
        return [
            plain_numbers({key: value for key, value in group.items() if key not in ("params", "param_names")})
            for group in self.optimizer.param_groups
        ]

    def contents(self) -> tuple[list[Source], dict[str, dict[str, Any]]]:
        """The state that this rank keeps: its tensors, and its plain values by parameter and entry."""
        sources: list[Source] = []
        values: dict[str, dict[str, Any]] = {}
        for name in self.parameters:
            described = self._describe(name)
            sources += self._sources(name, described)
            plain = {key: value for key, value in described.items() if not isinstance(value, Tensor)}
            if plain:
                values[name] = plain
        return sources, values

    def load(self, name: str, entries: dict[str, Any]) -> None:
        """Replace one parameter's state; ``{}`` removes it.

        Args:
            entries: local shards on the host, and plain values. If this rank does not keep the parameter's state
                (:meth:`keeps_state`), only their names are used.
        """
        parameter = self.parameters[name]
        if self.keeps_masters:
            self.optimizer.load_parameter_state(parameter, entries)  # type: ignore[attr-defined]
        elif entries:
            group = next(g for g, names in zip(self.optimizer.param_groups, self.groups, strict=True) if name in names)
            step_on_device = bool(group.get("fused") or group.get("capturable"))
            self.optimizer.state[parameter] = {
                key: _place(value, parameter, step_on_device) if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }
        else:
            self.optimizer.state.pop(parameter, None)

    def prepare_to_load(
        self, entries: Mapping[str, Collection[str]], hyperparameters: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Have the optimizer manage these parameters, frozen ones included: their state will be loaded.

        Args:
            entries: the names of their entries.
            hyperparameters: what will be loaded into groups, by their numbers.

        Raises:
            ValueError: a parameter cannot have these entries. Nothing has been loaded.
        """
        if hasattr(self.optimizer, "prepare_to_load"):
            listed = {self.parameters[name]: names for name, names in entries.items()}
            self.optimizer.prepare_to_load(listed, self._settings(hyperparameters))

    def check_complete(
        self, entries: Mapping[str, Mapping[str, Any]], hyperparameters: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """See :meth:`MixedPrecisionOptimizer.check_complete`."""
        if hasattr(self.optimizer, "check_complete"):
            listed = {self.parameters[name]: own for name, own in entries.items()}
            self.optimizer.check_complete(listed, self._settings(hyperparameters))

    def _settings(self, hyperparameters: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What of these will be loaded into each group."""
        return [
            {
                key: value
                for key, value in hyperparameters.get(number, {}).items()
                if key not in _RUNTIME_OPTIONS and not isinstance(live.get(key), Tensor)
            }
            for number, live in enumerate(self.optimizer.param_groups)
        ]

    def set_hyperparameters(self, group: int, saved: Mapping[str, Any]) -> None:
        """Load a group's hyper-parameters. A tensor learning rate is written in place."""
        live = self.optimizer.param_groups[group]
        for key, value in saved.items():
            if key in _RUNTIME_OPTIONS:
                continue
            if isinstance(live.get(key), Tensor):
                live[key].fill_(value)
            else:
                live[key] = value.clone() if isinstance(value, Tensor) else value

    def _sources(self, name: str, described: Mapping[str, Any]) -> list[Source]:
        parameter = self.parameters[name]
        shard = shard_of(parameter)
        if shard is None:
            return []
        sources = []
        for key, value in described.items():
            if isinstance(value, Tensor):
                local = local_tensor(value)
                is_full = local.shape != shard.lengths and self.has_whole_tensors
                part = full_shard(local.shape) if is_full else _entry_shard(name, key, local, shard)
                fetch = partial(self._fetch, name, key)
                sources.append(Source(entry_key(name, key), part, local.dtype, fetch, parameter, key))
        return sources

    @property
    def has_whole_tensors(self) -> bool:
        """Whether the optimizer updates whole tensors of sharded parameters.

        State whose shape is not the shard's is then the same on all ranks.
        """
        return bool(getattr(self.optimizer, "has_whole_tensors", False))

    def _fetch(self, name: str, key: str) -> Tensor:
        return local_tensor(self._entries(name)[key])

    def _describe(self, name: str) -> dict[str, Any]:
        """The entries with the right shapes, dtypes and plain values, without building tensors if possible."""
        describe = getattr(self.optimizer, "described_state", self.optimizer.state.get)
        return dict(describe(self.parameters[name]) or {})

    def _entries(self, name: str) -> dict[str, Any]:
        """One parameter's state. Reading it may build tensors, so the last result is cached."""
        if self._cached[0] != name:
            self._cached = ("", {})  # frees the previous tensors first
            read = getattr(self.optimizer, "kept_state", self.optimizer.state.get)
            self._cached = (name, dict(read(self.parameters[name]) or {}))
        return self._cached[1]


def same_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two groups have the same hyper-parameters."""
    keys = (first.keys() | second.keys()) - set(_RUNTIME_OPTIONS)
    return all(key in first and key in second and _equal(first[key], second[key]) for key in keys)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    return bool(first == second)


def entry_key(name: str, entry: str) -> str:
    """The key of an optimizer state entry in the checkpoint.

    Raises:
        TypeError: the entry's name has a dot.
    """
    if "." in entry:
        raise TypeError(f"the optimizer's state of {name} has an entry {entry!r}; names with dots cannot be saved")
    return f"optimizer.{name}.{entry}"


def stored_entries(keys: Iterable[str]) -> dict[str, list[str]]:
    """Parameter name -> its state entries among the checkpoint's keys."""
    found: dict[str, list[str]] = {}
    for key in keys:
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            name, _, entry = rest.rpartition(".")
            found.setdefault(name, []).append(entry)
    return found


def _entry_shard(name: str, key: str, local: Tensor, parameter: Shard) -> Shard:
    """The shard that an entry's local tensor is: the parameter's, or a whole tensor that all ranks have.

    Raises:
        CheckpointError: the entry of a sharded parameter has another shape.
    """
    if local.shape == parameter.lengths:
        return parameter
    if local.dim() == 0 or not parameter.sharded:
        return full_shard(local.shape)
    raise CheckpointError(
        f"the state entry {key!r} of {name} has local shape {tuple(local.shape)}, the parameter "
        f"{tuple(parameter.lengths)}; only element-wise state of a sharded parameter can be saved"
    )


def _place(value: Tensor, parameter: Tensor, step_on_device: bool) -> Tensor:
    """A state entry on the device where a plain torch optimizer expects it."""
    local = local_tensor(parameter)
    if value.dim() == 0:
        return value.to(local.device) if step_on_device else value
    if value.shape != local.shape:
        return value.to(local.device)
    # With the parameter's strides, which fused optimizers need.
    return like(parameter, torch.empty_like(local, dtype=value.dtype).copy_(value))
