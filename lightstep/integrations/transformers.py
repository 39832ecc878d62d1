"""transformers' ``Trainer`` (5.13 or later) with lightstep's optimizer, precision, clipping and sharding.

:class:`LightstepTrainer` is the Trainer with the argument ``strategy``. :class:`LightstepMixin` adds it to any class
made from the Trainer: ``class MyTrainer(LightstepMixin, SFTTrainer)``.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from lightstep.extras import needs

with needs("train"):
    from tqdm.auto import tqdm
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

from lightstep.clipping import clip_coefficient, global_grad_norm
from lightstep.config import ConfigError
from lightstep.config_errors import suggest
from lightstep.distributed import like, local_gradient, local_tensor
from lightstep.integrations.accelerate import LightstepOptimizer, connect
from lightstep.integrations.checks import (
    check_arguments,
    check_asynchronous_saves,
    check_gradients_are_kept,
    check_groups,
    check_made_by_strategy,
    check_optimizer_class,
    is_max_norm_chosen,
    max_norm,
    unwrap_optimizer,
)
from lightstep.integrations.trainer_checkpoints import TrainerCheckpoints
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.rules import Rule
from lightstep.optimizer.update import StepResult
from lightstep.optimizer_class import optimizer_class
from lightstep.plan.memory import state_of
from lightstep.plan.planning import plan_one
from lightstep.plan.report import measured_sentence, planned_sentence
from lightstep.precision.gradient_sums import set_grad
from lightstep.presets import read_mapping
from lightstep.sharding.fsdp_groups import sharded_modules
from lightstep.sharding.model_names import unwrap_model
from lightstep.strategy import Strategy

__all__ = ["LightstepMixin", "LightstepTrainer"]

logger = logging.getLogger(__name__)


class SynchronizedCallbackHandler(CallbackHandler):
    """Waits for deferred updates before a callback runs, which may have kept parameters since training began (EMA).

    transformers' own callbacks read no weights and no gradients. If there are no others, nothing waits. If another one
    defines an event around the step, it gets the clipped gradients. TRL's reference models can follow weights on the
    host.
    """

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        optimizer = self.optimizer
        if not isinstance(optimizer, LightstepOptimizer):
            return super().call_event(event, args, state, control, **kwargs)
        if self._others(event):
            wait_for_weights(optimizer)
        if event == "on_train_begin":
            for callback in [callback for callback in self.callbacks if hasattr(callback, "sync_target_model")]:
                if optimizer.optimizer.engine.host_gradients is not None:
                    callback.sync_target_model = follow_weights_on_the_host
        if event in ("on_train_begin", "on_pre_optimizer_step"):
            readers = self._others("on_pre_optimizer_step", "on_optimizer_step")
            check_gradients_are_kept(optimizer.optimizer, readers)
            if readers and event == "on_pre_optimizer_step":
                optimizer.clipped = ClippedGradients(optimizer.optimizer, self.model.parameters())
        if event == "on_optimizer_step" and optimizer.clipped is not None:
            optimizer.clipped.restore()
            optimizer.clipped = None
        return super().call_event(event, args, state, control, **kwargs)

    def _others(self, *events: str) -> list[str]:
        """The classes of callbacks that define one of the events and are not transformers' own."""
        return [type(callback).__name__ for callback in self.callbacks if any(_is_other(callback, e) for e in events)]


def wait_for_weights(optimizer: LightstepOptimizer) -> None:
    """Callbacks may read and write parameters that they hold: weights on the host are complete, and read again."""
    if optimizer.optimizer.engine.host_gradients is None:
        optimizer.wait_for_update()
    else:
        optimizer.synchronize()


