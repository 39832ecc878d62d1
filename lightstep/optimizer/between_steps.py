"""An optimizer between its steps: set-up, waits for updates, reads and edits of its state, the end."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import local_tensor
from lightstep.error_text import error_text
from lightstep.optimizer.changed_weights import ChangedWeights, Changes
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.host_gradients import HostGradients
from lightstep.optimizer.managed_parameters import InitialMasters, ManagedParameters, Places
from lightstep.optimizer.moments import Moments
from lightstep.optimizer.queue import Queue, UpdateTime
from lightstep.optimizer.rounded_weights import MasterWeights, check_master_weights
from lightstep.optimizer.state_edits import Edit, StateEdits, plain
from lightstep.optimizer.step_guard import BrokenStep, no_grad_no_inference, watch_forks
from lightstep.optimizer.unit_updater import UnitUpdater
from lightstep.optimizer.update import Norms
from lightstep.precision.gradients import GradientAccumulator
from lightstep.precision.loss_scale import ConstantLossScale, LossScale
from lightstep.precision.noise import check_seed
from lightstep.state.host_weights import HostWeights
from lightstep.state.interrupts import uninterrupted
from lightstep.state.schema import Managed
from lightstep.state.store import Store

logger = logging.getLogger(__name__)

_LONGEST_GAP = 60.0
"""Seconds that a reader in another thread waits between a backward that has updated weights and its ``step()``."""


class BetweenSteps:
    """What an optimizer keeps, and what is done with it between steps.

    It holds no reference to its optimizer, and dies with it.

    Attributes:
        param_groups: torch's, with the model's own parameters.
        accumulating: see :attr:`BaseOptimizer.accumulating <lightstep.optimizer.base.BaseOptimizer.accumulating>`.
        unreduced: see :attr:`BaseOptimizer.unreduced <lightstep.optimizer.base.BaseOptimizer.unreduced>`.
        managed: the parameters that it trains, from the set-up on.
        edits: what the user has changed in the state, until it is used.
        gradients: accumulates gradients.
        guard: admits one thread at a time.
        update_time: when updates run.
        queue: runs them.
        update_listeners: called when weights may change before ``step()``.
    """

    def __init__(
        self,
        classes: GroupClasses,
        *,
        master_weights: MasterWeights,
        reduce_float32: bool,
        loss_scale: LossScale,
        max_norm: float | None,
        norm_type: float,
        clip_layers: bool,
        backend: Store,
        places: Places | None,
        overflow_everywhere: bool | None,
        update_time: UpdateTime,
        initial_masters: InitialMasters | None = None,
        moments: Moments | None = None,
        host_weights: HostWeights | None = None,
        rounding_seed: int = 0,
    ) -> None:
        self.closed = True
        self._host_weights = host_weights
        self.unreduced = False
        self.param_groups: list[dict[str, Any]] = []
        self.accumulating: bool | None = None
        self.classes, self.master_weights = classes, check_master_weights(master_weights)
        self._overflow_everywhere, self.update_time = overflow_everywhere, update_time
        self._initial_masters, classes.in_backward = initial_masters, update_time.in_backward
        self.moments, self.rounding_seed = moments or Moments(), check_seed(rounding_seed)
        self.update_listeners: list[Callable[[], object]] = []
        self.edits = StateEdits()
        self._build(backend, reduce_float32, places)
        self.loss_scale, self.max_norm = loss_scale, max_norm
        self.norm_type, self.clip_layers = norm_type, clip_layers
        self._check_in_backward_settings()
        self.closed = False
        watch_forks(self)

    def _build(self, backend: Store, reduce_float32: bool, places: Places | None) -> None:
        """Make the parts that are never saved."""
        self.backend = backend
        self.host_gradients = self._make_host_gradients(reduce_float32)
        self.gradients = GradientAccumulator(reduce_float32, self.host_gradients)
        self.managed = ManagedParameters(
            self.classes,
            backend,
            self.master_weights,
            places,
            self._initial_masters,
            self.moments,
            self._host_weights,
            self.rounding_seed,
        )
        self.broken = BrokenStep(self.managed, backend)
        self.updater = UnitUpdater(self.classes, backend, self.broken, self.managed.record, self.host_gradients)
        self.queue = Queue(self.updater, backend, self.update_time, self.managed)
        self.guard = self.queue.guard
        listeners = self.update_listeners  # not self: that would be a reference cycle
        self.queue.on_early_update = lambda: [listener() for listener in listeners]
        self._norms: Norms | None = None

    def _make_host_gradients(self, float32: bool) -> HostGradients | None:
        if self._host_weights is None:
            return None
        gradients, own = HostGradients(self._host_weights, float32), weakref.ref(self)

        def measure(arrived: Sequence[tuple[Tensor, Tensor]]) -> None:
            engine = own()
            if engine is not None:
                engine._measure_arrived(arrived)

        def is_awaited(parameter: Tensor, gradient: Tensor) -> bool:
            engine = own()
            early = None if engine is None else engine.queue.early
            item = None if engine is None else engine.managed.get(parameter)
            return early is not None and item is not None and early.awaits(item, gradient)

        def is_first(parameter: Tensor) -> bool:
            engine = own()
            early = None if engine is None else engine.queue.early
            item = None if engine is None else engine.managed.get(parameter)
            return early is not None and item is not None and early.is_first(item)

        def is_accumulating() -> bool:
            engine = own()
            return engine is not None and engine.accumulating is True

        def forget(parameters: Sequence[Tensor]) -> None:
            engine = own()
            if engine is not None and engine._norms is not None:
                engine._norms.forget_norms(engine.managed.lookup(parameters))

        gradients.on_arrival, gradients.on_drop = measure, forget
        gradients.is_awaited, gradients.is_first = is_awaited, is_first
        gradients.is_accumulating = is_accumulating
        return gradients

    def _measure_arrived(self, arrived: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Gradients (of parameters) are about to leave the device: their norms are taken now."""
        if self._norms is not None:
            found = ((self.managed.get(parameter), gradient) for parameter, gradient in arrived)
            known = {item: gradient for item, gradient in found if item is not None}
            self._norms.add_norms(known, self.loss_scale)

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments for a copy."""
        names = ("master_weights", "loss_scale", "max_norm", "norm_type", "clip_layers", "moments", "rounding_seed")
        return {
            **{name: getattr(self, name) for name in names},
            "overflow_everywhere": self._overflow_everywhere,
            "reduce_float32": self.gradients.float32,
            "backend": self.backend.fresh(),
        }

    # -- set-up

    @property
    def is_set_up(self) -> bool:
        """Whether it manages parameters: from the first step or loaded state on."""
        return len(self.managed) > 0

    def set_up(self, also: Collection[Tensor] = ()) -> None:
        """Manage the trainable parameters of the groups, and the frozen ones in ``also``."""
        self.refuse_if_closed()
        with no_grad_no_inference():
            self.queue.wait_for_update()
            if not also and self.managed.covers(self.param_groups):
                return
            left = self.managed.state_of_removed(self.param_groups)
            if self.managed.set_up(self.param_groups, also):
                self.on_parameters_changed()
            for parameter, entries in left.items():  # as torch keeps it: the parameter may come back
                if parameter not in self.edits.unapplied:
                    self.edits.replace(parameter, entries)

    def on_parameters_changed(self) -> None:
        """Some of the managed parameters are new or have been replaced."""
        if self._host_weights is not None:
            self._host_weights.settle()  # the first norm compares some of them
        self._norms = Norms(
            self.managed,
            self.norm_type,
            self._overflow_everywhere,
            clip_layers=self.clip_layers,
            layer_by_layer=self.update_time.in_backward,
        )
        self.gradients.watch(self.param_groups, self.loss_scale)

    def on_loss_scale(self) -> None:
        """The loss scale is another one."""
        if self.loss_scale.is_identity:
            self.gradients.scaled.close()
        self.gradients.watch(self.param_groups, self.loss_scale)

    def start_over(self, backend: Store, host_weights: HostWeights | None) -> None:
        """Before the set-up: the groups have got other parameters, and state will live in ``backend``."""
        self.remove_hooks()
        self._host_weights = host_weights
        backend.take_residency_of(self.backend)
        self._build(backend, self.gradients.float32, self.managed.places)
        self.gradients.watch(self.param_groups, self.loss_scale)

    # -- readers and other threads

    @property
    def are_under_way(self) -> bool:
        """Whether updates are running, pending or begun."""
        return self.guard.is_busy or self.queue.pending or self.queue.started

    def parameters(self) -> Iterator[Tensor]:
        return (item.param for item in self.managed)

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """In the body, no other thread changes weights or state. Another thread gets in when no step has begun.

        Args:
            what: names the body in messages.

        Raises:
            RuntimeError: in a forked child; from a signal handler or hook in the middle of a step.
        """
        end = time.monotonic() + _LONGEST_GAP
        while True:
            with self.guard.reading(what):
                if not (self.guard.is_foreign and self.queue.started) or time.monotonic() > end:
                    self.guard.settle()
                    yield
                    self.guard.settle()
                    return
            time.sleep(0.001)

    # -- state

    def parameter_state(self, parameter: Tensor, kept_only: bool = False) -> dict[str, Any]:
        """Copies of the entries; ``kept_only``: what this process keeps, without communication, and not as copies."""
        self.refuse_if_closed()
        with self.reading("reading state"):
            self.settle_edits()
            return self.guard.work("reading state", self._parameter_state, parameter, kept_only)

    def read_state(self, parameter: Tensor) -> dict[str, Any]:
        """:meth:`parameter_state` without what the user has changed since the state was used last.

        Raises:
            RuntimeError: a step or a load has failed halfway, and no state has been loaded since.
        """
        self.refuse_unusable("Load a checkpoint before reading state")
        with self.reading("reading state"):
            return self.guard.work("reading state", self._parameter_state, parameter, False)

    def _parameter_state(self, parameter: Tensor, kept_only: bool) -> dict[str, Any]:
        item = self.managed.get(parameter)
        if item is None:
            return self.managed.initial_state(parameter)
        self.queue.wait_for_update()
        self.backend.synchronize()
        return self.managed.state_of(item, kept_only)

    def replace_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Replace the parameter's state; ``{}`` removes it."""
        with self.reading("loading state"):
            self.guard.work("loading state", self._replace_state, parameter, entries)
        self.broken.mark_loaded(parameter)

    def _replace_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        self.edits.release([parameter])
        if self.only_keeps_masters({parameter: entries}):
            self.managed.keep_initial_master(parameter, local_tensor(entries["master"]))
            return
        self.set_up(also=[parameter] if entries else ())
        item = self.managed.get(parameter)
        if item is None and not entries:
            return
        if item is None:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not among the optimizer's groups")
        self.managed.load_state(item, entries)

    def only_keeps_masters(self, states: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        """Whether state needs no set-up, before which the model may still be sharded: wrappers load such state back."""
        masters = all([*entries] == ["master"] for entries in states.values())
        return masters and not self.is_set_up and not any(map(self.managed.is_own_master, states))

    def refresh_masters(self) -> None:
        """Rebuild the masters from the weights."""
        if self.managed.refresh(self.param_groups):
            self.on_parameters_changed()
        self.broken.mark_masters_rebuilt()

    def weight_changes(self, dtypes: Mapping[Tensor, torch.dtype], least: float) -> Changes | None:
        """What has changed in weights since the last call, which had the same ``dtypes``. No update may be under way.

        ``None``: nobody knows, as there are no masters that others' writes would be found by, or no memory for bits.

        Args:
            dtypes: those of 2 bytes in which weights are compared, by parameter. Parameters are left out of which
                nobody knows.
            least: so many elements of local shards have to be known.
        """
        managed = ((self.managed.get(parameter), dtype) for parameter, dtype in dtypes.items())
        known = {item.param: dtype for item, dtype in managed if item is not None and _has_known_writers(item)}
        enough = sum(local_tensor(parameter).numel() for parameter in known) >= least
        units, changed = self.backend.units(), self.updater.changed if enough else None
        if enough and (changed is None or not changed.covers(units, known)):
            changed = self.updater.changed = self.managed.changed = None
            with contextlib.suppress(torch.OutOfMemoryError):
                changed = ChangedWeights(units, known)
        self.updater.changed = self.managed.changed = changed
        if changed is None:
            return None
        changed.mark(self.managed.find_written(item for item in self.managed if item.param in known))
        return changed.take()

    def release_device_memory(self) -> None:
        self.updater.stage.free()
        self.updater.shared.free()
        self.backend.release_device_memory()

    # -- state that the user has changed

    def apply_edits(self) -> None:
        """Bring what the user has changed in the state to where it lives.

        State that was assigned to a parameter which is in no group (yet) waits.

        Raises:
            ValueError: some of it cannot be a parameter's state. Nothing has been changed, and the edits are kept.
        """
        if not self.edits.unapplied:
            return
        listed, edits = self._listed_edits(), self.edits.take()
        try:
            self._apply_edits(listed)
        except BaseException:
            self.edits.put_back(edits)
            raise
        waiting = {p: edit for p, edit in edits.items() if p not in listed and edit.whole}
        self.edits.release(p for p, edit in waiting.items() if not edit.entries)  # deleted before it left its group
        self.edits.put_back({p: edit for p, edit in waiting.items() if edit.entries})

    def settle_edits(self) -> None:
        """:meth:`apply_edits` from outside of a step."""
        if self.queue.started:
            self._refuse_late_edits()
        if self.edits.unapplied:
            self.guard.work("changing state", self.apply_edits)

    def _apply_edits(self, edits: dict[Tensor, Edit]) -> None:
        if self.only_keeps_masters({parameter: edit.entries for parameter, edit in edits.items()}):
            for parameter, edit in edits.items():
                self.managed.keep_initial_master(parameter, local_tensor(plain(edit.entries["master"])))
            return
        self.set_up(also=[parameter for parameter, edit in edits.items() if edit.entries])
        pairs = [(item, edits[item.param]) for item in self.managed.lookup(edits)]
        for item, edit in pairs:
            self.managed.check_edit(item, {key: plain(value) for key, value in edit.entries.items()}, edit)
        for item, edit in pairs:
            entries = edit.applied_to(partial(self.managed.state_of, item))
            self.managed.load_state(item, {key: plain(value) for key, value in entries.items()})

    def _listed_edits(self) -> dict[Tensor, Edit]:
        """Those of parameters that are in a group: state of others waits until they are in one."""
        edits = self.edits.unapplied
        listed = [p for group in self.param_groups for p in group["params"]] if edits else ()
        return {parameter: edits[parameter] for parameter in listed if parameter in edits}

    def _edits_weights(self) -> bool:
        """Whether the next edits write to parameters, which are their own masters."""
        return any(self.managed.edits_weight(parameter, edit) for parameter, edit in self._listed_edits().items())

    def _refuse_late_edits(self) -> None:
        if self._listed_edits():
            self._drop_edits()
            raise RuntimeError(
                "optimizer.state was changed between backward() and step(), and backward has updated with the earlier "
                "state (optimizer_state.update: in_backward); the change has been dropped. Change the state after "
                "step() or before the last backward, or set update: at_step"
            )

    def _refuse_weight_edits(self) -> None:
        self._drop_edits()
        raise RuntimeError(
            "a master was assigned to optimizer.state, and its parameter is its own master: backward() would write to "
            "a weight that it needs (optimizer_state.update: in_backward); the changes of the state have been dropped. "
            "Write to the weights before the forward, load state with load_state_dict(), or set update: at_step"
        )

    def _drop_edits(self) -> None:
        listed = self._listed_edits()
        self.edits.put_back({p: edit for p, edit in self.edits.take().items() if p not in listed})

    # -- refusals

    def refuse_unusable(self, remedy: str) -> None:
        if self.closed or self.broken.reason is not None:
            self.refuse_if_closed()
            self.broken.refuse(remedy)

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise RuntimeError("this MixedPrecisionOptimizer is closed: its state is gone; make a new optimizer")

    def refuse_unfinished(self) -> None:
        if self.queue.started:
            raise RuntimeError(
                "backward() has begun to update the weights (optimizer_state.update: in_backward), and what would be "
                "saved now belongs to no step. Call step() first"
            )

    def _check_in_backward_settings(self) -> None:
        if not self.update_time.in_backward:
            return
        if self.max_norm is not None and not self.clip_layers:
            raise ValueError("updates in backward have no global norm: set clip_layers, or leave max_norm out")
        if not isinstance(self.loss_scale, ConstantLossScale):
            raise ValueError("updates in backward cannot skip a whole step: a constant loss scale is needed")

    # -- the end of a failed step, and of all

    def drop_broken_step(self) -> None:
        """All state is about to be loaded: drop what is under way of a step that has failed, or is about to fail.

        The step is marked as broken before its job has failed in the lane, and ``step()`` may have refused meanwhile:
        nobody has waited for that job yet. An update that fails now is as good as one that has failed before.
        """
        try:
            self.queue.wait_outside_step()
        except Exception as error:
            if not self.broken:
                raise
            logger.warning("a load of state drops an update that has failed: %s", error_text(error))
        if self.broken:
            self.guard.work("a load of state", self.queue.reset)

    def abandon_updates(self, what: str, error: BaseException) -> None:
        """Something that updates need has failed: drop all that are under way, until state has been loaded."""
        self.broken.mark_failed(what, error)
        self.drop_broken_step()

    def remove_hooks(self) -> None:
        self.gradients.close()
        self.queue.close()

    def close(self) -> None:
        """Complete pending updates, remove the hooks from the parameters, and free all memory."""
        self.guard.check("close()")
        try:
            self.guard.work("close()", self._finish)
        finally:
            self.backend.close()
            self.classes.close()

    def _finish(self) -> None:
        try:
            self.queue.wait_for_update()
        finally:
            self.closed = True
            self.remove_hooks()

    def __del__(self) -> None:
        """The pending updates reach the weights before the optimizer is gone."""
        if not getattr(self, "closed", True):
            self.shut_down()

    def shut_down(self, on_done: Callable[[], object] = bool) -> None:
        """The optimizer is gone: complete pending updates, then call ``on_done``."""
        if sys.is_finalizing() or self.guard.is_forked:
            return
        if self.backend.is_lane_thread:  # the garbage collector runs in any thread
            threading.Thread(target=self._shut_down, args=(on_done,), name="lightstep-end").start()
        else:
            self._shut_down(on_done)

    def _shut_down(self, on_done: Callable[[], object]) -> None:
        uninterrupted(self._finish_or_warn)
        on_done()

    def _finish_or_warn(self) -> None:
        try:
            self.guard.work("close()", self._finish)
            self.backend.synchronize()  # other streams may still use memory that is freed now
        except Exception as error:
            logger.warning("the last update of a deleted optimizer failed: %s", error_text(error))


def _has_known_writers(item: Managed) -> bool:
    """Whether all writes to the weight are updates here, or are found: its master must follow others."""
    return not item.own_master and not item.is_remote and item.home is None
