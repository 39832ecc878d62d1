"""The strategy file's schema: frozen models, every key optional, unknown keys refused.

A file becomes a :class:`StrategyConfig` through :func:`parse_config`. Nothing here imports torch: a configuration
can be read, checked and printed on a machine without it.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from lightstep.config_errors import describe_errors

Dtype = Literal["bfloat16", "float16", "float32"]
ActivationCheckpointing = bool | Literal["host"]


class ConfigError(ValueError):
    """A strategy or configuration that cannot be used; the message names the key, the value and what is allowed."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class SingleSharding(_Frozen):
    """One process, one device."""

    kind: Literal["single"] = "single"
    activation_checkpointing: ActivationCheckpointing = False
    """Recompute each transformer block in backward instead of keeping its activations; ``host``: what is kept, the
    blocks' inputs, rests on the host meanwhile."""


class DDPSharding(_Frozen):
    """Every rank holds the whole model; gradients are averaged by ``DistributedDataParallel``."""

    kind: Literal["ddp"] = "ddp"
    bucket_mib: Annotated[float, Field(gt=0)] = 25
    """Size of one all-reduce, in MiB."""
    find_unused_parameters: bool = False
    static_graph: bool = False
    """As in torch's DDP, which cannot leave out reductions then: no ``accumulate(last=False)``."""
    activation_checkpointing: ActivationCheckpointing = False


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
    activation_checkpointing: ActivationCheckpointing = False


class DeepSpeedSharding(_Frozen):
    """ZeRO through the DeepSpeed engine, which then owns masters, gradients, clipping and loss scaling."""

    kind: Literal["deepspeed"]
    stage: Literal[1, 2, 3] = 2
    """What is divided by the ranks: optimizer state; gradients too; weights too."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu`` keeps masters and state on the host and updates there; at stage 3 the weights rest on the host too."""
    config: str | dict[str, Any] | None = None
    """DeepSpeed's own configuration, a JSON file or a mapping; what contradicts this file is refused."""
    activation_checkpointing: ActivationCheckpointing = False

    def own_config(self, source: str) -> dict[str, Any]:
        """The mapping that ``config`` is or names.

        Raises:
            ConfigError: the file cannot be read, or holds something else; ``source`` is the strategy's name.
        """
        if not isinstance(self.config, str):
            return dict(self.config or {})
        try:
            values = json.loads(Path(self.config).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source}: sharding.config {self.config} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{source}: sharding.config {self.config} holds {what_it_holds(values)}; a mapping is needed"
            )
        return values


Sharding = Annotated[SingleSharding | DDPSharding | FSDP2Sharding | DeepSpeedSharding, Field(discriminator="kind")]


class NoLossScale(_Frozen):
    """Gradients are not scaled."""

    kind: Literal["none"] = "none"


_FP32_LARGEST = 3.4e38
"""The loss scale is an fp32 number."""


class ConstantScale(_Frozen):
    """The loss is multiplied by one fixed number."""

    kind: Literal["constant"]
    scale: Annotated[float, Field(gt=0, le=_FP32_LARGEST)]


class DynamicScale(_Frozen):
    """The scale grows after ``growth_interval`` good steps and shrinks on overflow."""

    kind: Literal["dynamic"]
    init_scale: Annotated[float, Field(gt=0, le=_FP32_LARGEST)] = 65536.0
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Annotated[int, Field(ge=1)] = 2000
    hysteresis: Annotated[int, Field(ge=1)] = 1
    min_scale: Annotated[float, Field(gt=0)] = 1.0
    max_scale: Annotated[float, Field(gt=0, le=_FP32_LARGEST)] = 2.0**32

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
    master_weights: bool | Literal["stochastic"] = True
    """Keep fp32 masters for 16-bit parameters; fp32 parameters are their own. ``stochastic``: keep none, and round
    bfloat16 weights stochastically after each update."""
    reduce: Literal["float32", "parameters"] = "float32"
    """Dtype in which gradients are reduced over ranks and added over micro-batches."""
    loss_scale: LossScaleConfig = NoLossScale()
    rounding_seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0
    """Seed of the noise with which weights and moments are rounded stochastically."""