@torch.no_grad()
def follow_weights_on_the_host(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """``SyncRefModelCallback.sync_target_model`` of TRL, which expects both models on one device."""
    for target, weight in zip(target_model.parameters(), model.parameters(), strict=True):
        own = local_tensor(target.data)
        own.mul_(1.0 - alpha).add_(local_tensor(weight.data).to(own.device), alpha=alpha)


def _is_other(callback: Any, event: str) -> bool:
    return not str(getattr(callback, event).__module__).startswith("transformers.")


class LightstepMixin(TrainerCheckpoints):
    """Put in front of a class made from ``transformers.Trainer``, it trains under a strategy.

    Args:
        strategy: a :class:`lightstep.Strategy`, or what ``Strategy.load`` takes: a name, a path, a mapping.
        rules: which optimizer class and hyper-parameters each parameter gets: :class:`lightstep.Rule` objects, or
            mappings or a YAML file as in ``lightstep train``. ``optim_args="rules=FILE"`` names such a file too. What
            a rule leaves out is the Trainer's.
        asynchronous_saves: train on while a checkpoint is written. ``checkpoint-N`` appears when it is whole.

    Raises:
        ConfigError: ``args`` contradict the strategy, the rules or ``asynchronous_saves``; the rules cannot be used.
        TypeError: ``optimizers`` holds another library's optimizer.
    """

    optimizer_cls_and_kwargs: Any
    rules: Sequence[Rule | Mapping[str, Any]] | None = None
    _step_report: StepReport

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | str | Path | Mapping[str, Any],
        rules: GivenRules | None = None,
        asynchronous_saves: bool = False,
        **kwargs: Any,
    ) -> None:
        self.strategy = strategy if isinstance(strategy, Strategy) else Strategy.load(strategy)
        self.asynchronous_saves = asynchronous_saves
        super().__init__(*args, **kwargs)
        if asynchronous_saves:
            check_asynchronous_saves(self.args)
        self.rules = read_rules(rules, self.args)
        if self.rules is not None and self.optimizer is not None:
            raise ConfigError("rules and optimizers=(optimizer, ...) both choose the optimizer; leave one out")
        self.callback_handler.__class__ = SynchronizedCallbackHandler
        if self.optimizer is not None:
            self._check_and_configure(self.optimizer)

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args, self.strategy)
        super().create_accelerator_and_postprocess()
        connect(self.accelerator, self.strategy).trainer = weakref.ref(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Cast the model to the strategy's dtype, and move it, unless it is to be sharded or rests on the host."""
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"{self.strategy.name}: the model is already wrapped in DistributedDataParallel; pass model.module, "
                "which the strategy wraps"
            )
        self.strategy.cast_parameters(model)
        config = self.strategy.config
        if config.sharding.kind != "fsdp2" and config.weights.placement == "device":
            super()._move_model_to_device(model, device)

    # -- the optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create what the rules say, or an optimizer of the Trainer's class and groups, by the strategy."""
        if self.optimizer is not None:
            return self.optimizer
        trained = self.model if model is None else model
        for module in sharded_modules(trained):  # an evaluation has left the root's weights gathered
            cast(FSDPModule, module).reshard()
        given = self.optimizer_cls_and_kwargs
        args = copy.copy(self.args)
        _, args.optim_args = split_optim_args(args.optim_args)
        chosen, values = given or self.get_optimizer_cls_and_kwargs(args, trained)
        check_optimizer_class(chosen, values, None if given else args.optim)
        check_groups(trained, getattr(self, "loss", None), values)
        if self.rules is not None:
            values = {key: value for key, value in values.items() if key not in ("params", "optimizer_dict")}
            rules = make_rules(self.rules, chosen, values, args)
            self.optimizer = self.strategy.create_optimizer(trained, rules=rules)
            self.optimizer.defaults["lr"] = args.learning_rate  # what min_lr and lr_end of schedules are relative to
            self._check_and_configure(self.optimizer)
            return self.optimizer

        def create(_: type, groups: Any, **hyperparameters: Any) -> BaseOptimizer:
            return self.strategy.create_optimizer(trained, chosen, param_groups=groups, **hyperparameters)

        # The Trainer calls a class, and checks that it is one, with its groups.
        placeholder = type(chosen.__name__, (torch.optim.Optimizer,), {"__new__": create})
        self.optimizer_cls_and_kwargs = (placeholder, values)
        try:
            super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given
        optimizer = cast(torch.optim.Optimizer, self.optimizer)
        self._check_and_configure(optimizer)
        return optimizer

    def _check_and_configure(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the strategy created it for this model, and apply ``max_grad_norm``."""
        inner: Any = unwrap_optimizer(optimizer)
        check_made_by_strategy(self.strategy, inner, self.model)
        if is_max_norm_chosen(self.args):
            inner.max_norm = max_norm(self.args.max_grad_norm)

    @property
    def _last_result(self) -> StepResult | None:
        """The result of the last step; ``None`` before the first."""
        return self.optimizer.result if isinstance(self.optimizer, LightstepOptimizer) else None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._step_report = StepReport(self.strategy, self.args)
        if isinstance(self.model, FSDPModule) and hasattr(self.model, "generate"):
            _gather_for_generate(self.model, self.strategy)
        return prepared

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, which ``auto_find_batch_size`` calls again after an error that tells of too little memory.

        Raises:
            RuntimeError: weights are half updated, so that a smaller batch does not help.
        """
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except RuntimeError as error:
            again = self.args.auto_find_batch_size and kwargs.get("resume_from_checkpoint") is None
            if again and self.optimizer is not None and self.optimizer.half_updated:
                raise RuntimeError(
                    "auto_find_batch_size tries no smaller batch: an update has failed halfway, and weights and state "
                    "may be half updated. Start again, or with resume_from_checkpoint, and set a smaller "
                    "per_device_train_batch_size"
                ) from error
            raise

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._step_report.on_batch(model, inputs, self._lightstep_optimizer)
        return super().training_step(model, inputs, *args, **kwargs)

    # -- clipping and logs

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the step clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return nothing: the step computes the norm."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        result = self._last_result
        self._step_report.end_step(self.state.global_step)
        super()._maybe_log_save_evaluate(tr_loss, None if result is None else result.grad_norm, *args, **kwargs)
        self._step_report.begin_step()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        result = self._last_result
        if result is not None and "grad_norm" in logs:
            logs["loss_scale"] = result.loss_scale
        super().log(logs, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for deferred updates and the pending save: callbacks and the caller may read weights and folders."""
        self._lightstep_optimizer.synchronize()
        self._finish_save()
        self._step_report.print_measured()
        return super()._finalize_training(*args, **kwargs)


def _gather_for_generate(model: Any, strategy: Strategy) -> None:
    """Make ``generate``, which may call a part of the model (an encoder), gather weights as ``forward`` does."""
    model.generate = type(model).generate.__get__(model)
    register_fsdp_forward_method(model, "generate")
    gathered = model.generate

    @functools.wraps(gathered)
    def generate(*args: Any, **kwargs: Any) -> Any:
        strategy.unwrap_model(model)  # waits for deferred updates: FSDP2 gathers before it calls any module
        return gathered(*args, **kwargs)

    model.generate = generate


class LightstepTrainer(LightstepMixin, Trainer):
    """``transformers.Trainer`` under a lightstep strategy: ``LightstepTrainer(model, args, strategy="stream", ...)``.

    ``strategy``, ``rules`` and ``asynchronous_saves`` are those of :class:`LightstepMixin`; the other arguments are the
    Trainer's.
    """


# -- gradients for callbacks that read or change them ---------------------------------------------------------------
#
# The Trainer clips before on_pre_optimizer_step, and drops gradients after on_optimizer_step. A lightstep step clips by
# itself and consumes the gradients. So where a callback defines one of these events, and only there, gradients are
# clipped in p.grad before the step, in fp32 and unscaled, and the step clips nothing.


class ClippedGradients:
    """The gradients of one step, clipped in ``p.grad``, unscaled, in fp32.

    A norm that is not finite makes them NaN, and the step is skipped as it would be without this.

    Args:
        optimizer: its gradients are complete.
        parameters: the model's, in its order; those that are not in the optimizer do not count.

    Attributes:
        norm: the norm of all gradients, unscaled and before clipping; 0-dim fp32.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer, parameters: Iterable[Tensor]) -> None:
        self._optimizer, self._scale = optimizer, optimizer.loss_scale
        own = {p for group in optimizer.param_groups for p in group["params"]}
        self._parameters = [p for p in parameters if p in own]
        self._kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            if not self._scale.is_identity:
                self._multiply(self._scale.tensor().reciprocal())
            self.norm = global_grad_norm(self._parameters, optimizer.norm_type)
            if optimizer.max_norm is not None:
                coefficient = clip_coefficient(self.norm, optimizer.max_norm)
                self._multiply(coefficient.where(self.norm.isfinite(), torch.nan))

    def _multiply(self, factor: Tensor) -> None:
        """Multiply each ``p.grad`` in fp32, in place if it is fp32."""
        for parameter in self._parameters:
            gradient = local_gradient(parameter, torch.float32)
            if gradient is None or parameter.grad is None:
                continue
            own = factor.to(gradient.device)
            if gradient.dtype.itemsize > 2 and gradient.data_ptr() == local_tensor(parameter.grad).data_ptr():
                gradient.mul_(own)
            else:
                set_grad(parameter, like(parameter, gradient.float() * own))

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:
        """A step that clips nothing, with the gradients that callbacks have left, scaled again."""
        optimizer, max_norm = self._optimizer, self._optimizer.max_norm
        self._kept = [(p, p.grad) for p in self._parameters if p.grad is not None]
        with torch.no_grad():
            for parameter, gradient in self._kept if not self._scale.is_identity else ():
                set_grad(parameter, gradient * self._scale.tensor(gradient.device))
        optimizer.max_norm = None
        try:
            result = optimizer.step(closure)
        finally:
            optimizer.max_norm = max_norm
        result.grad_norm = self.norm
        return result

    def restore(self) -> None:
        """Put the gradients back that the step has consumed, until the caller drops them (``zero_grad``)."""
        for parameter, gradient in self._kept:
            set_grad(parameter, gradient)


# -- rules --------------------------------------------------------------------------------------------------------

GivenRules = str | Path | Rule | Sequence[Rule | Mapping[str, Any]]
"""What ``LightstepTrainer(rules=...)`` takes: a YAML file, or rules, as objects or as such a file has them."""

_EXAMPLE = "rules: [{kinds: rest, lr: 0.001}]"
_KEYS = ("names", "kinds", "dims", "name", "lr", "weight_decay", "arguments")


def read_rules(given: GivenRules | None, args: TrainingArguments) -> Sequence[Rule | Mapping[str, Any]] | None:
    """The rules, from the argument or from the file that ``optim_args`` names; ``None`` if there are none.

    Raises:
        ConfigError: both name some, or the file has none.
    """
    file, _ = split_optim_args(args.optim_args)
    if file is not None and given is not None:
        raise ConfigError(f"rules are given twice: as rules= and as optim_args='rules={file}'; leave one out")
    given = file if given is None else given
    if isinstance(given, str | Path):
        path = Path(given).expanduser()
        content = read_mapping(path, _EXAMPLE)
        if set(content) != {"rules"} or not isinstance(content["rules"], list):
            raise ConfigError(f"{path}: one key is needed, rules, with a list: {_EXAMPLE}")
        return content["rules"]
    return [given] if isinstance(given, Rule) else given


def split_optim_args(optim_args: str | None) -> tuple[str | None, str | None]:
    """The file in ``rules=FILE``, and ``optim_args`` without it."""
    file, others = None, []
    for part in (optim_args or "").split(","):
        key, _, value = part.partition("=")
        if key.strip() == "rules":
            file = value.strip()
        elif part.strip():
            others.append(part)
    return file, ",".join(others) or None


def make_rules(
    given: Sequence[Rule | Mapping[str, Any]],
    default_class: type[torch.optim.Optimizer],
    values: Mapping[str, Any],
    args: TrainingArguments,
) -> list[Rule]:
    """Rules with all of their hyper-parameters.

    A rule that names no class is for ``default_class``. One that has no ``lr`` gets the Trainer's ``learning_rate``;
    those for ``default_class`` get the Trainer's other values too, ``weight_decay`` among them.

    Args:
        default_class: what ``args.optim`` chooses.
        values: its keyword arguments, as the Trainer would pass them.

    Raises:
        ConfigError: a rule has a key, a class or a value that does not exist.
    """
    rules = []
    for number, rule in enumerate(given):
        try:
            where, kind, own = _parts(rule, default_class, f"rules[{number}]")
            defaults = {"weight_decay": args.weight_decay, **values} if kind is default_class else {}
            rules.append(Rule(kind, **where, **({"lr": args.learning_rate} | defaults | own)))
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"rules[{number}]: {error}") from error
    return rules


