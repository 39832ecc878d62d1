"""The strategy file's schema: frozen models, every key optional, unknown keys refused.

A file becomes a :class:`StrategyConfig` through :func:`parse_config`. Nothing here imports torch: a configuration
can be read, checked and printed on a machine without it.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

Dtype = Literal["bfloat16", "float16", "float32"]


class ConfigError(ValueError):
    """A strategy or configuration that cannot be used; the message names the key, the value and what is allowed."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class SingleSharding(_Frozen):
    """One process, one device."""

    kind: Literal["single"] = "single"
    activation_checkpointing: bool = False
    """Recompute each transformer block in backward instead of keeping its activations."""


class DDPSharding(_Frozen):
    """Every rank holds the whole model; gradients are averaged by ``DistributedDataParallel``."""

    kind: Literal["ddp"] = "ddp"
    bucket_mib: Annotated[float, Field(gt=0)] = 25
    """Size of one all-reduce, in MiB."""
    find_unused_parameters: bool = False
    static_graph: bool = False
    """As in torch's DDP, which cannot leave out reductions then: no ``accumulate(last=False)``."""
    activation_checkpointing: bool = False


class Mesh(_Frozen):
    """Device mesh of FSDP2; ``auto`` is whatever the world size leaves. ``replicate > 1`` is HSDP."""

    replicate: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    shard: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _one_auto(self) -> Mesh:
        if self.replicate == "auto" and self.shard == "auto":
            raise ValueError("only one of replicate and shard can be auto")
        return self


class FSDP2Sharding(_Frozen):
    """``torch.distributed.fsdp.fully_shard`` on every transformer block and the root."""

    kind: Literal["fsdp2"] = "fsdp2"
    mesh: Mesh = Mesh()
    reshard_after_forward: bool | Annotated[int, Field(ge=2)] = True
    """Free a block's gathered weights after its forward; an int reshards to that many ranks."""
    wrap: Literal["auto"] | list[str] = "auto"
    """Class or module names to shard as units; ``auto`` asks the model, then takes the largest repeated block."""
    compute: Literal["parameters"] | Dtype = "parameters"
    """Dtype of forward and backward; ``parameters`` is the shards' own."""
    activation_checkpointing: bool = False


class DeepSpeedSharding(_Frozen):
    """ZeRO through the DeepSpeed engine."""

    kind: Literal["deepspeed"]
    stage: Literal[1, 2, 3] = 2
    offload: Literal["none", "cpu"] = "none"
    superoffload: bool = False
    zenflow: bool = False


Sharding = Annotated[SingleSharding | DDPSharding | FSDP2Sharding | DeepSpeedSharding, Field(discriminator="kind")]


class NoLossScale(_Frozen):
    """Gradients are not scaled."""

    kind: Literal["none"] = "none"


class ConstantScale(_Frozen):
    """The loss is multiplied by one fixed number."""

    kind: Literal["constant"]
    scale: Annotated[float, Field(gt=0)]


class DynamicScale(_Frozen):
    """The scale grows after ``growth_interval`` good steps and shrinks on overflow."""

    kind: Literal["dynamic"]
    init_scale: Annotated[float, Field(gt=0)] = 65536.0
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Annotated[int, Field(ge=1)] = 2000
    hysteresis: Annotated[int, Field(ge=1)] = 1
    min_scale: Annotated[float, Field(gt=0)] = 1.0
    max_scale: Annotated[float, Field(gt=0)] = 2.0**32

    @model_validator(mode="after")
    def _ordered(self) -> DynamicScale:
        if self.min_scale > self.max_scale:
            raise ValueError(f"min_scale {self.min_scale:g} is larger than max_scale {self.max_scale:g}")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale {self.init_scale:g} is outside [min_scale, max_scale] "
                f"= [{self.min_scale:g}, {self.max_scale:g}]"
            )
        return self


