"""Runs with weights on the host, and loads, after a step, a backward or a forward that failed or was interrupted."""

from __future__ import annotations

import copy
import re
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.state.host_fields import Field
from lightstep.state.lanes import LaneError, _Status
from lightstep.state.store import Store
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.training import Training
from tests.unit.test_host_weights import TIMES, make

FAILURES = ["no room", "a copy", "interrupt"]

pytestmark = pytest.mark.usefixtures("small_units")


class Saved:
    """A run as it is now, in a checkpoint and in state dicts."""

    def __init__(self, run: Training, folder: Path) -> None:
        self.folder, self.steps = folder, run.steps
        run.strategy.save_checkpoint(folder, run.model, run.optimizer)
        self.weights, self.state = copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())

    def load(self, run: Training, through_strategy: bool = True) -> None:
        """From one of the two."""
        if through_strategy:
            run.strategy.load_checkpoint(self.folder, run.model, run.optimizer)
        else:
            run.optimizer.load_state_dict(self.state)
            run.model.load_state_dict(self.weights)
        run.steps = self.steps


@every_value(time=TIMES, kind=FAILURES, gib=[0, 1])
def test_a_run_goes_on_after_a_failure(
    time: str, kind: str, gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ``count``-th copy to the device, wherever that is: in forward, in backward or in an update."""
    weights = {"placement": "host", "device_mib": 0.02, "gradients_gib": gib}
    run = make("stream", time, "clipped", "bfloat16", weights)
    run.train(2)
    saved = Saved(run, tmp_path / "c")
    wanted, left = run.train(3), 0
    bring, lock = Field.bring, threading.Lock()

    def failing(field: Field) -> None:
        """In the loop's thread, or in a lane's."""
        nonlocal left
        with lock:
            left -= 1
            number = left
        if kind == "no room" and number <= 0:  # until somebody needs it: a copy that is queued ahead is left out
            raise torch.OutOfMemoryError("out of memory")
        if kind == "a copy" and number == 0:
            field.lanes.host_to_device.run(partial(torch.zeros(2).copy_, torch.zeros(3)), "bringing some weights")
        elif kind == "interrupt" and number == 0:
            raise KeyboardInterrupt
        bring(field)

    messages = []
    for count in range(1 + TIMES.index(time) + 4 * (kind == "a copy"), 33, 8):
        left = count
        with monkeypatch.context() as patch:
            patch.setattr(Field, "bring", failing)
            try:
                run.train(3)
                run.optimizer.synchronize()  # the last update may still fail in its lane
            except KeyboardInterrupt:
                messages.append("interrupt")
            except (RuntimeError, torch.OutOfMemoryError) as error:
                messages.append(str(error))
        with suppress(LaneError):  # the second try may have been that of an update in its lane, which failed too
            run.optimizer.zero_grad()
        saved.load(run)
        assert run.train(2) == wanted[:2], f"{count}: {messages[-1]}"
    assert run.train(1) == wanted[2:]
    known = {
        "no room": "no room for the (weights|gradients) of .*set weights.device_mib",
        "a copy": "bringing some weights failed",
        "interrupt": "interrupt|KeyboardInterrupt",
    }
    assert len(messages) > 2 and all(re.search(known[kind], message) for message in messages), messages
    run.optimizer.close()


@every_value(
    update=[("overlap", 3), ("in_backward", 5)],  # nobody waits for that one before step()
    placement=["device", "host"],
    through_strategy=[True, False],
)
def test_a_load_takes_the_failure_of_a_step_that_is_known_as_broken(
    update: tuple[str, int],
    placement: str,
    through_strategy: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``step()`` may refuse while the job that failed has not told its lane yet."""
    time, number = update
    run = make("stream", time, "not clipped", "bfloat16", {"placement": placement})
    run.train(2)
    saved = Saved(run, tmp_path / "c")
    wanted, acquire, fail, calls, told = run.train(2), Store.acquire, _Status.fail, [0], threading.Event()

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise KeyboardInterrupt
        return acquire(*arguments)

    def failed(*arguments: Any) -> None:
        told.wait(PATIENCE)
        fail(*arguments)

    run.optimizer.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "acquire", failing)
        patch.setattr(_Status, "fail", failed)
        run.optimizer.backward(run.loss())
        end = monotonic() + PATIENCE
        while not run.optimizer.engine.broken and monotonic() < end:
            sleep(0.001)
        assert run.optimizer.engine.broken
        with pytest.raises(RuntimeError, match=r"KeyboardInterrupt.* half updated"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        threading.Timer(0.1, told.set).start()
        saved.load(run, through_strategy)
    assert run.train(2) == wanted
    run.optimizer.close()


@pytest.mark.parametrize("through_strategy", [True, False], ids=["checkpoint", "state dict"])
def test_a_load_takes_the_failure_of_an_update_that_is_under_way(
    through_strategy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails while the load waits for it, and nobody has known before."""
    run = make("stream", "next_forward", "not clipped", "bfloat16", {"placement": "host"})
    run.train(2)
    saved = Saved(run, tmp_path / "c")
    wanted, begun, fail = run.train(2), threading.Event(), threading.Event()

    def failing(*_: Any) -> Any:
        begun.set()
        fail.wait(PATIENCE)
        raise torch.OutOfMemoryError("out of memory")

    run.optimizer.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "acquire", failing)
        run.optimizer.backward(run.loss())
        run.optimizer.step()
        assert begun.wait(PATIENCE) and not run.optimizer.engine.broken
        threading.Timer(0.1, fail.set).start()
        saved.load(run, through_strategy)
    assert run.train(2) == wanted
    run.optimizer.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_failure_while_gradients_are_added_leaves_no_module_in_backward(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded then would be written to weights on the device that the next forward drops."""
    run = make("stream", "at_step", "clipped", "bfloat16", {"placement": "host", "device_mib": 0.001})
    run.train(2)
    saved = Saved(run, tmp_path / "c")
    wanted, bring = run.train(2), Field.bring

    def failing(field: Field) -> None:
        if field.what == "the gradients of embed":
            raise error
        bring(field)

    with monkeypatch.context() as patch:
        patch.setattr(Field, "bring", failing)
        with pytest.raises(error):
            run.train(1)
    run.optimizer.zero_grad()
    saved.load(run)
    assert run.train(2) == wanted
    run.optimizer.close()


@pytest.mark.parametrize("part", [False, True], ids=["a forward", "a forward of a part"])
def test_what_is_loaded_after_an_interrupted_forward_counts(part: bool, tmp_path: Path) -> None:
    """torch tells nobody that a forward was interrupted."""
    run = make("stream", "at_step", "clipped", "bfloat16", {"placement": "host", "device_mib": 0.02})
    run.train(2)
    saved = Saved(run, tmp_path / "c")
    wanted, block = run.train(2), run.model.blocks[1]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = block.up.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        block(torch.zeros(1, 7, dtype=torch.bfloat16)) if part else run.loss()
    handle.remove()
    saved.load(run)
    assert run.train(2) == wanted
    run.optimizer.close()


class Penalty(Training):
    """With the gradient of its input in the loss."""

    def loss(self, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + micro)
        inputs = torch.randn(4, 6, generator=generator).requires_grad_()
        (gradient,) = torch.autograd.grad(self.model(inputs).square().sum(), inputs, create_graph=True)
        return gradient.square().mean()


class Scaled(nn.Module):
    """Its second derivative reads a view of the weight: without memory behind it the process would end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sin(inputs * self.scale[None]) * self.scale[None]


@pytest.mark.parametrize("update", ["at_step", "next_forward"])
def test_a_second_derivative_has_all_weights_or_is_refused(update: str) -> None:
    def penalised(**weights: Any) -> Penalty:
        state = {"backend": "stream", "update": update}
        return Penalty(state, "float32", lambda: nn.Sequential(*[Scaled() for _ in range(6)]), weights=weights)

    wanted = penalised().train(2)
    assert penalised(placement="host", device_mib=1).train(2) == wanted
    run = penalised(placement="host", device_mib=0.0001)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"^create_graph=True, and of .* MiB of weights .* or .*placement: device$"
        ):
            run.train(1)
        run.optimizer.zero_grad()
    run.optimizer.close()
