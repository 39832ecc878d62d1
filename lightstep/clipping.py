"""One global gradient norm, its overflow flag, and the clip coefficient: one pass and one reduction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightstep.distributed import NormReduction, local_gradient, local_tensor

LARGEST_POWER = 8
"""Of the finite norms."""


class GradientNorm:
    """The norm of all gradients together, planned once for a list of parameters.

    Args:
        parameters: plain tensors and DTensors on any meshes, in the same order on all ranks of a mesh.
        norm_type: p of the norm, 1 to 8; ``math.inf`` is the largest element.
        everywhere: agree on overflow over all ranks of the default process group; ``None`` decides by the parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], norm_type: float = 2.0, everywhere: bool | None = None) -> None:
        self.norm_type = check_norm_type(norm_type)
        self._reduction = NormReduction(parameters, everywhere)

    def __call__(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """``(norm, overflow)``: 0-dim fp32; ``overflow`` is 1 where the norm is not finite on some rank, else 0.

        Args:
            gradients: each parameter's local gradient, ``None`` where it has none.
        """
        return self._of_sums(self._partial_sums(gradients))

    def of_norms(self, norms: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """The same from each gradient's own norm (0-dim fp64, of :func:`tensor_norms`): the gradients may be gone."""
        parts: list[list[Tensor]] = [[] for _ in range(self._reduction.sums)]
        for norm, place in zip(norms, self._reduction.places, strict=True):
            if norm is not None:
                parts[place].append(norm.to(self._reduction.device))
        nothing = torch.zeros((), dtype=torch.float64, device=self._reduction.device)
        return self._of_sums([self._sum_of_norms(torch.stack(part)) if part else nothing.clone() for part in parts])

    def _of_sums(self, sums: list[Tensor]) -> tuple[Tensor, Tensor]:
        total, overflow = self._reduction.total_and_overflow(sums, self.norm_type)
        norm = _root(total, self.norm_type)
        return norm, torch.maximum((~norm.isfinite()).float(), overflow.float().clamp_(max=1))

    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The norm alone, 0-dim fp32."""
        return _root(self._reduction.total(self._partial_sums(gradients), self.norm_type), self.norm_type)

    def _partial_sums(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """This rank's ``sum |g|^p`` for each sum of the reduction, 0-dim fp64 on the reduction's device."""
        parts: list[list[Tensor]] = [[] for _ in range(self._reduction.sums)]
        for gradient, place in zip(gradients, self._reduction.places, strict=True):
            if gradient is not None and gradient.numel():
                parts[place].append(gradient)
        return [self._sum(part) for part in parts]

    def _sum(self, gradients: list[Tensor]) -> Tensor:
        device = self._reduction.device
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=device)
        norms = torch.cat([norms.to(device) for norms in tensor_norms(gradients, self.norm_type)])
        return self._sum_of_norms(norms)

    def _sum_of_norms(self, norms: Tensor) -> Tensor:
        return norms.amax() if math.isinf(self.norm_type) else norms.pow_(self.norm_type).sum()


def tensor_norms(gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each gradient, as one 1-dim fp64 tensor per device.

    The elements are added in fp64: fp32 sums lose digits in large tensors and squares leave its range.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return [torch.stack(_norms(listed, norm_type)) for listed in by_device.values()]


def _norms(gradients: list[Tensor], norm_type: float) -> list[Tensor] | tuple[Tensor, ...]:
    if gradients[0].device.type == "cpu":
        return [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64) for gradient in gradients]
    return torch._foreach_norm(gradients, norm_type, dtype=torch.float64)


def _root(total: Tensor, norm_type: float) -> Tensor:
    return (total if math.isinf(norm_type) else total.pow(1.0 / norm_type)).float()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, 0-dim fp32: torch's ``clip_grad_norm_`` rule."""
    return (max_norm / (norm + 1e-6)).clamp_(max=1.0)


def global_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all ``p.grad`` together, as if the model were on one device.

    Correct on any mix of plain tensors and DTensors on different meshes; replicated parameters count once. Sharded
    parameters make this a collective call: every rank calls it with its parameters in the same order. One all-reduce
    over each mesh that shards something.

    Args:
        parameters: a tensor or tensors; those without ``.grad`` count as zero.
        norm_type: p, 1 to 8; ``math.inf`` is the largest element.

    Returns:
        0-dim fp32 tensor on the gradients' device.

    Raises:
        ValueError: ``norm_type`` is another number.
    """
    listed = _listed(parameters)
    check_norm_type(norm_type)
    if not listed:
        return torch.zeros((), dtype=torch.float32)
    return GradientNorm(listed, norm_type).norm([local_gradient(p, torch.float32) for p in listed])


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all ``p.grad`` in place so that their global norm is at most ``max_norm``; see :func:`global_grad_norm`.

    Only for plain torch optimizers: a lightstep optimizer clips by itself, in ``step()``.

    Returns:
        The norm before clipping, 0-dim fp32. Where it is not finite the gradients become so too, as in torch.

    Raises:
        ValueError: ``max_norm`` is not a positive number, or ``norm_type`` not one from 1 to 8 or ``math.inf``.
    """
    check_max_norm(max_norm)
    listed = _listed(parameters)
    norm = global_grad_norm(listed, norm_type)
    coefficient = clip_coefficient(norm, max_norm)
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in listed:
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad.detach())
            by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, coefficient.to(device))
    return norm


def check_max_norm(max_norm: float) -> float:
    """``max_norm`` itself; raises ValueError when it is not a positive number."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm!r}; a positive number is needed (leave clipping out to turn it off)")
    return float(max_norm)


def check_norm_type(norm_type: float) -> float:
    """``norm_type`` itself as a float; raises ValueError when it is below 1, above 8 and finite, or no number."""
    known = isinstance(norm_type, (int, float)) and not isinstance(norm_type, bool)
    if not known or not (1 <= norm_type <= LARGEST_POWER or norm_type == math.inf):
        raise ValueError(
            f"norm_type is {norm_type!r}; a number from 1 to {LARGEST_POWER} or math.inf is needed (2 is Euclidean, "
            "math.inf the largest element; higher powers of fp32 gradients leave the range of fp64)"
        )
    return float(norm_type)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
