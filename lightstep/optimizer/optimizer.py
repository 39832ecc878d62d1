"""The engine as a ``torch.optim.Optimizer``: torch's interface, and nothing else."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightstep.clipping import check_max_norm, check_norm_type
from lightstep.error_text import value_text
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.engine import Engine
from lightstep.optimizer.managed_parameters import InitialMasters, Places
from lightstep.optimizer.moments import Moments
from lightstep.optimizer.param_groups import Place, plain_numbers
from lightstep.optimizer.queue import AT_STEP, UpdateTime
from lightstep.optimizer.rounded_weights import MasterWeights
from lightstep.optimizer.serialization import check_complete, load_torch_state_dict, prepare_to_load, snapshot
from lightstep.optimizer.state_view import StateView
from lightstep.optimizer.step_guard import eager
from lightstep.optimizer.update import StepResult
from lightstep.precision.loss_scale import ConstantLossScale, LossScale
from lightstep.precision.split import Splitter
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_weights import HostWeights
from lightstep.state.schema import Managed
from lightstep.state.snapshot import Snapshot
from lightstep.state.store import Store


def _of_engine(name: str, check: Callable[[Any], Any] | None = None, fixed: bool = False) -> Any:
    """An attribute of the optimizer that is stored in its engine.

    Lightning Fabric wraps an optimizer in an object that runs the optimizer's methods with itself as ``self``. Both
    have the same engine.

    Args:
        check: returns the value to store, or raises.
        fixed: it cannot change after the set-up.
    """

    def store(optimizer: MixedPrecisionOptimizer, value: Any) -> None:
        if fixed and optimizer.engine.is_set_up:
            raise AttributeError(
                f"{name} is {getattr(optimizer.engine, name)!r} and cannot change once the optimizer has been set up; "
                "to continue with another value, make a new optimizer and load this one's state_dict()"
            )
        setattr(optimizer.engine, name, value if check is None else check(value))

    return property(operator.attrgetter(f"engine.{name}"), store)


def _check_loss_scale(value: Any) -> LossScale:
    if not isinstance(value, LossScale):
        raise TypeError(
            f"loss_scale is {value_text(value)}; a lightstep.LossScale is needed, for example "
            "lightstep.DynamicLossScale()"
        )
    return value


def _check_max_norm(given: Any) -> float | None:
    return None if given is None else check_max_norm(given)


class MixedPrecisionOptimizer(BaseOptimizer):
    """Any element-wise torch optimizer, run on fp32 masters of low-precision parameters.

    Usually made by ``strategy.create_optimizer``. Set-up is lazy: nothing is allocated, and the parameters may still be
    moved, cast, sharded or replaced, until the first ``step()`` or ``load_state_dict()``. When it is deleted, pending
    updates are completed, and its memory and hooks are freed at once.

    Args:
        params: parameters or group dictionaries, as for any torch optimizer.
        optimizer_class: the class whose arithmetic updates the masters.
        hyperparameters: its keyword arguments; with neither ``fused`` nor ``foreach`` it runs fused if torch can.
        master_weights: keep fp32 masters for bf16 and fp16 parameters, in ``state[p]["master"]``; ``"stochastic"``:
            keep none, and round bf16 weights stochastically after each update.
        reduce_float32: add micro-batches' gradients in fp32, not in the parameters' dtype.
        loss_scale: ``None`` is no scaling.
        max_norm: global norm to clip to; ``None`` is off.
        norm_type: p of the norm; ``math.inf`` is the largest element.
        clip_layers: clip each layer by its own norm, not all gradients by the global one.
        backend: where masters and state live; ``None`` is on the device.
        places: called at set-up for the name and layer of each parameter.
        overflow_everywhere: whether all ranks of the process group skip a step together; ``None``: if any parameter is
            a DTensor.
        update_time: when updates run.
        initial_masters: called at set-up with each 16-bit parameter; returns the fp32 values that its local shard was
            rounded from, or ``None``. The master starts from them, unless the weight has changed since. With
            ``keep=True`` (state is saved before the set-up) it must return them again later.
        moments: the dtype in which moments are kept between updates; ``None``: fp32, as the class has them.
        host_weights: the model's weights that rest on the host.
        rounding_seed: of the noise for stochastic rounding of moments and weights, from 0 to 2^32 - 1.

    Raises:
        TypeError: ``optimizer_class`` is not a usable optimizer class.
        ValueError: ``max_norm``, ``norm_type`` or ``rounding_seed`` is out of range; or the class refuses its
            hyper-parameters, or torch the groups.
    """

    max_norm = _of_engine("max_norm", _check_max_norm)
    norm_type = _of_engine("norm_type", check_norm_type, fixed=True)
    clip_layers = _of_engine("clip_layers", bool, fixed=True)
    master_weights = _of_engine("master_weights")
    accumulating = _of_engine("accumulating")
    unreduced = _of_engine("unreduced")
    gradients = _of_engine("gradients")
    is_set_up = _of_engine("is_set_up")
    param_groups = _of_engine("param_groups")
    _packing = False  # state_dict() is reading the state

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        hyperparameters: Mapping[str, Any] | None = None,
        *,
        master_weights: MasterWeights = True,
        reduce_float32: bool = True,
        loss_scale: LossScale | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_layers: bool = False,
        backend: Store | None = None,
        places: Places | None = None,
        overflow_everywhere: bool | None = None,
        update_time: UpdateTime = AT_STEP,
        initial_masters: InitialMasters | None = None,
        moments: Moments | None = None,
        host_weights: HostWeights | None = None,
        rounding_seed: int = 0,
    ) -> None:
        classes = GroupClasses(optimizer_class, dict(hyperparameters or {}))
        self.engine = Engine(
            classes,
            master_weights=master_weights,
            reduce_float32=reduce_float32,
            loss_scale=_check_loss_scale(loss_scale or ConstantLossScale(1.0)),
            max_norm=_check_max_norm(max_norm),
            norm_type=check_norm_type(norm_type),
            clip_layers=bool(clip_layers),
            backend=backend or Store(Splitter, home="device"),
            places=places,
            overflow_everywhere=overflow_everywhere,
            update_time=update_time,
            initial_masters=initial_masters,
            moments=moments,
            host_weights=host_weights,
            rounding_seed=rounding_seed,
        )
        super().__init__(params, dict(classes.own.defaults))
        classes.own_is_used = any(group.get("optimizer_class") is None for group in self.param_groups)
        classes.inspect_groups(self.param_groups)
        self.engine.gradients.watch(self.param_groups, self.engine.loss_scale)

    @property
    def loss_scale(self) -> LossScale:
        return self.engine.loss_scale

    @loss_scale.setter
    def loss_scale(self, given: LossScale) -> None:
        self.engine.loss_scale = _check_loss_scale(given)
        self.engine.on_loss_scale()

    @property
    def _backend(self) -> Store:
        return self.engine.backend

    def check_shapes(self, names: Mapping[Tensor, str]) -> None:
        """Check that the groups' classes take the shapes of their parameters; the set-up does that, too.

        Raises:
            ValueError: one of them refuses a parameter, or a lazy module's has no shape yet. The error names it as
                ``names`` does.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if is_lazy(parameter):
                    raise ValueError(
                        f"{names[parameter]} has no shape yet, because its module is lazy: run one forward "
                        "of the model before the optimizer is created"
                    )
                if parameter.requires_grad:
                    self.engine.classes.arithmetic_for(group).check_shape(names[parameter], parameter.shape)

    def forget_parameters(self) -> None:
        """Before the set-up: remove all parameters from ``param_groups``, until others are put there."""
        for group in self.param_groups:
            group["params"] = []
        self.engine.gradients.watch(self.param_groups, self.engine.loss_scale)

    def start_over(self, backend: Store, host_weights: HostWeights | None = None) -> None:
        """Before the set-up: ``param_groups`` have got other parameters, and state will live in ``backend``.

        Args:
            host_weights: the model's weights, if they rest on the host now.

        Raises:
            RuntimeError: the optimizer has been set up.
        """
        if self.is_set_up:
            raise RuntimeError(
                f"this {type(self).__name__} has been set up for the parameters it had; shard the model before the "
                "first step and before state is loaded"
            )
        self.engine.start_over(backend, host_weights)

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
        has_state = any(item.updated for item in self.engine.managed.by_parameter.values())
        return self.engine.step(closure, init_state=not has_state and _is_state_initialization())

    @eager
    def grad_norm(self) -> Tensor:
        """The norm that the next ``step()`` will report: 0-dim fp32, unscaled, before clipping.

        It is measured once. The optimizer owns the gradients from here on: call ``step()`` or ``zero_grad()`` next.

        Raises:
            RuntimeError: layers are updated in backward, and their gradients have been freed.
        """
        return self.engine.grad_norm()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have reached the optimizer, the fp32 sums too.

        Gradients that micro-batches under ``strategy.accumulate(last=False)`` left inside FSDP2 cannot be reached
        before they are reduced: to drop a started accumulation, run one more micro-batch with ``last=True`` first.

        Args:
            set_to_none: if false, every parameter that had a gradient in the last step gets zeros. The next step takes
                zeros as a gradient, as torch does: it decays the weight, and its momentum moves it.
        """
        self.engine.zero_gradients(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        own = self.defaults
        if isinstance(param_group, dict):  # torch refuses anything else
            param_group.update(plain_numbers(param_group))
            self.defaults = self.engine.classes.defaults_for(param_group)
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = own
        self.engine.gradients.watch(self.param_groups, self.engine.loss_scale)

    # -- deferred updates

    @contextmanager
    def between_steps(self, what: str = "reading weights and state") -> Iterator[None]:
        with self.engine.reading(what):
            self.wait_for_update()
            yield

    @eager
    def wait_for_update(self, parameters: Iterable[Tensor] | None = None) -> None:
        if self.engine.queue.may_be_pending:
            self.engine.queue.wait_outside_step(None if parameters is None else self.engine.managed.lookup(parameters))

    @eager
    def wait_for_step(self) -> None:
        self.engine.queue.wait_outside_step(decided=True)

    @property
    def has_deferred_updates(self) -> bool:
        return self.engine.queue.may_be_pending

    def add_update_listener(self, listener: Callable[[], object]) -> None:
        self.engine.update_listeners.append(listener)

    @eager
    def wait_on_stream(self, parameters: Iterable[Tensor]) -> None:
        if self.engine.queue.may_be_ahead:
            self.engine.queue.wait_on_stream_outside_step(self.engine.managed.lookup(parameters))

    @contextmanager
    def _after_whole_steps(self, call: str) -> Iterator[None]:
        """In the body, which is in ``call``, no update is under way, and none has failed."""
        with self.engine.reading(call):
            self.engine.broken.refuse(f"Load a checkpoint before {call}")
            self.wait_for_update()
            yield

    def synchronize(self) -> None:
        with self._after_whole_steps("synchronize()"):
            self._backend.synchronize()
            for device in self.engine.managed.devices:
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)

    # -- memory

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        is_number = isinstance(gib, (int, float)) and not isinstance(gib, bool)
        if gib != "auto" and not (is_number and 0 <= gib < math.inf):
            raise ValueError(f"set_residency({gib!r}): a number of GiB of at least 0 is needed, or 'auto'")
        self.engine.refuse_if_closed()
        with self._after_whole_steps("set_residency()"):
            self.engine.guard.work("set_residency()", self._backend.set_residency, gib)

    def release_device_memory(self) -> None:
        self.engine.refuse_if_closed()
        with self._after_whole_steps("release_device_memory()"):
            self.synchronize()
            self.engine.guard.work("release_device_memory()", self.engine.release_device_memory)
        if any(device.type != "cpu" for device in self.engine.managed.devices):
            torch.accelerator.memory.empty_cache()

    def refresh_master_weights(self) -> None:
        with self.engine.reading("refresh_master_weights()"):
            if self.engine.broken.needs_state:
                self.engine.broken.refuse("Load a checkpoint before refresh_master_weights()")
            self.wait_for_update()
            self.engine.settle_edits()
            self.engine.guard.work("refresh_master_weights()", self.engine.refresh_masters)

    def memory_report(self) -> dict[str, float]:
        if self.engine.guard.is_busy_here:  # sizes are known in the middle of a step, too
            return self._memory_report()
        with self.engine.reading("memory_report()"):
            return self._memory_report()

    def _memory_report(self) -> dict[str, float]:
        parameters = sum(item.local.numel() for item in self.engine.managed)
        stage = self.engine.updater.stage.nbytes()
        report: dict[str, float] = {**self._backend.memory(), "gradient_stage_bytes": stage}
        report["exchange_bytes"] = self.engine.updater.shared.nbytes()
        report["saving_bytes"] = self.engine.managed.saving_bytes()
        changed = self.engine.managed.changed
        report["delta_bytes"] = 0 if changed is None else changed.nbytes
        report["parameters"] = parameters
        for place in ("device", "host"):
            report[f"{place}_bytes_per_parameter"] = report[f"{place}_bytes"] / max(parameters, 1)
        return report

    # -- state

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """Parameter → entries of the base optimizer, and ``"master"``; assigning a mapping replaces all state."""
        if self._packing:
            updated = [item.param for item in self.engine.managed if item.updated]
            return {parameter: self.engine.parameter_state(parameter) for parameter in updated}
        return StateView(self.engine)

    @state.setter
    def state(self, entries: Mapping[Tensor, Mapping[str, Any]]) -> None:
        view = StateView(self.engine)
        with self.engine.reading("loading state"):
            for parameter in dict.fromkeys([*view, *filter(torch.is_tensor, entries)]):
                view[parameter] = dict(entries.get(parameter, {}))

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class whose arithmetic updates the masters, unless a group names another one."""
        return self.engine.classes.own.optimizer_class

    @property
    def has_whole_tensors(self) -> bool:
        """Whether a class of its groups is not element-wise: state may have another shape than its parameter."""
        return self.engine.classes.whole_tensors

    def managed(self) -> list[Managed]:
        """The records of the trainable parameters, in group order; sets the optimizer up if necessary."""
        self.engine.guard.work("setting up the optimizer", self.engine.set_up)
        return list(self.engine.managed)

    def prepare_to_load(self, entries: Mapping[Tensor, Collection[str]], settings: Sequence[Mapping[str, Any]]) -> None:
        """Set the optimizer up, if necessary, for state that will be loaded.

        Args:
            entries: the names of its entries, by parameter; frozen ones of the groups may be among them.
            settings: the hyper-parameters that will be loaded into each group: which entries there are depends on them.

        Raises:
            ValueError: a parameter cannot have these entries under these settings. Nothing has been loaded.
        """
        prepare_to_load(self.engine, entries, settings)

    def check_complete(
        self, entries: Mapping[Tensor, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """After :meth:`prepare_to_load`: check that the class can go on from these entries.

        Args:
            entries: by parameter; in the place of tensors with dimensions, meta tensors.

        Raises:
            ValueError: some are missing. Nothing has been loaded.
        """
        check_complete(self.engine, entries, settings)

    def parameter_state(self, parameter: Tensor) -> dict[str, Any]:
        """Copies of ``state[parameter]``; DTensors for a DTensor; ``{}`` without state.

        If replicas share the work, all of them call this, and those that do not keep the state get a copy.
        """
        return self.engine.parameter_state(parameter)

    def kept_state(self, parameter: Tensor) -> dict[str, Any]:
        """:meth:`parameter_state` without communication: ``{}`` if another replica keeps the state. Not copies, where
        the state itself can be returned."""
        return self.engine.parameter_state(parameter, kept_only=True)

    def described_state(self, parameter: Tensor) -> dict[str, Any]:
        """:meth:`kept_state` without data: meta tensors of the local shapes and dtypes, and plain values."""
        self.engine.refuse_if_closed()
        with self.engine.reading("reading state"):
            self.engine.settle_edits()
            item = self.engine.managed.get(parameter)
            return self.engine.managed.initial_state(parameter) if item is None else self._backend.describe(item)

    def pinned_state(
        self,
        wanted: Mapping[Tensor, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None = None,
    ) -> Snapshot | None:
        """A snapshot of state entries, for another thread to read while steps go on.

        Call :meth:`synchronize` first. Entries that are not in the snapshot have to be read by other means.

        Args:
            wanted: names of entries by parameter.
            weight_of: returns, for a parameter, a function that returns its local weight of now, on the host.
            copies: host memory for copies; ``None``: there are no steps until the snapshot is closed.
        """
        self.engine.settle_edits()
        return self.engine.guard.work("saving state", self.engine.managed.pin, wanted, weight_of, copies)

    def keeps_state(self, parameter: Tensor) -> bool:
        """Whether this process keeps the parameter's state, and no other replica; sets up if necessary."""
        if parameter.requires_grad:
            self.managed()
        item = self.engine.managed.get(parameter)
        return item is None or not item.is_remote

    def load_parameter_state(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Replace one parameter's state; ``{}`` removes it. Shards must be placed like the parameter.

        If replicas share the work, all of them call this. A replica that does not keep the parameter's state
        (:meth:`keeps_state`) uses only the names of the entries.

        Raises:
            ValueError: an entry has another shape than the parameter's local shard, or the parameter is in no group.
        """
        self.engine.replace_state(parameter, entries)

    def expect_reduction(self) -> None:
        self.engine.expect_reduction()

    def expect_unreduced(self) -> None:
        self.engine.expect_unreduced()

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have arrived on this rank that no step has used."""
        arrived = (p.grad is not None for group in self.param_groups for p in group["params"])
        return self.engine.unreduced or any(arrived)

    @property
    def half_updated(self) -> bool:
        """Whether a step or a load has failed halfway and no checkpoint has been loaded since."""
        return bool(self.engine.broken)

    @property
    def needs_state(self) -> bool:
        """Whether it is half updated, and weights with masters made of them would not repair it."""
        return self.engine.broken.needs_state

    def refuse_half_updated(self, remedy: str) -> None:
        """Raise if a step has failed halfway and no checkpoint has been loaded since, or if a step is under way.

        Raises:
            RuntimeError: with what failed, and ``remedy``; or that ``step()`` has to be called first.
        """
        self.engine.broken.refuse(remedy)
        self.engine.refuse_unfinished()

    def refuse_until_loaded(self, reason: str, weights_only: bool = False) -> None:
        """Make ``step()``, ``backward()`` with updates, and saving raise until all state has been loaded.

        For a load that failed after it had changed something.

        Args:
            reason: what happened, as the beginning of a sentence: ``"loading runs/a/step-100 failed (...)"``.
            weights_only: only weights were being loaded: loading them and ``refresh_master_weights()`` suffices.
        """
        self.engine.broken.mark(reason, weights_only)

    @eager
    def state_dict(self) -> dict[str, Any]:
        """torch's layout: ``state`` by index, ``param_groups``, and ``loss_scale``; a snapshot.

        Complete on every rank. If replicas share the work (``optimizer_state.backend: stream`` under DDP and HSDP) all
        of them call this, and each then has all the state in memory; ``strategy.save_checkpoint`` does not need that.

        Raises:
            RuntimeError: a step or a load has failed halfway, and no state has been loaded since.
        """
        self.engine.refuse_if_closed()
        with self.engine.reading("state_dict()"):
            self.refuse_half_updated("Load a checkpoint before saving one")
            self.wait_for_update()
            self.engine.settle_edits()
            self._packing = True
            try:
                packed = super().state_dict()
            finally:
                self._packing = False
            return self._state_dict(packed)

    def _state_dict(self, packed: dict[str, Any]) -> dict[str, Any]:
        packed.setdefault("loss_scale", self.loss_scale.state_dict())
        packed["param_groups"] = [plain_numbers(group) for group in packed["param_groups"]]
        indices = [index for group in packed["param_groups"] for index in group["params"]]
        masters = {index: self._initial_state(p) for index, p in zip(indices, self._parameters(), strict=True)}
        states = {**masters, **packed["state"]}
        state = {index: dict(own) for index, own in states.items() if own}  # copies already
        return {**snapshot({key: value for key, value in packed.items() if key != "state"}), "state": state}

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _initial_state(self, parameter: Tensor) -> dict[str, Any]:
        """``{"master": ...}`` for a parameter without state whose master does not start from its weight."""
        return {} if parameter in self.state else self.engine.parameter_state(parameter)

    @eager
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, or from the state dict of the plain torch optimizer.

        Raises:
            ValueError: groups or shapes do not match; nothing has been changed then.
        """
        with self.engine.reading("load_state_dict()"):
            self.engine.drop_broken_step()
            load_torch_state_dict(self, self.engine, state_dict)

    def __repr__(self) -> str:
        name = type(self).__name__
        return super().__repr__().replace(name, f"{name}[{self.engine.classes.name}]", 1)

    def close(self) -> None:
        """Free the memory of the state backend and remove the hooks from the parameters."""
        self.engine.close()

    def __getstate__(self) -> dict[str, Any]:
        with self.engine.reading("copying or pickling the optimizer"):
            self.refuse_half_updated("Load a checkpoint before copying the optimizer")
            self.wait_for_update()
            return self._copied_state()

    def _copied_state(self) -> dict[str, Any]:
        engine = self.engine
        mine = set(self._parameters())
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "state": {p: engine.parameter_state(p) for p in self._parameters()},
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
            classes.add_class(optimizer_class, hyperparameters)
        # A copy updates in step(): no strategy makes forwards wait for it.
        self.engine = Engine(classes, **state.pop("engine"), places=lambda: known, update_time=AT_STEP)
        self.param_groups = state.pop("param_groups")
        super().__setstate__(state)
        self.engine.gradients.watch(self.param_groups, self.engine.loss_scale)
        for parameter, values in entries.items():
            if values:
                self.load_parameter_state(parameter, values)


def _is_state_initialization() -> bool:
    """Whether ``torch.distributed.checkpoint`` calls ``step()`` to make state, with zero gradients and ``lr`` 0.

    A user's own step may look just like that (warm-up from 0, advantages that are all zero) and must count. So the
    caller is looked for among the frames: ``_init_optim_state``, which restores the groups after the step.
    """

    frame: Any = sys._getframe(1)
    for _ in range(20):  # wrappers of hooks, schedulers, accelerate and Fabric come between
        if frame is None:
            return False
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False
