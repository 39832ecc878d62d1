"""Shards that rest on the host under FSDP2: the bits of a run that keeps them on the device."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.two_tensor import TwoTensor

import lightstep
from lightstep import ConfigError
from lightstep.distributed import local_tensor
from lightstep.state.host_fields import Field
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.training import FSDP2, PRECISIONS, Training
from tests.unit.test_homes_and_times import HOMES


class Run(Training):
    """Every micro-batch is reduced.

    Args:
        mib: device memory for weights; ``None``: they are on the device.
    """

    def __init__(
        self,
        mib: float | None,
        home: str = "stream",
        time: str = "next_forward",
        sharding: dict[str, Any] = FSDP2,
    ) -> None:
        weights = {} if mib is None else {"weights": {"placement": "host", "device_mib": mib}}
        values = {"sharding": sharding, "clipping": {"max_norm": 0.3}, **weights}
        super().__init__({**values, "optimizer_state": {**HOMES[home], "update": time}})

    def accumulate(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


# ---- checkpoints, and what users do between steps


@on_ranks(2)
def test_what_is_written_to_data_between_two_evaluations_counts() -> None:
    """Nobody counts such a write, and no read through the model says that there may be one."""
    losses = []
    for time, mib in (("at_step", None), ("at_step", 64.0), ("next_forward", 64.0)):
        run = Run(mib, "resident", time)
        weight = run.inner.blocks[1].up.weight  # FSDP2 keeps those of the root gathered
        run.step()
        run.step()  # the first one defers nothing
        with torch.no_grad():
            losses.append([loss_of(run.model, 5, 0, run.rank, run.device).item()])
            local_tensor(weight).data.mul_(0.5)
            losses[-1].append(loss_of(run.model, 5, 0, run.rank, run.device).item())
        run.optimizer.close()
    assert losses[0] == losses[1] == losses[2] and losses[0][0] != losses[0][1]


@on_ranks(2)
def test_parameters_that_were_replaced_are_refused() -> None:
    run = Run(0.02)
    run.step()
    run.inner.load_state_dict({name: value.clone() for name, value in run.inner.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"is another parameter than the one that rests.*load without assign=True"):
        run.evaluate()


# ---- errors


@on_ranks(2, "sharding", [FSDP2, {**FSDP2, "reshard_after_forward": False}])
def test_a_second_derivative_is_refused(sharding: dict[str, Any]) -> None:
    """FSDP2 gives back the memory of weights that it would read: the process may end."""
    run = Run(64.0, sharding=sharding)
    run.step()
    with pytest.raises(RuntimeError, match=r"^create_graph=True, and FSDP2 gathers.*placement: device, and call model"):
        loss_of(run.model, 1, 0, run.rank, run.device).backward(create_graph=True)


@on_ranks(2, "mib", [None, 0.001])
def test_an_interrupt_that_torch_cannot_forget_is_named(mib: float | None) -> None:
    """torch 2.11 cannot forget a backward; otherwise a run goes on (``test_programs.py``)."""
    run = Run(mib)

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    run.inner.blocks[1].register_full_backward_hook(raising)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        run.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"the last backward ended with an error.*or use torch 2\.13"):
            run.step()


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch has it from 2.13 on")
@on_ranks(2, ("time", "counts"), [("at_step", (1, 5)), ("next_forward", (3,))])
def test_a_run_goes_on_after_a_failure(time: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """No room for the same weights on all ranks: the run goes on from a checkpoint, in the same process."""
    run = Run(0.02, time=time)
    run.step()
    run.strategy.save_checkpoint(tmp_path / time, run.model, run.optimizer)
    start, bring, left = run.steps, Field.bring, 0
    wanted = run.train(2)

    def failing(field: Field) -> None:
        nonlocal left
        left -= 1
        if left <= 0:  # until somebody needs it: a copy that is queued ahead is left out
            raise torch.OutOfMemoryError("out of memory")
        bring(field)

    messages = []
    for count in counts:
        run.strategy.load_checkpoint(tmp_path / time, run.model, run.optimizer)
        run.steps, left = start, count
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Field, "bring", failing)
            try:
                run.train(2)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                messages.append(str(error))
        run.optimizer.zero_grad()
        run.strategy.load_checkpoint(tmp_path / time, run.model, run.optimizer)
        run.steps = start
        assert run.train(2) == wanted, (count, messages[-1])
    assert messages
    assert all(re.search("no room for the .*weights.device_mib", text) for text in messages)


@on_ranks(2)
def test_a_model_that_is_given_up_leaves_no_memory() -> None:
    run = Run(0.02, time="overlap")
    run.train(2)
    weights, model = weakref.ref(run.optimizer.engine._host_weights), weakref.ref(run.inner)
    del run
    gc.collect()
    gc.collect()  # what is kept for the model goes after it
    assert weights() is None and model() is None


@on_ranks(2)
def test_other_tensors_are_refused() -> None:
    model = TinyTransformer()
    model.head.weight = torch.nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    values = {"sharding": {"kind": "fsdp2"}, "precision": PRECISIONS["fp32"], "weights": {"placement": "host"}}
    with pytest.raises(ValueError, match=r"head\.weight is a TwoTensor, and weights that rest on the host are plain"):
        lightstep.Strategy.load(values).prepare_model(model)


def test_replicas_are_refused() -> None:
    for sharding in ({"kind": "fsdp2", "mesh": {"replicate": 2, "shard": "auto"}}, {"kind": "ddp"}):
        with pytest.raises(ConfigError, match=r"set sharding\.kind: single, or fsdp2 with mesh\.replicate: 1"):
            lightstep.Strategy.load({"sharding": sharding, "weights": {"placement": "host"}})
