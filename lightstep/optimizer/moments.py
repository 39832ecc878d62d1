"""Which entries of the base optimizers' state are moments, and how they are kept between updates.

A moment is an average of gradients or of their squares. It may be kept in fewer bits: the weights' masters are not
rounded by that. Other entries (averages of weights, step sizes) stay in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.distributed import window_of
from lightstep.optimizer.classes import GroupClasses
from lightstep.precision.moments import BFloat16
from lightstep.precision.moments_int8 import LARGEST_BLOCK, SMALLEST_BLOCK, Int8
from lightstep.precision.noise import Noise, numbered
from lightstep.state.schema import Codec, EntrySpec, Managed, Schema, entry_dtype

__all__ = ["Moments", "moments_of"]

logger = logging.getLogger(__name__)

_KEPT = (torch.float32, torch.bfloat16)
_LOST = {
    "float32": "nothing is lost",
    "bfloat16": "rounded to nearest, to 8 significant bits",
    "int8": "rounded to the nearest codes; only values that lightstep saved from int8 moments are exact",
}
"""What loading other moments loses, by how they are kept."""
_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_diff", "exp_inf", "momentum_buffer"}
    | {"square_avg", "grad_avg", "acc_delta", "sum"}
)


@dataclass(frozen=True)
class Moments:
    """How moments are kept.

    Args:
        dtype: ``"float32"``, as the base optimizer has them; ``"bfloat16"``; or ``"int8"``, codes with a scale for each
            block, of parameters whose last dimension can be divided into blocks.
        rounding: of shorter moments: to nearest, or stochastic (:mod:`lightstep.precision.noise`). ``None``: 8-bit ones
            stochastically, because a second moment with ``beta2`` 0.999 stands still otherwise, and to nearest where
            that is impossible; bf16 to nearest.
    """

    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    rounding: Literal["nearest", "stochastic"] | None = None
    _noise: Noise = field(default_factory=Noise, init=False, compare=False, repr=False)
    _logged: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return Moments, (self.dtype, self.rounding)

    def set_up(self, items: Iterable[Managed], classes: GroupClasses, seed: int = 0) -> None:
        """Give these parameters, which are new, schemas that say how their moments are kept.

        Args:
            seed: of the noise.

        Raises:
            ValueError: none of the classes has moments, or none has moments that can be rounded like this; or a shard
                cuts blocks.
        """
        if self.dtype == "float32":
            return
        items = list(items)
        owners = {item: classes.arithmetic_for(item.group).optimizer_class for item in items}
        schemas = {owners[item]: item.schema for item in items}
        found = {owner: moments_of(owner, schema) for owner, schema in schemas.items()}
        self._check(schemas, found)
        known: dict[tuple[type, int, bool], Schema] = {}
        for item in items:
            owner, block = owners[item], _block_of(item) if self.dtype == "int8" else 1
            if not block:
                continue
            noise = self._noise if self._is_stochastic(schemas[owner]) and self._has_window(item, seed) else None
            key = owner, block, noise is not None
            if key not in known:
                coded = {
                    name: replace(spec, codec=self._codec(spec, block, noise)) for name, spec in found[owner].items()
                }
                known[key] = {**schemas[owner], **coded}
            item.schema = known[key]

    def _codec(self, spec: EntrySpec, block: int, noise: Noise | None) -> Codec:
        return BFloat16(noise) if self.dtype == "bfloat16" else Int8(block, spec.never_negative, noise)

    def _is_stochastic(self, schema: Schema) -> bool:
        """Whether entries under this schema are rounded stochastically: the noise depends on the ``step`` in it."""
        return self._rounding == "stochastic" and "step" in schema

    @property
    def _rounding(self) -> str:
        return self.rounding or ("stochastic" if self.dtype == "int8" else "nearest")

    def _has_window(self, item: Managed, seed: int) -> bool:
        """Find out where the elements of a parameter are that is to be rounded stochastically."""
        try:
            item.window = numbered(window_of(item.param), seed)
        except ValueError as error:
            if self.rounding is not None:
                raise ValueError(
                    f"optimizer_state.moments_rounding is stochastic, and {item.name} cannot have it: {error}; "
                    "set nearest"
                ) from error
            self._log_once(
                "moments of parameters that are sharded along several dimensions behind the first are rounded to "
                "nearest: noise needs elements that are in one window"
            )
            return False
        return True

    def _check(self, schemas: Mapping[type, Schema], found: Mapping[type, Mapping[str, EntrySpec]]) -> None:
        names = {owner: f"{owner.__name__} ({', '.join(schema) or 'no state'})" for owner, schema in schemas.items()}
        if not any(found.values()):
            raise ValueError(
                f"optimizer_state.moments is {self.dtype}, and {' and '.join(names.values())} has no entry that is "
                f"known to be a moment. Set it to float32; or name the moments on the class, moments = ('exp_avg',)"
            )
        uncounted = [names[owner] for owner, specs in found.items() if specs and "step" not in schemas[owner]]
        if self._rounding == "nearest" or not uncounted:
            return
        if self.rounding is not None and not any(
            specs and self._is_stochastic(schemas[owner]) for owner, specs in found.items()
        ):
            raise ValueError(
                f"optimizer_state.moments_rounding is stochastic, and {' and '.join(uncounted)} counts no steps in its "
                "state, on which the noise depends. Set it to nearest: a momentum does not stall"
            )
        self._log_once(f"moments of {' and '.join(uncounted)} are rounded to nearest: their state counts no steps")

    def refuse_late(
        self, item: Managed, entries: Iterable[str], classes: GroupClasses, settings: Mapping[str, Any]
    ) -> None:
        """Refuse moments that the parameter's group did not have at the set-up: they would be kept as they are.

        Args:
            settings: what will be loaded into the group.

        Raises:
            ValueError: there are such.
        """
        unknown = [key for key in entries if key not in item.schema and key != "master"]
        if self.dtype == "float32" or not unknown:
            return
        arithmetic = classes.arithmetic_for(item.group)
        schema = arithmetic.schema(item.local.device, [{**item.group, **settings}])
        late = [key for key in unknown if key in moments_of(arithmetic.optimizer_class, schema)]
        if late:
            raise ValueError(
                f"the state of {item.name} has {' and '.join(late)}, which {arithmetic.name} keeps under the loaded "
                f"settings, and did not under those of the first step: optimizer_state.moments: {self.dtype} cannot "
                "keep it in fewer bits any more. Make the optimizer with these settings (amsgrad, centered, momentum), "
                "or load before its first step"
            )

    def log_conversion(self, item: Managed, entries: Mapping[str, Any]) -> None:
        """Log, once, that loaded moments are kept otherwise from here on, and what is lost."""
        for key, value in entries.items():
            spec = item.schema.get(key)
            if spec is None or not spec.like_parameter or not isinstance(value, Tensor):
                continue
            given, kept = str(value.dtype).removeprefix("torch."), "float32" if spec.codec is None else self.dtype
            if given != kept and given in ("float32", "bfloat16") and entry_dtype(spec, item) in _KEPT:
                self._log_once(f"loaded moments are {given}, and are kept in {kept} from here on: {_LOST[kept]}")

    def log_decoded(self) -> None:
        """Log, once, that loaded moments were another library's codes."""
        self._log_once(
            "loaded moments are codes of bitsandbytes or torchao, and are decoded to float32: exactly, but what these "
            "codes had lost stays lost"
        )

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.info(line)


def _block_of(item: Managed) -> int:
    """Elements of a block, the same for all shards of the parameter; 0 if its rows cannot be divided into blocks."""
    shape = item.param.shape
    if len(shape) < 2 or not item.param.numel():
        return 0
    block = min(shape[-1] & -shape[-1], LARGEST_BLOCK)  # the largest power of two that divides a row
    if block < SMALLEST_BLOCK:
        return 0
    if item.local.numel() and item.local.shape[-1] % block:
        raise ValueError(
            f"optimizer_state.moments is int8, and {item.name} is sharded along its last dimension, "
            f"{item.local.shape[-1]} of {shape[-1]}, which cuts blocks of {block}; set moments: bfloat16"
        )
    return block


def moments_of(optimizer_class: type, schema: Schema) -> dict[str, EntrySpec]:
    """fp32 entries of the parameter's shape that are known to be moments, or that the class names in ``moments``."""
    names = _NAMES.union(getattr(optimizer_class, "moments", ()))
    return {
        key: spec
        for key, spec in schema.items()
        if key in names and spec.like_parameter and spec.dtype == torch.float32
    }
