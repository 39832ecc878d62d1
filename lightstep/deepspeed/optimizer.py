"""The contract over a DeepSpeed engine, which owns masters, gradients, loss scaling, clipping and optimizer state."""

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
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.optimizer.result import StepResult

_NOT_SETTINGS = ("params", "param_names")


class DeepSpeedOptimizer(BaseOptimizer):
    """A ``torch.optim.Optimizer`` over the model's own parameters, whose steps a DeepSpeed engine does.

    ``param_groups`` are the caller's (schedulers change them). The optimizer inside the engine has one flat fp32
    partition per group, and gets their hyper-parameters before each step.

    Args:
        engine: a ``DeepSpeedEngine`` with a ZeRO optimizer.
        param_groups: groups of the model's parameters with all their hyper-parameters, frozen parameters included.
        defaults: hyper-parameters of the class.
    """

    loss_scale: EngineLossScale

    def __init__(self, engine: Any, param_groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
        super().__init__(list(param_groups), dict(defaults))
        self.engine = engine
        self.loss_scale = EngineLossScale(engine.optimizer)
        self._inside = EngineState(engine)
        self._collected = 0
        self._reduced = False
        self._offloaded = False
        self._failure: str | None = None
        self._closed = False
        self._seen = self._versions()

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class whose arithmetic updates the masters."""
        return type(self.engine.basic_optimizer)

    # -- a step

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Scale ``loss`` (one element) and backpropagate; the engine reduces the gradients.

        Raises:
            ValueError: more than one element.
            RuntimeError: the step's last micro-batch was already there (see ``strategy.accumulate``).
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
        if not self._follows_zenflow:
            self.engine.set_gradient_accumulation_boundary(last)
        self.loss_scale.pin()
        with self._ending_with("backward()"):
            self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        self._collected += 1
        self._reduced = last

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Update the weights from the micro-batches since the last step, or skip when their gradients overflow.

        DeepSpeed reads norm and overflow on the host: the host waits here.

        Raises:
            ValueError: a closure.
            RuntimeError: only micro-batches with ``last=False`` so far.
        """
        self._refuse_unusable()
        if closure is not None:
            raise ValueError(
                "step(closure): the closure's own backward would go past DeepSpeed's engine; call "
                "optimizer.backward(loss) and then step() without a closure"
            )
        if self._collected == 0:
            return self._empty_step()
        if not self._reduced:
            raise RuntimeError(
                f"step() after {self._collected} micro-batches with last=False: DeepSpeed has not reduced them; run "
                "the last one inside strategy.accumulate(model, last=True)"
            )
        self._reload()
        self._adopt_outside_changes()
        self._copy_hyperparameters()
        used = self.loss_scale.scale
        with self._ending_with("step()"):
            self.engine.step()
        self._collected, self._reduced = 0, False
        self._seen = self._versions()
        overflow = bool(self.engine.optimizer.overflow)
        if overflow:
            self._inside.forget_gradients()
        self.loss_scale.pin()
        return StepResult(self._norm(overflow), torch.tensor(overflow), torch.tensor(used))

    def _norm(self, overflow: bool) -> Tensor:
        """NaN where the engine computes none."""
        known = None if self._follows_zenflow else self.engine.get_global_grad_norm()
        norm = math.inf if overflow else known
        return torch.as_tensor(math.nan if norm is None else norm, dtype=torch.float32).detach().reshape(())

    def _empty_step(self) -> StepResult:
        warnings.warn("step() found no gradient and changes nothing: backward() was not called", stacklevel=3)
        return StepResult(torch.zeros(()), torch.tensor(False), torch.tensor(self.loss_scale.scale))

    @contextlib.contextmanager
    def _ending_with(self, what: str) -> Iterator[None]:
        """After an error in here DeepSpeed's buffers are in no known state."""
        try:
            yield
        except BaseException as error:
            self._failure = f"{what} failed ({type(error).__name__}: {error})"
            raise

    @property
    def _follows_zenflow(self) -> bool:
        """ZenFlow itself decides when gradients are applied."""
        return bool(getattr(self.engine, "zenflow", False))

    def _copy_hyperparameters(self) -> None:
        for ours, theirs in self._pairs():
            theirs.update({key: value for key, value in ours.items() if key not in _NOT_SETTINGS})

    def _pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Our groups and the engine's; it has none for groups without a trainable parameter."""
        trained = [group for group in self.param_groups if any(p.requires_grad for p in group["params"])]
        return zip(trained, self.engine.optimizer.param_groups, strict=True)

    # -- weights that somebody else changed

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._trained()]

    def _trained(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _adopt_outside_changes(self) -> None:
        """Weights loaded after the optimizer was made would be reverted by masters that do not know of them."""
        if self.engine.zero_optimization_partition_weights():
            return  # weights are gathered and freed all the time
        for parameter, seen in zip(self._trained(), self._seen, strict=True):
            if parameter._version != seen:
                self._inside.adopt(parameter)

    def refresh_master_weights(self) -> None:
        """Rebuild the fp32 masters from the model's weights.

        It also happens by itself when weights of stage 1 or 2 were changed in place. At stage 3 call it after changes
        under ``deepspeed.zero.GatheredParameters``.
        """
        self._reload()
        self._inside.refresh()
        self._seen = self._versions()

    # -- what DeepSpeed keeps to itself

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to forget after a step: DeepSpeed has consumed the gradients.

        Raises:
            RuntimeError: micro-batches were accumulated since the last step: DeepSpeed cannot drop them.
        """
        if self._collected:
            raise RuntimeError(
                f"zero_grad() after {self._collected} micro-batches of a step: their gradients are in DeepSpeed's own "
                "buffers, and it has no way to drop them. Finish the step first"
            )
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "engine"):  # not while the constructor adds the first groups
            raise RuntimeError(
                "add_param_group: DeepSpeed divides its groups by the ranks once, when the engine is made; put all "
                "parameters into strategy.create_optimizer(param_groups=...)"
            )
        super().add_param_group(param_group)

    def wait_for_update(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Nothing is deferred: DeepSpeed updates within ``step()``."""

    @property
    def has_deferred_updates(self) -> bool:
        return False

    def wait_on_stream(self, parameters: Iterable[Tensor]) -> None:
        """Nothing is deferred."""

    def synchronize(self) -> None:
        device = torch.device(self.engine.device)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        raise ValueError(
            f"set_residency({gib!r}): DeepSpeed keeps the optimizer state in one place, which sharding.offload chooses "
            "when the engine is made"
        )

    def release_device_memory(self) -> None:
        """Masters and state move to the host until the next backward, step or checkpoint.

        Raises:
            RuntimeError: in the middle of an accumulation.
        """
        self._refuse_unusable()
        if self._collected:
            raise RuntimeError("release_device_memory() between the micro-batches of a step; call step() first")
        self.synchronize()
        if not self._offloaded:
            self._offloaded = self._inside.offload()
        if torch.device(self.engine.device).type != "cpu":
            torch.accelerator.memory.empty_cache()

    def _reload(self) -> None:
        if self._offloaded:
            self._inside.reload()
            self._offloaded = False

    def memory_report(self) -> dict[str, float]:
        return self._inside.memory()

    # -- state

    def prepare_for_checkpoint(self) -> None:
        """State is in its place and belongs to one step; it may be read or replaced.

        Raises:
            RuntimeError: in the middle of an accumulation, or after a backward or step that failed.
        """
        self._refuse_unusable()
        if self._collected:
            raise RuntimeError(
                f"{self._collected} micro-batches of a step are in DeepSpeed's buffers and would be lost; call step() "
                "before a checkpoint is saved or loaded"
            )
        self._reload()
        self._copy_hyperparameters()

    def refuse_half_updated(self, remedy: str) -> None:
        """Called by what saves any optimizer, which would find no state in this one.

        Raises:
            RuntimeError: always; it says what to use.
        """
        raise RuntimeError(
            "a DeepSpeedOptimizer keeps its state inside the engine: save it with strategy.save_checkpoint of the "
            "strategy that made it"
        )

    def take_hyperparameters(self, settings: Sequence[Mapping[str, Any]] | None) -> None:
        """Of each group with trainable parameters, in order.

        Args:
            settings: as saved; ``None`` takes those that DeepSpeed has read, which at stage 3 knows the first group's
                only: there the groups keep theirs.
        """
        if settings is None and self.engine.zero_optimization_partition_weights():
            return
        for number, (ours, theirs) in enumerate(self._pairs()):
            known = theirs if settings is None else settings[number]
            ours.update({key: value for key, value in known.items() if key in ours and key not in _NOT_SETTINGS})

    def loaded(self) -> None:
        """A checkpoint was read into the engine, and hyper-parameters into the groups."""
        self.loss_scale.renew()
        self._copy_hyperparameters()
        self._seen = self._versions()

    def state_dict(self) -> dict[str, Any]:
        """torch's layout on every rank, with ``"master"`` among the entries: collective, and the whole state in memory.

        ``strategy.save_checkpoint`` does without either.
        """
        self.prepare_for_checkpoint()
        indices = [p for group in self.param_groups for p in group["params"]]
        groups, first = [], 0
        for group in self.param_groups:
            numbers = list(range(first, first + len(group["params"])))
            first += len(numbers)
            kept = {key: value for key, value in group.items() if key != "params"}
            groups.append({**plain_numbers(kept), "params": numbers})
        entries = {number: self._inside.whole(parameter) for number, parameter in enumerate(indices)}
        return {
            "state": {number: values for number, values in entries.items() if values},
            "param_groups": groups,
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Not possible: DeepSpeed reads its state from its own files.

        Raises:
            NotImplementedError: always; it says what to use.
        """
        raise NotImplementedError(
            "load_state_dict: DeepSpeed reads its optimizer state from its own checkpoint files; use "
            "strategy.load_checkpoint, after `lightstep checkpoint convert` for a checkpoint of another kind"
        )

    def close(self) -> None:
        """Take the engine's hooks off the model and give its buffers back."""
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
