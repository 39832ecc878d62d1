"""Steps under FSDP2 and DDP strategies: what is sent and added up, over which parameters, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lightstep
from lightstep.config import ConfigError
from lightstep.distributed import like, local_tensor
from tests.distributed.models import Slope, TinyTransformer, loss_of
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.training import (
    DDP,
    FSDP2,
    HSDP,
    collectives,
    full,
    load,
    made,
    same_on_all_ranks,
    same_tensors,
    train,
    weights_of,
)

REDUCTIONS = {"allreduce_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_", "reduce_"}

# -- gradients


def slopes(micro: int, world_size: int, apart: int = 9) -> tuple[list[Tensor], Tensor]:
    """A gradient for each rank, and their mean, which needs more than bf16's 8 bits."""
    values = [torch.full((5, 3), 2.0 ** (-5 * micro - apart * rank)) for rank in range(world_size)]
    return values, torch.stack(values).sum(0) / world_size


def master_of(optimizer: Any, parameter: Tensor) -> Tensor:
    """The whole one."""
    return full(optimizer.state[parameter]["master"]).cpu()


@on_ranks(None, ("ranks", "sharding", "reductions", "norm"), [(2, FSDP2, 4, 2), (4, HSDP, 8, 2), (2, DDP, 1, 0)])
def test_what_is_sent(rank: int, sharding: dict[str, Any], reductions: int, norm: int) -> None:
    """No reduction before the last micro-batch; in ``step`` one all-reduce on the one mesh and one for the flag."""
    strategy, model, optimizer = made(sharding, TinyTransformer())
    train(strategy, model, optimizer, steps=1)
    with collectives() as counted, strategy.accumulate(model, last=False):
        optimizer.backward(loss_of(model, 0, 0, rank, strategy.device))
    assert not REDUCTIONS & counted.keys(), counted
    assert sharding["kind"] != "ddp" or not counted, counted
    with collectives() as counted, strategy.accumulate(model, last=True):
        optimizer.backward(loss_of(model, 0, 1, rank, strategy.device))
    assert sum(counted[name] for name in REDUCTIONS) >= reductions, counted
    with collectives() as counted:
        optimizer.step()
    assert counted == Counter({"allreduce_": norm + 1}), counted


@on_ranks(None, ("ranks", "sharding", "backend"), [(2, FSDP2, "bulk"), (4, HSDP, "stream")])
def test_a_deep_copy_goes_on_by_itself(sharding: dict[str, Any], backend: str) -> None:
    strategy, model, optimizer = made(sharding, TinyTransformer(), sections={"optimizer_state": {"backend": backend}})
    train(strategy, model, optimizer, steps=1)
    twin = copy.deepcopy(optimizer)
    if backend == "stream":  # each shares the work with the other replicas
        with pytest.raises(TypeError, match=r"cannot be pickled: save optimizer\.state_dict"):
            pickle.dumps(optimizer)
        assert len(twin.managed()) > sum(not item.is_remote for item in twin.managed())
        assert [item.is_remote for item in twin.managed()] == [item.is_remote for item in optimizer.managed()]
    listed = ([p for group in one.param_groups for p in group["params"]] for one in (optimizer, twin))
    pairs = [(p, q) for p, q in zip(*listed, strict=True) if p in optimizer.state]
    assert len(pairs) == len(optimizer.state) == len(twin.state) > 0
    for _ in range(2):
        for parameter, copied in pairs:
            parameter.grad = like(parameter, torch.ones_like(local_tensor(parameter)))
            copied.grad = like(copied, torch.ones_like(local_tensor(copied)))
        assert optimizer.step() and twin.step()
    for parameter, copied in pairs:
        assert parameter is not copied and torch.equal(local_tensor(parameter), local_tensor(copied))
        ours, its = optimizer.parameter_state(parameter), twin.parameter_state(copied)
        assert ours.keys() == its.keys() > {"master", "exp_avg"}
        assert all(torch.equal(local_tensor(ours[key]), local_tensor(its[key])) for key in ours)


