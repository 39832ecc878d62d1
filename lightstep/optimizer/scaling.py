"""The factors by which gradients are multiplied before the update: one over the loss scale, times the clip coefficient.

Norms are those of unscaled gradients, with the bits that they have if the scale is divided out first.

The norm is that of all gradients together, or with ``clip_layers`` that of each layer. A layer is a part of the model
(a transformer block, or a module outside the blocks), however its state is cut into units.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from lightstep.clipping import GradientNorm, clip_coefficient
from lightstep.distributed import differs_across_ranks, like
from lightstep.optimizer.unit_updater import Gradients
from lightstep.precision.loss_scale import LossScale
from lightstep.state.schema import Managed
from lightstep.state.units import group_by_layer

__all__ = ["Scaling"]

Factor = Tensor | None


class Scaling:
    """Norms and factors of one optimizer's gradients; a new object is made when its parameters change.

    It sets :attr:`Managed.norm_group`.

    Args:
        managed: the parameters, in the order of ``model.parameters()``: the last bits of the norm depend on it.
        norm_type: p of the norms.
        everywhere: whether all ranks of the process group agree on overflow; ``None`` decides by the parameters.
        clip_layers: clip each layer by its own norm.
        layer_by_layer: gradients exist one layer at a time: :meth:`add_norm` and :meth:`layer_factors` are used.

    Attributes:
        layers: the parameters of each layer.
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
        parameters = [item.param for item in self._managed]
        self._global_norm = GradientNorm(_measured(self._managed), norm_type, everywhere, parameters, whole=True)
        self._half = all(item.local.dtype == torch.float16 for item in self._managed)
        self.layers = group_by_layer(self._managed)
        by_layer = self.layers if clip_layers or layer_by_layer else []
        for number, layer in enumerate(by_layer):
            for item in layer:
                item.norm_group = number
        self._layer_norms = [GradientNorm(_measured(layer), norm_type, False) for layer in by_layer]
        self._norms: dict[Managed, Tensor] = {}

    # -- all gradients at once

    def norm(self, gradients: Gradients, loss_scale: LossScale) -> tuple[Tensor, Tensor]:
        """The global norm of the gradients divided by the loss scale, and the overflow flag: 0-dim fp32."""
        return self._combine(self._global_norm, self._norms_of(self._managed, gradients, loss_scale), loss_scale)

    def _norms_of(
        self, items: Sequence[Managed], gradients: Gradients, loss_scale: LossScale
    ) -> Sequence[Tensor | None]:
        """Each parameter's own norm: one that has been stored, or that of its gradient."""
        if not self._norms:
            return self._tensor_norms(list(map(gradients.get, items)), loss_scale)
        left = [item for item in items if item in gradients and item not in self._norms]
        found = dict(zip(left, self._tensor_norms([gradients[item] for item in left], loss_scale), strict=True))
        return [found.get(item, self._norms.get(item)) if item in gradients else None for item in items]

    def _tensor_norms(self, gradients: Sequence[Tensor | None], loss_scale: LossScale) -> Sequence[Tensor | None]:
        """Each gradient's own norm, for :meth:`_combine`."""
        if loss_scale.is_identity or self._divided_later(loss_scale):
            return self._global_norm.tensor_norms(gradients)
        divided = (None if g is None else g.float() / loss_scale.tensor(g.device) for g in gradients)
        return [self._global_norm.tensor_norms([gradient])[0] for gradient in divided]  # one copy at a time

    def _combine(
        self, norm_of: GradientNorm, norms: Sequence[Tensor | None], loss_scale: LossScale
    ) -> tuple[Tensor, Tensor]:
        norm, overflow = norm_of.combine(norms)
        if not loss_scale.is_identity and self._divided_later(loss_scale):
            norm = norm / loss_scale.tensor(norm.device)
        return norm, overflow

    def _divided_later(self, loss_scale: LossScale) -> bool:
        """Whether dividing the norm by the scale, not the gradients, gives the same bits.

        Division by a power of two is exact, and squares of fp16 numbers stay in the range of fp32 with and without the
        scale. Squares of other dtypes may leave it, and roots other than the first and second of a power of two are
        rounded.
        """
        exact = self._half and self._norm_type in (1, 2, math.inf)
        return exact and loss_scale.power_of_two

    def unclipped_factors(self, loss_scale: LossScale, device: torch.device) -> tuple[Factor, Factor]:
        """``(divisor, factor)`` of a step that clips nothing."""
        return _factors(None if loss_scale.is_identity else loss_scale.tensor(device).clone(), loss_scale, None)

    def factors(
        self, gradients: Gradients, norm: Tensor, loss_scale: LossScale, scale: Factor, max_norm: float | None
    ) -> list[tuple[Gradients, Factor, Factor]]:
        """The gradients that are scaled alike, with ``(divisor, factor)`` of
        :class:`~lightstep.optimizer.unit_updater.Update`: all of them, or those of each layer.

        Args:
            norm: the global norm, unscaled.
            loss_scale: the scale of the gradients.
            scale: its value in this step, 0-dim fp32; ``None`` is 1.
            max_norm: ``None`` clips nothing.
        """
        if max_norm is None or not self._clip_layers:
            coefficient = None if max_norm is None else clip_coefficient(norm, max_norm)
            return [(gradients, *_factors(scale, loss_scale, coefficient))]
        found = []
        for layer, norm_of_layer in zip(self.layers, self._layer_norms, strict=True):
            norms = self._norms_of(layer, gradients, loss_scale)
            layer_norm = self._combine(norm_of_layer, norms, loss_scale)[0].to(norm.device)
            own = {item: gradients[item] for item in layer if item in gradients}
            found.append((own, *_factors(scale, loss_scale, clip_coefficient(layer_norm, max_norm))))
        return found

    # -- one layer at a time

    def reset_norms(self) -> None:
        """Forget the norms of an earlier step."""
        self._norms.clear()

    def forget_norms(self, items: Iterable[Managed]) -> None:
        """Forget the norms of gradients that have been dropped."""
        for item in items:
            self._norms.pop(item, None)

    def add_norms(self, gradients: Gradients, loss_scale: LossScale) -> None:
        """Store the norms of gradients that will be freed before the end of the step."""
        norms = self._tensor_norms(list(gradients.values()), loss_scale)
        for item, norm in zip(gradients, norms, strict=True):
            assert norm is not None
            self._norms[item] = norm

    @property
    def stored_norms(self) -> Collection[Managed]:
        """The parameters whose norms have been stored since :meth:`reset_norms`."""
        return self._norms.keys()

    def total_norm(self, loss_scale: LossScale) -> tuple[Tensor, Tensor]:
        """:meth:`norm` of all gradients whose norms have been stored."""
        return self._combine(self._global_norm, [self._norms.get(item) for item in self._managed], loss_scale)

    def layer_factors(
        self, number: int, gradients: Gradients, loss_scale: LossScale, max_norm: float | None
    ) -> tuple[Factor, Factor, Tensor]:
        """``(divisor, factor, overflow)`` of one layer whose norms are stored; the same on all ranks that share it."""
        device = next(iter(gradients.values())).device
        norms = [self._norms.get(item) if item in gradients else None for item in self.layers[number]]
        norm = self._combine(self._layer_norms[number], norms, loss_scale)[0].to(device)
        scale = None if loss_scale.is_identity else loss_scale.tensor(device)
        coefficient = None if max_norm is None else clip_coefficient(norm, max_norm)
        return *_factors(scale, loss_scale, coefficient), (~norm.isfinite()).float()


def _measured(items: Sequence[Managed]) -> list[Tensor]:
    """The parameters, on the devices of their gradients. There is nothing to be read in those that rest on the host."""
    found: list[Tensor] = []
    for item in items:
        if item.home is None:
            found.append(item.param)
            continue
        found.append(like(item.param, item.local.detach()).requires_grad_(item.param.requires_grad))
        found[-1].differs_across_ranks = differs_across_ranks(item.param)  # type: ignore[attr-defined]
    return found


def _factors(scale: Factor, loss_scale: LossScale, coefficient: Factor) -> tuple[Factor, Factor]:
    """``(divisor, factor)``: one multiplication, unless dividing by the scale is inexact."""
    if scale is None:
        return None, coefficient
    if not loss_scale.power_of_two:
        return scale, coefficient
    return None, scale.reciprocal() if coefficient is None else coefficient / scale