def _named_loss_scale(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else {"kind": "none"} if value is None else value


LossScaleConfig = Annotated[
    NoLossScale | ConstantScale | DynamicScale, Field(discriminator="kind"), BeforeValidator(_named_loss_scale)
]


class Precision(_Frozen):
    """Dtypes of parameters, masters and gradients, and how the loss is scaled."""

    parameters: Dtype = "bfloat16"
    """Dtype of the weights that forward and backward use (of the shards under FSDP2)."""
    master_weights: bool = True
    """Keep fp32 masters for 16-bit parameters; fp32 parameters are their own."""
    reduce: Literal["float32", "parameters"] = "float32"
    """Dtype in which gradients are reduced over ranks and added over micro-batches."""
    loss_scale: LossScaleConfig = NoLossScale()


class Clipping(_Frozen):
    """One global gradient norm; ``max_norm: null`` measures it and clips nothing."""

    max_norm: float | None = 1.0
    norm_type: float = 2.0

    @field_validator("max_norm", "norm_type", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("a number is needed")
        return math.inf if value in ("inf", ".inf") else value

    @field_validator("max_norm")
    @classmethod
    def _positive(cls, value: float | None) -> float | None:
        if value is not None and not value > 0:
            raise ValueError("must be a positive number, or null to clip nothing")
        return value

    @field_validator("norm_type")
    @classmethod
    def _norm(cls, value: float) -> float:
        if not value >= 1:
            raise ValueError("must be at least 1 (2 is the Euclidean norm, .inf the largest element)")
        return value

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)


class OptimizerState(_Frozen):
    """Where masters and optimizer state live between steps, and when they are updated."""

    backend: Literal["resident", "bulk", "stream"] = "resident"
    update: Literal["at_step", "next_forward", "in_backward"] = "at_step"
    prefetch_layers: Annotated[int, Field(ge=0)] = 2
    """Stream: layers whose state is fetched ahead of the one being updated."""
    ring_mib: Annotated[float, Field(gt=0)] = 512
    """Stream: device memory of the ring of staging buffers, in MiB."""
    resident_gib: Annotated[float, Field(ge=0)] | Literal["auto"] = 0.0
    """Stream: optimizer state that stays on the device, in GiB."""


class StrategyConfig(_Frozen):
    """Everything a strategy file says; see ``docs/strategy-files.md``."""

    description: str = ""
    sharding: Sharding = SingleSharding()
    precision: Precision = Precision()
    clipping: Clipping = Clipping()
    optimizer_state: OptimizerState = OptimizerState()

    def model_post_init(self, context: Any) -> None:
        precision = self.precision
        if precision.parameters == "float16" and precision.loss_scale.kind == "none":
            warnings.warn(
                "precision.parameters is float16 and precision.loss_scale is none: small gradients vanish; "
                "set precision.loss_scale: {kind: dynamic}",
                stacklevel=4,
            )
        if precision.parameters != "float32" and not precision.master_weights:
            warnings.warn(
                f"precision.master_weights is false with {precision.parameters} parameters: updates smaller than half "
                "a unit in the last place of a weight (2^-9 of it in bfloat16) are lost; set "
                "precision.master_weights: true",
                stacklevel=4,
            )


def parse_config(values: Mapping[str, Any], source: str) -> StrategyConfig:
    """``values`` as a :class:`StrategyConfig`; raises :class:`ConfigError` with one sentence per mistake."""
    try:
        return StrategyConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(describe_errors(error, StrategyConfig, source)) from None


def merge_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """``values`` with dotted keys (``{"clipping.max_norm": 0.5}``) or nested mappings laid over it.

    A section whose ``kind`` is overridden starts afresh: the keys of the old kind do not apply to the new one.
    """
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for dotted, value in (overrides or {}).items():
        _assign(merged, dotted.split("."), value)
    return merged


def _assign(target: dict[str, Any], path: list[str], value: Any) -> None:
    head, *rest = path
    old = target.get(head)
    if rest:
        inner = {"kind": old} if isinstance(old, str) else dict(old) if isinstance(old, Mapping) else {}
        if rest == ["kind"] and inner.get("kind", value) != value:
            inner = {}
        target[head] = inner
        _assign(inner, rest, value)
    elif (
        isinstance(value, Mapping)
        and isinstance(old, Mapping)
        and value.get("kind", old.get("kind")) == old.get("kind")
    ):
        target[head] = dict(old)
        for key, entry in value.items():
            _assign(target[head], str(key).split("."), entry)
    else:
        target[head] = value


def describe_errors(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """Pydantic's findings as one sentence each: key, value, what is allowed, the nearest name."""
    return f"{source}: " + "; ".join(_describe(item, model) for item in error.errors())


def _describe(item: Any, model: type[BaseModel]) -> str:
    location = [str(part) for part in item["loc"]]
    owner, key = _walk(model, location)
    given = item["input"]
    if item["type"] == "extra_forbidden":
        allowed = sorted(owner.model_fields)
        near = suggest(key.rsplit(".", 1)[-1], allowed)
        return f"unknown key '{key}' (value {given!r}){near}; allowed: {', '.join(allowed)}"
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = given.get("kind") if isinstance(given, Mapping) else given
        expected = item.get("ctx", {}).get("expected_tags", "").replace("'", "").split(", ")
        names = [name for name in expected if name] or _kinds(owner, location)
        return f"'{key}.kind' is {tag!r}{suggest(str(tag), names)}; allowed: {', '.join(names)}"
    context = item.get("ctx", {})
    if item["type"] == "literal_error":
        names = [name.strip(" '") for name in context["expected"].replace(" or ", ", ").split(", ")]
        return f"'{key}' is {given!r}{suggest(str(given), names)}; allowed: {', '.join(names)}"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"'{key}' is {given!r}: {message[0].lower()}{message[1:]}"


def _kinds(owner: type[BaseModel], location: list[str]) -> list[str]:
    annotation = owner.model_fields[location[-1]].annotation if location[-1] in owner.model_fields else None
    return [
        get_args(option.model_fields["kind"].annotation)[0]
        for option in get_args(annotation)
        if hasattr(option, "model_fields")
    ]


def _walk(model: type[BaseModel], location: list[str]) -> tuple[type[BaseModel], str]:
    """The model that owns the last key of ``location`` and the dotted key as it stands in the file.

    Pydantic puts the tag of a union into the location (``sharding.fsdp2.mesh``): those parts are no keys.
    """
    keys: list[str] = []
    owner = model
    options: dict[str, type[BaseModel]] = {}
    for index, part in enumerate(location):
        if part in options:
            owner, options = options[part], {}
            continue
        field = owner.model_fields.get(part)
        if field is None and (keys and index > 0 and not part.isidentifier()):
            continue
        keys.append(part)
        candidates = [field.annotation, *get_args(field.annotation)] if field is not None else []
        models = [option for option in candidates if isinstance(option, type) and issubclass(option, BaseModel)]
        options = {option.model_fields["kind"].default: option for option in models if "kind" in option.model_fields}
        options |= {
            get_args(option.model_fields["kind"].annotation)[0]: option
            for option in models
            if "kind" in option.model_fields
        }
        if len(models) == 1 and index + 1 < len(location) and location[index + 1] not in options:
            owner = models[0]
    return owner, ".".join(keys)


def suggest(name: str, allowed: list[str]) -> str:
    """``, did you mean 'x'?`` for the nearest of ``allowed``, or nothing."""
    near = difflib.get_close_matches(name, allowed, n=2, cutoff=0.5)
    return f", did you mean {' or '.join(repr(match) for match in near)}?" if near else ""