class Routed(nn.Module):
    """Two of three weights take part in a forward, as with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Parameter(torch.zeros(5, 3)) for _ in range(3))

    def forward(self, values: Tensor, branch: str) -> Tensor:
        return ((self.first + getattr(self, branch)) * values).sum()


# By micro-batch: each rank's branch, and whether gradients are reduced. None: nor does DDP see the forward.
@on_ranks(2, "early", [True, False])
def test_a_model_that_is_sharded_by_hand(rank: int, world_size: int, early: bool) -> None:
    """A model that user code shards: what is reduced in fp32 stays so, and micro-batches are added in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for reduce_dtype, apart in ((torch.float32, 9), (None, 0)):
        strategy = load({"kind": "single"}, clipping={"max_norm": None})
        model: nn.Module = Routed().to(strategy.device, torch.bfloat16)
        optimizer: Any = None if early else strategy.create_optimizer(model, torch.optim.SGD, lr=1.0)
        mesh = init_device_mesh(strategy.device.type, (world_size,))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        if optimizer is None:
            optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=1.0)
        else:
            optimizer.param_groups[0]["params"] = list(model.parameters())
        expected = torch.zeros(5, 3)
        for _ in range(2):
            for micro in range(3):
                values, mean = slopes(micro, world_size, apart)
                optimizer.backward(model(values[rank].to(strategy.device, torch.bfloat16), "left"))
                expected -= mean
            optimizer.step()
        found = master_of(optimizer, model.first)
        assert torch.equal(found, expected), (reduce_dtype, found, expected)


