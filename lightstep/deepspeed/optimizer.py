"""The optimizer over a DeepSpeed engine, which owns masters, gradients, loss scale, clipping and optimizer state."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightstep.distributed import is_divided, whole_shape
from lightstep.error_text import error_text
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.optimizer.update import StepResult
from lightstep.precision.loss_scale import LossScale

_NOT_SETTINGS = ("params", "param_names")

_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""Attributes with this rank's flat fp32 masters: stages 1 and 2; stage 1 with bf16 and fp32 accumulation; stage 3."""

_MODEL_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Attributes with the model's parameters in each partition, in the same order."""


class DeepSpeedOptimizer(BaseOptimizer):
    """A ``torch.optim.Optimizer`` over the model's parameters, whose steps a DeepSpeed engine executes.

    ``param_groups`` belong to the caller, whose schedulers change them. The optimizer inside the engine has one flat
    fp32 partition per group, and gets the hyper-parameters before each step.

    Args:
        engine: a ``DeepSpeedEngine`` with a ZeRO optimizer.
        param_groups: groups of the model's parameters, frozen ones included, with all hyper-parameters.
        defaults: the class's default hyper-parameters.
    """

    loss_scale: EngineLossScale

    def __init__(self, engine: Any, param_groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        super().__init__(list(param_groups), dict(defaults))
        self.engine = engine
        self.loss_scale = EngineLossScale(engine.optimizer)
        self._state = EngineState(engine)
        self._micro_batches = 0  # since the last step
        self._reduced = False  # whether the last of them has been reduced
        self._offloaded = False
        self._failure: str | None = None
        self._closed = False
        self._seen_versions = self._versions()

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class that updates the masters."""
        return type(self.engine.basic_optimizer)

    # -- a step

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Scale ``loss`` and backpropagate. The engine reduces the gradients.

        Raises:
            ValueError: ``loss`` does not have exactly one element.
            RuntimeError: the step's last micro-batch has been reduced already (see ``strategy.accumulate``).
        """
        self._refuse_unusable()
        if loss.numel() != 1:
            raise ValueError(f"backward() needs a loss of one element; this one has shape {tuple(loss.shape)}")
        if self._reduced:
            raise RuntimeError(
                "backward() after the step's last micro-batch: DeepSpeed has reduced its gradients. Call step() first; "
                "to accumulate, run every micro-batch inside strategy.accumulate(model, last=...), with last=True only "
                "for the last one"
            )
        self._reload()
        last = not self.accumulating
        self.engine.set_gradient_accumulation_boundary(last)
        self.loss_scale.freeze()
        with self._recording_failure("backward()"):
            self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        self._micro_batches += 1
        self._reduced = last

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Update the weights from the micro-batches since the last step, or skip the step if gradients overflowed.

        The host waits for the device: DeepSpeed reads norm and overflow on the host.

        Raises:
            ValueError: a closure was passed.
            RuntimeError: all micro-batches had ``last=False``.
        """
        self._refuse_unusable()
        if closure is not None:
            raise ValueError(
                "step(closure): the closure's own backward would go past DeepSpeed's engine; call "
                "optimizer.backward(loss) and then step() without a closure"
            )
        if self._micro_batches == 0:
            return self._empty_step()
        if not self._reduced:
            raise RuntimeError(
                f"step() after {self._micro_batches} micro-batches with last=False: DeepSpeed has not reduced them; "
                "run the last one inside strategy.accumulate(model, last=True)"
            )
        self._reload()
        self._refresh_changed_masters()
        self._copy_hyperparameters()
        loss_scale = self.loss_scale.scale
        with self._recording_failure("step()"):
            self.engine.step()
        self._micro_batches, self._reduced = 0, False
        self._seen_versions = self._versions()
        overflow = bool(self.engine.optimizer.overflow)
        if overflow:
            # With offloading DeepSpeed would accumulate onto what a skipped step has left.
            gradients = getattr(self.engine.optimizer, "averaged_gradients", {})
            gradients.update(dict.fromkeys(gradients))
        self.loss_scale.freeze()
        return StepResult(self._norm(overflow), torch.tensor(overflow), torch.tensor(loss_scale))

    def _norm(self, overflow: bool) -> Tensor:
        """The gradient norm; infinite after an overflow."""
        norm = math.inf if overflow else self.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32).detach().reshape(())

    def _empty_step(self) -> StepResult:
        warnings.warn("step() found no gradient and changes nothing: backward() was not called", stacklevel=3)
        return StepResult(torch.zeros(()), torch.tensor(False), torch.tensor(self.loss_scale.scale))

    @contextlib.contextmanager
    def _recording_failure(self, what: str) -> Iterator[None]:
        """If the block fails, the optimizer cannot be used any more: DeepSpeed's buffers are in an unknown state."""
        try:
            yield
        except BaseException as error:
            self._failure = f"{what} failed ({error_text(error)})"
            raise

    def _copy_hyperparameters(self) -> None:
        """Copy the groups' hyper-parameters to the engine."""
        for number, engine_group in zip(self.engine_groups, self.engine.optimizer.param_groups, strict=True):
            group = self.param_groups[number]
            engine_group.update({key: value for key, value in group.items() if key not in _NOT_SETTINGS})

    @property
    def engine_groups(self) -> list[int]:
        """The numbers of the groups that the engine has: those with trainable parameters."""
        groups = enumerate(self.param_groups)
        return [number for number, group in groups if any(p.requires_grad for p in group["params"])]

    # -- weights that were changed outside

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._trained()]

    def _trained(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _refresh_changed_masters(self) -> None:
        """Rebuild the masters of weights that were changed since the last step: else the next one would revert them."""
        if self.engine.zero_optimization_partition_weights():
            return  # gathering and freeing partitioned weights changes their versions
        for parameter, version in zip(self._trained(), self._seen_versions, strict=True):
            fragment = getattr(parameter, "_hp_mapping", None)  # of the master, if this rank has a part of it
            if parameter._version != version and fragment is not None:
                fragment.update_hp()

    def refresh_master_weights(self) -> None:
        """Rebuild the fp32 masters from the model's weights.

        At stages 1 and 2 the next step does so by itself for weights that were changed in place. At stage 3 call this
        after changes under ``deepspeed.zero.GatheredParameters``.
        """
        self._refuse_unusable()
        self._reload()
        self.engine.optimizer.refresh_fp32_params()
        self._seen_versions = self._versions()

    # -- what DeepSpeed does not support

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. After a step there are none: DeepSpeed has consumed them.

        Raises:
            RuntimeError: there were micro-batches since the last step, whose gradients DeepSpeed cannot drop.
        """
        if self._micro_batches:
            raise RuntimeError(
                f"zero_grad() after {self._micro_batches} micro-batches of a step: their gradients are in DeepSpeed's "
                "own buffers, and it has no way to drop them. Finish the step first"
            )
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "engine"):  # not while the constructor adds the first groups
            raise RuntimeError(
                "add_param_group: DeepSpeed partitions its groups over the ranks once, when the engine is created; put "
                "all parameters into strategy.create_optimizer(param_groups=...)"
            )
        super().add_param_group(param_group)

    def wait_for_update(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Does nothing: DeepSpeed updates all weights in ``step()``."""

    @property
    def has_deferred_updates(self) -> bool:
        return False

    def wait_on_stream(self, parameters: Iterable[Tensor]) -> None:
        """Does nothing: no update is deferred."""

    def synchronize(self) -> None:
        self._refuse_unusable()
        device = torch.device(self.engine.device)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        raise ValueError(
            f"set_residency({gib!r}): DeepSpeed keeps all optimizer state either on the device or on the host; set "
            "sharding.offload"
        )

    def release_device_memory(self) -> None:
        """Offload masters and state to the host until the next backward, step or checkpoint.

        Raises:
            RuntimeError: called between the micro-batches of a step.
        """
        self._refuse_unusable()
        if self._micro_batches:
            raise RuntimeError("release_device_memory() between the micro-batches of a step; call step() first")
        self.synchronize()
        if not self._offloaded:
            self._offloaded = self._state.offload()
        if torch.device(self.engine.device).type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _reload(self) -> None:
        if self._offloaded:
            self._state.reload()
            self._offloaded = False

    def memory_report(self) -> dict[str, float]:
        return self._state.memory()

    # -- state

    def prepare_for_checkpoint(self) -> None:
        """Reload offloaded state, and give the engine the hyper-parameters. Its state may then be read or replaced.

        Raises:
            RuntimeError: called between the micro-batches of a step, or after a backward or step that failed.
        """
        self._refuse_unusable()
        if self._micro_batches:
            raise RuntimeError(
                f"{self._micro_batches} micro-batches of a step are in DeepSpeed's buffers and would be lost; call "
                "step() before a checkpoint is saved or loaded"
            )
        self._reload()
        self._copy_hyperparameters()

    @contextlib.contextmanager
    def replacing_state(self) -> Iterator[None]:
        """In the block :meth:`load_parameter_state` replaces all state."""
        self._state.has_older_state = True
        try:
            yield
        finally:
            self._state.has_older_state = None

    def refuse_half_updated(self, remedy: str) -> None:
        """Refuse functions that save any optimizer: they would find no state in this one.

        Raises:
            RuntimeError: always; the message says what to use.
        """
        raise RuntimeError(
            "a DeepSpeedOptimizer keeps its state inside the engine: save it with strategy.save_checkpoint of the "
            "strategy that created it"
        )

    def load_parameter_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Load one parameter's whole master and state from another strategy's checkpoint, whose weights are loaded.

        Called by every rank, for each parameter of all groups, in :meth:`replacing_state`.

        Args:
            entries: on the host. Without ``"master"`` the weight is the master; moments that are missing are zeros.
        """
        if parameter.requires_grad:
            self._state.load(parameter, entries)

    def after_load(self) -> None:
        """Call this when a checkpoint has been loaded into the engine, and hyper-parameters into the groups."""
        self.loss_scale.reset()
        self._copy_hyperparameters()
        self._seen_versions = self._versions()

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's layout, with ``"master"`` entries. Collective; every rank needs memory for it.

        ``strategy.save_checkpoint`` needs neither.
        """
        self.prepare_for_checkpoint()
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbered = super().state_dict()["param_groups"]
        state = {index: self._state.full_entries(parameter) for index, parameter in enumerate(parameters)}
        return {
            "state": {index: entries for index, entries in state.items() if entries},
            "param_groups": [plain_numbers(group) for group in numbered],
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Not supported: DeepSpeed loads its state from its own files.

        Raises:
            NotImplementedError: always; the message says what to use.
        """
        raise NotImplementedError(
            "load_state_dict: DeepSpeed reads its optimizer state from its own checkpoint files; use "
            "strategy.load_checkpoint, after `lightstep checkpoint convert` for a checkpoint of another kind"
        )

    def close(self) -> None:
        """Remove the engine's hooks from the model, and free its buffers."""
        if not self._closed:
            self.engine.destroy()
        self._closed = True

    def _refuse_unusable(self) -> None:
        if self._closed:
            raise RuntimeError("this DeepSpeedOptimizer is closed; make a new model and optimizer")
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}; weights and state may be half updated, and DeepSpeed's buffers cannot be emptied: "
                "make a new model and optimizer, and load a checkpoint"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a DeepSpeedOptimizer cannot be copied or pickled: its engine cannot; save a checkpoint instead"
        )