class Clipping(_Frozen):
    """One global gradient norm; ``max_norm: null`` measures it and clips nothing."""

    max_norm: float | None = 1.0
    norm_type: float = 2.0
    scope: Literal["global", "unit"] = "global"
    """Clip all gradients by the global norm, or each unit (a transformer block, what lies outside) by its own."""

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
        return None if value == math.inf else value

    @field_validator("norm_type")
    @classmethod
    def _norm(cls, value: float) -> float:
        if not (1 <= value <= 8 or value == math.inf):
            raise ValueError("must be from 1 to 8, or .inf (2 is the Euclidean norm, .inf the largest element)")
        return value

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)


class OptimizerState(_Frozen):
    """Where masters and optimizer state live between steps, and when they are updated."""

    backend: Literal["resident", "bulk", "stream"] = "resident"
    update: Literal["at_step", "next_forward", "in_backward", "overlap"] = "at_step"
    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """In what moments are kept between updates, which compute with them in fp32."""
    moments_rounding: Literal["nearest", "stochastic"] | None = None
    """How bfloat16 and int8 moments are rounded after each update; ``None``: int8 stochastically where that is
    possible, bfloat16 to nearest."""
    prefetch_layers: Annotated[int, Field(ge=0)] = 2
    """Stream: layers whose state is fetched ahead of the one being updated."""
    ring_mib: Annotated[float, Field(gt=0)] = 512
    """Stream: device memory of the ring of staging buffers, in MiB."""
    resident_gib: Annotated[float, Field(ge=0)] | Literal["auto"] = 0.0
    """Stream: optimizer state that stays on the device, in GiB."""
    spare_host_gib: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Stream, bulk: host memory for second versions of records (update overlap, asynchronous saves), in GiB; ``auto``
    takes what is free, but for a tenth."""
    previous_weights: Literal["auto", "device", "host"] = "auto"
    """Update overlap: where weights are kept as they were until their update counts; ``auto``: on the host if state
    stays on the device (``resident_gib``), else on the device while it has room."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> OptimizerState:
        if self.spare_host_gib != "auto" and self.backend == "resident":
            raise ValueError(
                f"spare_host_gib {self.spare_host_gib:g} is host memory for second versions of records on the host, "
                "and backend is resident; leave it out, or set backend: stream"
            )
        if self.previous_weights != "auto" and self.update != "overlap":
            raise ValueError(
                f"previous_weights {self.previous_weights} is where update overlap keeps weights until their update "
                f"counts, and update is {self.update}; leave it out, or set update: overlap"
            )
        if self.moments_rounding == "stochastic" and self.moments == "float32":
            raise ValueError(
                "moments_rounding stochastic is how moments are rounded to fewer bits, and moments is float32; set "
                "moments: bfloat16 or int8, or leave it out"
            )
        if self.resident_gib != 0 and self.backend != "stream":
            raise ValueError(
                f"resident_gib {self.resident_gib} is the part of backend stream's state that stays on the device, and "
                f"backend is {self.backend}; leave it out, or set backend: stream"
            )
        return self


class Weights(_Frozen):
    """Where weights and gradients are while nobody works on them."""

    placement: Literal["device", "host"] = "device"
    device_mib: Annotated[float, Field(gt=0)] = 2048
    """Placement host: device memory for weights and gradients that are brought ahead or may be needed again, in MiB;
    what modules and updates work on counts, too."""
    gradients_gib: Annotated[float, Field(ge=0)] | Literal["auto"] = 0.0
    """Placement host: device memory beside that, in GiB, in which gradients and sums of micro-batches stay until their
    update instead of leaving for the host. ``auto``: what the peak of the first three steps leaves free."""

    @model_validator(mode="after")
    def _device_memory_has_an_effect(self) -> Weights:
        if self.placement == "device" and self.gradients_gib != 0:
            raise ValueError(
                f"gradients_gib {self.gradients_gib} is device memory for gradients that rest on the host, and "
                "placement is device, where all of them are; leave it out, or set placement: host"
            )
        if self.placement == "device" and self.device_mib != type(self).model_fields["device_mib"].default:
            raise ValueError(
                f"device_mib {self.device_mib:g} is device memory for weights that rest on the host, and placement is "
                "device; leave it out, or set placement: host"
            )
        return self