def _parts(
    rule: Rule | Mapping[str, Any], default_class: type[torch.optim.Optimizer], label: str
) -> tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]:
    """Which parameters, which class, and the hyper-parameters that the rule itself has."""
    if isinstance(rule, Rule):
        where = {"names": rule.names, "kinds": rule.kinds, "dims": rule.dims}
        return where, rule.optimizer_class, rule.hyperparameters
    if not isinstance(rule, Mapping):
        raise ConfigError(
            f"{label} is {rule!r:.80}; a lightstep.Rule or a mapping such as {{'kinds': 'rest'}} is needed"
        )
    for key in rule:
        if key not in _KEYS:
            raise ConfigError(f"{label} has {key!r}{suggest(str(key), list(_KEYS))}; allowed: {', '.join(_KEYS)}")
    where = {key: rule.get(key) for key in ("names", "kinds", "dims")}
    kind = default_class if rule.get("name") is None else optimizer_class(rule["name"], f"{label}.name")
    own = {key: float(rule[key]) for key in ("lr", "weight_decay") if rule.get(key) is not None}
    return where, kind, {**own, **(rule.get("arguments") or {})}


# -- planned and measured time and memory ---------------------------------------------------------------------------


class StepReport:
    """Prints the plan at the first batch of a run, and the measurement at its end.

    Args:
        args: the Trainer's.
    """

    def __init__(self, strategy: Strategy, args: Any) -> None:
        self._strategy, self._args = strategy, args
        self._enabled = bool(args.should_log)
        self._started: float | None = None
        self._seconds: dict[int, float] = {}

    def on_batch(self, model: Any, inputs: Any, optimizer: torch.optim.Optimizer) -> None:
        """Called before each micro-batch. The plan is for the size of the first one."""
        if self._started is None:
            if self._enabled:
                tqdm.write(self._plan_sentence(model, inputs, optimizer))
            self.begin_step()

    def _plan_sentence(self, model: Any, inputs: Any, optimizer: torch.optim.Optimizer) -> str:
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None  # TRL's GRPO: a list of prompts
        args = self._args
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return "no plan: the batches have no input_ids of two dimensions"
        work = {
            "sequence": tokens.shape[1],
            "micro_batches": args.gradient_accumulation_steps,
            "checkpointed": args.gradient_checkpointing or None,
        }
        given = self._strategy.name, self._strategy.config, unwrap_model(model), tokens.numel(), work, args.world_size
        on_cpu, state = self._strategy.device.type == "cpu", state_of(optimizer)
        return planned_sentence(lambda: plan_one(*given, optimizer=state, on_cpu=on_cpu), on_cpu)

    def begin_step(self) -> None:
        """Start the clock, after logging, evaluation and saving."""
        self._started = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Stop the clock; may be called twice for a step, at its end and at the end of the epoch."""
        if self._started is not None:
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - self._started

    def print_measured(self) -> None:
        """Print the mean step time. The first step, which includes set-up, is left out if there are others."""
        every = list(self._seconds.values())
        seconds = every[1:] or every
        if self._enabled and seconds:
            tqdm.write(measured_sentence(self._strategy.device, 1e3 * sum(seconds) / len(seconds)))
