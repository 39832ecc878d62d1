"""One step: collect all gradients → norm → skip? → update the weights → update the loss scale."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.optimizer.between_steps import BetweenSteps
from lightstep.optimizer.host_gradients import HostGradients
from lightstep.optimizer.managed_parameters import ManagedParameters, Places
from lightstep.optimizer.queue import Factors
from lightstep.optimizer.step_guard import eager_backward
from lightstep.optimizer.update import Gradients, GroupValues, Norms, StepResult, Update, factors_of
from lightstep.precision.gradients import unshared
from lightstep.state.host_weights import HostWeights
from lightstep.state.schema import Managed
from lightstep.state.store import Store


class Measured(NamedTuple):
    """All gradients, their unscaled norm, and the overflow flag (both 0-dim fp32)."""

    gradients: Gradients
    norm: Tensor
    overflow: Tensor


class Engine(BetweenSteps):
    """What an optimizer does, apart from torch's interface: backwards and steps.

    It is the :class:`EarlyStep` of updates in backward.
    """

    def _build(self, backend: Store, reduce_float32: bool, places: Places | None) -> None:
        super()._build(backend, reduce_float32, places)
        self._measured: Measured | None = None
        self._used: list[Tensor] = []  # the parameters that had a gradient in the last step
        self._skips_on_device = False
        self._kinds: Any = None  # of groups and classes, on which that depends

    # -- backward

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        if self._measured is not None:
            raise RuntimeError(
                "backward() between grad_norm() and step(): the gradients have been added up; call step() or "
                "zero_grad() first"
            )
        if self.closed:
            self.refuse_if_closed()
        self.guard.check("backward()")
        self.guard.trainer = threading.get_ident()
        self.queue.wait_outside_step()  # updates may still read gradients from memory that the next ones are written to
        self.gradients.watch(self.param_groups, self.loss_scale)  # parameters may have been cast, frozen or unfrozen
        if self._host_weights is not None:
            self._host_weights.rest()
            if self.accumulating is True and self.gradients.float32:
                self._host_weights.gradient_dtype = torch.float32
            self.set_up()  # norms are measured in backward
        accumulates = self.accumulating is True and self._overflow_everywhere is True
        self.unreduced = self.unreduced or accumulates
        if self.gradients.scaled.unscaled:
            self._allow_dropped_gradients()
        scaled: AbstractContextManager[None] = nullcontext()
        alone: AbstractContextManager[Any] = nullcontext()
        updating: AbstractContextManager[None] = nullcontext()
        if not self.loss_scale.is_identity:
            loss, scaled = loss.float() * self.loss_scale.tensor(loss.device), self.gradients.scaled.running()
        # A second backward through a graph that is retained would need weights from before speculative updates.
        is_last = self.accumulating is False and (self.update_time.in_backward or not retain_graph)
        if self.queue.early is not None and is_last:  # it may update units: other threads wait until it ends
            alone, updating = self.guard.backward, self.queue.early.updating(self)
        try:
            with self.gradients.backward(), scaled, alone, updating, eager_backward():
                loss.backward(retain_graph=retain_graph)
        except RuntimeError as error:
            self._explain(error)
            raise
        if self.unreduced and not accumulates:
            self.expect_reduction()

    def _explain(self, error: RuntimeError) -> None:
        """Explain autograd's refusal of a graph that needs weights from before an update in backward."""
        other = self.update_time.without_early
        if other is not None and "modified by an inplace operation" in str(error):
            raise RuntimeError(
                f"{error} If that is a weight: with optimizer_state.update: {self.update_time.name} a backward updates "
                "weights, and another part of the graph, or a graph that was made before, needs the old ones. Run all "
                "backwards of a step but the last under strategy.accumulate(model, last=False), or set update: "
                f"{other.name}"
            ) from error

    # -- what updates in backward need: see :class:`EarlyStep`

    def prepare_backward(self, final: bool) -> tuple[Sequence[Sequence[Managed]], Factors] | None:
        if not final and (self._norms is None or self.clip_layers or self.broken.reason is not None):
            return None
        if final:
            self._check_in_backward_settings()  # settings may have been changed
            self.refuse_unusable("Load a checkpoint before the next backward")
        edits_weights = bool(self.edits.unapplied) and self._edits_weights()
        if final and edits_weights:
            self._refuse_weight_edits()
        if self.edits.unapplied and not edits_weights:  # step() edits weights: backward needs the old ones
            self.settle_edits()
        norms = self.guard.work("backward()", self._prepare, adopt=final)
        if norms is None:
            return None
        if self.edits.readings:
            self.edits.outdate()
        if not final:
            device = next(iter(self.managed.by_parameter.values())).local.device
            scale = None if self.loss_scale.is_identity else self.loss_scale.tensor(device).clone()
            return norms.layers, factors_of(scale, self.loss_scale, None)
        norms.reset_norms()
        self._used = []
        return norms.layers, (None, None)

    def take(self, item: Managed) -> Tensor | None:
        gradient = self.gradients.take(item.param)
        if gradient is not None:
            self._used.append(item.param)
            gradient = gradient.to(item.local.device)  # that of a weight on the host may be there
        if gradient is not None and self._norms is not None:
            self._norms.add_norms({item: gradient}, self.loss_scale)
        return gradient

    def make_layer_update(self, layer: int, gradients: Gradients, values: GroupValues) -> Update | None:
        """A layer is skipped if its norm is not finite."""
        assert self._norms is not None
        scaling = self._norms.layer_factors(layer, gradients, self.loss_scale, self.max_norm)
        update = Update(gradients, *scaling, values)
        return None if self._skips([update]) else update

    # -- step

    def step(self, closure: Callable[[], Any] | None, init_state: bool = False) -> StepResult:
        self.guard.check("step()")
        if self.closed or self.broken.reason is not None:
            self.refuse_unusable("Load a checkpoint before the next step")
        self.gradients.watch(self.param_groups, self.loss_scale)
        loss = None if closure is None else self._run_closure(closure)
        if self.unreduced or self.gradients.scaled.unscaled:
            self.refuse_wrong_gradients()
        self.guard.trainer = threading.get_ident()
        return self.guard.work("step()", self._step, loss, init_state)

    def _step(self, loss: Any, init_state: bool) -> StepResult:
        if self.queue.started:
            return self._complete(loss)
        if self.edits.unapplied:
            self.apply_edits()
        gradients, norm, overflow = self._measure()
        if not self.updater.stage.is_reserved:
            self.updater.reserve_stage(gradients)  # if that fails, step() may be called again
        self._used = [item.param for item in gradients]
        self._measured = None  # from here on the step owns the gradients
        self.gradients.consume()
        scale = None if self.loss_scale.is_identity else self.loss_scale.tensor(norm.device).clone()
        result = StepResult(norm, overflow, scale, loss, self.queue.redone, self.queue.rolled_back)
        if init_state and not any(item.updated for item in self.managed):
            self._init_state(gradients, overflow)
            return result
        if self._norms is not None:
            values = GroupValues(self.param_groups, self.update_time.deferred)
            scaled = self._norms.factors(gradients, norm, self.loss_scale, scale, self.max_norm)
            self._start([Update(own, divisor, factor, overflow, values) for own, divisor, factor in scaled])
        if scale is not None:
            self.loss_scale.update(overflow)
        if self._host_weights is not None:
            self._end_step(self._host_weights)
        return result

    def _end_step(self, weights: HostWeights) -> None:
        if self._norms is not None:
            self._norms.reset_norms()
        if not self.queue.pending:  # the caller may write to weights now, also to those that it holds
            weights.forget_idle(fresh=True)
            weights.wait_for_copies()
        weights.fit_staying()

    def _start(self, updates: list[Update]) -> None:
        if self.edits.readings:
            self.edits.outdate()
        if self._skips(updates):
            self.queue.skip()
        else:
            for listener in self.update_listeners:  # reads in other threads wait from now on
                listener()
            self.queue.start(updates)

    def _skips(self, updates: Sequence[Update]) -> bool:
        """Whether to skip the step; the host reads the flag only if the base optimizer cannot skip on the device.

        That is so for classes without ``found_inf``, and before there is state.
        """
        kinds = updates[0].values.kinds, self.classes.version
        if kinds != self._kinds:
            devices = self.managed.devices
            self._skips_on_device = all(self.classes.skips_on_device(device, self.param_groups) for device in devices)
            self._kinds = kinds
        on_host = not self._skips_on_device or any(update.without_state for update in updates)
        return on_host and self.queue.overflows(updates)

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        if not self.loss_scale.is_identity:
            raise ValueError(
                f"step(closure) with {self.loss_scale!r}: the closure's own backward would not be scaled; call "
                "optimizer.backward(loss) and then step() without a closure"
            )
        with torch.enable_grad():
            return closure()

    def _complete(self, loss: Any) -> StepResult:
        """Complete a step whose updates began in backward."""
        assert self._norms is not None
        if self._host_weights is not None:
            self._host_weights.rest()
        self._refuse_late_edits()
        self._refuse_late_parameters()
        assert self.queue.early is not None
        self.queue.early.complete(self)
        if self.host_gradients is not None:
            self.host_gradients.wait_until_measured()
        if not self._norms.stored_norms:
            _warn_no_gradients(self.managed)
        norm, overflow = self._norms.total_norm(self.loss_scale)
        self._norms.reset_norms()  # the next step may be one whose backwards were all loss.backward()
        self.gradients.scaled.unscaled = False
        if self._host_weights is not None:
            self._end_step(self._host_weights)
        scale = None if self.loss_scale.is_identity else self.loss_scale.tensor(norm.device).clone()
        return StepResult(norm, overflow, scale, loss)

    def _refuse_late_parameters(self) -> None:
        """Refuse gradients of parameters that were frozen, or in no group, in the last backward."""
        listed = (p for group in self.param_groups for p in group["params"] if p.grad is not None)
        late = [tuple(parameter.shape) for parameter in listed if self.managed.get(parameter) is None]
        if late:
            raise RuntimeError(
                f"{len(late)} parameters (the first of shape {late[0]}) have gradients, and were frozen or in no group "
                "when backward began to update weights (optimizer_state.update: in_backward). Nothing has been done: "
                "drop their gradients and call step() again; unfreeze or add parameters before the last backward, or "
                "set update: at_step"
            )

    def _init_state(self, gradients: Gradients, overflow: Tensor) -> None:
        """Make state for a checkpoint to fill; without one, the first update starts from scratch."""
        initialised = list(gradients)
        if self.edits.readings:
            self.edits.outdate()
        update = Update(gradients, None, None, overflow, GroupValues(self.param_groups))
        update.drop_gradients(update.elsewhere)
        self.updater.run([update])
        self.backend.synchronize()
        self.managed.mark_provisional(initialised)

    # -- the norm

    def grad_norm(self) -> Tensor:
        self.refuse_unusable("Load a checkpoint before the next step")
        if self.unreduced or self.gradients.scaled.unscaled:
            self.refuse_wrong_gradients()
        if self.update_time.in_backward:
            raise RuntimeError(
                "grad_norm() before step(): optimizer_state.update is in_backward, and the layers' gradients have been "
                "freed with their updates; read the norm from the result of step()"
            )
        return self.guard.work("grad_norm()", self._measure_norm)

    def _measure_norm(self) -> Tensor:
        self.apply_edits()
        self._measured = self._measure()
        self.gradients.consume()
        return self._measured.norm.clone()

    def _measure(self) -> Measured:
        """The gradients stay where they are until ``step()`` owns them: after an error here, nothing is lost."""
        if self._measured is not None:
            return self._check_measured(self._measured)
        norms, early, gradients = self._norms, self.queue.early, None
        if self._host_weights is not None:
            self._host_weights.rest()
        if early is not None and early.awaits_step and self.managed.covers(self.param_groups):
            found = self._collect_gradients()
            if found and early.validate(found, self):
                gradients = found  # else speculative updates are rolled back: there, or by `_prepare`
        if gradients is None:
            norms, gradients = self._prepare(), self._collect_gradients()
        if not gradients:
            _warn_no_gradients(self.managed)
        if norms is None:
            return Measured({}, torch.zeros((), device="cpu"), torch.zeros((), device="cpu"))
        if self.host_gradients is not None:
            self.host_gradients.wait_until_measured()
            self._measure_left(self.host_gradients, norms, gradients)
        return Measured(gradients, *norms.norm(gradients, self.loss_scale))

    def _prepare(self, adopt: bool = True) -> Norms | None:
        """Set up parameters and allocate memory, before gradients are touched: if that fails nothing is lost.

        ``None`` if all parameters are frozen.

        Args:
            adopt: rebuild the masters of weights that somebody else has written to.
        """
        self.queue.wait_for_update()
        if not self.managed.covers(self.param_groups):
            self.set_up()
        if self._norms is None:
            return None
        if self.managed.provisional:
            self.managed.drop_provisional_state()
        if adopt and self.managed.adopt_outside_changes(self.param_groups):
            self.on_parameters_changed()
        self.backend.prepare()
        return self._norms

    def _collect_gradients(self) -> Gradients:
        items = list(self.managed.by_parameter.values())
        found = zip(items, self.gradients.collect([item.param for item in items]), strict=True)
        present = {item: gradient for item, gradient in found if gradient is not None}
        if self.host_gradients is not None:  # most are empty, and none is shared
            return {item: gradient.to(item.local.device) for item, gradient in present.items()}
        return unshared(present)

    def _measure_left(self, host: HostGradients, norms: Norms, gradients: Gradients) -> None:
        """Measure the norms of gradients that were on the host before there was a set-up, or that the user has set."""
        for item, gradient in gradients.items():
            if item not in norms.stored_norms:
                with host.holding({item.param: gradient}):
                    norms.add_norms({item: gradient}, self.loss_scale)

    def _check_measured(self, measured: Measured) -> Measured:
        """What :meth:`grad_norm` has measured; parameters may have been edited, cast or moved since."""
        if any(self.gradients.has_gradient(item.param) for item in self.managed):
            raise RuntimeError(
                "gradients arrived between grad_norm() and step(), and are not in the norm: call step() or zero_grad() "
                "before the next backward"
            )
        early, gradients = self.queue.early, measured.gradients
        fits = early is not None and early.awaits_step and self.managed.covers(self.param_groups) and bool(gradients)
        if early is not None and fits and early.validate(gradients, self):
            return measured
        self._prepare()
        items = ((self.managed.get(item.param), gradient) for item, gradient in measured.gradients.items())
        moved = {item: gradient.to(item.local.device) for item, gradient in items if item is not None}
        return measured._replace(gradients=moved)

    # -- gradients that are dropped, or must not be used

    def zero_gradients(self, set_to_none: bool) -> None:
        """Drop all gradients, the fp32 sums too.

        Args:
            set_to_none: if false, parameters that have a gradient, or had one in the last step, have zeros afterwards.
                A step has dropped the gradients that torch would still have there.
        """
        listed = [p for group in self.param_groups for p in group["params"]]
        measured = () if self._measured is None else (item.param for item in self._measured.gradients)
        stored = () if self.host_gradients is None else self.host_gradients.totals()
        used = {*self._used, *measured, *stored, *(p for p in listed if p.grad is not None)}
        self._drop_gradients()
        self._used = []
        for parameter in listed:
            parameter.grad = None
        self.gradients.watch(self.param_groups, self.loss_scale)  # a user's own loss.backward() may follow
        if not set_to_none:
            for parameter in used.intersection(listed):
                parameter.grad = torch.zeros_like(parameter)

    def _drop_gradients(self) -> None:
        if self.unreduced:
            self.gradients.drop_unreduced(p for group in self.param_groups for p in group["params"])
        self.gradients.clear()
        if self.host_gradients is not None and self._norms is not None:
            self._norms.reset_norms()
        self._measured, self.unreduced = None, False
        if self.queue.early is not None:
            self.queue.early.drop_gradients()

    def refuse_wrong_gradients(self) -> None:
        """Refuse those of unscaled losses, and those that have not been reduced over the ranks."""
        if self.gradients.scaled.unscaled:
            self.refuse_unscaled()
        if self.unreduced:
            self._refuse_unreduced()

    def refuse_unscaled(self) -> None:
        self._allow_dropped_gradients()
        self.gradients.scaled.refuse_unscaled()

    def _allow_dropped_gradients(self) -> None:
        """Gradients of an unscaled loss do no harm once ``model.zero_grad()`` has dropped them."""
        left = any(p.grad is not None for group in self.param_groups for p in group["params"])
        self.gradients.scaled.unscaled = left

    def expect_reduction(self) -> None:
        self.unreduced = bool(self._keeps_unreduced())

    def expect_unreduced(self) -> None:
        if self._overflow_everywhere is True and not self.unreduced:
            self.unreduced = bool(self._keeps_unreduced())

    def _refuse_unreduced(self) -> None:
        if self._keeps_unreduced() is False:  # reduced by loss.backward()
            self.unreduced = False
        if self.unreduced:
            raise RuntimeError(
                "gradients of a backward under strategy.accumulate(model, last=False) have not been reduced over the "
                "ranks since, and a step would leave them out. Run each step's last micro-batch, with a forward of the "
                "model, under strategy.accumulate(model, last=True)"
            )

    def _keeps_unreduced(self) -> bool | None:
        return self.gradients.keeps_unreduced(p for group in self.param_groups for p in group["params"])


def _warn_no_gradients(managed: ManagedParameters) -> None:
    warnings.warn(
        f"step() found no gradient on any of {len(managed)} parameters and changes nothing: backward was "
        "not called, its gradients were not reduced (strategy.accumulate(last=True)), or the model's "
        "parameters were replaced (load_state_dict(assign=True)) after the optimizer was made",
        stacklevel=10,
    )
