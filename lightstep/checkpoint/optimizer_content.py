"""An optimizer's parameters by name and its state entry by entry, as a checkpoint saves and loads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.tensors import Shard, Source, shard_of, whole
from lightstep.distributed import like, local_tensor
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.sharding.model_names import NamedTensor

_CHOICES_OF_THIS_RUN = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Group keys that say how to compute, not what: the live optimizer's stay."""


class OptimizerContent:
    """An optimizer's parameters by name, and its state entry by entry.

    Any ``torch.optim.Optimizer`` will do; one with ``load_parameter_state`` places what it is given itself. One with
    ``kept_state`` and ``keeps_state`` may share its state with other ranks: each saves and loads what it keeps.

    Raises:
        CheckpointError: it has parameters that the model has not.
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
        self._last: tuple[str, dict[str, Any]] = ("", {})

    @property
    def class_name(self) -> str | None:
        """The class whose arithmetic is used, when the optimizer says so; all of them where groups have their own."""
        wrapper = hasattr(self.optimizer, "load_parameter_state")
        inner = getattr(self.optimizer, "optimizer_class", None if wrapper else type(self.optimizer))
        if inner is None:
            return None
        named = (group.get("optimizer_class", inner.__name__) for group in self.optimizer.param_groups)
        return " + ".join(sorted({name.rpartition(".")[2] for name in named}))

    @property
    def keeps_masters(self) -> bool:
        """Whether it can take an fp32 master for a low-precision parameter."""
        return hasattr(self.optimizer, "load_parameter_state")

    def keeps(self, name: str) -> bool:
        """Whether this rank loads the parameter's state; otherwise a replica of this rank does."""
        return not hasattr(self.optimizer, "keeps_state") or self.optimizer.keeps_state(self.parameters[name])

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Each group's settings, ``initial_lr`` and tensor learning rates included."""
        return [
            plain_numbers({key: value for key, value in group.items() if key not in ("params", "param_names")})
            for group in self.optimizer.param_groups
        ]

    def contents(self) -> tuple[list[Source], dict[str, dict[str, Any]]]:
        """The state that this rank keeps: every tensor, fetched when it is written, and what is no tensor, by parameter
        and key."""
        sources: list[Source] = []
        values: dict[str, dict[str, Any]] = {}
        for name in self.parameters:
            described = self._described(name)
            sources += self._sources_of(name, described)
            plain = {key: value for key, value in described.items() if not isinstance(value, Tensor)}
            if plain:
                values[name] = plain
        return sources, values

    def load(self, name: str, entries: dict[str, Any]) -> None:
        """Replace one parameter's state by these (local shards on the host); ``{}`` removes it.

        Of a parameter that this rank does not keep (:meth:`keeps`) only the names of the entries matter.
        """
        parameter = self.parameters[name]
        if self.keeps_masters:
            self.optimizer.load_parameter_state(parameter, entries)  # type: ignore[attr-defined]
        elif entries:
            group = next(g for g, names in zip(self.optimizer.param_groups, self.groups, strict=True) if name in names)
            step_on_device = bool(group.get("fused") or group.get("capturable"))
            self.optimizer.state[parameter] = {
                key: _beside(parameter, value, step_on_device) if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }
        else:
            self.optimizer.state.pop(parameter, None)

    def expect(self, names: Iterable[str]) -> None:
        """These parameters are about to be loaded, frozen ones among them."""
        if hasattr(self.optimizer, "managed"):
            self.optimizer.managed(also=[self.parameters[name] for name in names])

    def set_hyperparameters(self, group: int, saved: Mapping[str, Any]) -> None:
        """Take over a group's settings; a live tensor learning rate is filled, not exchanged."""
        live = self.optimizer.param_groups[group]
        for key, value in saved.items():
            if key in _CHOICES_OF_THIS_RUN:
                continue
            if isinstance(live.get(key), Tensor):
                live[key].fill_(value)
            else:
                live[key] = value.clone() if isinstance(value, Tensor) else value

    def _sources_of(self, name: str, described: Mapping[str, Any]) -> list[Source]:
        parameter = self.parameters[name]
        shard = shard_of(parameter)
        if shard is None:
            return []
        sources = []
        for key, value in described.items():
            if isinstance(value, Tensor):
                local = local_tensor(value)
                kept_whole = local.shape != shard.lengths and self.has_whole_tensors
                part = whole(local.shape) if kept_whole else _part_of(name, key, local, shard)
                fetch = self._fetch(name, key)
                sources.append(Source(entry_key(name, key), part, local.dtype, fetch, parameter, key))
        return sources

    @property
    def has_whole_tensors(self) -> bool:
        """Whether its classes see whole tensors of sharded parameters: state of other shapes is alike on all ranks."""
        return bool(getattr(self.optimizer, "has_whole_tensors", False))

    def _fetch(self, name: str, key: str) -> Any:
        return lambda: local_tensor(self._entries(name)[key])

    def _described(self, name: str) -> dict[str, Any]:
        """The entries' shapes, dtypes and plain values; building the entries themselves may take time."""
        describe = getattr(self.optimizer, "described_state", self.optimizer.state.get)
        return dict(describe(self.parameters[name]) or {})

    def _entries(self, name: str) -> dict[str, Any]:
        """State of one parameter. It may be built on access, so the last one asked for is kept, and only that."""
        if self._last[0] != name:
            self._last = ("", {})
            read = getattr(self.optimizer, "kept_state", self.optimizer.state.get)
            self._last = (name, dict(read(self.parameters[name]) or {}))
        return self._last[1]


def same_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two groups would be updated alike."""
    keys = (first.keys() | second.keys()) - set(_CHOICES_OF_THIS_RUN)
    return all(key in first and key in second and _equal(first[key], second[key]) for key in keys)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    return bool(first == second)


def entry_key(name: str, entry: str) -> str:
    """The name of one state entry among the checkpoint's tensors."""
    if "." in entry:
        raise TypeError(f"the optimizer's state of {name} has an entry {entry!r}; names with dots cannot be saved")
    return f"optimizer.{name}.{entry}"


def stored_entries(keys: Iterable[str]) -> dict[str, list[str]]:
    """Which entries the checkpoint holds, by parameter."""
    found: dict[str, list[str]] = {}
    for key in keys:
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            name, _, entry = rest.rpartition(".")
            found.setdefault(name, []).append(entry)
    return found


def _part_of(name: str, key: str, local: Tensor, parameter: Shard) -> Shard:
    """Where an entry's local tensor lies: like its parameter's, or the same on all ranks."""
    if local.shape == parameter.lengths:
        return parameter
    if local.dim() == 0 or not parameter.sharded:
        return whole(local.shape)
    raise CheckpointError(
        f"the state entry {key!r} of {name} has local shape {tuple(local.shape)}, the parameter "
        f"{tuple(parameter.lengths)}; only element-wise state of a sharded parameter can be saved"
    )


def _beside(parameter: Tensor, value: Tensor, step_on_device: bool) -> Tensor:
    """A plain torch optimizer's entry, where that optimizer expects it."""
    local = local_tensor(parameter)
    if value.dim() == 0:
        return value.to(local.device) if step_on_device else value
    if value.shape != local.shape:
        return value.to(local.device)
    # With the parameter's strides: fused optimizers walk both side by side.
    return like(parameter, torch.empty_like(local, dtype=value.dtype).copy_(value))