@on_ranks(2)
def test_sums_that_fsdp2_has_rounded(rank: int, world_size: int) -> None:
    """An optimizer that knows only the parameters cannot have FSDP2 add in fp32, and refuses 16-bit sums."""
    from torch.distributed.fsdp import fully_shard

    device = device_of(rank, world_size)
    model: Any = Routed().to(device, torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    optimizer = lightstep.MixedPrecisionOptimizer(model.parameters(), torch.optim.SGD, hyperparameters={"lr": 1.0})

    def backward() -> None:
        optimizer.backward(model(torch.ones(5, 3, device=device, dtype=torch.bfloat16), "left"))

    for _ in range(2):
        backward()
    with pytest.raises(RuntimeError, match=r"several backwards in 16 bits.*create_optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    for summed in (False, True):
        model.set_requires_gradient_sync(not summed)
        backward()
        model.set_requires_gradient_sync(True)
        if summed:
            backward()
        assert optimizer.step()
    first = optimizer.param_groups[0]["params"][0]
    assert torch.equal(master_of(optimizer, first), torch.full((5, 3), -3.0))


# -- optimizers and replicas that were made in another order, or elsewhere


@on_ranks(2, ("sharding", "parameters"), [(FSDP2, "float32"), (FSDP2, "bfloat16"), (DDP, "bfloat16")])
def test_parameters_swapped_after_building(sharding: dict[str, Any], parameters: str) -> None:
    """As accelerate does. 16-bit gradients are not rounded when the optimizer was built first, or for another model."""

    def run(order: str) -> dict[str, Tensor]:
        strategy = load(sharding, precision={"parameters": parameters})
        torch.manual_seed(0)
        model: nn.Module = TinyTransformer().to(strategy.parameter_dtype)
        if order == "prepared first":
            model = strategy.prepare_model(model)
            optimizer = strategy.create_optimizer(model, lr=1e-2)
        else:
            given = model if order == "optimizer first" else strategy.prepare_model(TinyTransformer())
            optimizer = strategy.create_optimizer(given, lr=1e-2)
            model = strategy.prepare_model(model)
            optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
        assert all(train(strategy, model, optimizer))
        return weights_of(strategy, model)

    expected = run("prepared first")
    same_tensors(run("optimizer first"), expected)
    same_tensors(run("another model's optimizer"), expected)


@on_ranks(2)
def test_a_replica_that_is_not_known(rank: int, world_size: int) -> None:
    """DDP by hand: micro-batches that it did not reduce are refused, and what it does reduce is right."""
    device = device_of(rank, world_size)

    def run(by_strategy: bool, reduce: str, no_sync: bool) -> tuple[Any, nn.Module]:
        torch.manual_seed(0)
        strategy = load({"kind": "single"}, precision={"reduce": reduce})
        model = nn.parallel.DistributedDataParallel(
            strategy.prepare_model(TinyTransformer()), find_unused_parameters=True, gradient_as_bucket_view=by_strategy
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        if by_strategy:
            optimizer: Any = strategy.create_optimizer(model, lr=1e-2)
        else:
            optimizer = lightstep.MixedPrecisionOptimizer(
                trained, hyperparameters={"lr": 1e-2}, reduce_float32=reduce == "float32"
            )
        for step in range(2):
            for micro in range(3):
                with model.no_sync() if no_sync and micro < 2 else contextlib.nullcontext():
                    optimizer.backward(loss_of(model, step, micro, rank, device) / 3)
            optimizer.step()
        return optimizer, model

    for by_strategy in (False, True):
        with pytest.raises(
            RuntimeError, match=r"was changed after backward.*DistributedDataParallel of your own.*reduce_float32"
        ):
            run(by_strategy, "float32", no_sync=True)
        for reduce, no_sync in (("float32", False), ("parameters", True)):
            optimizer, model = run(by_strategy, reduce, no_sync)
            assert same_on_all_ranks(model), (by_strategy, reduce)
            with model.no_sync():
                for micro in range(2):
                    optimizer.backward(loss_of(model, 3, micro, rank, device))
            model.zero_grad()
            optimizer.backward(loss_of(model, 3, 2, rank, device))
            assert optimizer.step()
            assert same_on_all_ranks(model), (by_strategy, reduce)


class WithExpert(Slope):
    """With a second weight that is another one on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts = nn.ParameterList([torch.full((2, 2), float(rank))])
        self.experts[0].differs_across_ranks = True

    def forward(self, slope: Tensor) -> Tensor:
        return super().forward(slope) + (self.experts[0] * slope[:2, :2].to(self.weight.dtype)).sum()


@on_ranks(2, "backend", ["resident", "stream"])
def test_an_expert_beside_the_replica(rank: int, world_size: int, backend: str) -> None:
    """Experts that DDP is told to ignore keep their own weights and gradients, and count in the norm one by one."""
    for sharding in (FSDP2, DDP):
        with pytest.raises(ConfigError, match=r"experts.0 says that it differs across ranks"):
            load(sharding).prepare_model(WithExpert(rank))
    strategy = load({"kind": "ddp"}, clipping={"max_norm": None}, optimizer_state={"backend": backend})
    model = WithExpert(rank)
    model._ddp_params_and_buffers_to_ignore = ["experts.0"]  # type: ignore[assignment]
    prepared = strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(prepared, torch.optim.SGD, lr=1.0)
    for micro in range(2):
        with strategy.accumulate(prepared, last=micro == 1):
            optimizer.backward(prepared(torch.full((5, 3), rank + 1.0, device=strategy.device)))
    result = optimizer.step()
    optimizer.synchronize()
    mean, inner = sum(range(1, world_size + 1)) / world_size, 5 * 3
    squares = inner * (2 * mean) ** 2 + inner * (2 * mean) ** 2 + sum(4 * (2 * (r + 1)) ** 2 for r in range(world_size))
    assert float(result.grad_norm) == pytest.approx(squares**0.5)
    assert torch.equal(model.experts[0].float().cpu(), torch.full((2, 2), rank - 2.0 * (rank + 1)))


# -- gradients that are refused
