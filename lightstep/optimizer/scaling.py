"""By what gradients are multiplied before the update: the loss scale taken out, and clipped by a norm.

Norms are those of the gradients without the loss scale, with the bits they have when it is divided out first.

The norm is that of all gradients together, or with ``layers`` each layer's own. A layer is what shares a place in the
model (a transformer block, a module outside the blocks), however its state is cut for streaming.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightstep.clipping import GradientNorm, clip_coefficient
from lightstep.optimizer.walk import Gradients
from lightstep.precision.loss_scale import LossScale
from lightstep.state.backend import Managed
from lightstep.state.units import group_by_layer

__all__ = ["Scaling"]

Factor = Tensor | None


class Scaling:
    """Norms and factors of one optimizer's gradients; made anew when its parameters change.

    Args:
        managed: the parameters, in the order of ``model.parameters()``: the last bits of the norm depend on it.
        norm_type: p of the norms.
        everywhere: whether all ranks of the process group agree on overflow; ``None`` decides by the parameters.
        clip_layers: clip each layer by its own norm.
        layer_by_layer: gradients come and go by :meth:`keep` and :meth:`of_layer`.

    Attributes:
        layers: the parameters layer by layer.
    """

    def __init__(
        self,
        managed: Iterable[Managed],
        norm_type: float,
        everywhere: bool | None = None,
        *,
        clip_layers: bool = False,
        layer_by_layer: bool = False,
    ) -> None:
        self._managed = list(managed)
        self._norm_type, self._clip_layers = norm_type, clip_layers
        self._norm = GradientNorm([item.param for item in self._managed], norm_type, everywhere)
        self._half = all(item.local.dtype == torch.float16 for item in self._managed)
        self.layers = group_by_layer(self._managed)
        by_layer = self.layers if clip_layers or layer_by_layer else []
        self._layer_norms = [GradientNorm([item.param for item in layer], norm_type, False) for layer in by_layer]
        self._kept: dict[Managed, Tensor] = {}

    # -- all gradients at once

    def norm(self, gradients: Gradients, loss_scale: LossScale) -> tuple[Tensor, Tensor]:
        """The global norm of the gradients divided by the loss scale, and the overflow flag: 0-dim fp32."""
        norms = self._norms([gradients.get(item) for item in self._managed], loss_scale)
        return self._of_norms(self._norm, norms, loss_scale)

    def _norms(self, gradients: Sequence[Tensor | None], loss_scale: LossScale) -> Sequence[Tensor | None]:
        """Each gradient's own norm, for :meth:`_of_norms`."""
        if loss_scale.is_identity or self._divided_later(loss_scale):
            return self._norm.tensor_norms(gradients)
        divided = (None if g is None else g.float() / loss_scale.tensor(g.device) for g in gradients)
        return [self._norm.tensor_norms([gradient])[0] for gradient in divided]  # none is kept beside the next

    def _of_norms(
        self, together: GradientNorm, norms: Sequence[Tensor | None], loss_scale: LossScale
    ) -> tuple[Tensor, Tensor]:
        norm, overflow = together.of_norms(norms)
        return norm / loss_scale.tensor(norm.device) if self._divided_later(loss_scale) else norm, overflow

    def _divided_later(self, loss_scale: LossScale) -> bool:
        """Whether the norm is divided by the scale in the place of the gradients, because that is the same.

        Powers of two change no digit, and squares of what fitted fp16 stay in the range of fp32 with the scale and
        without it. Those of other gradients may leave it, and other roots of powers of two are rounded.
        """
        exact = self._half and self._norm_type in (1, 2, math.inf)
        return exact and loss_scale.power_of_two and not loss_scale.is_identity

    def unclipped(self, loss_scale: LossScale, device: torch.device) -> tuple[Factor, Factor]:
        """``(divisor, factor)`` where the norm clips nothing."""
        return _scaled(loss_scale, loss_scale.tensor(device).clone(), None)

    def of_all(
        self, gradients: Gradients, norm: Tensor, loss_scale: LossScale, scale: Tensor, max_norm: float | None
    ) -> tuple[Factor, Factor | Mapping[Managed, Tensor]]:
        """``(divisor, factor)`` of :class:`~lightstep.optimizer.walk.Update`.

        Args:
            norm: the global norm, unscaled.
            loss_scale: by which the gradients are multiplied.
            scale: its number in this step, 0-dim fp32.
            max_norm: ``None`` clips nothing.
        """
        if max_norm is None or not self._clip_layers:
            return _scaled(loss_scale, scale, None if max_norm is None else clip_coefficient(norm, max_norm))
        divisor, factors = None, {}
        for layer, norm_of_layer in zip(self.layers, self._layer_norms, strict=True):
            norms = self._norms([gradients.get(item) for item in layer], loss_scale)
            own = self._of_norms(norm_of_layer, norms, loss_scale)[0].to(scale.device)
            divisor, factor = _scaled(loss_scale, scale, clip_coefficient(own, max_norm))
            assert factor is not None
            factors.update(dict.fromkeys(layer, factor))
        return divisor, factors

    # -- gradients that come and go layer by layer

    def start(self) -> None:
        """Forget the norms of an earlier step."""
        self._kept.clear()

    def keep(self, item: Managed, gradient: Tensor, loss_scale: LossScale) -> None:
        """Remember the norm of a gradient that will be gone at the end of the step."""
        (norm,) = self._norms([gradient], loss_scale)
        assert norm is not None
        self._kept[item] = norm

    @property
    def has_kept(self) -> bool:
        """Whether any gradient has come since :meth:`start`."""
        return bool(self._kept)

    def kept_norm(self, loss_scale: LossScale) -> tuple[Tensor, Tensor]:
        """:meth:`norm` of all that was kept."""
        return self._of_norms(self._norm, [self._kept.get(item) for item in self._managed], loss_scale)

    def of_layer(
        self, number: int, gradients: Gradients, loss_scale: LossScale, max_norm: float | None
    ) -> tuple[Factor, Factor, Tensor]:
        """``(divisor, factor, overflow)`` of one layer whose norms were kept; all ranks that share it agree."""
        device = next(iter(gradients.values())).device
        kept = [self._kept.get(item) if item in gradients else None for item in self.layers[number]]
        norm = self._of_norms(self._layer_norms[number], kept, loss_scale)[0].to(device)
        scale = loss_scale.tensor(device)
        coefficient = None if max_norm is None else clip_coefficient(norm, max_norm)
        return *_scaled(loss_scale, scale, coefficient), (~norm.isfinite()).float()


def _scaled(loss_scale: LossScale, scale: Tensor, coefficient: Factor) -> tuple[Factor, Factor]:
    """One multiplication, unless dividing by the scale is inexact."""
    if loss_scale.is_identity:
        return None, coefficient
    if not loss_scale.power_of_two:
        return scale, coefficient
    return None, scale.reciprocal() if coefficient is None else coefficient / scale
