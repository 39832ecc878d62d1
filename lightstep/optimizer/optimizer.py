"""torch's face of the engine: a ``torch.optim.Optimizer`` in every respect, and nothing else."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.eager import eager, own_work
from lightstep.optimizer.engine import Engine
from lightstep.optimizer.managed_parameters import InitialMasters, Places
from lightstep.optimizer.moments import Moments
from lightstep.optimizer.param_groups import Place, plain_numbers
from lightstep.optimizer.result import StepResult
from lightstep.optimizer.schedule import AtStep, Schedule
from lightstep.optimizer.serialization import load_torch_state_dict, snapshot
from lightstep.optimizer.settings import OfEngine
from lightstep.optimizer.state_view import StateView
from lightstep.precision.loss_scale import ConstantLossScale, LossScale
from lightstep.precision.split import Splitter
from lightstep.state.backend import Managed, PinnedState, StateBackend
from lightstep.state.kept_copies import KeptCopies
from lightstep.state.resident import ResidentBackend


class MixedPrecisionOptimizer(BaseOptimizer):
    """Any element-wise torch optimizer, run on fp32 masters of low-precision parameters.

    Usually made by ``strategy.create_optimizer``. Set-up is lazy: nothing is allocated, and the parameters may still be
    moved, cast, sharded or exchanged, until the first ``step()`` or ``load_state_dict()``. When it is deleted, updates
    that are still under way are completed first, and its memory and hooks go at once.

    Args:
        params: parameters or group dictionaries, as for any torch optimizer.
        optimizer_class: the class whose arithmetic updates the masters.
        hyperparameters: its keyword arguments; with neither ``fused`` nor ``foreach`` it runs fused where torch can.
        master_weights: keep fp32 masters for bf16 and fp16 parameters, in ``state[p]["master"]``.
        reduce_float32: add micro-batches' gradients in fp32, not in the parameters' dtype.
        loss_scale: ``None`` is no scaling.
        max_norm: global norm to clip to; ``None`` is off.
        norm_type: p of the norm; ``math.inf`` is the largest element.
        clip_layers: clip each layer by its own norm, not all gradients by the global one.
        backend: where masters and state live; ``None`` is on the device.
        places: called at set-up for the name and layer of each parameter.
        overflow_everywhere: whether all ranks of the process group skip a step together; ``None``: if any parameter is
            a DTensor.
        update_time: when the updates that a step decides upon are done.
        initial_masters: called at set-up with each 16-bit parameter: the fp32 values of its local shard that it was
            rounded from, or ``None``. Its master starts from them, unless the weight was changed since. With
            ``keep=True`` it is only asked: state is saved before the set-up.
        moments: in what moments are kept between updates; ``None``: in fp32, as the class has them.

    Raises:
        TypeError: ``optimizer_class`` is not a usable optimizer class.
        ValueError: ``max_norm`` or ``norm_type`` is out of range; or from the class about its hyper-parameters, or from
            torch about the groups.
    """

    loss_scale = OfEngine()
    max_norm = OfEngine()
    norm_type = OfEngine()
    clip_layers = OfEngine()
    master_weights = OfEngine()
    accumulating = OfEngine()
    unreduced = OfEngine()
    gradients = OfEngine()
    is_set_up = OfEngine()
    param_groups = OfEngine()

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        hyperparameters: Mapping[str, Any] | None = None,
        *,
        master_weights: bool = True,
        reduce_float32: bool = True,
        loss_scale: LossScale | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_layers: bool = False,
        backend: StateBackend | None = None,
        places: Places | None = None,
        overflow_everywhere: bool | None = None,
        update_time: type[Schedule] = AtStep,
        initial_masters: InitialMasters | None = None,
        moments: Moments | None = None,
    ) -> None:
        classes = GroupClasses(optimizer_class, dict(hyperparameters or {}))
        self.engine = Engine(
            classes,
            master_weights=master_weights,
            reduce_float32=reduce_float32,
            loss_scale=loss_scale or ConstantLossScale(1.0),
            max_norm=max_norm,
            norm_type=norm_type,
            clip_layers=clip_layers,
            backend=backend or ResidentBackend(Splitter),
            places=places,
            overflow_everywhere=overflow_everywhere,
            update_time=update_time,
            initial_masters=initial_masters,
            moments=moments,
        )
        super().__init__(params, dict(classes.own.defaults))
        self.engine.watch_gradients()

    @property
    def _backend(self) -> StateBackend:
        return self.engine.backend

    def forget_parameters(self) -> None:
        """Before the set-up: hold no parameter, until others are put into ``param_groups``."""
        for group in self.param_groups:
            group["params"] = []
        self.engine.watch_gradients()

    def start_over(self, backend: StateBackend) -> None:
        """Before the set-up: other parameters stand in ``param_groups`` now, and state will live in ``backend``.

        Raises:
            RuntimeError: it is too late.
        """
        if self.is_set_up:
            raise RuntimeError(
                f"this {type(self).__name__} has been set up for the parameters it had; shard the model before the "
                "first step and before state is loaded"
            )
        self.engine.start_over(backend)

    # -- one iteration

    @eager
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; one element is needed (loss.mean() or loss.sum())"
            )
        self.engine.backward(loss, retain_graph)

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        return self.engine.step(closure, makes_state=_makes_state_exist(self))

    @eager
    def grad_norm(self) -> Tensor:
        """The norm that the next ``step()`` will report, already now: 0-dim fp32, unscaled, before clipping.

        It is measured once. The gradients are the optimizer's from here on; ``step()`` or ``zero_grad()`` comes next.

        Raises:
            RuntimeError: layers are updated in backward, and their gradients are gone.
        """
        return self.engine.grad_norm()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that reached the optimizer, those added up in fp32 too.

        What micro-batches under ``strategy.accumulate(last=False)`` left inside FSDP2 is out of reach until it is
        reduced: to drop a started accumulation, run one more with ``last=True`` first.
        """
        self.engine.drop_gradients()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        own = self.defaults
        if isinstance(param_group, dict):  # torch refuses anything else
            param_group.update(plain_numbers(param_group))
            self.defaults = self.engine.classes.adopt(param_group)
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = own
        self.engine.watch_gradients()

    # -- updates that are under way

    @eager
    def wait_for_update(self, parameters: Iterable[Tensor] | None = None) -> None:
        schedule = self.engine.schedule
        if not schedule.pending:
            return
        with own_work():
            schedule.wait_for_update(None if parameters is None else self.engine.managed.those_of(parameters))

    @eager
    def wait_for_step(self) -> None:
        if self.engine.schedule.pending:
            with own_work():
                self.engine.schedule.wait_for_step()

    @property
    def has_deferred_updates(self) -> bool:
        return self.engine.schedule.pending

    def tell_of_updates(self, listener: Callable[[], object]) -> None:
        self.engine.listeners.append(listener)

    @eager
    def wait_on_stream(self, parameters: Iterable[Tensor]) -> None:
        with own_work():
            self.engine.schedule.wait_on_stream(self.engine.managed.those_of(parameters))

    def synchronize(self) -> None:
        self.wait_for_update()
        self._backend.synchronize()
        for device in self.engine.managed.devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    # -- memory

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        known = gib == "auto" or (isinstance(gib, (int, float)) and not isinstance(gib, bool) and 0 <= gib < math.inf)
        if not known:
            raise ValueError(f"set_residency({gib!r}): a number of GiB of at least 0 is needed, or 'auto'")
        self.engine.refuse_if_closed()
        self.wait_for_update()
        with own_work():
            self._backend.set_residency(gib)

    def release_device_memory(self) -> None:
        self.engine.refuse_if_closed()
        self.synchronize()
        with own_work():
            self.engine.walk.stage.free()
            self.engine.walk.shared.free()
            self._backend.release_device_memory()
        if any(device.type != "cpu" for device in self.engine.managed.devices):
            torch.accelerator.memory.empty_cache()

    def refresh_master_weights(self) -> None:
        self.wait_for_update()
        with own_work():
            if self.engine.managed.refresh(self.param_groups):
                self.engine.follow_parameters()
        self.engine.broken.refreshed()

    def memory_report(self) -> dict[str, float]:
        parameters = sum(item.local.numel() for item in self.engine.managed)
        stage = self.engine.walk.stage.nbytes()
        report: dict[str, float] = {**self._backend.memory(), "gradient_stage_bytes": stage}
        report["exchange_bytes"] = self.engine.walk.shared.nbytes()
        report["saving_bytes"] = self.engine.managed.saving_bytes()
        report["parameters"] = parameters
        for place in ("device", "host"):
            report[f"{place}_bytes_per_parameter"] = report[f"{place}_bytes"] / max(parameters, 1)
        return report

    # -- state

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """Parameter → entries of the base optimizer, and ``"master"``; assigning a mapping replaces all state."""
        return StateView(self.engine)

    @state.setter
    def state(self, entries: Mapping[Tensor, Mapping[str, Any]]) -> None:
        for item in self.engine.managed:
            self.engine.replace_state(item.param, entries.get(item.param, {}))

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class whose arithmetic updates the masters."""
        return self.engine.classes.own.optimizer_class

    @property
    def has_whole_tensors(self) -> bool:
        """Whether a class of its groups is not element-wise: state may have other shapes than its parameter."""
        return self.engine.classes.whole_tensors

    def managed(self, also: Collection[Tensor] = ()) -> list[Managed]:
        """The trainable parameters with their names, in group order (set up if need be).

        Args:
            also: frozen parameters of the groups that are about to get state.
        """
        self.engine.set_up(also)
        return list(self.engine.managed)

    def parameter_state(self, parameter: Tensor) -> dict[str, Any]:
        """``state[parameter]``: live entries where they can be; DTensors for a DTensor. ``{}`` without state.

        Where replicas share the work, all of them call this, and those that do not keep the state get a copy.
        """
        return self.engine.parameter_state(parameter)

    def kept_state(self, parameter: Tensor) -> dict[str, Any]:
        """:meth:`parameter_state` without communication: ``{}`` where another replica keeps the state."""
        return self.engine.parameter_state(parameter, kept_only=True)

    def described_state(self, parameter: Tensor) -> dict[str, Any]:
        """:meth:`kept_state` without numbers: local shapes and dtypes as meta tensors, and plain values."""
        self.engine.refuse_if_closed()
        item = self.engine.managed.get(parameter)
        return self.engine.managed.given(parameter) if item is None else self._backend.describe(item)

    def pinned_state(
        self,
        wanted: Mapping[Tensor, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: KeptCopies | None = None,
    ) -> PinnedState | None:
        """State entries as they are now, for another thread to read while steps go on.

        Call :meth:`synchronize` first. What is not in the snapshot has to be read by other means.

        Args:
            wanted: names of entries by parameter.
            weight_of: what returns a parameter's local weight of this moment on the host, when it is called.
            copies: host memory for copies; ``None``: there are no steps until the snapshot is closed.
        """
        with own_work():
            return self.engine.managed.pin(wanted, weight_of, copies)

    def keeps_state(self, parameter: Tensor) -> bool:
        """Whether this process keeps the parameter's state, and not another replica (set up if need be)."""
        if parameter.requires_grad:
            self.engine.set_up()
        item = self.engine.managed.get(parameter)
        return item is None or not item.elsewhere

    def takes_entry(self, group: Mapping[str, Any], key: str, entry: Tensor, shape: torch.Size) -> bool:
        """Whether a state entry (local part) can belong to a parameter of this group and local shape."""
        return self.engine.managed.takes(group, key, entry, shape)

    def load_parameter_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Replace one parameter's state; ``{}`` removes it. Shards must be this parameter's.

        Where replicas share the work, all of them call this; of a parameter whose state another one keeps
        (:meth:`keeps_state`) only the entries' names count.

        Raises:
            ValueError: an entry has another shape than the parameter's local shard, or the parameter is a stranger.
        """
        self.engine.replace_state(parameter, entries)
        self.engine.broken.repaired(parameter)

    @property
    def half_updated(self) -> bool:
        """Whether a step or a load broke off and no checkpoint was loaded since."""
        return bool(self.engine.broken)

    def refuse_half_updated(self, remedy: str) -> None:
        """Raise if a step broke off and no checkpoint was loaded since, or is under way.

        Raises:
            RuntimeError: what failed, and ``remedy``; or that ``step()`` is missing.
        """
        self.engine.broken.refuse(remedy)
        self.engine.refuse_unfinished()

    def refuse_until_loaded(self, reason: str, weights_only: bool = False) -> None:
        """From now on ``step()``, ``backward()`` with updates and saving refuse, until all state has been loaded.

        For a load that failed after it had changed something.

        Args:
            reason: what happened, as the beginning of a sentence: ``"loading runs/a/step-100 failed (...)"``.
            weights_only: only weights were being loaded: ``refresh_master_weights()`` after a load of them does, too.
        """
        self.engine.broken.because(reason, weights_only)

    @eager
    def state_dict(self) -> dict[str, Any]:
        """torch's layout: ``state`` by index, ``param_groups``, and ``loss_scale``; a snapshot.

        Complete on every rank. Where replicas share the work (``optimizer_state.backend: stream`` under DDP and HSDP)
        all of them call it, and each has all the state in memory then; ``strategy.save_checkpoint`` does without.
        """
        self.engine.refuse_if_closed()
        self.engine.refuse_unfinished()
        self.wait_for_update()
        packed = super().state_dict()
        packed.setdefault("loss_scale", self.loss_scale.state_dict())
        packed["param_groups"] = [plain_numbers(group) for group in packed["param_groups"]]
        indices = [index for group in packed["param_groups"] for index in group["params"]]
        masters = {index: self._start_of(p) for index, p in zip(indices, self._parameters(), strict=True)}
        states = {**masters, **packed["state"]}
        return snapshot({**packed, "state": {index: dict(own) for index, own in states.items() if own}})

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _start_of(self, parameter: Tensor) -> dict[str, Any]:
        """From what a parameter without state starts, if that is not its weight: ``{"master": ...}``."""
        return {} if parameter in self.state else self.engine.parameter_state(parameter)

    @eager
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, or from the state dict of the plain torch optimizer.

        Raises:
            ValueError: groups or shapes do not match; nothing has been changed then.
        """
        self.wait_for_update()  # the update under way may still write into its groups
        load_torch_state_dict(self, state_dict)

    def __repr__(self) -> str:
        name = type(self).__name__
        return super().__repr__().replace(name, f"{name}[{self.engine.classes.name}]", 1)

    def close(self) -> None:
        """Give back the memory of the state backend and take the hooks off the parameters."""
        self.engine.close()

    def __getstate__(self) -> dict[str, Any]:
        engine = self.engine
        engine.refuse_unfinished()
        self.wait_for_update()
        mine = set(self._parameters())
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": {p: snapshot(engine.parameter_state(p)) for p in self._parameters()},  # live entries are views
            "places": {p: place for p, place in engine.managed.places().items() if p in mine},
            "classes": engine.classes.classes,
            "engine": engine.settings,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        entries: dict[Tensor, dict[str, Any]] = state.pop("state")
        known: dict[Tensor, Place] = state.pop("places")
        own, *named = state.pop("classes")
        classes = GroupClasses(*own)
        for optimizer_class, hyperparameters in named:
            classes.know(optimizer_class, hyperparameters)
        # No strategy makes forwards wait for a copy: it updates in step().
        self.engine = Engine(
            classes,
            **state.pop("engine"),
            places=lambda: known,
            update_time=AtStep,
        )
        self.param_groups = state.pop("param_groups")
        super().__setstate__(state)
        self.engine.watch_gradients()
        for parameter, values in entries.items():
            if values:
                self.load_parameter_state(parameter, values)


def _makes_state_exist(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``torch.distributed.checkpoint`` calls: it makes state exist by a step with zero gradients and ``lr`` 0.

    A user's own step may look just like that (warm-up from 0, advantages that are all zero) and counts, so that the
    caller is looked for: a function of torch's that hands the groups it has set to 0 back after the step.
    """
    if any(item.updated for item in optimizer.engine.managed):  # type: ignore[attr-defined]
        return False
    frame: Any = sys._getframe(1)
    for _ in range(20):  # hooks' and schedulers' wrappers, accelerate's and Fabric's are between
        if frame is None:
            return False
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False
