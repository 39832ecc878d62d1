"""Newton-Schulz on the matrices that a rank owns, replayed as CUDA graphs.

Orthogonalizing one matrix takes about 30 kernels, and starting them one by one can take the host longer than the GPU
needs to run them. A graph starts all of them at once. It consists of the same kernels. One is recorded for each shape,
and used if its first result has the bits of torch's own function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.optimizer.sharded_muon import orthogonalize

__all__ = ["Graph", "Orthogonalizer"]

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
