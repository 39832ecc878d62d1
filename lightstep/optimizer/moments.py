"""Which entries of the base optimizers' state are moments, and the dtype in which they are kept between updates.

A moment is an average of gradients or of their squares. It may be kept in bf16: the weights' masters are not rounded by
that. Other entries (averages of weights, step sizes) stay in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.distributed import Window, window_of
from lightstep.optimizer.classes import GroupClasses
from lightstep.precision.moments import StochasticRounding
from lightstep.state.schema import EntrySpec, Managed, Schema, entry_dtype

__all__ = ["Moments", "moments_of"]

logger = logging.getLogger(__name__)

_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_diff", "exp_inf", "momentum_buffer"}
    | {"square_avg", "grad_avg", "acc_delta", "sum"}
)


@dataclass(frozen=True)
class Moments:
    """How moments are kept.

    Args:
        dtype: ``"float32"``, as the base optimizer has them, or ``"bfloat16"``.
        rounding: of bf16 moments: to nearest, or stochastic
            (:class:`~lightstep.precision.moments.StochasticRounding`).
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    _stochastic: StochasticRounding = field(default_factory=StochasticRounding, init=False, compare=False, repr=False)
    _logged: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return Moments, (self.dtype, self.rounding)

    def set_up(self, items: Iterable[Managed], classes: GroupClasses) -> None:
        """Set dtype and rounding in these parameters' schemas, which are new.

        Raises:
            ValueError: none of the classes has moments, or none has moments that can be rounded like this.
        """
        if self.dtype == "float32":
            return
        schemas = {classes.arithmetic_for(item.group).optimizer_class: item.schema for item in items}
        found = {owner: moments_of(owner, schema) for owner, schema in schemas.items()}
        self._check(schemas, found)
        for owner, specs in found.items():
            for spec in specs.values():
                spec.kept = torch.bfloat16
                spec.rounding = self._stochastic if self._is_stochastic(schemas[owner]) else None
        for item in items:
            if self.rounding == "stochastic":
                item.window = _window_of(item)

    def _is_stochastic(self, schema: Schema) -> bool:
        """Whether entries under this schema are rounded stochastically: the noise depends on the ``step`` in it."""
        return self.rounding == "stochastic" and "step" in schema

    def _check(self, schemas: Mapping[type, Schema], found: Mapping[type, Mapping[str, EntrySpec]]) -> None:
        names = {owner: f"{owner.__name__} ({', '.join(schema) or 'no state'})" for owner, schema in schemas.items()}
        if not any(found.values()):
            raise ValueError(
                f"optimizer_state.moments is {self.dtype}, and {' and '.join(names.values())} has no entry that is "
                f"known to be a moment. Set it to float32; or name the moments on the class, moments = ('exp_avg',)"
            )
        uncounted = [names[owner] for owner, specs in found.items() if specs and "step" not in schemas[owner]]
        if self.rounding == "nearest" or not uncounted:
            return
        if not any(specs and self._is_stochastic(schemas[owner]) for owner, specs in found.items()):
            raise ValueError(
                f"optimizer_state.moments_rounding is stochastic, and {' and '.join(uncounted)} counts no steps in its "
                "state, on which the noise depends. Set it to nearest: a momentum does not stall"
            )
        self._log_once(f"moments of {' and '.join(uncounted)} are rounded to nearest: their state counts no steps")

    def log_conversion(self, item: Managed, entries: Mapping[str, Any]) -> None:
        """Log, once, that loaded moments are converted from one dtype to the other."""
        for key, value in entries.items():
            spec = item.schema.get(key)
            if spec is None or not spec.like_parameter or not isinstance(value, Tensor):
                continue
            dtype = entry_dtype(spec, item)
            if {value.dtype, dtype} == {torch.float32, torch.bfloat16}:
                self._log_once(f"loaded moments are {value.dtype}, and are kept in {dtype} from here on")

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.info(line)


def moments_of(optimizer_class: type, schema: Schema) -> dict[str, EntrySpec]:
    """fp32 entries of the parameter's shape that are known to be moments, or that the class names in ``moments``."""
    names = _NAMES.union(getattr(optimizer_class, "moments", ()))
    return {
        key: spec
        for key, spec in schema.items()
        if key in names and spec.like_parameter and spec.dtype == torch.float32
    }


def _window_of(item: Managed) -> Window:
    try:
        return window_of(item.param)
    except ValueError as error:
        raise ValueError(
            f"optimizer_state.moments_rounding is stochastic, and {item.name} cannot have it: {error}; set nearest"
        ) from error
