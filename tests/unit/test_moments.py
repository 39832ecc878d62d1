"""Moments in bf16: the bits of a plain loop that keeps them so, everywhere, and what becomes of them in checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from tests.covering import every_pair
from tests.reference.pair import DTYPES, EVERY_TIME, TWO_GROUPS, Pair, scale_for
from tests.reference.short_moments import NearestMoments, StochasticMoments

ROUNDINGS = {"nearest": NearestMoments, "stochastic": StochasticMoments}


class ShortPair(Pair):
    """Both with moments in bf16."""

    def __init__(self, *args: Any, rounding: str, **options: Any) -> None:
        self.reference_class = ROUNDINGS[rounding]
        super().__init__(*args, moments="bfloat16", moments_rounding=rounding, **options)


CLASSES = {
    **{name: (*found, {}) for name, found in TWO_GROUPS.items()},
    "AdamW-for-loop": (torch.optim.AdamW, {"lr": 3e-3}, {"lr": 1e-3}, {"fused": False}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}, {"lr": 0.1}, {}),
}


@every_pair(name=CLASSES, parameters=DTYPES, backend=EVERY_TIME, rounding=ROUNDINGS)
def test_the_bits_of_a_loop_that_keeps_its_moments_so(name: str, parameters: str, backend: str, rounding: str) -> None:
    if name == "SGD-momentum" and rounding == "stochastic":
        rounding = "nearest"  # it counts no steps
    optimizer_class, first, second, common = CLASSES[name]
    pair = ShortPair(
        optimizer_class,
        first,
        second,
        common=common,
        parameters=parameters,
        backend=backend,
        rounding=rounding,
        max_norm=0.35,
        overflow_at=(2, 5),
        late_from=4,
        intermittent=True,
        **scale_for(parameters),
    )
    pair.train(6)
    pair.resume()
    pair.check()
    pair.train(4)
    moments = [
        value
        for p in pair.model.parameters()
        for key, value in pair.optimizer.state.get(p, {}).items()
        if key not in ("master", "step", "mu_product")
    ]
    assert moments and {value.dtype for value in moments} == {torch.bfloat16}
