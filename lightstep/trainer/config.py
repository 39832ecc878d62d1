"""The schema of the training file: frozen models that refuse unknown keys. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from lightstep.config import ConfigError, StrategyConfig, merge_overrides, read_yaml
from lightstep.config_errors import describe_errors
from lightstep.paths import local_path
from lightstep.presets import read_mapping

DEVICES = ("cpu", "cuda")
STDLIB = "stdlib"

Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Model(_Frozen):
    """The model: a new one, or one from a folder. A plain string is ``path``."""

    config: dict[str, Any] | None = None
    """A new byte-level model: ``model_type`` and keys of its transformers configuration."""
    path: str | None = None
    """A local Hugging Face folder with weights and tokenizer."""

    @model_validator(mode="after")
    def _check_source(self) -> Model:
        if (self.config is None) == (self.path is None):
            raise ValueError("give either config (a new model) or path (a local Hugging Face folder)")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs model_type, for example model_type: llama")
        return self


class Data(_Frozen):
    """The text. A plain string is ``path``."""

    path: str = STDLIB
    """A folder, a text file, a JSONL file, or ``stdlib``: sources and docs of the Python that runs this."""
    text_key: str = "text"
    """JSONL: the key that holds the text."""
    suffixes: list[str] | None = None
    """Folder: suffixes of the files to read, for example ``[.py, .md]``. Default: all text files."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of the documents held out for validation."""


class Batch(_Frozen):
    """The batch of one optimizer step, over all ranks."""

    sequences: Count = 8
    length: Annotated[int, Field(ge=2)] = 256
    """Tokens per sequence."""
    accumulation: Count = 1
    """Micro-batches per step."""


