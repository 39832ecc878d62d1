"""The optimizer over a DeepSpeed engine, which owns masters, gradients, loss scale, clipping and optimizer state."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.deepspeed.scale import EngineLossScale
from lightstep.deepspeed.state import EngineState
from lightstep.error_text import error_text
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.optimizer.result import StepResult

_NOT_SETTINGS = ("params", "param_names")


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
            self._state.clear_gradients()
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
        for group, engine_group in self._group_pairs():
            engine_group.update({key: value for key, value in group.items() if key not in _NOT_SETTINGS})

    def _group_pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Pairs of this optimizer's and the engine's groups. The engine has only those with trainable parameters."""
        trained = [group for group in self.param_groups if any(p.requires_grad for p in group["params"])]
        return zip(trained, self.engine.optimizer.param_groups, strict=True)

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
            if parameter._version != version:
                self._state.refresh_parameter(parameter)

    def refresh_master_weights(self) -> None:
        """Rebuild the fp32 masters from the model's weights.

        At stages 1 and 2 the next step does so by itself for weights that were changed in place. At stage 3 call this
        after changes under ``deepspeed.zero.GatheredParameters``.
        """
        self._reload()
        self._state.refresh()
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

    def refuse_half_updated(self, remedy: str) -> None:
        """Refuse functions that save any optimizer: they would find no state in this one.

        Raises:
            RuntimeError: always; the message says what to use.
        """
        raise RuntimeError(
            "a DeepSpeedOptimizer keeps its state inside the engine: save it with strategy.save_checkpoint of the "
            "strategy that created it"
        )

    def load_hyperparameters(self, settings: Sequence[Mapping[str, Any]] | None) -> None:
        """Set the hyper-parameters of each group with trainable parameters.

        Args:
            settings: one mapping per group, as saved. ``None``: use those that DeepSpeed has loaded. At stage 3 it
                loads only the first group's, so the groups keep theirs.
        """
        if settings is None and self.engine.zero_optimization_partition_weights():
            return
        for number, (group, engine_group) in enumerate(self._group_pairs()):
            loaded = engine_group if settings is None else settings[number]
            group.update({key: value for key, value in loaded.items() if key in group and key not in _NOT_SETTINGS})

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
        groups, first = [], 0
        for group in self.param_groups:
            indices = list(range(first, first + len(group["params"])))
            first += len(indices)
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append({**plain_numbers(settings), "params": indices})
        state = {index: self._state.full_entries(parameter) for index, parameter in enumerate(parameters)}
        return {
            "state": {index: entries for index, entries in state.items() if entries},
            "param_groups": groups,
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
