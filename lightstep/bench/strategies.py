"""lightstep's own strategies as contenders, built and stepped through the public interface only; `--strategies`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from lightstep.bench.run import OPTIMIZERS, Contender, Entry, Skipped, Task, optimizer_arguments, split_names
from lightstep.config import ConfigError, merge_overrides, parse_config, read_yaml
from lightstep.distributed import like, world_size
from lightstep.optimizer import MixedPrecisionOptimizer
from lightstep.presets import read_source
from lightstep.strategy import Strategy

_SEPARATOR = re.compile(r":(?=[^:=/]+=)")  # a colon before key=; other colons belong to a path


class _Prepared(Contender):
    """A model prepared by a strategy."""

    def __init__(self, task: Task, strategy: Strategy) -> None:
        if strategy.device.type != task.device.type:
            raise Skipped(f"strategies run on this process's {strategy.device.type}; --device cannot change that")
        self._strategy = strategy
        self.model = strategy.prepare_model(task.model(strategy.parameter_dtype))
        self.gradient_dtype = strategy.parameter_dtype

    def close(self) -> None:
        self._strategy.close()


class StrategyContender(_Prepared):
    """`Strategy.load(name)` → `prepare_model` → `create_optimizer`, and the loop of the README."""

    kind = "lightstep"

    def __init__(self, task: Task, strategy: Strategy) -> None:
        if task.provides_gradients and strategy.config.sharding.kind == "deepspeed":
            raise Skipped("DeepSpeed takes its gradients from backward only; measure it with --iteration")
        if task.optimizer != "adamw" and strategy.config.sharding.kind == "deepspeed":
            raise Skipped("a DeepSpeed engine has one optimizer class; --optimizer muon needs two")
        super().__init__(task, strategy)
        self._optimizer = strategy.create_optimizer(self.model, **_arguments(task, strategy))
        self._parameters = list(self.model.parameters())

    def placed(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return list(map(like, self._parameters, gradients))

    def step(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()

    def set_max_norm(self, max_norm: float) -> None:
        if not isinstance(self._optimizer, MixedPrecisionOptimizer):
            raise Skipped("DeepSpeed clips to the same norm in every step")
        self._optimizer.max_norm = max_norm

    def accumulate(self) -> AbstractContextManager[object]:
        return self._strategy.accumulate(self.model)

    def backward(self, loss: Tensor) -> None:
        self._optimizer.backward(loss)

    def update(self) -> None:
        result = self._optimizer.step()
        self.grad_norm, self.redone_steps = result.grad_norm, result.redone + result.rolled_back

    def host_bytes(self) -> int:
        return int(self._optimizer.memory_report()["host_bytes"])

    def save(self, path: Path) -> None:
        """Save weights, masters and state."""
        self._strategy.save_checkpoint(path, self.model, self._optimizer)

    def save_async(self, path: Path) -> Any:
        """Start the same save in a thread. Returns a handle with `done()` and `result()`."""
        return self._strategy.save_checkpoint(path, self.model, self._optimizer, asynchronous=True)

    def saved_tensors(self) -> dict[str, Tensor]:
        """Copies of all tensors of the checkpoint, by name."""
        self._optimizer.synchronize()
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach().clone()
            state = self._optimizer.state.get(parameter, {})
            found |= {f"optimizer.{name}.{k}": v.clone() for k, v in state.items() if isinstance(v, Tensor)}
        return found

    def finish(self) -> None:
        self._optimizer.synchronize()

    def close(self) -> None:
        close = getattr(self._optimizer, "close", None)
        if callable(close):
            close()
        super().close()


def _arguments(task: Task, strategy: Strategy) -> dict[str, Any]:
    """Those of `create_optimizer`. Where DeepSpeed updates on the CPU, its own kernel does, compiled at the first use.

    Raises:
        Skipped: there is no compiler for it.
    """
    arguments, sharding = optimizer_arguments(task.optimizer), strategy.config.sharding
    if sharding.kind == "deepspeed" and sharding.offload == "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        try:
            CPUAdamBuilder().load()
        except RuntimeError as error:
            raise Skipped(f"DeepSpeed's CPUAdam cannot be built here ({error})") from error
        arguments["optimizer_class"] = DeepSpeedCPUAdam
    return arguments


class WithoutOptimizer(_Prepared):
    """Forward and backward of `resident`, or of `fsdp2` on several ranks; gradients are dropped."""

    name = "no optimizer"
    about = "forward and backward, and the gradients dropped"
    kind = "baseline"
    optimizers = tuple(OPTIMIZERS)

    def __init__(self, task: Task) -> None:
        name = "resident" if world_size() == 1 else "fsdp2"
        super().__init__(task, Strategy.load(name, overrides=task.settings))

    def step(self, gradients: Sequence[Tensor]) -> None:
        return

    def update(self) -> None:
        self.model.zero_grad(set_to_none=True)


# -- `--strategies` ---------------------------------------------------------------------------------------------------


def parse_strategies(text: str, task: Task, ranks: int = 1) -> list[Entry]:
    """The entries of `--strategies`. Wrong names and keys raise here; unsupported combinations raise when built.

    Raises:
        ConfigError: an unknown strategy, key or value.
    """
    names = task.default_strategies(ranks) if text == "default" else split_names(text)
    return [_strategy(name, task.settings) for name in names]


def _strategy(text: str, settings: Mapping[str, Any]) -> Entry:
    strategy, overrides = parse_overrides(text, settings)
    name, values = read_source(strategy)
    config = parse_config(merge_overrides(values, overrides), name)

    def build(task: Task) -> Contender:  # each has settings of its own
        _, overrides = parse_overrides(text, task.settings)
        return StrategyContender(task, Strategy.load(strategy, overrides=overrides))

    own = (assignment.partition("=") for assignment in _SEPARATOR.split(text)[1:])
    label = " ".join([strategy, *(f"{key.split('.')[-1]}={value}" for key, _, value in own)])
    on_device = config.optimizer_state.backend == "resident" and config.weights.placement == "device"
    resident = on_device and config.sharding.kind != "deepspeed"  # DeepSpeed says elsewhere where its state is
    return Entry(text, label, "lightstep", config.description or text, build, resident=resident)


def parse_overrides(text: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split `stream:optimizer_state.ring_mib=256:precision.reduce=parameters` into the strategy and its overrides.

    Args:
        settings: the bench's own overrides; the text wins. They come last, because overriding a section's `kind`
            drops the section's other keys.

    Raises:
        ConfigError: the strategy's name is missing, or a value is not valid YAML.
    """
    strategy, *assignments = _SEPARATOR.split(text)
    if not strategy or ("=" in strategy and not assignments):
        raise ConfigError(f"--strategies {text}: the strategy's name is missing; write NAME:section.key=VALUE")
    own: dict[str, Any] = {}
    for key, _, value in (assignment.partition("=") for assignment in assignments):
        try:
            own[key] = read_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(f"--strategies {text}: {value!r} is not a valid YAML value of {key}") from None
    return strategy, {**own, **{key: value for key, value in settings.items() if key not in own}}
