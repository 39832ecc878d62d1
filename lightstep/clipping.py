"""One global gradient norm, its overflow flag, and the clip coefficient: one pass and one reduction."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightstep.distributed import NormReduction, local_gradient, local_tensor
from lightstep.error_text import value_text

LARGEST_POWER = 8
"""The largest finite p of a norm."""

_LARGE = 1 << 26
"""Elements from which two streams are used: torch launches a kernel for each 21 million."""


class GradientNorm:
    """The global norm of gradients, planned once for a list of parameters.

    If ``torch.nn.utils.clip_grad_norm_`` is defined for these parameters (:attr:`NormReduction.as_torch`), the norm has
    that function's bits: each gradient's norm in fp32, then the norm of these. Otherwise powers are added up in fp64.

    Args:
        parameters: plain tensors and DTensors on any meshes, in the order of ``model.parameters()`` (the last bits
            depend on it), the same on all ranks of a mesh.
        norm_type: p of the norm, 1 to 8; ``math.inf`` is the largest element.
        everywhere: agree on overflow over all ranks of the default process group; ``None`` decides by the parameters.
        compared: see :class:`NormReduction`.
        whole: ``RuntimeError`` where a gradient is missing that other ranks have for their shards.

    Attributes:
        device: the device of the norm.
        dtype: the dtype of each gradient's own norm.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        norm_type: float = 2.0,
        everywhere: bool | None = None,
        compared: Sequence[Tensor] | None = None,
        whole: bool = False,
    ) -> None:
        self.norm_type = check_norm_type(norm_type)
        self._parameters, self._whole = parameters, whole
        self._reduction = NormReduction(parameters, everywhere, compared)
        self.device = self._reduction.device
        self.dtype = torch.float32 if self._reduction.as_torch else torch.float64

    def __call__(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """``(norm, overflow)``: 0-dim fp32; ``overflow`` is 1 if the norm is not finite on some rank, else 0.

        Args:
            gradients: each parameter's local gradient; ``None`` if it has none.
        """
        return self.combine(self.tensor_norms(gradients))

    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The norm alone, 0-dim fp32."""
        return self.combined(self.tensor_norms(gradients))

    def combined(self, norms: Sequence[Tensor | None]) -> Tensor:
        """:meth:`norm` from the :meth:`tensor_norms`."""
        if self._reduction.as_torch:
            return self._as_torch(norms)
        return self._root(self._reduction.total(self._partial_sums(norms), self.norm_type))

    def tensor_norms(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each gradient's own norm, 0-dim and on its device; ``None`` without a gradient."""
        norms: list[Tensor | None] = [None] * len(gradients)
        for number, gradient in enumerate(gradients):
            if gradient is not None and 0 in gradient.shape:  # an empty shard
                norms[number] = gradient.new_zeros((), dtype=self.dtype)
        left = [(n, one) for n, one in enumerate(gradients) if one is not None and norms[n] is None]
        for kind in dict.fromkeys([(one.device, one.dtype) for _, one in left]):
            group = [(n, one) for n, one in left if (one.device, one.dtype) == kind]
            for (number, _), norm in zip(group, self._norms([one for _, one in group]), strict=True):
                norms[number] = norm
        return norms

    def _norms(self, gradients: list[Tensor]) -> Sequence[Tensor]:
        if self._reduction.as_torch and gradients[0].is_cuda:
            gradients = [self._aligned(gradient) for gradient in gradients]
        if gradients[0].is_cuda and len(gradients) > 1:
            sizes = [gradient.numel() for gradient in gradients]
            if sum(sizes) >= _LARGE:
                return self._norms_on_two_streams(gradients, _middle(sizes))
        return torch._foreach_norm(gradients, self.norm_type, dtype=self.dtype)

    def _norms_on_two_streams(self, gradients: list[Tensor], middle: int) -> Sequence[Tensor]:
        """The tensors before ``middle`` on one stream, the others beside them: one launch does not fill a large GPU.

        Each stream waits for the other one, so the memory that one allocates may be read and freed on the other.
        """
        current, side = torch.cuda.current_stream(gradients[0].device), _side_stream(gradients[0].device)
        side.wait_stream(current)
        with side:
            second = torch._foreach_norm(gradients[middle:], self.norm_type, dtype=self.dtype)
        first = torch._foreach_norm(gradients[:middle], self.norm_type, dtype=self.dtype)
        current.wait_stream(side)
        return [*first, *second]

    def _aligned(self, gradient: Tensor) -> Tensor:
        """The gradient at an aligned address, as in a plain loop: the kernel's order of additions depends on it.

        The kernel adds four elements at a time if the first one is aligned to four. In a plain loop each gradient is a
        tensor of its own; DDP's buckets hold gradients at any address. Shards are the same views of FSDP2's buffer in
        both cases.
        """
        if self.norm_type not in (1.0, 2.0, math.inf):  # torch has no foreach kernel, and one kernel per dtype
            gradient = gradient.float()
        aligned = self._reduction.sharded or gradient.data_ptr() % (4 * gradient.element_size()) == 0
        return gradient if aligned else gradient.clone()

    def combine(self, norms: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """:meth:`__call__` from the :meth:`tensor_norms`; the gradients are not needed any more.

        Raises:
            ValueError: in the first call, on all ranks: parameters on slices of a mesh are not copies of each other.
        """
        reduction = self._reduction
        if reduction.assumed_copies:
            reduction.check_copies()
        if reduction.as_torch:
            norm = self._as_torch(norms)
            overflow = (~norm.isfinite()).float()
            return norm, reduction.anywhere(overflow) if reduction.everywhere else overflow
        total, overflow = reduction.total_and_overflow(
            self._partial_sums(norms), self.norm_type, self._present(norms), self._refuse_partial
        )
        norm = self._root(total)
        return norm, torch.maximum((~norm.isfinite()).float(), overflow.float().clamp_(max=1))

    def _as_torch(self, norms: Sequence[Tensor | None]) -> Tensor:
        """The bits of ``torch.nn.utils.get_total_norm``, in one reduction over the shards."""
        listed = [norm for norm in norms if norm is not None]
        local = torch.stack(listed) if listed else torch.zeros(0)
        local = local.to(self.device, torch.float32)
        if self._reduction.has_shards:
            local = self._over_shards(local, norms)
        is_empty = math.isinf(self.norm_type) and not local.numel()  # torch has no maximum of nothing
        return local.new_zeros(()) if is_empty else torch.linalg.vector_norm(local, self.norm_type)

    def _over_shards(self, local: Tensor, norms: Sequence[Tensor | None]) -> Tensor:
        """The norms of all shards' parameters."""
        pairs = zip(self._parameters, norms, strict=True)
        has_gradient = [norm is not None for parameter, norm in pairs if norm is not None or parameter.requires_grad]

        def on_partial(positions: Sequence[int]) -> None:
            numbers = [number for number, found in enumerate(self._present(norms)) if found is not None]
            self._refuse_partial([numbers[position] for position in positions])

        if math.isinf(self.norm_type):
            return self._reduction.max_over_shards(local, has_gradient, on_partial)
        return self._reduction.sum_over_shards(local, has_gradient, self.norm_type, on_partial)

    def _present(self, norms: Sequence[Tensor | None]) -> list[bool | None]:
        """For each parameter, whether it has a gradient here; ``None``: it can have none on any rank."""
        pairs = zip(self._parameters, norms, strict=True)
        return [True if norm is not None else False if p.requires_grad else None for p, norm in pairs]

    def _refuse_partial(self, elsewhere: Sequence[int]) -> None:
        """Refuse gradients that other ranks alone have, if they have to be the whole ones."""
        parameters = [self._parameters[number] for number in elsewhere] if self._whole else []
        found = [tuple(parameter.shape) for parameter in parameters if local_tensor(parameter).numel()]
        if found:
            raise RuntimeError(
                f"{len(found)} sharded parameters (shapes {found[:3]}) have a gradient on other ranks and none on "
                "this one: ranks have used different parameters of one FSDP module, and FSDP2 has added up gradients "
                "that do not belong together; or p.grad was set to None on some ranks alone, which the others do not "
                "see. For the first call model.set_reduce_scatter_unused_params(True) (torch 2.13) before "
                "the first backward, or let all ranks use the same parameters. optimizer.zero_grad() drops the "
                "gradients"
            )

    def _partial_sums(self, norms: Sequence[Tensor | None]) -> list[Tensor]:
        """This rank's ``sum |g|^p`` for each partial sum of the reduction, 0-dim fp64 on its device."""
        parts: list[list[Tensor]] = [[] for _ in range(self._reduction.num_sums)]
        for norm, index in zip(norms, self._reduction.sum_of, strict=True):
            if norm is not None:
                parts[index].append(norm.to(self.device))
        return [self._sum(part) for part in parts]

    def _sum(self, norms: list[Tensor]) -> Tensor:
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        stacked = torch.stack(norms).double()
        return stacked.amax() if math.isinf(self.norm_type) else stacked.pow_(self.norm_type).sum()

    def _root(self, total: Tensor) -> Tensor:
        return (total if math.isinf(self.norm_type) else total.pow(1.0 / self.norm_type)).float()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _middle(sizes: Sequence[int]) -> int:
    """Where to cut a list of two sizes or more, so that both parts add up to about as much and neither is empty."""
    total, ends = sum(sizes), itertools.accumulate(sizes)
    return next(n for n, (size, end) in enumerate(zip(sizes, ends, strict=True)) if n and 2 * end - size >= total)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, 0-dim fp32, as in torch's ``clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp_(max=1.0)


class KeptGradients(Protocol):
    """Gradients that are not in ``p.grad``: see ``lightstep.optimizer.host_gradients``."""

    def totals(self) -> Mapping[Tensor, Tensor]:
        """By parameter."""

    def measured(self, parameter: Tensor) -> Tensor | None:
        """The parameter, on the device of its gradients, and empty; ``None``: it is none of these."""

    def reading(self, parameter: Tensor) -> AbstractContextManager[Tensor]:
        """In the body, the whole local gradient of this parameter is on the device."""


_keepers: weakref.WeakSet[KeptGradients] = weakref.WeakSet()


def add_keeper(keeper: KeptGradients) -> None:
    """From now on :func:`global_grad_norm` reads these gradients, too. What clips ``p.grad`` refuses their parameters.

    That holds for torch's own functions as well, which Fabric and torchtitan call: they would do nothing.
    """
    _keepers.add(keeper)
    utils = torch.nn.utils
    for module, name in (
        (utils.clip_grad, "_clip_grads_with_norm_"),
        (utils, "clip_grads_with_norm_"),
        (utils.clip_grad, "clip_grad_value_"),
        (utils, "clip_grad_value_"),
    ):
        function = getattr(module, name, None)
        if function is not None and not hasattr(function, "refuses_kept_gradients"):
            setattr(module, name, _refusing(function))


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        listed = _listed(parameters)
        _refuse_kept(listed)
        return function(listed, *args, **kwargs)

    checked.refuses_kept_gradients = True  # type: ignore[attr-defined]
    return checked


def _kept(parameters: Iterable[Tensor]) -> dict[Tensor, KeptGradients]:
    keepers = list(_keepers)
    listed = set(parameters) if keepers else ()
    return {parameter: keeper for keeper in keepers for parameter in keeper.totals() if parameter in listed}


def _refuse_kept(parameters: Sequence[Tensor]) -> None:
    if kept := _kept(parameters):
        raise ValueError(
            f"the gradients of {len(kept)} of {len(parameters)} parameters are on the host (weights.placement: host), "
            "not in p.grad, where they could be clipped; set clipping.max_norm in the strategy, by which step() clips, "
            "and remove this call. lightstep.global_grad_norm and optimizer.grad_norm() measure them"
        )


def global_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all ``p.grad`` together, as if the model were on one device.

    Gradients that ``weights.placement: host`` has taken to the host in backward count as they would in ``p.grad``.

    Correct for any mix of plain tensors and DTensors on different meshes; replicated parameters count once. For fp32
    gradients of plain tensors on one device, or of shards on one mesh, it has the bits of torch's own
    ``clip_grad_norm_`` on the same list. With sharded parameters this is a collective: every rank calls it with its
    parameters in the same order. It costs one all-reduce per mesh that shards a parameter.

    Args:
        parameters: a tensor or tensors; those without a gradient count as zero.
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
    kept = _kept(listed)
    gradients = [None if p in kept else local_gradient(p, torch.float32) for p in listed]
    with torch.no_grad():
        norm_of = GradientNorm(_measured(listed), norm_type)
        norms = norm_of.tensor_norms(gradients)
        for number, parameter in enumerate(listed):
            if parameter in kept:
                with kept[parameter].reading(parameter) as gradient:
                    norms[number] = norm_of.tensor_norms([gradient])[0]
        return norm_of.combined(norms)


def _measured(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters, on the devices of their gradients."""
    keepers = list(_keepers)
    return [next((own for keeper in keepers if (own := keeper.measured(p)) is not None), p) for p in parameters]


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all ``p.grad`` in place so that their global norm is at most ``max_norm``; see :func:`global_grad_norm`.

    Only for plain torch optimizers: a lightstep optimizer clips by itself, in ``step()``.

    Returns:
        The norm before clipping, 0-dim fp32. If it is not finite, the gradients are not finite afterwards, as in torch.

    Raises:
        ValueError: ``max_norm`` is not a positive number, or ``norm_type`` not one from 1 to 8 or ``math.inf``; or the
            gradients are on the host (``weights.placement: host``).
    """
    check_max_norm(max_norm)
    listed = _listed(parameters)
    _refuse_kept(listed)
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
    """``max_norm`` as a float; raises ``ValueError`` if it is not a positive number."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
        raise ValueError(
            f"max_norm is {value_text(max_norm)}; a positive number is needed (leave clipping out to turn it off)"
        )
    return float(max_norm)


def check_norm_type(norm_type: float) -> float:
    """``norm_type`` as a float; raises ``ValueError`` if it is neither a number from 1 to 8 nor ``math.inf``."""
    is_number = isinstance(norm_type, (int, float)) and not isinstance(norm_type, bool)
    if not is_number or not (1 <= norm_type <= LARGEST_POWER or norm_type == math.inf):
        raise ValueError(
            f"norm_type is {value_text(norm_type)}; a number from 1 to {LARGEST_POWER} or math.inf is needed (2 is "
            "Euclidean, math.inf the largest element; higher powers of fp32 gradients overflow fp64)"
        )
    return float(norm_type)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
