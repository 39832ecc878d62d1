"""Masters and optimizer state inside a DeepSpeed engine: where they are, how large, and whole tensors of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""Flat fp32 partitions of this rank: of stages 1 and 2, of stage 1 with bf16 and fp32 accumulation, of stage 3."""

_MODEL_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""The model's parameters of each partition, in the same order of stages."""


class EngineState:
    """A view of the ZeRO optimizer inside an engine.

    Args:
        engine: a ``DeepSpeedEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._on_host_already: list[tuple[dict[str, Any], str]] = []

    @property
    def masters(self) -> list[Tensor]:
        """This rank's flat fp32 partitions."""
        return list(self._known(_MASTERS))

    @property
    def model_groups(self) -> list[list[Tensor]]:
        """The model's trainable parameters of each group of the optimizer inside."""
        groups: list[list[Tensor]] = [[] for _ in self._zero.param_groups]
        owner = getattr(self._zero, "sub_group_to_group_id", {})
        for number, members in enumerate(self._known(_MODEL_GROUPS)):
            groups[owner.get(number, number)].extend(members)
        return groups

    def _known(self, names: Iterable[str]) -> Any:
        return next(getattr(self._zero, name) for name in names if hasattr(self._zero, name))

    # -- masters

    def refresh(self) -> None:
        """All masters from the model's weights."""
        self._zero.refresh_fp32_params()

    def adopt(self, parameter: Tensor) -> None:
        """One parameter's master from its weights (stages 1 and 2)."""
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is not None:  # this rank keeps a part of its master
            fragment.update_hp()

    def forget_gradients(self) -> None:
        """What a skipped step has left: with offloading DeepSpeed would add the next step's gradients to it."""
        gradients = getattr(self._zero, "averaged_gradients", {})
        gradients.update(dict.fromkeys(gradients))

    # -- whole tensors

    def whole(self, parameter: Tensor) -> dict[str, Any]:
        """One parameter's entries on the host with its master, in the parameter's shape; ``{}`` without state.

        Every rank calls it.
        """
        if not parameter.requires_grad:
            return {}
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        flat = self._partition_of(parameter)
        entries = dict(self._zero.optimizer.state.get(flat, {}))
        divided = [key for key, value in entries.items() if isinstance(value, Tensor) and value.shape == flat.shape]
        found = {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in entries.items()
            if key not in divided
        }
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is not None:  # DeepSpeed links state after the first group's first update, when others have none
            fragment.set_optim_state_fragment(flat, entries)
        found |= {key: _on_host(safe_get_full_optimizer_state(parameter, key)) for key in divided}
        return {**found, "master": _on_host(safe_get_full_fp32_param(parameter))}

    def _partition_of(self, parameter: Tensor) -> Tensor:
        for partition, members in zip(self.masters, self._known(_MODEL_GROUPS), strict=True):
            if any(member is parameter for member in members):
                return partition
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not among the engine's groups")

    # -- memory

    def offload(self) -> bool:
        """Move what the engine keeps on the device to the host until :meth:`reload`; false where nothing is there.

        Raises:
            RuntimeError: this kind of engine cannot.
        """
        if self._engine.zero_use_cpu_optimizer():
            return False
        if not hasattr(self._zero, "offload_states"):
            raise RuntimeError(
                "release_device_memory: DeepSpeed cannot move the state of stage 1 with bfloat16 weights and "
                "precision.reduce float32; set sharding.stage to 2"
            )
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        self._on_host_already = [place for place, tensor in self._entries() if tensor.device.type == "cpu"]
        held = [Kind.hp_params, Kind.optim_states]
        if self._engine.zero_optimization_partition_weights():
            self._move(torch.device("cpu"))  # DeepSpeed does that for its own Adam only
            held = [Kind.contiguous_grad_buffer]
        self._engine.offload_states(include=held, pin_memory=torch.device(self._engine.device).type != "cpu")
        return True

    def reload(self) -> None:
        """Everything is where it was."""
        self._engine.reload_states()
        if self._engine.zero_optimization_partition_weights():
            self._move(torch.device(self._engine.device))
        # Step counts: DeepSpeed takes them along to the device, where torch would wait for them.
        for state, key in self._on_host_already:
            state[key] = state[key].cpu()

    def _move(self, device: torch.device) -> None:
        for tensor in self._held():
            tensor.data = tensor.data.to(device)

    def _held(self) -> list[Tensor]:
        """Masters, and the state of their shape."""
        return [*self.masters, *(entry for _, entry in self._entries() if entry.dim() > 0)]

    def _entries(self) -> list[tuple[tuple[dict[str, Any], str], Tensor]]:
        """The state's tensors, step counts included, and where they are kept."""
        states = self._zero.optimizer.state.values()
        return [((s, key), value) for s in states for key, value in s.items() if isinstance(value, Tensor)]

    def memory(self) -> dict[str, float]:
        """As ``BaseOptimizer.memory_report``."""
        kinds = ("device_bytes", "host_bytes", "ring_bytes", "gradient_stage_bytes", "exchange_bytes", "saving_bytes")
        numbers = dict.fromkeys(kinds, 0.0)
        for tensor in self._held():
            off_device = tensor.device.type == "cpu" and torch.device(self._engine.device).type != "cpu"
            numbers["host_bytes" if off_device else "device_bytes"] += tensor.numel() * tensor.element_size()
        numbers["parameters"] = float(sum(master.numel() for master in self.masters))
        for place in ("device", "host"):
            numbers[f"{place}_bytes_per_parameter"] = numbers[f"{place}_bytes"] / max(numbers["parameters"], 1.0)
        return numbers


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
