"""The textbook loop without masters: weights widened, torch's own step in fp32, weights rounded stochastically."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.reference.plain_loop import ReferenceLoop
from tests.reference.short_moments import (
    NearestMoments,
    StochasticInt8Moments,
    StochasticMoments,
    stochastically_rounded,
)


class RoundedWeights(ReferenceLoop):
    """Between steps a master is its weight, widened. The noise is that of moments, with the name ``weight``."""

    def _update(self, grads: dict[Tensor, Tensor]) -> None:
        super()._update(grads)
        for param, master in self.masters.items():
            state = self.optimizer.state.get(master, {})
            if param.dtype == torch.bfloat16 and state:
                param.copy_(stochastically_rounded(master, "weight", int(state["step"]), self.rounding_seed))
                master.copy_(param)


class RoundedWithNearestMoments(RoundedWeights, NearestMoments):
    pass


class RoundedWithStochasticMoments(RoundedWeights, StochasticMoments):
    pass


class RoundedWithStochasticInt8Moments(RoundedWeights, StochasticInt8Moments):
    pass
