"""Masters and optimizer state inside a DeepSpeed engine: reading, refreshing, offloading and measuring them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""Attributes with this rank's flat fp32 masters: stages 1 and 2; stage 1 with bf16 and fp32 accumulation; stage 3."""

_MODEL_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attributes with the model's parameters in each partition, in the same order."""


class EngineState:
    """Accesses the ZeRO optimizer inside an engine.

    Args:
        engine: a ``DeepSpeedEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._host_entries: list[tuple[dict[str, Any], str]] = []
        """While state is offloaded: the entries that are on the host anyway."""

    @property
    def masters(self) -> list[Tensor]:
        """This rank's flat fp32 partitions."""
        return list(self._first_attribute(_MASTERS))

    @property
    def model_groups(self) -> list[list[Tensor]]:
        """The model's trainable parameters in each group of the engine's optimizer."""
        groups: list[list[Tensor]] = [[] for _ in self._zero.param_groups]
        owner = getattr(self._zero, "sub_group_to_group_id", {})
        for number, members in enumerate(self._first_attribute(_MODEL_GROUPS)):
            groups[owner.get(number, number)].extend(members)
        return groups

    def _first_attribute(self, names: Iterable[str]) -> Any:
        """The first of these attributes that the ZeRO optimizer has."""
        return next(getattr(self._zero, name) for name in names if hasattr(self._zero, name))

    # -- masters

    def refresh(self) -> None:
        """Rebuild all masters from the model's weights."""
        self._zero.refresh_fp32_params()

    def refresh_parameter(self, parameter: Tensor) -> None:
        """Rebuild one parameter's master from its weights (stages 1 and 2)."""
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is not None:  # this rank has a part of the master
            fragment.update_hp()

    def clear_gradients(self) -> None:
        """Clear the gradients that a skipped step has left: with offloading DeepSpeed would accumulate onto them."""
        gradients = getattr(self._zero, "averaged_gradients", {})
        gradients.update(dict.fromkeys(gradients))

    # -- whole tensors

    def full_entries(self, parameter: Tensor) -> dict[str, Any]:
        """One parameter's whole state entries and master on the host, in the parameter's shape; ``{}`` if it is frozen.

        Called by every rank.
        """
        if not parameter.requires_grad:
            return {}
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        flat = self._partition_of(parameter)
        entries = dict(self._zero.optimizer.state.get(flat, {}))
        partitioned = [key for key, value in entries.items() if isinstance(value, Tensor) and value.shape == flat.shape]
        found = {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in entries.items()
            if key not in partitioned
        }
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is not None:  # DeepSpeed links it after the first group's first update, when other groups have none
            fragment.set_optim_state_fragment(flat, entries)
        found |= {key: _to_host(safe_get_full_optimizer_state(parameter, key)) for key in partitioned}
        return {**found, "master": _to_host(safe_get_full_fp32_param(parameter))}

    def _partition_of(self, parameter: Tensor) -> Tensor:
        for partition, members in zip(self.masters, self._first_attribute(_MODEL_GROUPS), strict=True):
            if any(member is parameter for member in members):
                return partition
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not among the engine's groups")

    # -- memory

    def offload(self) -> bool:
        """Move masters and state from the device to the host until :meth:`reload`. ``False`` if they are on the host.

        Raises:
            RuntimeError: DeepSpeed cannot offload the state of this kind of engine.
        """
        if self._engine.zero_use_cpu_optimizer():
            return False
        if not hasattr(self._zero, "offload_states"):
            raise RuntimeError(
                "release_device_memory: DeepSpeed cannot move the state of stage 1 with bfloat16 weights and "
                "precision.reduce float32; set sharding.stage to 2"
            )
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        self._host_entries = [entry for entry, tensor in self._entries() if tensor.device.type == "cpu"]
        kinds = [Kind.hp_params, Kind.optim_states]
        if self._engine.zero_optimization_partition_weights():
            self._move(torch.device("cpu"))  # at stage 3 DeepSpeed offloads only its own Adam's state
            kinds = [Kind.contiguous_grad_buffer]
        self._engine.offload_states(include=kinds, pin_memory=torch.device(self._engine.device).type != "cpu")
        return True

    def reload(self) -> None:
        """Undo :meth:`offload`."""
        self._engine.reload_states()
        if self._engine.zero_optimization_partition_weights():
            self._move(torch.device(self._engine.device))
        # Step counts: DeepSpeed has moved them to the device too, where the host would wait for them in each step.
        for state, key in self._host_entries:
            state[key] = state[key].cpu()

    def _move(self, device: torch.device) -> None:
        for tensor in self._state_tensors():
            tensor.data = tensor.data.to(device)

    def _state_tensors(self) -> list[Tensor]:
        """Masters and state tensors, without step counts."""
        return [*self.masters, *(entry for _, entry in self._entries() if entry.dim() > 0)]

    def _entries(self) -> list[tuple[tuple[dict[str, Any], str], Tensor]]:
        """All tensors in the optimizer's state with their mapping and key, step counts included."""
        states = self._zero.optimizer.state.values()
        return [((s, key), value) for s in states for key, value in s.items() if isinstance(value, Tensor)]

    def memory(self) -> dict[str, float]:
        """As ``BaseOptimizer.memory_report``."""
        kinds = ("device_bytes", "host_bytes", "ring_bytes", "gradient_stage_bytes", "exchange_bytes", "saving_bytes")
        report = dict.fromkeys(kinds, 0.0)
        for tensor in self._state_tensors():
            on_host = tensor.device.type == "cpu" and torch.device(self._engine.device).type != "cpu"
            report["host_bytes" if on_host else "device_bytes"] += tensor.numel() * tensor.element_size()
        report["parameters"] = float(sum(master.numel() for master in self.masters))
        for memory in ("device", "host"):
            report[f"{memory}_bytes_per_parameter"] = report[f"{memory}_bytes"] / max(report["parameters"], 1.0)
        return report


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
