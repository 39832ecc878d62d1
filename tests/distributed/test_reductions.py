"""What reaches a step of the gradients that WRAPPED and DDP reduce, where users do what their tutorials do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lightstep
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.training import DDP, FSDP2, RESIDENT, Training, same_on_all_ranks, same_tensors


class Layers(nn.Module):
    """Four equal layers, each an WRAPPED unit."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=bias) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values


class Run(Training):
    def __init__(self, sharding: dict[str, Any], state: dict[str, Any], bias: bool = True) -> None:
        values = {"sharding": sharding, "clipping": {"max_norm": None}, "optimizer_state": state}
        groups = lambda model: [{"params": [*model.parameters()]}]  # noqa: E731
        super().__init__(values, lambda: Layers(bias), optimizer_class=torch.optim.SGD, groups=groups, lr=0.5)
        self.layers: Any = self.inner.layers

    def loss(self, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + 10 * micro + self.rank)
        values = torch.randn(6, 8, generator=generator).to(self.device, torch.bfloat16)
        return self.model(values).float().square().mean()

    def penalty(self) -> Tensor:
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return torch.stack([shard.float().sum() for shard in shards]).sum()


WRAPPED = {**FSDP2, "wrap": ["Linear"]}
IN_BACKWARD = {"backend": "stream", "update": "in_backward"}


def assert_same(runs: list[Run]) -> None:
    same_tensors(runs[0].snapshot(), runs[1].snapshot())


@on_ranks(2)
def test_replicas_get_weights_of_layers_in_which_some_gradients_are_missing(rank: int, world_size: int) -> None:
    """Units in which another layer lacks one are updated in step(), where its weight is sent for the first time."""
    sharding = {**WRAPPED, "mesh": {"replicate": 2, "shard": 1}}
    runs = [Run(sharding, state) for state in (RESIDENT, IN_BACKWARD)]
    for run in runs:
        for step in range(5):
            run.layers[0].weight.requires_grad_(step not in (1, 2))
            run.layers[2].weight.requires_grad_(step not in (0, 3))
            run.layers[3].bias.requires_grad_(step != 2)
            run.optimizer.backward(run.loss())
            run.update()
    assert_same(runs)


@on_ranks(2)
def test_weights_that_a_static_graph_does_not_use_stay_as_they_are(rank: int, world_size: int) -> None:
    """They have no gradient, so that weight decay leaves them alone, too."""
    values = {"sharding": {"kind": "ddp", "static_graph": True}, "clipping": {"max_norm": None}}
    strategy, model = lightstep.Strategy.load(values), Layers(bias=False)
    model.idle = nn.Linear(8, 8)
    inputs = torch.ones(2, 8, device=device_of(rank, world_size), dtype=torch.bfloat16)
    model = strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=0.5, weight_decay=0.5)
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(3):
        optimizer.backward(model(inputs).float().square().mean())
        assert optimizer.step()
    stays = [torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True)]
    assert stays == [False] * 4 + [True] * 2


def prepared(parameters: str, sharding: dict[str, Any], frozen: bool = False) -> Any:
    values = {"sharding": sharding, "precision": {"parameters": parameters}, "clipping": {"max_norm": None}}
    strategy, model = lightstep.Strategy.load(values), Layers(bias=False)
    model.layers[1].requires_grad_(not frozen)
    return strategy, strategy.prepare_model(model)


@on_ranks(2, "parameters", ["float32", "bfloat16"])
def test_parameters_that_ddp_does_not_reduce_are_refused(rank: int, world_size: int, parameters: str) -> None:
    """Those that were frozen in prepare_model(), or were put into the model after it."""
    device = device_of(rank, world_size)
    strategy, model = prepared(parameters, DDP, frozen=True)
    optimizer = strategy.create_optimizer(
        model, torch.optim.SGD, param_groups=[{"params": [*model.parameters()]}], lr=0.1
    )
    values = torch.full((2, 8), float(rank + 1), device=device, dtype=getattr(torch, parameters))
    optimizer.backward(model(values).float().sum())
    optimizer.step()
    model.module.layers[1].requires_grad_(True)
    optimizer.backward(model(values).float().sum())
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight has a gradient that DDP does not reduce.*was frozen in"):
        optimizer.step()
    optimizer.zero_grad()
    model.module.layers[1].requires_grad_(False)
    late = nn.Linear(8, 8, bias=False, device=device, dtype=values.dtype)
    model.module.layers.append(late)
    optimizer.add_param_group({"params": [late.weight]})
    optimizer.backward(model(values).float().sum())
    with pytest.raises(RuntimeError, match=r"layers\.4\.weight has a gradient .* was not in the model"):
        optimizer.step()
    optimizer.zero_grad()
    late.weight.differs_across_ranks = True  # type: ignore[assignment]
    optimizer.backward(model(values).float().sum())
    assert optimizer.step()


