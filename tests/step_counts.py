"""What a reader of one steady step meets, and what it costs in Python: ``python -m tests.step_counts``.

One iteration of plain AdamW (forward, backward, step) is traced on the CPU, after a few untraced ones. Counted are the
functions, classes and files of lightstep that run, in the lanes' threads too, and all calls of Python and C functions
for each parameter. What a GPU does by kernels and streams, the CPU does by stand-ins: by torch's own passes, checksums
and threads. In place of a look at versions it compares weights with their masters. A call of a stand-in counts as one,
and what it calls does not.

The model has blocks with as many parameters as a transformer's. They are as small as they can be if each is to be a
unit of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep import Strategy
from tests import one_pass_on_cpu

PACKAGE = str(Path(lightstep.__file__).resolve().parent)
STAND_INS = {
    one_pass_on_cpu.__file__: "",
    f"{PACKAGE}/precision/split.py": "",
    f"{PACKAGE}/state/weight_comparison.py": "",
    f"{PACKAGE}/state/lanes.py": ("Thread", "CallerLane", "_Status", "_Job", "_run", "_thread_main"),
}
"""What runs on the CPU alone: files, and how the names of their functions begin."""
PRESETS = ("resident", "stream", "stream-overlap")
BLOCKS, LAYERS, WIDTH, WARM_UP = 10, 6, 384, 5
EVERYTHING_STREAMED = {"optimizer_state.resident_gib": 0, "optimizer_state.spare_host_gib": 1}


class Count(NamedTuple):
    """``functions``, ``classes`` and ``files`` of lightstep, and ``calls`` of any function for each parameter."""

    functions: int
    classes: int
    files: int
    calls: float


class Trace:
    """Counts the calls in this thread and in threads that start later, while :meth:`of` runs."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._calls, self._on = 0, False

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function, as for ``sys.setprofile``."""
        if self._on and event in ("call", "c_call") and not _is_of_a_stand_in(frame, event):
            self._calls += 1
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                self._codes.add(frame.f_code)

    def of(self, work: Callable[[], object], parameters: int) -> Count:
        """Run ``work`` once and count."""
        self._on = True
        work()
        self._on = False
        codes = [code for code in self._codes if not code.co_name.startswith("<")]  # lambdas and comprehensions
        owners = {(code.co_filename, code.co_qualname.partition(".")[0]) for code in codes}
        classes = {owner for owner in owners if owner[1].lstrip("_")[0].isupper()}
        return Count(len(codes), len(classes), len({code.co_filename for code in codes}), self._calls / parameters)


def _is_of_a_stand_in(frame: FrameType, event: str) -> bool:
    """Whether a stand-in calls this: not if it is the stand-in that is called."""
    begins = event == "call" and _is_known(frame.f_code)
    caller = frame.f_back if begins else frame
    while caller is not None and not _is_known(caller.f_code):
        caller = caller.f_back
    return caller is not None and _is_stand_in(caller.f_code) and (not begins or _is_stand_in(frame.f_code))


def _is_known(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) or code.co_filename in STAND_INS


def _is_stand_in(code: CodeType) -> bool:
    return code.co_qualname.startswith(STAND_INS.get(code.co_filename, ()))


@contextmanager
def tracing() -> Iterator[Trace]:
    """The profile function is set from the beginning, so that all lanes have it."""
    trace = Trace()
    with pytest.MonkeyPatch.context() as patch:
        one_pass_on_cpu.install(patch)
        threading.setprofile(trace.see)
        sys.setprofile(trace.see)
        try:
            yield trace
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def count(preset: str) -> Count:
    """One steady iteration under a preset."""
    with tracing() as trace:
        strategy = Strategy.load(preset, overrides=EVERYTHING_STREAMED if preset != "resident" else None)
        model = strategy.prepare_model(Model())
        optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-3)
        parameters = len(list(model.parameters()))  # now: reading them waits for the step before

        def iterate() -> None:
            with strategy.accumulate(model):
                optimizer.backward(model(_batch()).float().square().mean())
            optimizer.step()

        for _ in range(WARM_UP):
            iterate()
        return trace.of(iterate, parameters)


def count_by_hand() -> Count:
    """The same iteration by hand: fp32 masters, torch's clipping and fused AdamW."""
    with tracing() as trace:
        model = Model().to(torch.bfloat16)
        parameters = list(model.parameters())
        masters = [parameter.detach().float() for parameter in parameters]
        optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)

        def iterate() -> None:
            model(_batch()).float().square().mean().backward()
            _take_gradients(parameters, masters)
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)

        for _ in range(WARM_UP):
            iterate()
        return trace.of(iterate, len(parameters))


def _take_gradients(parameters: list[nn.Parameter], masters: list[Tensor]) -> None:
    for parameter, master in zip(parameters, masters, strict=True):
        assert parameter.grad is not None
        master.grad, parameter.grad = parameter.grad.float(), None


class Model(nn.Module):
    """Blocks in a list, by which lightstep finds them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))) for _ in range(BLOCKS)
        )

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def _batch() -> Tensor:
    return torch.ones(2, WIDTH, dtype=torch.bfloat16)


def main() -> None:
    sys.stdout.write("| | functions | classes | files | calls per parameter |\n|---|---|---|---|---|\n")
    for name, (functions, classes, files, calls) in {
        "by hand": count_by_hand(),
        **{preset: count(preset) for preset in PRESETS},
    }.items():
        sys.stdout.write(f"| {name} | {functions} | {classes} | {files} | {calls:.1f} |\n")


if __name__ == "__main__":
    main()
