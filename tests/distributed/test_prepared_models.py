"""Prepared models on two ranks: reads while updates are deferred, loops that drop or forget ``prepare_model``."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import lightstep
from lightstep import ConfigError
from lightstep.distributed import local_tensor
from lightstep.optimizer import queue
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.training import (
    DDP,
    FSDP2,
    load,
    same_on_all_ranks,
    same_tensors,
    train,
    weights_of,
)
from tests.unit.test_prepared_models import EarlyExit

STATES = {"at_step": {"backend": "stream"}, "next_forward": {"backend": "stream", "update": "next_forward"}}


def local(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_tensor(p).detach().clone() for name, p in model.named_parameters()}


def evaluated(model: nn.Module) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, 0, 0, 0, next(model.parameters()).device)
    model.train()
    return {"loss": loss}


@on_ranks(2, "sharding", [DDP, FSDP2])
def test_reads_while_updates_are_deferred(sharding: dict[str, Any]) -> None:
    """Units are updated only when somebody waits for them: who does not wait reads old weights."""
    at_once, ahead = queue.SUBMIT_IN_STEP, queue.SUBMIT_AHEAD
    queue.SUBMIT_IN_STEP = queue.SUBMIT_AHEAD = 0
    readers: list[Callable[[nn.Module], dict[str, Tensor]]] = [
        local,
        evaluated,
        lambda model: {key: local_tensor(value).clone() for key, value in model.state_dict().items()},
    ]
    if sharding["kind"] == "ddp":  # FSDP2 refuses deep copies
        readers.append(lambda model: local(AveragedModel(copy.deepcopy(model)).module))
    try:
        found = []
        for state in STATES.values():
            strategy = load(sharding, optimizer_state=state, clipping={"max_norm": 0.5})
            torch.manual_seed(0)
            model = strategy.prepare_model(EarlyExit())
            optimizer = strategy.create_optimizer(model, lr=1e-2)
            inner = strategy.unwrap_model(model)
            seen = []
            for read in readers:
                assert all(train(strategy, model, optimizer))
                assert optimizer.has_deferred_updates is (state is STATES["next_forward"])
                model.zero_grad()
                assert optimizer.has_deferred_updates is (state is STATES["next_forward"])
                seen.append(read(inner))
            found.append(seen)
        for expected, tested in zip(*found, strict=True):
            same_tensors(tested, expected)
    finally:
        queue.SUBMIT_IN_STEP, queue.SUBMIT_AHEAD = at_once, ahead


@on_ranks(
    2,
    ("sharding", "state", "parameters"),
    [(DDP, "at_step", "bfloat16"), (DDP, "next_forward", "float32"), (FSDP2, "at_step", "bfloat16")],
)
def test_the_return_value_may_be_dropped(rank: int, sharding: dict[str, Any], state: str, parameters: str) -> None:
    """A loop that drops what ``prepare_model`` returns trains as one that keeps it, and as one that goes past it."""
    runs = []
    past = parameters == "float32"  # with 16-bit parameters the step refuses that
    ways = ((True, False, False), (False, True, False), (False, True, True), *([(True, True, False)] if past else []))
    for keep, call_inside, first in ways:
        strategy = load(sharding, precision={"parameters": parameters}, optimizer_state=STATES[state])
        torch.manual_seed(rank)
        model: nn.Module = TinyTransformer()
        early = strategy.create_optimizer(model, lr=1e-2) if first else None
        prepared = strategy.prepare_model(model)
        inside = model
        if keep:
            model = prepared
        del prepared
        gc.collect()
        if early is None:
            strategy.create_optimizer(model, lr=1e-2)  # given up at once
        optimizer = early or strategy.create_optimizer(model, lr=1e-2)
        del early
        assert all(train(strategy, inside if call_inside else model, optimizer))
        optimizer.synchronize()
        runs.append(weights_of(strategy, model))
        assert sharding["kind"] == "fsdp2" or same_on_all_ranks(strategy.unwrap_model(model))
        if not keep and sharding["kind"] == "ddp" and rank == 0:  # on one rank alone: nothing is communicated
            model.eval()
            loss_of(model, 0, 0, 0, strategy.device)
    for run in runs[1:]:
        same_tensors(run, runs[0])


@on_ranks(2)
def test_a_model_that_was_never_prepared_is_refused() -> None:
    for name in ("ddp", "ddp-stream", "fsdp2", "fsdp2-stream", "fsdp2-fp32", "fsdp2-in-backward", "hsdp"):
        strategy = lightstep.Strategy.load(name)
        strategy.start()
        for dtype in {torch.float32, strategy.parameter_dtype}:
            model = TinyTransformer().to(device=strategy.device, dtype=dtype)
            before = local(model)
            optimizer = strategy.create_optimizer(model, lr=1e-2)
            with pytest.raises(ConfigError, match=r"prepare_model\(model\)"):
                train(strategy, model, optimizer)
            same_tensors(local(model), before)