@on_ranks(2)
def test_a_second_backward_after_one_forward_is_refused(rank: int, world_size: int) -> None:
    device = device_of(rank, world_size)
    strategy, model = prepared("float32", DDP)
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=0.1)
    values = torch.full((2, 8), float(rank + 1), device=device)

    def backward(loss: Tensor, last: bool = True, **more: Any) -> None:
        with strategy.accumulate(model, last=last):
            optimizer.backward(loss, **more)

    def forward(last: bool = True) -> Tensor:
        with strategy.accumulate(model, last=last):
            return model(values).square().mean()

    def twice_through_one() -> None:
        loss = forward()
        backward(loss, retain_graph=True)
        backward(loss)

    def through_an_earlier_one() -> None:
        losses = [forward(), forward()]
        for loss in losses:
            backward(loss)

    for refused in (twice_through_one, through_an_earlier_one):
        refused()
        with pytest.raises(RuntimeError, match="two backwards have gone through forwards"):
            optimizer.step()
        optimizer.zero_grad()
        forward()  # without a backward
        loss = forward(last=False)
        backward(loss, last=False, retain_graph=True)  # on this rank, to be reduced with the last one
        backward(loss, last=False)
        for _ in range(2):
            backward(forward())
        backward(sum(parameter.square().sum() for parameter in model.parameters()))  # equal on all ranks
        assert optimizer.step()
        assert same_on_all_ranks(model)


@on_ranks(2)
def test_a_rank_that_runs_out_of_inputs_before_others_says_so(rank: int, world_size: int) -> None:
    """Under torch's ``join()`` the others' steps would communicate with its part in their reductions."""
    device = device_of(rank, world_size)
    strategy, model = prepared("float32", DDP)
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=0.1)

    def train(steps: int) -> None:
        with model.join():
            for _ in range(steps):
                optimizer.backward(model(torch.ones(2, 8, device=device)).square().mean())
                assert optimizer.step()

    train(2)
    assert same_on_all_ranks(model)
    if rank == 0:
        dist.all_reduce(torch.ones(1, device=device))  # what a forward tells ranks that have run out
    else:
        with pytest.raises(RuntimeError, match=r"this rank has run out of inputs.*drop_last=True"):
            train(0)


@on_ranks(2)
def test_parameters_that_fsdp2_has_not_sharded_are_refused(rank: int, world_size: int) -> None:
    device = device_of(rank, world_size)
    for marked in (False, True):
        strategy, model = prepared("bfloat16", WRAPPED)
        late = nn.Linear(8, 8, bias=False, device=device, dtype=torch.bfloat16)
        late.weight.differs_across_ranks = marked  # type: ignore[assignment]
        model.layers.append(late)
        optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=0.1)
        optimizer.backward(model(torch.ones(2, 8, device=device, dtype=torch.bfloat16)).float().sum())
        if marked:
            assert optimizer.step()
        else:
            with pytest.raises(ValueError, match=r"layers\.4\.weight and 0 others .* put into the model after prepare"):
                optimizer.step()


@on_ranks(2)
def test_hooks_of_the_user_see_the_result_of_a_reduction_and_leave_it_in_fp32(rank: int, world_size: int) -> None:
    """Whenever they are set: before the optimizer is made, or between two steps."""
    runs = [Run(WRAPPED, RESIDENT) for _ in range(3)]
    strategy, seen = runs[0].strategy, []
    torch.manual_seed(0)
    runs[1].model = runs[1].inner = strategy.prepare_model(Layers(True))
    runs[1].layers = runs[1].model.layers
    runs[1].layers[0].set_all_reduce_hook(lambda flat: seen.append(flat.mul_(2)))
    runs[1].optimizer = strategy.create_optimizer(runs[1].model, torch.optim.SGD, lr=0.5)
    for step in range(4):
        if step == 1:
            runs[1].layers[1].set_all_reduce_hook(lambda flat: seen.append(flat))
        if step == 2:
            runs[1].layers[0].set_all_reduce_hook(None)
        for number, run in enumerate(runs):
            run.optimizer.backward(run.loss())
            for parameter in run.layers[0].parameters():
                assert parameter.grad.dtype == torch.float32
                if number == 0 and step < 2:  # what the hook does
                    parameter.grad.mul_(2)
            run.update()
        assert {flat.dtype for flat in seen} == {torch.float32}
        assert_same(runs[:2])
    assert len(seen) == 2 + 3


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch has it from 2.13 on")
@on_ranks(2, "failing", [0, 1, 2])
def test_micro_batches_before_one_that_failed_are_not_lost_unnoticed(rank: int, world_size: int, failing: int) -> None:
    """FSDP2 keeps their sums, to which a backward that ended with an error has added a part of its own."""
    runs = [Run(WRAPPED, RESIDENT) for _ in range(2)]

    def raising(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def micro_batch(run: Run, micro: int) -> None:
        with run.strategy.accumulate(run.model, last=micro == 2):
            run.optimizer.backward(run.loss(micro))

    for micro in range(failing):
        micro_batch(runs[0], micro)
    handle = runs[0].layers[1].register_full_backward_hook(raising)
    with pytest.raises(torch.OutOfMemoryError):
        micro_batch(runs[0], failing)
    handle.remove()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a backward ended with an error, and its gradients are mixed"):
            runs[0].loss()
    runs[0].optimizer.zero_grad()
    for run in runs:
        for micro in range(3):
            micro_batch(run, micro)
        run.update()
    assert_same(runs)
