"""One step: take all gradients → norm → skip? → run the update → adapt the loss scale."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.clipping import check_max_norm, check_norm_type
from lightstep.distributed import local_tensor
from lightstep.optimizer.broken_step import BrokenStep
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.eager import eager_backward, own_work
from lightstep.optimizer.group_values import GroupValues
from lightstep.optimizer.in_backward import InBackward
from lightstep.optimizer.managed_parameters import InitialMasters, ManagedParameters, Places
from lightstep.optimizer.moments import Moments
from lightstep.optimizer.overlap import Overlap
from lightstep.optimizer.result import StepResult
from lightstep.optimizer.scaling import Scaling
from lightstep.optimizer.schedule import Schedule
from lightstep.optimizer.settings import Fixed, Setting, check_loss_scale
from lightstep.optimizer.walk import Gradients, UnitWalk, Update
from lightstep.precision.gradients import GradientAccumulator, unshared
from lightstep.precision.loss_scale import ConstantLossScale, LossScale
from lightstep.precision.scaled_backward import ScaledBackward
from lightstep.state.backend import Managed, StateBackend
from lightstep.state.interrupts import uninterrupted

logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """All gradients, their norm without the loss scale, and whether it overflows (0-dim fp32 tensors)."""

    gradients: Gradients
    norm: Tensor
    overflow: Tensor


class Engine:
    """What an optimizer does, without torch's face. It refers to nobody above it: gone when its optimizer is.

    Attributes:
        param_groups: torch's, with the model's own parameters.
        accumulating: see :attr:`BaseOptimizer.accumulating <lightstep.optimizer.base.BaseOptimizer.accumulating>`.
        unreduced: see :attr:`BaseOptimizer.unreduced <lightstep.optimizer.base.BaseOptimizer.unreduced>`.
        managed: the parameters it has taken charge of.
        gradients: where gradients are added up.
        schedule: when updates run.
        listeners: called when weights have changed before ``step()``.
    """

    loss_scale = Setting(check_loss_scale)
    max_norm = Setting(lambda given: None if given is None else check_max_norm(given))
    norm_type = Fixed(check_norm_type)
    clip_layers = Fixed(bool)

    def __init__(
        self,
        classes: GroupClasses,
        *,
        master_weights: bool,
        reduce_float32: bool,
        loss_scale: LossScale,
        max_norm: float | None,
        norm_type: float,
        clip_layers: bool,
        backend: StateBackend,
        places: Places | None,
        overflow_everywhere: bool | None,
        update_time: type[Schedule],
        initial_masters: InitialMasters | None = None,
        moments: Moments | None = None,
    ) -> None:
        self._process, self.closed = os.getpid(), True
        self.unreduced = False
        self.param_groups: list[dict[str, Any]] = []
        self.accumulating: bool | None = None
        self.classes, self.master_weights = classes, master_weights
        self._overflow_everywhere, self.update_time = overflow_everywhere, update_time
        self._initial_masters, classes.in_backward = initial_masters, update_time.in_backward
        self.moments = moments or Moments()
        self.listeners: list[Callable[[], object]] = []
        self.start(backend, reduce_float32, places)
        self.loss_scale, self.max_norm = loss_scale, max_norm
        self.norm_type, self.clip_layers = norm_type, clip_layers
        self._refuse_what_needs_all_gradients()
        self.closed = False

    def start(self, backend: StateBackend, reduce_float32: bool, places: Places | None) -> None:
        """Everything that is built up while working and never saved."""
        self.backend = backend
        self.gradients = GradientAccumulator(reduce_float32)
        self.scaled_backward = ScaledBackward()
        self.managed = ManagedParameters(
            self.classes, backend, self.master_weights, places, self._initial_masters, self.moments
        )
        self.broken = BrokenStep(self.managed, backend)
        self.walk = UnitWalk(self.classes, backend, self.broken, self.managed.record)
        self.schedule = self.update_time(self.walk, backend)
        listeners = self.listeners  # and not the engine, which has the schedule
        self.schedule.announce = lambda: [listener() for listener in listeners]
        self._scaling: Scaling | None = None
        self._measured: Measured | None = None

    @property
    def is_set_up(self) -> bool:
        """Whether parameters have been taken charge of: from the first step or loaded state on."""
        return len(self.managed) > 0

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments that a copy is made with."""
        names = ("master_weights", "loss_scale", "max_norm", "norm_type", "clip_layers", "moments")
        return {
            **{name: getattr(self, name) for name in names},
            "overflow_everywhere": self._overflow_everywhere,
            "reduce_float32": self.gradients.float32,
            "backend": self.backend.fresh(),
        }

    def start_over(self, backend: StateBackend) -> None:
        """Before the set-up: other parameters are in the groups now."""
        self.take_hooks_off()
        if type(backend) is type(self.backend):  # it may have been told something: set_residency
            backend = self.backend
        self.start(backend, self.gradients.float32, self.managed.places)
        self.watch_gradients()

    # -- backward

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        if self._measured is not None:
            raise RuntimeError(
                "backward() between grad_norm() and step(): the gradients have been added up; call step() or "
                "zero_grad() first"
            )
        self.schedule.wait_for_update()  # gradients that it still reads may stand where the next ones will be put
        self.watch_gradients()  # parameters may have been cast, frozen or thawed
        self.gradients.begin_backward()
        self.unreduced = self.accumulating is True and self._overflow_everywhere is True
        self._notice_what_was_given_up()
        if not self.loss_scale.is_identity:
            loss = loss.float() * self.loss_scale.tensor(loss.device)
        with self.scaled_backward.running(), self._updating(retain_graph), eager_backward():
            loss.backward(retain_graph=retain_graph)
        self.gradients.end_backward()

    def _updating(self, retain_graph: bool) -> contextlib.AbstractContextManager[None]:
        """What the last micro-batch's backward does besides. Units are not tried where the graph stays: its weights may
        be needed again."""
        if self.accumulating is False and isinstance(self.schedule, InBackward):
            return self._running(self.schedule)
        if self.accumulating is False and isinstance(self.schedule, Overlap) and not retain_graph:
            return self._trying(self.schedule)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _running(self, schedule: InBackward) -> Iterator[None]:
        """Layers are updated as backward completes them."""
        if schedule.started:
            raise RuntimeError(
                "a second backward() before step(): the first one has updated the weights already "
                "(optimizer_state.update: in_backward). Run all backwards of a step but the last under "
                "strategy.accumulate(model, last=False)"
            )
        self._refuse_what_needs_all_gradients()  # settings may have been changed
        self.refuse_unusable("Load a checkpoint before the next backward")
        with torch.no_grad():
            scaling = self._make_ready()
        if scaling is None:
            yield
            return
        scaling.start()
        with schedule.running(scaling.layers, self.param_groups, self._take, self._decide):
            yield

    @contextlib.contextmanager
    def _trying(self, schedule: Overlap) -> Iterator[None]:
        """Units are tried as backward completes them."""
        if not self.is_set_up or self.clip_layers or self.broken:
            yield
            return
        with own_work():
            scaling = self._make_ready()
        if scaling is None:
            yield
            return
        device = next(iter(self.managed)).local.device
        divided = scaling.unclipped(self.loss_scale, device)
        with schedule.trying(scaling.layers, self.param_groups, lambda item: self.gradients.peek(item.param), divided):
            yield

    def _take(self, item: Managed) -> Tensor | None:
        gradient = self.gradients.take(item.param)
        if gradient is not None and self._scaling is not None:
            self._scaling.keep(item, gradient, self.loss_scale)
        return gradient

    def _decide(self, layer: int, gradients: Gradients, values: GroupValues) -> Update | None:
        """The update of one layer in backward. One that is not finite stays as it is."""
        assert self._scaling is not None
        scaling = self._scaling.of_layer(layer, gradients, self.loss_scale, self.max_norm)
        update = Update(gradients, *scaling, values)
        return None if self._skips(update) else update

    def watch_gradients(self) -> None:
        """Frozen parameters too: they may be thawed before the next backward."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.gradients.watch(parameters)
        self.scaled_backward.watch(parameters, self.loss_scale)

    def _notice_what_was_given_up(self) -> None:
        """Gradients of a loss that was not scaled are gone after ``model.zero_grad()``."""
        if self.scaled_backward.unscaled and not self.gradients.delivered:
            left = any(p.grad is not None for group in self.param_groups for p in group["params"])
            self.scaled_backward.unscaled = left

    def drop_gradients(self) -> None:
        """Those that reached the optimizer, those added up in fp32 too (``zero_grad``)."""
        self.gradients.clear()
        self._measured, self.unreduced = None, False
        self.scaled_backward.clear()
        self.schedule.drop()

    # -- step

    def step(self, closure: Callable[[], Any] | None, makes_state: bool = False) -> StepResult:
        loss = self._evaluate(closure)
        self.refuse_unscaled()
        self._refuse_unreduced()
        with own_work():
            if isinstance(self.schedule, InBackward) and self.schedule.started:
                self.schedule.wait_for_update()
                return self._complete(self.schedule, loss)
            gradients, norm, overflow = self._measure()
            self.walk.make_room(gradients)  # without it the step may be called again
            self._consume()
            scale = self.loss_scale.tensor(norm.device).clone()
            result = StepResult(norm, overflow, scale, loss, self.schedule.redone)
            if makes_state and not any(item.updated for item in self.managed):
                self._make_state(gradients, overflow)
                return result
            if self.is_set_up:
                divisor, factor = self._factors(gradients, result.grad_norm, scale)
                self._start(Update(gradients, divisor, factor, overflow, GroupValues(self.param_groups)))
            self.loss_scale.update(overflow)
            return result

    def _start(self, update: Update) -> None:
        if self._skips(update):
            self.schedule.wait_for_update()
        else:
            self.schedule.start(update)

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        self.refuse_unusable("Load a checkpoint before the next step")
        if closure is None:
            return None
        if not self.loss_scale.is_identity:
            raise ValueError(
                f"step(closure) with {self.loss_scale!r}: the closure's own backward would not be scaled; call "
                "optimizer.backward(loss) and then step() without a closure"
            )
        with torch.enable_grad():
            return closure()

    def _complete(self, schedule: InBackward, loss: Any) -> StepResult:
        """The end of a step whose updates began in backward."""
        assert self._scaling is not None
        schedule.complete(list(self.managed), self._take, self._decide)
        if not self._scaling.has_kept:
            _warn_of_nothing(self.managed)
        norm, overflow = self._scaling.kept_norm(self.loss_scale)
        self.scaled_backward.clear()
        return StepResult(norm, overflow, self.loss_scale.tensor(norm.device).clone(), loss)

    def grad_norm(self) -> Tensor:
        self.refuse_unusable("Load a checkpoint before the next step")
        self.refuse_unscaled()
        self._refuse_unreduced()
        if self.update_time.in_backward:
            raise RuntimeError(
                "grad_norm() before step(): optimizer_state.update is in_backward, and the layers' gradients went with "
                "their updates; read it from the result of step()"
            )
        with own_work():
            self._measured = self._measure()
            self.gradients.consume()
            return self._measured.norm.clone()

    def _measure(self) -> Measured:
        """Nothing is given up until :meth:`_consume`: after a failure in here all gradients are still there."""
        if self._measured is not None:
            return self._measured_before(self._measured)
        gradients = self._collected() if self._may_hold() else {}
        if self._holds(gradients):
            scaling = self._scaling
        else:
            scaling, gradients = self._make_ready(), self._collected()
        if not gradients:
            _warn_of_nothing(self.managed)
        if scaling is None:
            return Measured({}, torch.zeros((), device="cpu"), torch.zeros((), device="cpu"))
        return Measured(gradients, *scaling.norm(gradients, self.loss_scale))

    def _collected(self) -> Gradients:
        items = list(self.managed)
        found = zip(items, self.gradients.collect([item.param for item in items]), strict=True)
        return unshared({item: gradient for item, gradient in found if gradient is not None})

    def _may_hold(self) -> bool:
        """Whether units were tried, and nothing but the gradients can speak against them."""
        return self.schedule.undecided and self.managed.covers(self.param_groups)

    def _holds(self, gradients: Gradients) -> bool:
        """Whether :meth:`step` may decide about what was tried; if not, :meth:`_make_ready` waits for what is left."""
        return bool(gradients) and self.schedule.holds(gradients, self.param_groups, self.managed.written)

    def _measured_before(self, measured: Measured) -> Measured:
        """What :meth:`grad_norm` has measured: weights may have been edited, cast or moved since."""
        if any(self.gradients.has_gradient(item.param) for item in self.managed):
            raise RuntimeError(
                "gradients arrived between grad_norm() and step(), which have no part in the norm: call step() or "
                "zero_grad() before the next backward"
            )
        if self._may_hold() and self._holds(measured.gradients):
            return measured
        self._make_ready()
        items = ((self.managed.get(item.param), gradient) for item, gradient in measured.gradients.items())
        moved = {item: gradient.to(item.local.device) for item, gradient in items if item is not None}
        return measured._replace(gradients=moved)

    def _consume(self) -> None:
        """The step takes place."""
        self._measured = None
        self.gradients.consume()
        self.scaled_backward.clear()

    def _factors(self, gradients: Gradients, norm: Tensor, scale: Tensor) -> Any:
        assert self._scaling is not None
        return self._scaling.of_all(gradients, norm, self.loss_scale, scale, self.max_norm)

    def _skips(self, update: Update) -> bool:
        """Where the base optimizer cannot skip on the device, or has no state yet, the host reads the flag."""
        devices = {item.local.device for item in update.gradients}
        on_device = all(item.updated for item in update.gradients) and all(
            self.classes.skips_on_device(device, self.param_groups) for device in devices
        )
        return not on_device and self.schedule.overflows(update)

    def _make_state(self, gradients: Gradients, overflow: Tensor) -> None:
        """State for a checkpoint to fill; without one, the first update starts afresh."""
        initialised = list(gradients)
        self.walk.run(Update(gradients, None, None, overflow, GroupValues(self.param_groups)))
        self.backend.synchronize()
        self.managed.mark_provisional(initialised)

    # -- set-up

    def _make_ready(self) -> Scaling | None:
        """Parameters and memory, while the gradients are still there: without the memory nothing has happened.

        ``None`` while everything is frozen.
        """
        self.set_up()
        if not self.is_set_up:
            return None
        self.managed.drop_provisional_state()
        if self.managed.adopt_outside_changes(self.param_groups):
            self.follow_parameters()
        self.backend.prepare()
        return self._scaling

    def set_up(self, also: Collection[Tensor] = ()) -> None:
        """Take charge of the trainable parameters of the groups, and of these frozen ones."""
        self.refuse_if_closed()
        with own_work():
            self.schedule.wait_for_update()
            if self.managed.set_up(self.param_groups, also):
                self.follow_parameters()

    def follow_parameters(self) -> None:
        """The managed parameters are others than before, or new."""
        self._scaling = Scaling(
            self.managed,
            self.norm_type,
            self._overflow_everywhere,
            clip_layers=self.clip_layers,
            layer_by_layer=self.update_time.in_backward,
        )
        self.watch_gradients()

    # -- state

    def parameter_state(self, parameter: Tensor, kept_only: bool = False) -> dict[str, Any]:
        """Live entries where they can be; ``kept_only``: without communication, what this process keeps."""
        self.refuse_if_closed()
        item = self.managed.get(parameter)
        with own_work():
            if item is None:
                return self.managed.given(parameter)
            self.schedule.wait_for_update()
            self.backend.synchronize()
            return self.managed.state_of(item, kept_only)

    def replace_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """The parameter's state is this; ``{}`` removes it."""
        if not self.is_set_up and [*entries] == ["master"]:  # whoever loads nothing else may shard the model yet
            self.managed.give(parameter, local_tensor(entries["master"]))
            return
        self.set_up(also=[parameter] if entries else ())
        item = self.managed.get(parameter)
        if item is None and not entries:
            return
        if item is None:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not among the optimizer's groups")
        with own_work():
            self.managed.load_state(item, entries)

    # -- refusals

    def _refuse_what_needs_all_gradients(self) -> None:
        if not self.update_time.in_backward:
            return
        if self.max_norm is not None and not self.clip_layers:
            raise ValueError("updates in backward know no global norm: set clip_layers, or leave max_norm out")
        if not isinstance(self.loss_scale, ConstantLossScale):
            raise ValueError("updates in backward cannot skip a whole step: a constant loss scale is needed")

    def refuse_unscaled(self) -> None:
        self._notice_what_was_given_up()
        self.scaled_backward.refuse_unscaled()

    def _refuse_unreduced(self) -> None:
        if self.unreduced:
            raise RuntimeError(
                "the last backward ran under strategy.accumulate(model, last=False): its gradients were not reduced "
                "over the ranks, and a step would leave them out. Run each step's last micro-batch under "
                "strategy.accumulate(model, last=True)"
            )

    def refuse_unusable(self, remedy: str) -> None:
        self.refuse_if_closed()
        self.broken.refuse(remedy)

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise RuntimeError("this MixedPrecisionOptimizer is closed: its state is gone; make a new optimizer")

    def refuse_unfinished(self) -> None:
        if self.schedule.started:
            raise RuntimeError(
                "backward() has begun to update the weights (optimizer_state.update: in_backward), and what would be "
                "saved now belongs to no step. Call step() first"
            )

    # -- end

    def take_hooks_off(self) -> None:
        self.gradients.close()
        self.scaled_backward.close()
        self.schedule.close()

    def close(self) -> None:
        """Finish what is under way, take the hooks off the parameters, and give all memory back."""
        try:
            self._finish()
        finally:
            self.backend.close()
            self.classes.close()

    def _finish(self) -> None:
        with own_work():
            try:
                self.schedule.wait_for_update()
            finally:
                self.closed = True
                self.take_hooks_off()

    def __del__(self) -> None:
        """The last update is in the weights before the optimizer is gone."""
        if not getattr(self, "closed", True):
            self.end()

    def end(self, then: Callable[[], object] = bool) -> None:
        """Nobody will step any more: finish what is under way, and ``then`` do that."""
        if sys.is_finalizing() or os.getpid() != self._process:
            return
        if self.schedule.pending and self.backend.lanes.in_own_thread:  # the collector runs in any thread
            threading.Thread(target=self._end, args=(then,), name="lightstep-end").start()
        else:
            self._end(then)

    def _end(self, then: Callable[[], object]) -> None:
        uninterrupted(self._finish_at_end)
        then()

    def _finish_at_end(self) -> None:
        try:
            self._finish()
            self.backend.synchronize()  # memory that other streams use may be given back
        except Exception as error:
            logger.warning("an optimizer went away, and its last update failed: %s: %s", type(error).__name__, error)

    def finish_update(self) -> None:
        """What the caller does next finds every parameter updated."""
        with own_work():
            self.schedule.wait_for_update()


def _warn_of_nothing(items: Collection[Managed] | ManagedParameters) -> None:
    warnings.warn(
        f"step() found no gradient on any of {len(items)} parameters and changes nothing: backward was "
        "not called, its gradients were not reduced (strategy.accumulate(last=True)), or the model's "
        "parameters were exchanged (load_state_dict(assign=True)) after the optimizer was made",
        stacklevel=7,
    )