class EngineLossScale(LossScale):
    """DeepSpeed's loss scale, which DeepSpeed updates itself.

    DeepSpeed grows its scale before it divides the gradients by it. In such a step it would divide by twice the scale
    that the loss was multiplied by. The scale is therefore frozen from backward to the end of the step.

    Args:
        zero: the engine's ZeRO optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self.reset()

    @property
    def _scaler(self) -> Any:
        """DeepSpeed's scaler, which loading a checkpoint replaces; ``None`` if DeepSpeed does not scale."""
        return getattr(self._zero, "loss_scaler", None)

    @property
    def scale(self) -> float:
        """The scale for the next backward."""
        scaler = self._scaler
        return 1.0 if scaler is None else float(scaler.cur_scale)

    def reset(self) -> None:
        """Set up DeepSpeed's current scaler. Call this when a checkpoint has replaced it."""
        if self._dynamic:
            self._scaler.raise_error_at_min_scale = False  # an overflow at the minimum skips the step, too
        self.freeze()

    def freeze(self) -> None:
        """Have DeepSpeed use the current scale until the next call."""
        if self._dynamic:
            self._zero.override_loss_scale(self.scale)

    @property
    def _dynamic(self) -> bool:
        return bool(getattr(self._scaler, "dynamic", False))

    def tensor(self, device: torch.device | None = None) -> Tensor:
        return torch.tensor(self.scale, dtype=torch.float32, device=device)

    def update(self, overflow: bool | Tensor) -> None:
        """Does nothing: DeepSpeed updates its scale in ``step()``."""

    @property
    def is_identity(self) -> bool:
        return not self._dynamic and self.scale == 1.0

    @property
    def power_of_two(self) -> bool:
        return self._dynamic or math.frexp(self.scale)[0] == 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the dynamic scale of another strategy's checkpoint, in DeepSpeed's count of steps.

        DeepSpeed's first growth after an overflow is one step later than lightstep's, hence the 2.
        """
        scaler = self._scaler
        if self._dynamic and "good_steps" in state_dict:
            scaler.cur_scale = float(state_dict["scale"])
            scaler.cur_hysteresis = max(int(state_dict["hysteresis_left"]), 1)
            scaler.last_overflow_iter = scaler.cur_iter - int(state_dict["good_steps"]) - 2

    def __repr__(self) -> str:
        return f"EngineLossScale(scale={self.scale:g})"


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
        self.has_older_state: bool | None = None
        """While state is replaced: whether any from before is still there."""

    @property
    def masters(self) -> list[Tensor]:
        """This rank's flat fp32 partitions."""
        return list(self._first_attribute(_MASTERS))

    @property
    def model_groups(self) -> list[list[Tensor]]:
        """The model's trainable parameters in each group of the engine's optimizer."""
        groups: list[list[Tensor]] = [[] for _ in self._zero.param_groups]
        owner = getattr(self._zero, "sub_group_to_group_id", {})
        for number, members in enumerate(self.partitions):
            groups[owner.get(number, number)].extend(members)
        return groups

    @property
    def partitions(self) -> list[list[Tensor]]:
        """The model's parameters in each of :attr:`masters`. They share its step count."""
        return list(self._first_attribute(_MODEL_GROUPS))

    def _first_attribute(self, names: Iterable[str]) -> Any:
        """The first of these attributes that the ZeRO optimizer has."""
        return next(getattr(self._zero, name) for name in names if hasattr(self._zero, name))

    # -- whole tensors

    def full_entries(self, parameter: Tensor) -> dict[str, Any]:
        """One parameter's whole state entries and master on the host, in the parameter's shape; ``{}`` if it is frozen.

        Called by every rank.
        """
        if not parameter.requires_grad:
            return {}
        flat = self._partition_of(parameter)
        entries = {"master": flat, **self._zero.optimizer.state.get(flat, {})}
        return {key: self._whole(parameter, flat, value) for key, value in entries.items()}

    def _whole(self, parameter: Tensor, flat: Tensor, value: Any) -> Any:
        """One entry, whole and on the host. What is not divided as ``flat`` is copied."""
        if not isinstance(value, Tensor) or value.shape != flat.shape:
            return value.detach().clone() if isinstance(value, Tensor) else value
        start, first, length = self._part_of(parameter)
        shape = whole_shape(parameter)
        whole = torch.zeros(shape.numel(), dtype=value.dtype, device=self._engine.device)
        whole[first : first + length] = value.detach()[start : start + length]
        dist.all_reduce(whole.view(torch.uint8))  # as integers: a sum of floats makes 0.0 of -0.0
        return whole.view(shape).cpu()

    def _partition_of(self, parameter: Tensor) -> Tensor:
        for partition, members in zip(self.masters, self.partitions, strict=True):
            if any(member is parameter for member in members):
                return partition
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not among the engine's groups")

    def load(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Copy this rank's part of a parameter's whole master and state. The first call of a load drops older state.

        Raises:
            RuntimeError: called elsewhere than in a load of the strategy.
        """
        if self.has_older_state is None:
            raise RuntimeError(
                "a DeepSpeedOptimizer keeps its state inside the engine: load it with strategy.load_checkpoint of the "
                "strategy that created it"
            )
        if self.has_older_state:
            self._zero.refresh_fp32_params()
            self._zero.optimizer.state.clear()
            self.has_older_state = False
        flat, (start, first, length) = self._partition_of(parameter), self._part_of(parameter)
        part = slice(start, start + length)
        for key, value in entries.items():
            if key == "master":
                flat[part] = value.flatten()[first : first + length]
                continue
            state = self._zero.optimizer.state[flat]
            if key != "step" and isinstance(value, Tensor) and value.shape == whole_shape(parameter):
                if key not in state:
                    state[key] = torch.zeros_like(flat)
                state[key][part] = value.flatten()[first : first + length]
            else:
                state[key] = value.to(flat.device) if isinstance(value, Tensor) and self._counts_on_device else value

    def _part_of(self, parameter: Tensor) -> tuple[int, int, int]:
        """This rank's part: where it begins in the flat partition and in the flattened parameter, and its length."""
        if is_divided(parameter):
            _, start, length = self._zero.grad_position[self._zero.get_param_id(parameter)]
            first = length * self._zero._get_param_partition_rank(parameter)
            return start, first, max(0, min(length, parameter.ds_numel - first))  # type: ignore[attr-defined]
        fragment = getattr(parameter, "_hp_mapping", None)
        if fragment is None:
            return 0, 0, 0
        there, here = fragment.hp_fragment_address, fragment.lp_fragment_address
        return there.start, here.start, here.numel

    @property
    def _counts_on_device(self) -> bool:
        """Whether the class keeps step counts with the parameters."""
        group = self._zero.optimizer.param_groups[0]
        return bool(group.get("fused") or group.get("capturable"))

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
        kinds = ("device", "host", "ring", "gradient_stage", "exchange", "saving", "delta")
        report = {f"{kind}_bytes": 0.0 for kind in kinds}
        for tensor in self._state_tensors():
            on_host = tensor.device.type == "cpu" and torch.device(self._engine.device).type != "cpu"
            report["host_bytes" if on_host else "device_bytes"] += tensor.numel() * tensor.element_size()
        report["parameters"] = float(sum(master.numel() for master in self.masters))
        for memory in ("device", "host"):
            report[f"{memory}_bytes_per_parameter"] = report[f"{memory}_bytes"] / max(report["parameters"], 1.0)
        return report
