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

    Where ``torch.nn.utils.clip_grad_norm_`` is defined for such parameters (:attr:`NormReduction.as_torch`) it has that
    function's bits: each gradient's norm in fp32, and the norm of these. Elsewhere the powers are added up in fp64.

    Args:
        parameters: plain tensors and DTensors on any meshes, in the order of ``model.parameters()``, on which the last
            bits depend; the same on all ranks of a mesh.
        norm_type: p of the norm, 1 to 8; ``math.inf`` is the largest element.
        everywhere: agree on overflow over all ranks of the default process group; ``None`` decides by the parameters.

    Attributes:
        device: where the norm is.
        dtype: of each gradient's own norm.
    """

    def __init__(self, parameters: Sequence[Tensor], norm_type: float = 2.0, everywhere: bool | None = None) -> None:
        self.norm_type = check_norm_type(norm_type)
        self._parameters = parameters
        self._reduction = NormReduction(parameters, everywhere)
        self.device = self._reduction.device
        self.dtype = torch.float32 if self._reduction.as_torch else torch.float64

    def __call__(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """``(norm, overflow)``: 0-dim fp32; ``overflow`` is 1 where the norm is not finite on some rank, else 0.

        Args:
            gradients: each parameter's local gradient, ``None`` where it has none.
        """
        return self.of_norms(self.tensor_norms(gradients))

    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The norm alone, 0-dim fp32."""
        norms = self.tensor_norms(gradients)
        if self._reduction.as_torch:
            return self._as_torch(norms)
        return self._root(self._reduction.total(self._partial_sums(norms), self.norm_type))

    def tensor_norms(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each gradient's own norm, 0-dim and on its device; ``None`` where nothing has a norm."""
        found: list[Tensor | None] = [None] * len(gradients)
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if gradient.numel():
                alike.setdefault((gradient.device, gradient.dtype), []).append((number, gradient))
            else:  # another rank has all of it
                found[number] = gradient.new_zeros((), dtype=self.dtype)
        for listed in alike.values():
            for (number, _), norm in zip(listed, self._norms([gradient for _, gradient in listed]), strict=True):
                found[number] = norm
        return found

    def _norms(self, gradients: list[Tensor]) -> Sequence[Tensor]:
        if self._reduction.as_torch and gradients[0].is_cuda:
            gradients = [self._as_allocated(gradient) for gradient in gradients]
        return torch._foreach_norm(gradients, self.norm_type, dtype=self.dtype)

    def _as_allocated(self, gradient: Tensor) -> Tensor:
        """The gradient as torch's loop has it: the kernel's order of additions depends on the address.

        It adds four elements at a time where the first one is aligned to four. DDP's buckets hold gradients at any
        address, a plain loop in tensors of their own; shards are the same views of FSDP2's buffer in both.
        """
        if self.norm_type not in (1.0, 2.0, math.inf):  # no kernel for the list, and one for each dtype
            gradient = gradient.float()
        own = self._reduction.sharded or gradient.data_ptr() % (4 * gradient.element_size()) == 0
        return gradient if own else gradient.clone()

    def of_norms(self, norms: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """:meth:`__call__` from each gradient's :meth:`tensor_norms`: the gradients may be gone.

        Raises:
            ValueError: in the first call, on all ranks: parameters on slices of a mesh are no copies of each other.
        """
        self._reduction.refuse_unequal_copies()
        if self._reduction.as_torch:
            norm = self._as_torch(norms)
            return norm, self._reduction.anywhere(~norm.isfinite())
        total, overflow = self._reduction.total_and_overflow(self._partial_sums(norms), self.norm_type)
        norm = self._root(total)
        return norm, torch.maximum((~norm.isfinite()).float(), overflow.float().clamp_(max=1))

    def _as_torch(self, norms: Sequence[Tensor | None]) -> Tensor:
        """The bits of ``torch.nn.utils.get_total_norm``, in one reduction over the shards."""
        listed = [norm for norm in norms if norm is not None]
        own = torch.stack(listed) if listed else torch.zeros(0)
        own = own.to(self.device, torch.float32)
        if math.isinf(self.norm_type):
            largest = torch.linalg.vector_norm(own, self.norm_type) if listed else own.new_zeros(())
            return self._reduction.largest_of_shards(largest)
        expected = zip(self._parameters, norms, strict=True)
        present = [norm is not None for parameter, norm in expected if norm is not None or parameter.requires_grad]
        return torch.linalg.vector_norm(self._reduction.over_shards(own, present, self.norm_type), self.norm_type)

    def _partial_sums(self, norms: Sequence[Tensor | None]) -> list[Tensor]:
        """This rank's ``sum |g|^p`` for each sum of the reduction, 0-dim fp64 on the reduction's device."""
        parts: list[list[Tensor]] = [[] for _ in range(self._reduction.sums)]
        for norm, place in zip(norms, self._reduction.places, strict=True):
            if norm is not None:
                parts[place].append(norm.to(self.device))
        return [self._sum(part) for part in parts]

    def _sum(self, norms: list[Tensor]) -> Tensor:
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        stacked = torch.stack(norms).double()
        return stacked.amax() if math.isinf(self.norm_type) else stacked.pow_(self.norm_type).sum()

    def _root(self, total: Tensor) -> Tensor:
        return (total if math.isinf(self.norm_type) else total.pow(1.0 / self.norm_type)).float()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, 0-dim fp32: torch's ``clip_grad_norm_`` rule."""
    return (max_norm / (norm + 1e-6)).clamp_(max=1.0)


def global_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all ``p.grad`` together, as if the model were on one device.

    Correct on any mix of plain tensors and DTensors on different meshes; replicated parameters count once. For fp32
    gradients of plain tensors on one device, or of shards on one mesh, it has the bits of torch's own
    ``clip_grad_norm_`` on the same list. Sharded parameters make this a collective call: every rank calls it with its
    parameters in the same order. One all-reduce over each mesh that shards something.

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
