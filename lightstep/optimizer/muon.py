"""torch's Muon on matrices that are divided among ranks, bit for bit, in three parts.

Momentum and the master's update are element-wise, so each rank does them on its block. Only the orthogonalization needs
whole matrices: in bf16, as in torch, on one rank for each matrix.

On CUDA it is replayed as graphs. Orthogonalizing one matrix takes about 30 kernels, and starting them one by one can
take the host longer than the GPU needs to run them. A graph starts all of them at once. It consists of the same
kernels. One is recorded for each shape, and used if its first result has the bits of torch's own function.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "MOMENTUM",
    "Graph",
    "Orthogonalizer",
    "apply_direction",
    "is_installed_muon",
    "orthogonalize",
    "update_momentum",
]


MOMENTUM = "momentum_buffer"


def is_installed_muon(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether this is the installed torch's Muon, and the functions here have its bits."""
    return optimizer_class is getattr(torch.optim, "Muon", None) and _is_bit_exact()


def update_momentum(momentum: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Update the momentum; returns the update direction, to be rounded to bf16 and orthogonalized."""
    momentum.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalize(direction: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Orthogonalize a whole direction in bf16, which may be overwritten."""
    from torch.optim import _muon

    settings = (group[key] for key in ("ns_coefficients", "ns_steps", "eps"))
    result: Tensor = _muon._zeropower_via_newtonschulz(direction, *settings)
    return result


def apply_direction(master: Tensor, direction: Tensor, group: Mapping[str, Any], shape: torch.Size) -> None:
    """Weight decay, then a step of the master along the orthogonalized direction.

    Args:
        shape: of the whole matrix.
    """
    from torch.optim import _muon

    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    master.mul_(1 - lr * group["weight_decay"])
    master.add_(direction, alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], shape))


@functools.cache
def _is_bit_exact() -> bool:
    """Compare two updates of a wide and of a tall matrix with those of the class."""
    numbers = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        for changes in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}):
            start, *gradients = torch.randn(3, *shape, generator=numbers, dtype=torch.float32, device="cpu")
            theirs, mine, momentum = start.clone(), start.clone(), torch.zeros_like(start)
            muon = torch.optim.Muon([theirs], lr=0.02, **changes)  # type: ignore[arg-type]
            (group,) = muon.param_groups
            for gradient in gradients:
                theirs.grad = gradient
                muon.step()
                try:
                    direction = orthogonalize(update_momentum(momentum, gradient, group).bfloat16(), group)
                    apply_direction(mine, direction, group, mine.shape)
                except (AttributeError, TypeError, KeyError):  # another version of torch
                    return False
            if not torch.equal(theirs, mine):
                return False
    return True


logger = logging.getLogger(__name__)


class _Key(NamedTuple):
    """What the kernels depend on."""

    address: int
    shape: torch.Size
    settings: tuple[Any, ...]
    reduced_precision: Any


class Graph(NamedTuple):
    """Recorded work.

    Attributes:
        replay: queues the work on the current stream. It uses the memory that it was recorded with.
        result: what the work returns; the next replay overwrites it.
        nbytes: device memory that it holds.
    """

    replay: Callable[[], None]
    result: Tensor
    nbytes: int


class Orthogonalizer:
    """Orthogonalizes whole matrices in bf16. It may overwrite them, and the next call may overwrite the result.

    On CUDA, matrices of one shape should be in the same memory: a graph is used for that memory alone. The first two
    matrices there are not replayed. The first one prepares torch's libraries. With the second one the graph is recorded
    and compared; the host waits for that.
    """

    def __init__(self) -> None:
        self._graphs: dict[_Key, Graph] = {}
        self._seen: set[_Key] = set()
        self._eager: set[_Key] = set()
        self._recorder: _Recorder | None = None

    def __reduce__(self) -> Any:
        """A copy has no graphs yet."""
        return Orthogonalizer, ()

    def __call__(self, direction: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Orthogonalize a matrix under the settings of its group."""
        key = _key(direction, group)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return graph.result
        if key in self._eager or not _can_record(direction.device):
            return orthogonalize(direction, group)
        if key not in self._seen:
            self._seen.add(key)
            return orthogonalize(direction, group)
        expected = orthogonalize(direction.clone(), group)
        graph = self._recorded(direction, group, expected)
        if graph is None:
            self._eager.add(key)
        else:
            self._graphs[key] = graph
        return expected

    def _recorded(self, direction: Tensor, group: Mapping[str, Any], expected: Tensor) -> Graph | None:
        """A graph that gives the ``expected`` result; ``None`` if there is none."""
        if self._recorder is None:
            self._recorder = _Recorder(direction.device)
        try:
            graph = self._recorder.record(lambda: orthogonalize(direction, group))
        except RuntimeError as error:
            reason = str(error)
        else:
            graph.replay()
            if torch.equal(_bits(graph.result), _bits(expected)):
                return graph
            reason = "its result differs"
        logger.info("matrices of shape %s are orthogonalized without a graph: %s", tuple(direction.shape), reason)
        return None

    def retain(self, addresses: Collection[int]) -> None:
        """Drop the graphs for all other memory, which has been freed. The host then waits once."""
        stale = [key for key in self._seen if key.address not in addresses]
        graphs = [self._graphs.pop(key) for key in stale if key in self._graphs]
        if graphs:
            torch.accelerator.synchronize(graphs[0].result.device)  # their own memory is about to be freed, too
        for key in stale:
            self._eager.discard(key)
            self._seen.discard(key)

    def nbytes(self) -> int:
        """Device memory held."""
        return sum(graph.nbytes for graph in self._graphs.values())

    def free(self) -> None:
        """Free it. Graphs are recorded again when they are needed."""
        self._graphs.clear()
        self._recorder = None


class _Recorder:
    """Records work on a stream of its own. All graphs share their memory, because they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Graph:
        """Record the kernels of ``work``, which do not run yet.

        Raises:
            RuntimeError: the work cannot be recorded.
        """
        device = self._stream.device
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        before = torch.cuda.memory_reserved(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads use the device
            try:
                result = work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return Graph(graph.replay, result, max(torch.cuda.memory_reserved(device) - before, 0))


def _bits(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.int16)  # NaN is equal to itself


def _can_record(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _key(direction: Tensor, group: Mapping[str, Any]) -> _Key:
    settings = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
    rounding = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return _Key(direction.data_ptr(), direction.shape, settings, rounding)
