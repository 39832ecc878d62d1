"""The one ``step()``: fp32 masters, unscaling, one global norm, clipping, skip, update, write-back."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.clipping import check_max_norm, check_norm_type
from lightstep.optimizer.arithmetic import BaseArithmetic, GroupValues
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.borrowed import KeptInside
from lightstep.optimizer.broken_step import BrokenStep
from lightstep.optimizer.in_backward import InBackward
from lightstep.optimizer.managed_parameters import ManagedParameters, Places, StateView
from lightstep.optimizer.own_work import own_work
from lightstep.optimizer.param_groups import Place, learning_rates_are_zero, plain_numbers
from lightstep.optimizer.result import StepResult
from lightstep.optimizer.scaling import Scaling
from lightstep.optimizer.serialization import load_torch_state_dict, snapshot
from lightstep.optimizer.settings import Fixed, Setting, check_loss_scale
from lightstep.optimizer.updates import AtStep, Updates
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.precision.gradients import GradientAccumulator, unshared
from lightstep.precision.loss_scale import ConstantLossScale, LossScale
from lightstep.precision.scaled_backward import ScaledBackward
from lightstep.state.backend import Managed, StateBackend
from lightstep.state.resident import ResidentBackend


class MixedPrecisionOptimizer(BaseOptimizer):
    """Any element-wise torch optimizer, run on fp32 masters of low-precision parameters.

    Usually made by ``strategy.create_optimizer``. Set-up is lazy: nothing is allocated, and the parameters may still be
    moved, cast, sharded or exchanged, until the first ``step()`` or ``load_state_dict()``.

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
        initial_masters: called at set-up for the fp32 local shard from which a parameter was rounded, if there is one.

    Raises:
        TypeError: ``optimizer_class`` is not a usable optimizer class.
        ValueError: ``max_norm`` or ``norm_type`` is out of range; or from the class about its hyper-parameters, or from
            torch about the groups.
    """

    loss_scale = Setting(check_loss_scale)
    max_norm = Setting(lambda given: None if given is None else check_max_norm(given))
    norm_type = Fixed(check_norm_type)
    clip_layers = Fixed(bool)

    accumulating = KeptInside()
    _scaling = KeptInside()
    _measured = KeptInside()
    _closed = KeptInside(False)

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
        update_time: type[Updates] = AtStep,
        initial_masters: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        self._inside: dict[str, Any] = {}
        self._arithmetic = BaseArithmetic(optimizer_class, dict(hyperparameters or {}))
        super().__init__(params, dict(self._arithmetic.defaults))
        self.loss_scale = loss_scale or ConstantLossScale(1.0)
        self.master_weights = master_weights
        self.max_norm, self.norm_type, self.clip_layers = max_norm, norm_type, clip_layers
        self._backend = backend or ResidentBackend()
        self._overflow_everywhere = overflow_everywhere
        self._update_time = update_time
        self._initial_masters = initial_masters
        self._refuse_what_needs_all_gradients()
        self._start(reduce_float32, places)

    def _refuse_what_needs_all_gradients(self) -> None:
        if not self._update_time.in_backward:
            return
        if self.max_norm is not None and not self.clip_layers:
            raise ValueError("updates in backward know no global norm: set clip_layers, or leave max_norm out")
        if not isinstance(self.loss_scale, ConstantLossScale):
            raise ValueError("updates in backward cannot skip a whole step: a constant loss scale is needed")

    def _start(self, reduce_float32: bool, places: Places | None) -> None:
        """Everything that is built up while working and never saved."""
        self.gradients = GradientAccumulator(reduce_float32)
        self._scaled_backward = ScaledBackward()
        self._managed = ManagedParameters(self._arithmetic, self._backend, self.master_weights, places)
        self._state_view = StateView(self._managed, self.parameter_state, self._replace_state)
        self._broken = BrokenStep(self._managed, self._backend)
        self._walk = UnitWalk(self._arithmetic, self._backend, self._broken, self._managed.record)
        self._updates = self._update_time(self._walk, self._backend)
        self._scaling, self._closed = None, False
        self._measured = None
        self._watch_gradients()

    @property
    def is_set_up(self) -> bool:
        """Whether parameters have been taken charge of: from the first step or loaded state on."""
        return len(self._managed) > 0

    def forget_parameters(self) -> None:
        """Before the set-up: hold no parameter, until others are put into ``param_groups``."""
        for group in self.param_groups:
            group["params"] = []
        self._watch_gradients()

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
        self.gradients.close()
        self._scaled_backward.close()
        if type(backend) is not type(self._backend):  # else it may have been told something: set_residency
            self._backend = backend
        self._start(self.gradients.float32, self._managed.places)

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """Parameter → entries of the base optimizer, and ``"master"``; assigning a mapping replaces all state."""
        return self._state_view

    @state.setter
    def state(self, entries: Mapping[Tensor, Mapping[str, Any]]) -> None:
        if hasattr(self, "_managed"):  # torch's constructor assigns an empty one
            for item in self._managed:
                self._replace_state(item.param, entries.get(item.param, {}))

    def _watch_gradients(self) -> None:
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self.gradients.watch(trainable)
        self._scaled_backward.watch(trainable, self.loss_scale)

    def _notice_what_was_given_up(self) -> None:
        """Gradients of a loss that was not scaled are gone after ``model.zero_grad()``."""
        if self._scaled_backward.unscaled and not self.gradients.delivered:
            left = any(p.grad is not None for group in self.param_groups for p in group["params"])
            self._scaled_backward.unscaled = left

    # -- one iteration

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; one element is needed (loss.mean() or loss.sum())"
            )
        if self._measured is not None:
            raise RuntimeError(
                "backward() between grad_norm() and step(): the gradients have been added up; call step() or "
                "zero_grad() first"
            )
        self._updates.land()  # gradients that it still reads may stand where the next ones will be put
        self._watch_gradients()  # parameters may have been frozen or thawed
        self._notice_what_was_given_up()
        if not self.loss_scale.is_identity:
            loss = loss.float() * self.loss_scale.tensor(loss.device)
        with self._scaled_backward.running(), self._updating():
            loss.backward(retain_graph=retain_graph)

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """With ``update: in_backward``: layers are updated as the last micro-batch's backward completes them."""
        if not isinstance(self._updates, InBackward) or self.accumulating is not False:
            yield
            return
        updates = self._updates
        if updates.started:
            raise RuntimeError(
                "a second backward() before step(): the first one has updated the weights already "
                "(optimizer_state.update: in_backward). Run all backwards of a step but the last under "
                "strategy.accumulate(model, last=False)"
            )
        self._refuse_what_needs_all_gradients()  # settings may have been changed
        self._refuse_if_closed()
        self._broken.refuse("Load a checkpoint before the next backward")
        with torch.no_grad():
            self._make_ready()
        assert self._scaling is not None
        self._scaling.start()
        with updates.running(self._scaling.layers, self.param_groups, self._take, self._decide):
            yield

    def _take(self, item: Managed) -> Tensor | None:
        """The whole gradient of one parameter in backward; its norm is kept."""
        assert self._scaling is not None
        gradient = self.gradients.take(item.param)
        if gradient is not None:
            self._scaling.keep(item, gradient, self.loss_scale)
        return gradient

    def _decide(self, layer: int, gradients: Gradients, values: GroupValues) -> Update | None:
        """The update of one layer in backward. One that is not finite stays as it is."""
        assert self._scaling is not None
        divisor, factor, overflow = self._scaling.of_layer(layer, gradients, self.loss_scale, self.max_norm)
        if self._skip_known_to_host(gradients, overflow):
            return None
        return Update(gradients, divisor, factor, overflow, values)

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        loss = self._evaluate(closure)
        self._notice_what_was_given_up()
        self._scaled_backward.refuse_unscaled()
        with own_work():
            self._updates.land()
            if isinstance(self._updates, InBackward) and self._updates.started:
                return self._complete(self._updates, loss)
            self._measured = gradients, norm, overflow = self._measure()
            self._walk.make_room(gradients)  # without it the step may be called again
            self._measured = None
            assert self._scaling is not None
            scale = self.loss_scale.tensor(norm.device).clone()
            result = StepResult(norm, overflow, scale, loss)
            if self._is_state_initialisation(gradients, norm):
                self._initialise_state(gradients, overflow)
                return result
            if not self._skip_known_to_host(gradients, overflow):
                divisor, factor = self._scaling.of_all(
                    gradients, result.grad_norm, self.loss_scale, scale, self.max_norm
                )
                self._updates.start(self._update(gradients, divisor, factor, overflow))
            self.loss_scale.update(overflow)
            return result

    def grad_norm(self) -> Tensor:
        """The norm that the next ``step()`` will report, already now: 0-dim fp32, unscaled, before clipping.

        It is measured once. The gradients are the optimizer's from here on; ``step()`` or ``zero_grad()`` comes next.

        Raises:
            RuntimeError: layers are updated in backward, and their gradients are gone.
        """
        self._refuse_if_closed()
        self._broken.refuse("Load a checkpoint before the next step")
        self._scaled_backward.refuse_unscaled()
        if isinstance(self._updates, InBackward):
            raise RuntimeError(
                "grad_norm() before step(): optimizer_state.update is in_backward, and the layers' gradients went with "
                "their updates; read it from the result of step()"
            )
        with own_work():
            self._updates.land()
            self._measured = self._measure()
            return self._measured[1].clone()

    def _measure(self) -> tuple[Gradients, Tensor, Tensor]:
        """All gradients, their norm without the loss scale, and whether it overflows."""
        if self._measured is not None:
            return self._measured_before()
        gradients = self._collect_gradients()
        assert self._scaling is not None
        return gradients, *self._scaling.norm(gradients, self.loss_scale)

    def _measured_before(self) -> tuple[Gradients, Tensor, Tensor]:
        """What :meth:`grad_norm` has measured: weights may have been edited, cast or moved since."""
        if any(self.gradients.has_gradient(item.param) for item in self._managed):
            raise RuntimeError(
                "gradients arrived between grad_norm() and step(), which have no part in the norm: call step() or "
                "zero_grad() before the next backward"
            )
        self._make_ready()
        gradients, norm, overflow = self._measured
        items = ((self._managed.get(item.param), gradient) for item, gradient in gradients.items())
        return {item: gradient.to(item.local.device) for item, gradient in items if item is not None}, norm, overflow

    def _complete(self, updates: InBackward, loss: Any) -> StepResult:
        """The end of a step whose updates began in backward."""
        assert self._scaling is not None
        updates.complete(list(self._managed))
        norm, overflow = self._scaling.kept_norm(self.loss_scale)
        return StepResult(norm, overflow, self.loss_scale.tensor(norm.device).clone(), loss)

    def _update(
        self,
        gradients: Gradients,
        divisor: Tensor | None,
        factor: Tensor | Mapping[Managed, Tensor] | None,
        overflow: Tensor,
    ) -> Update:
        return Update(gradients, divisor, factor, overflow, GroupValues(self.param_groups))

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        self._refuse_if_closed()
        self._broken.refuse("Load a checkpoint before the next step")
        if closure is None:
            return None
        if not self.loss_scale.is_identity:
            raise ValueError(
                f"step(closure) with {self.loss_scale!r}: the closure's own backward would not be scaled; call "
                "optimizer.backward(loss) and then step() without a closure"
            )
        with torch.enable_grad():
            return closure()

    def refuse_half_updated(self, remedy: str) -> None:
        """Raise if a step broke off and no checkpoint was loaded since, or is under way.

        Raises:
            RuntimeError: what failed, and ``remedy``; or that ``step()`` is missing.
        """
        self._broken.refuse(remedy)
        self._refuse_unfinished()

    def _refuse_unfinished(self) -> None:
        if isinstance(self._updates, InBackward) and self._updates.started:
            raise RuntimeError(
                "backward() has begun to update the weights (optimizer_state.update: in_backward), and what would be "
                "saved now belongs to no step. Call step() first"
            )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: its state is gone; make a new optimizer")

    def _make_ready(self) -> None:
        """Parameters and memory, while the gradients are still there: without the memory nothing has happened."""
        self._set_up()
        self._managed.drop_provisional_state()
        if self._managed.adopt_outside_changes(self.param_groups):
            self._follow_parameters()
        self._backend.prepare()

    def _collect_gradients(self) -> Gradients:
        self._make_ready()
        taken = ((item, self.gradients.take(item.param)) for item in self._managed)
        gradients = unshared({item: gradient for item, gradient in taken if gradient is not None})
        if not gradients:
            warnings.warn(
                f"step() found no gradient on any of {len(self._managed)} parameters and changes nothing: backward was "
                "not called, its gradients were not reduced (strategy.accumulate(last=True)), or the model's "
                "parameters were exchanged (load_state_dict(assign=True)) after the optimizer was made",
                stacklevel=5,
            )
        return gradients

    def _skip_known_to_host(self, gradients: Gradients, overflow: Tensor) -> bool:
        """Where the base optimizer cannot skip on the device, or has no state yet, the host reads the flag."""
        devices = {item.local.device for item in gradients}
        on_device = all(item.updated for item in gradients) and all(
            self._arithmetic.skips_on_device(device, self.param_groups) for device in devices
        )
        return not on_device and bool(overflow)

    # -- set-up

    @own_work()
    def _set_up(self, also: Collection[Tensor] = ()) -> None:
        self._refuse_if_closed()
        self._updates.land()
        if self._managed.set_up(self.param_groups, also):
            self._follow_parameters()

    def _follow_parameters(self) -> None:
        """The managed parameters are others than before, or new."""
        self._scaling = Scaling(
            self._managed,
            self.norm_type,
            self._overflow_everywhere,
            clip_layers=self.clip_layers,
            layer_by_layer=self._update_time.in_backward,
        )
        self._watch_gradients()

    def _is_state_initialisation(self, gradients: Gradients, norm: Tensor) -> bool:
        """``torch.distributed.checkpoint`` makes state exist by a step with zero gradients and ``lr`` 0."""
        first = not any(item.updated for item in self._managed)
        return first and bool(gradients) and learning_rates_are_zero(self.param_groups) and float(norm) == 0.0

    def _initialise_state(self, gradients: Gradients, overflow: Tensor) -> None:
        initialised = list(gradients)
        self._walk.run(self._update(gradients, None, None, overflow))
        self._backend.synchronize()
        self._managed.mark_provisional(initialised)

    # -- the rest of the contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # torch refuses anything else
            param_group.update(plain_numbers(param_group))
        super().add_param_group(param_group)
        if hasattr(self, "gradients"):  # not while the constructor adds the first groups
            self._watch_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that reached the optimizer, those added up in fp32 too.

        What micro-batches under ``strategy.accumulate(last=False)`` left inside FSDP2 is out of reach until it is
        reduced: to drop a started accumulation, run one more with ``last=True`` first.
        """
        self.gradients.clear()
        self._measured = None
        self._scaled_backward.clear()
        if isinstance(self._updates, InBackward):
            self._updates.drop()
        super().zero_grad(set_to_none)

    @own_work()
    def land(self, parameters: Iterable[Tensor] | None = None) -> None:
        found = None if parameters is None else (self._managed.get(parameter) for parameter in parameters)
        self._updates.land(None if found is None else (item for item in found if item is not None))

    @property
    def has_deferred_updates(self) -> bool:
        return self._updates.pending

    @own_work()
    def hold(self, parameters: Iterable[Tensor]) -> None:
        found = (self._managed.get(parameter) for parameter in parameters)
        self._updates.hold(item for item in found if item is not None)

    def synchronize(self) -> None:
        self.land()
        self._backend.synchronize()
        for device in self._managed.devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    @own_work()
    def set_residency(self, gib: float | Literal["auto"]) -> None:
        known = gib == "auto" or (isinstance(gib, (int, float)) and not isinstance(gib, bool) and 0 <= gib < math.inf)
        if not known:
            raise ValueError(f"set_residency({gib!r}): a number of GiB of at least 0 is needed, or 'auto'")
        self._refuse_if_closed()
        self._updates.land()
        self._backend.set_residency(gib)

    @own_work()
    def release_device_memory(self) -> None:
        self._refuse_if_closed()
        self.synchronize()
        self._walk.stage.free()
        self._backend.release_device_memory()
        if any(device.type != "cpu" for device in self._managed.devices):
            torch.accelerator.memory.empty_cache()

    @own_work()
    def refresh_master_weights(self) -> None:
        self._updates.land()
        if self._managed.refresh(self.param_groups):
            self._follow_parameters()

    def memory_report(self) -> dict[str, float]:
        parameters = sum(item.local.numel() for item in self._managed)
        report: dict[str, float] = {**self._backend.memory(), "gradient_stage_bytes": self._walk.stage.nbytes()}
        report["parameters"] = parameters
        for place in ("device", "host"):
            report[f"{place}_bytes_per_parameter"] = report[f"{place}_bytes"] / max(parameters, 1)
        return report

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class whose arithmetic updates the masters."""
        return self._arithmetic.optimizer_class

    def managed(self, also: Collection[Tensor] = ()) -> list[Managed]:
        """The trainable parameters with their names, in group order (set up if need be).

        Args:
            also: frozen parameters of the groups that are about to get state.
        """
        self._set_up(also)
        return list(self._managed)

    def parameter_state(self, parameter: Tensor) -> dict[str, Any]:
        """``state[parameter]``: live entries where they can be; DTensors for a DTensor. ``{}`` without state.

        Where replicas share the work, all of them call this, and those that do not keep the state get a copy.
        """
        return self._state_of(parameter, kept_only=False)

    def kept_state(self, parameter: Tensor) -> dict[str, Any]:
        """:meth:`parameter_state` without communication: ``{}`` where another replica keeps the state."""
        return self._state_of(parameter, kept_only=True)

    def described_state(self, parameter: Tensor) -> dict[str, Any]:
        """:meth:`kept_state` without numbers: local shapes and dtypes as meta tensors, and plain values."""
        self._refuse_if_closed()
        item = self._managed.get(parameter)
        return {} if item is None else self._backend.describe(item)

    def keeps_state(self, parameter: Tensor) -> bool:
        """Whether this process keeps the parameter's state, and not another replica (set up if need be)."""
        if parameter.requires_grad:
            self._set_up()
        item = self._managed.get(parameter)
        return item is None or not item.elsewhere

    @own_work()
    def _state_of(self, parameter: Tensor, kept_only: bool) -> dict[str, Any]:
        self._refuse_if_closed()
        item = self._managed.get(parameter)
        if item is None:
            return {}
        self._updates.land()
        self._backend.synchronize()
        return self._managed.state_of(item, kept_only)

    def takes_entry(self, entry: Tensor, shape: torch.Size) -> bool:
        """Whether a state entry (local part) can belong to a parameter of this local shape."""
        return self._managed.takes(entry, shape)

    def load_parameter_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Replace one parameter's state; ``{}`` removes it. Shards must be this parameter's.

        Where replicas share the work, all of them call this; of a parameter whose state another one keeps
        (:meth:`keeps_state`) only the entries' names count.

        Raises:
            ValueError: an entry has another shape than the parameter's local shard, or the parameter is a stranger.
        """
        self._replace_state(parameter, entries)
        self._broken.repaired(parameter)

    @own_work()
    def _replace_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        self._set_up(also=[parameter] if entries else ())
        item = self._managed.get(parameter)
        if item is None and not entries:
            return
        if item is None:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not among the optimizer's groups")
        self._managed.load_state(item, entries)

    @property
    def half_updated(self) -> bool:
        """Whether a step broke off and no checkpoint was loaded since."""
        return bool(self._broken)

    def state_dict(self) -> dict[str, Any]:
        """torch's layout: ``state`` by index, ``param_groups``, and ``loss_scale``; a snapshot.

        Complete on every rank. Where replicas share the work (``optimizer_state.backend: stream`` under DDP and HSDP)
        all of them call it, and each has all the state in memory then; ``strategy.save_checkpoint`` does without.
        """
        self._refuse_if_closed()
        self._refuse_unfinished()
        self.land()
        packed = super().state_dict()
        packed.setdefault("loss_scale", self.loss_scale.state_dict())
        packed["param_groups"] = [plain_numbers(group) for group in packed["param_groups"]]
        state = {key: dict(entries) for key, entries in packed.pop("state").items()}
        return {"state": snapshot(state) if self._backend.hands_out_state else state, **snapshot(packed)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, or from the state dict of the plain torch optimizer.

        Raises:
            ValueError: groups or shapes do not match; nothing has been changed then.
        """
        self.land()  # the update under way may still write into its groups
        load_torch_state_dict(self, state_dict)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, f"{type(self).__name__}[{self._arithmetic.name}]", 1)

    def close(self) -> None:
        """Give back the memory of the state backend and take the hooks off the parameters."""
        self._updates.land()
        self.gradients.close()
        self._scaled_backward.close()
        self._backend.close()
        self._closed = True

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_unfinished()
        self._updates.land()
        mine = {parameter for group in self.param_groups for parameter in group["params"]}
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": {p: self.parameter_state(p) for p in self.state},
            "loss_scale": self.loss_scale,
            "master_weights": self.master_weights,
            "max_norm": self.max_norm,
            "norm_type": self.norm_type,
            "clip_layers": self.clip_layers,
            "_overflow_everywhere": self._overflow_everywhere,
            "places": {p: place for p, place in self._managed.places().items() if p in mine},
            "optimizer_class": self._arithmetic.optimizer_class,
            "hyperparameters": self._arithmetic.hyperparameters,
            "reduce_float32": self.gradients.float32,
            "backend": self._backend.fresh(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        entries: dict[Tensor, dict[str, Any]] = state.pop("state")
        self._inside = {}
        self._backend = state.pop("backend")
        self._arithmetic = BaseArithmetic(state.pop("optimizer_class"), state.pop("hyperparameters"))
        reduce_float32 = state.pop("reduce_float32")
        known: dict[Tensor, Place] = state.pop("places")
        for setting in ("loss_scale", "max_norm", "norm_type", "clip_layers"):
            setattr(self, setting, state.pop(setting))
        super().__setstate__(state)
        self._update_time = AtStep  # no strategy makes forwards wait for this one
        self._start(reduce_float32, lambda: known)
        for parameter, values in entries.items():
            self.load_parameter_state(parameter, values)