class RolloutServers(_Frozen):
    """Servers that generate, and get the weights that are published."""

    kind: Literal["vllm", "vllm-nccl", "sglang"]
    """``vllm`` has lightstep's plugin, ``vllm-nccl`` vLLM's own engine for NCCL."""
    urls: Annotated[list[Annotated[str, Field(pattern=r"^https?://.+")]], Field(min_length=1)]
    """Such as ``http://host:8000``."""
    pause: Literal["wait", "keep", "abort"] | None = None
    """What happens to running requests; ``None`` is ``wait`` for vLLM and ``keep`` for SGLang."""
    backend: Literal["gloo", "nccl"] | None = None
    """Of the process group; ``None`` is nccl for weights on a GPU, else gloo."""
    deltas: bool | Literal["auto"] = False
    """vLLM: weights that did not change since the last set are not sent; ``auto``: where that takes less time."""

    @model_validator(mode="after")
    def _only_vllm_takes_deltas(self) -> RolloutServers:
        if self.deltas and self.kind != "vllm":
            raise ValueError(f"rollout servers of kind {self.kind} with deltas: leave deltas out")
        return self


class Rollout(_Frozen):
    """Who generates in reinforcement learning, and how the weights get there."""

    mode: Literal["sync", "async"] = "sync"
    """``sync``: the ranks that train generate in turn. ``async``: ranks of their own generate and nothing else."""
    ranks: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] | None = None
    """Async: how many ranks generate, the last ones (default 1); or which ones, by their numbers."""
    parameters: Dtype | None = None
    """Dtype of the inference weights; ``None`` is that of ``precision.parameters``."""
    bucket_mib: Annotated[float, Field(gt=0)] = 256
    """Weights travel layer by layer, larger layers in buckets of at most this size or one tensor."""
    servers: RolloutServers | None = None
    """Servers that get what is published; with mode sync."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Async, or with servers: seconds that one side waits for the other (default 300)."""

    @field_validator("ranks")
    @classmethod
    def _distinct(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or len(set(value)) < len(value)):
            raise ValueError("at least one rank is needed, each once")
        return value

    @model_validator(mode="after")
    def _sync_has_no_ranks(self) -> Rollout:
        waiting = ("ranks",) if self.servers is not None else ("ranks", "timeout_s")
        idle = [f"{name} {getattr(self, name)}" for name in waiting if getattr(self, name) is not None]
        if self.mode == "async" and self.servers is not None:
            raise ValueError(
                "rollout servers with mode async: there ranks of this program generate, and servers are elsewhere; "
                "leave mode out, or the servers"
            )
        if self.mode == "sync" and idle:
            raise ValueError(
                f"rollout {' and '.join(idle)} with mode sync: there the ranks that train generate, and nobody waits; "
                "leave it out, or set mode: async"
            )
        return self


class RolesConfig(_Frozen):
    """Roles beside the trainers' (``strategy.prepare_model(factory, role=...)``)."""

    rollout: Rollout = Rollout()