class OptimizerRule(_Frozen):
    """Settings for some parameters (:class:`lightstep.Rule`). Omitted keys are taken from ``optimizer``."""

    names: str | list[str] | None = None
    """Regular expressions; a parameter matches if one of them is found in its name."""
    kinds: str | list[str] | None = None
    """``hidden_matrices``, ``embeddings``, ``head``, ``norms``, ``biases``; ``rest``: all others."""
    dims: int | list[int] | None = None
    """Numbers of dimensions."""
    name: str | None = None
    """The optimizer class."""
    lr: Annotated[float, Field(gt=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Default: ``optimizer.weight_decay`` if the class is the same."""
    arguments: dict[str, Any] = {}
    """Merged over ``optimizer.arguments`` if the class is the same."""


class Optimizer(_Frozen):
    """The optimizer class, by its name in ``torch.optim`` or as ``package.module.Class``."""

    name: str = "AdamW"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Default: that of the class."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of the class."""
    rules: list[OptimizerRule] = []
    """Other classes and settings for some parameters; exactly one rule must match each parameter."""


class Scheduler(_Frozen):
    """The learning rate over the run, as ``transformers.get_scheduler`` names it."""

    name: str = "cosine"
    warmup_steps: CountOrZero = 0
    arguments: dict[str, Any] = {}
    """``scheduler_specific_kwargs``, for example ``{min_lr_rate: 0.1}``."""

    @model_validator(mode="after")
    def _check_used(self) -> Scheduler:
        if self.name == "constant" and self.warmup_steps:
            raise ValueError(
                f"constant has no warmup_steps ({self.warmup_steps}); set name: constant_with_warmup, or leave them out"
            )
        if self.name in ("constant", "constant_with_warmup") and self.arguments:
            raise ValueError(f"{self.name} takes no arguments ({', '.join(self.arguments)}); leave them out")
        return self


class Ema(_Frozen):
    """An exponential moving average of the weights. A plain number is ``decay``."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    every: Count = 1
    """Steps between updates of the average."""
    validation: bool = False
    """Validate with the average instead of the weights."""


class Validation(_Frozen):
    """How the held-out text is used."""

    sequences: Count = 128
    every: CountOrZero = 0
    """Steps between validations during the run; 0: only before and after it."""


class Checkpoint(_Frozen):
    """When checkpoints are written, beside the one at the end."""

    every: CountOrZero = 500
    """Steps between checkpoints; 0: only at the end."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: CountOrZero = 0
    """Also keep the checkpoints of every so many steps; 0: none."""
    weights_every: CountOrZero = 0
    """Steps between saves of the weights alone, all of which are kept; 0: none."""
    asynchronous: bool = True
    """Continue training during the write. DeepSpeed's engine always saves synchronously."""


class Lines(_Frozen):
    """How often a progress line is printed when there is no terminal for a progress bar."""

    seconds: Annotated[float, Field(ge=0)] = 10
    steps: CountOrZero = 0
    """0: by time alone. Figures are available every ``log_every`` steps."""


class Sample(_Frozen):
    """Text that the model generates at the end."""

    prompts: Annotated[list[str], Field(min_length=1)] = ["def ", "import "]
    tokens: Count = 120
    temperature: Annotated[float, Field(gt=0)] = 0.8
    top_k: CountOrZero = 50
    """Sample from so many of the most likely tokens; 0: all."""


def _path_from_string(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _decay_from_number(value: Any) -> Any:
    return {"decay": value} if isinstance(value, int | float | str) and not isinstance(value, bool) else value


_SHORT_FORMS = {"data": _path_from_string, "model": _path_from_string, "ema": _decay_from_number}
"""Sections that a file may give as one value."""


class TrainConfig(_Frozen):
    """A training file."""

    name: str = "train"
    """The run's folder in ``output``."""
    output: Path = Path("runs")
    seed: CountOrZero = 0
    strategy: str | dict[str, Any] = "resident"
    """A strategy's name, path or content; or one for each kind of device: ``{cuda: resident, cpu: fp32}``."""
    strategy_overrides: dict[str, Any] = {}
    """Overrides of the strategy by dotted keys: ``{clipping.max_norm: 0.5}``."""
    model: Annotated[Model, BeforeValidator(_path_from_string)]
    data: Annotated[Data, BeforeValidator(_path_from_string)] = Data()
    steps: Count = 1000
    batch: Batch = Batch()
    loss_chunk: Count | None = None
    """Tokens whose logits are computed at a time, in forward and again in backward; ``None``: all at once."""
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    ema: Annotated[Ema, BeforeValidator(_decay_from_number)] | None = None
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    log_every: Count = 10
    """Steps between reads of loss and norm, which wait for the device. Every step is logged."""
    lines: Lines = Lines()
    trackers: list[Tracker] = ["tensorboard"]
    """``tensorboard`` writes to the run's folder; accelerate's other trackers log under the run's name."""
    sample: Sample | None = Sample()

    @field_validator("output", mode="before")
    @classmethod
    def _check_output(cls, value: Any) -> Any:
        return local_path(value, "a run writes to a local folder") if isinstance(value, str | Path) else value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w.\-]*", value):
            raise ValueError("letters, digits, '_', '.' and '-' are allowed, and not '.' or '-' first")
        return value

    @field_validator("strategy")
    @classmethod
    def _check_devices(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if per_device(value) and set(value) != set(DEVICES):
            raise ValueError(f"a strategy for each of {', '.join(DEVICES)} is needed")
        return value

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return self.output / self.name

    def strategy_for(self, device: str) -> str | dict[str, Any]:
        """The strategy on this type of device."""
        if isinstance(self.strategy, dict) and per_device(self.strategy):
            return self.strategy["cpu" if device == "cpu" else "cuda"]
        return self.strategy


def per_device(strategy: str | Mapping[str, Any]) -> bool:
    """Whether this is ``{cuda: ..., cpu: ...}``."""
    return isinstance(strategy, Mapping) and bool(strategy) and set(strategy) <= set(DEVICES)


def load_config(path: Path, strategy: str | None = None, assignments: Sequence[str] = ()) -> TrainConfig:
    """Read a training file and apply the overrides of the command line.

    Args:
        strategy: replaces the file's strategy and its overrides.
        assignments: ``key=value`` with dotted keys and YAML values; ``strategy.<key>`` overrides a key of the strategy.

    Raises:
        ConfigError: the file is missing or not valid YAML, or a key is unknown or wrong.
    """
    path = path.expanduser()
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give the path of a training file")
    values = read_mapping(path, "model:, data:, ...")
    if strategy is not None:
        values = {**values, "strategy": strategy, "strategy_overrides": {}}
    for assignment in assignments:
        values = _assigned(values, assignment)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_errors(error, TrainConfig, str(path))) from None


def _assigned(values: dict[str, Any], assignment: str) -> dict[str, Any]:
    key, found, text = assignment.partition("=")
    key = key.strip()
    if not found or not key:
        raise ConfigError(f"--set {assignment}: key=value is needed, for example --set steps=100")
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {assignment}: {text!r} is not a valid YAML value") from None
    head, _, rest = key.partition(".")
    if head == "strategy" and rest and rest.split(".")[0] in DEVICES:
        _check_device(values.get("strategy", TrainConfig.model_fields["strategy"].default), rest, assignment)
    elif head == "strategy" and rest:
        return {**values, "strategy_overrides": {**(values.get("strategy_overrides") or {}), rest: value}}
    if head in StrategyConfig.model_fields and head not in TrainConfig.model_fields:
        raise ConfigError(f"--set {assignment}: {head!r} is a key of the strategy; write --set strategy.{assignment}")
    if rest and head in _SHORT_FORMS:
        values = {**values, head: _SHORT_FORMS[head](values.get(head))}
    return merge_overrides(values, {key: value})


def _check_device(strategy: Any, rest: str, assignment: str) -> None:
    """``strategy.cpu`` needs a strategy per device; ``strategy.cpu.KEY`` needs that strategy to be a mapping."""
    device, _, inner = rest.partition(".")
    if inner and not (isinstance(strategy, Mapping) and isinstance(strategy.get(device), Mapping)):
        raise ConfigError(
            f"--set {assignment}: strategy.{device} is not a mapping; write --set strategy.{inner}=VALUE to set this "
            f"key of the strategy, or --set strategy.{device}=NAME to choose another"
        )
    if not (isinstance(strategy, Mapping) and per_device(strategy)):
        raise ConfigError(
            f"--set {assignment}: strategy is {strategy!r}, one for every device; write --set strategy=NAME, "
            "or --set 'strategy={cuda: NAME, cpu: NAME}'"
        )