class StrategyConfig(_Frozen):
    """Everything a strategy file says; see ``docs/strategy-files.md``."""

    description: str = ""
    sharding: Sharding = SingleSharding()
    precision: Precision = Precision()
    clipping: Clipping = Clipping()
    optimizer_state: OptimizerState = OptimizerState()
    weights: Weights = Weights()
    roles: RolesConfig = RolesConfig()

    @model_validator(mode="after")
    def _own_ranks(self) -> StrategyConfig:
        if self.sharding.kind == "deepspeed" and self.roles.rollout.mode == "async":
            raise ValueError(
                "roles.rollout.mode async with sharding.kind deepspeed: DeepSpeed's engine takes all ranks; set "
                "sharding.kind to fsdp2, ddp or single, or roles.rollout.mode to sync"
            )
        return self

    @model_validator(mode="after")
    def _weights_on_the_host(self) -> StrategyConfig:
        if self.weights.placement == "device":
            return self
        if self.weights.gradients_gib == "auto" and self.optimizer_state.resident_gib == "auto":
            raise ValueError(
                "weights.gradients_gib auto and optimizer_state.resident_gib auto: each would take all device memory "
                "that is free; set one of them to a number of GiB"
            )
        if isinstance(self.sharding, FSDP2Sharding) and self.sharding.mesh.replicate == 1:
            return self
        if self.sharding.kind != "single":
            mesh = " with replicas (HSDP)" if self.sharding.kind == "fsdp2" else ""
            raise ValueError(
                f"weights.placement host with sharding.kind {self.sharding.kind}{mesh}: weights rest on the host for "
                "one device, or sharded over all ranks; set sharding.kind: single, or fsdp2 with mesh.replicate: 1, or "
                "placement: device"
            )
        return self

    @model_validator(mode="after")
    def _moments_of_masters(self) -> StrategyConfig:
        parameters = self.precision.parameters
        moments = self.optimizer_state.moments
        if moments != "float32" and parameters != "float32" and not self.precision.master_weights:
            raise ValueError(
                f"optimizer_state.moments {moments} with precision.master_weights false: the moments of {parameters} "
                f"parameters without masters are {parameters} already; leave it out, or set master_weights: true"
            )
        return self

    @model_validator(mode="after")
    def _rounded_weights(self) -> StrategyConfig:
        if self.precision.master_weights == "stochastic" and self.precision.parameters != "bfloat16":
            raise ValueError(
                f"precision.master_weights stochastic with parameters {self.precision.parameters}: weights are rounded "
                "to bfloat16; set parameters: bfloat16, or master_weights: true"
            )
        return self

    @model_validator(mode="after")
    def _seed_of_noise(self) -> StrategyConfig:
        state, seed = self.optimizer_state, self.precision.rounding_seed
        rounding = state.moments_rounding or {"int8": "stochastic"}.get(state.moments)
        if seed and rounding != "stochastic" and self.precision.master_weights != "stochastic":
            raise ValueError(
                f"precision.rounding_seed {seed} is the seed of stochastic rounding, and nothing is rounded so: "
                f"master_weights is {str(self.precision.master_weights).lower()}, optimizer_state.moments "
                f"{state.moments} and moments_rounding {state.moments_rounding or 'null'}; leave it out, or set "
                "master_weights or moments_rounding to stochastic"
            )
        return self

    @model_validator(mode="after")
    def _in_backward(self) -> StrategyConfig:
        if self.optimizer_state.update != "in_backward":
            return self
        global_clipping = self.clipping.max_norm is not None and self.clipping.scope == "global"
        needs = {
            f"clipping.max_norm is {self.clipping.max_norm} with scope global": global_clipping,
            "precision.loss_scale is dynamic": self.precision.loss_scale.kind == "dynamic",
        }
        found = [what for what, here in needs.items() if here]
        if found:
            raise ValueError(
                f"optimizer_state.update in_backward updates a layer before the other gradients are known, and "
                f"{' and '.join(found)}, which needs all of them first. Change clipping.scope to unit (each layer is "
                "clipped by its own norm: another clipping) or clipping.max_norm to null (no clipping); "
                "precision.loss_scale to none (bfloat16 needs none) or constant (float16 gradients may overflow); or "
                "optimizer_state.update to next_forward or at_step (all gradients stay in memory until the step)"
            )
        return self

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


class _PlainValues(yaml.SafeLoader):
    """YAML of plain values in which a mapping has each key once (of two, PyYAML would drop the first) and ``1e-8`` is a
    number, as in YAML 1.2 (in PyYAML's 1.1 it is text)."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


_PlainValues.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_yaml(text: str) -> Any:
    """What the YAML text holds.

    Raises:
        yaml.YAMLError: it is not valid, or a key is twice in one mapping.
    """
    try:
        return yaml.load(text, Loader=_PlainValues)
    except yaml.MarkedYAMLError as error:
        raise yaml.YAMLError(_where_and_why(error)) from None
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def what_it_holds(value: Any) -> str:
    """A YAML value that should have been a mapping, in YAML's words."""
    if isinstance(value, list):
        return "a list"
    return "text" if isinstance(value, str) else f"the value {value!r}"


def _where_and_why(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's words in one line, without its name for a text that is no file."""
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + ", ".join(part for part in (error.context, error.problem) if part)


def merge_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """``values`` with dotted keys (``{"clipping.max_norm": 0.5}``) or nested mappings laid over it.

    A section whose ``kind`` is overridden starts afresh: the keys of the old kind do not apply to the new one. In which
    order the overrides stand does not matter.
    """
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(
            f"overrides are {overrides!r:.80}; a mapping is needed, for example {{'clipping.max_norm': 0.5}}"
        )
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for path, value in _kinds_first(overrides or {}):
        _assign(merged, path, value)
    return merged


def _kinds_first(overrides: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Paths and values: whole sections, then kinds, then keys of the new kind, which a later kind would take away."""
    paths = [(str(dotted).split("."), value) for dotted, value in overrides.items()]
    return sorted(paths, key=lambda entry: (len(entry[0]), entry[0][-1] != "kind"))


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
        for below, entry in _kinds_first(value):
            _assign(target[head], below, entry)
    else:
        target[head] = value
