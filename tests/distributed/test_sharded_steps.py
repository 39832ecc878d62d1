"""Steps under FSDP2 and DDP strategies: what is sent and added up, over which parameters, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import lightstep
from lightstep.config import ConfigError
from lightstep.distributed import like, local_tensor
from tests.distributed.models import Slope, TinyTransformer, loss_of
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.training import (
    DDP,
    FSDP2,
    HSDP,
    Training,
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


UNCLIPPED = {"clipping": {"max_norm": None}}
SGD = torch.optim.SGD


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


@on_ranks(None, ("ranks", "sharding"), [(3, FSDP2), (4, HSDP), (2, DDP)])
def test_overflow_on_one_rank_skips_on_all(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """An inf that only the last rank has, in its shard or in its copy."""
    strategy, model, optimizer = made(sharding, TinyTransformer())
    train(strategy, model, optimizer, steps=1, micro_batches=1)
    before = weights_of(strategy, model)
    for name, parameter in strategy.unwrap_model(model).named_parameters():
        if name.startswith(("dead", "frozen", "blocks.0", "blocks.1")):
            continue
        local = torch.zeros_like(local_tensor(parameter))
        if rank == world_size - 1 and local.numel():
            local.view(-1)[-1] = torch.inf
        parameter.grad = like(parameter, local)
        on_last = torch.tensor(float(local.numel() > 0), device=strategy.device)
        dist.broadcast(on_last, src=world_size - 1)
        result = optimizer.step()
        assert bool(result) is (float(on_last) == 0.0), name
    if sharding["kind"] == "ddp":
        same_tensors(before, weights_of(strategy, model))


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
ROUTES = {
    "reduced-twice": [("left", "left", True), ("left", "left", True)],
    "another-branch": [("left", "left", True), ("right", "right", True)],
    "one-rank-changes": [("left", "left", True), ("left", "right", True)],
    "back-again": [("left", "right", True), ("right", "left", True), ("left", "left", True)],
    "summed-first": [("left", "right", False), ("left", "left", True)],
    "summed-unseen": [("left", "right", None), ("left", "right", None), ("left", "left", True)],
    "summed-between": [("right", "right", True), ("left", "right", False), ("left", "left", True)],
}


@on_ranks(2, "by_hand", [False, True])
def test_weights_that_some_micro_batches_leave_out(rank: int, world_size: int, by_hand: bool) -> None:
    """Each weight moves by the fp32 sum of all micro-batches' averages; one without any gradient gets no state."""
    for route, micro_batches in ROUTES.items():
        strategy, model, optimizer = made(DDP, Routed(), SGD, 1.0, UNCLIPPED)
        sums = {name: torch.zeros(5, 3) for name in ("first", "left", "right")}
        used = set()
        for micro, (*branches, reduced) in enumerate(micro_batches):
            values, _ = slopes(micro, world_size)
            with strategy.accumulate(model, last=bool(reduced)):
                forward = strategy.unwrap_model(model) if reduced is None else model
                loss = forward(values[rank].to(strategy.device, torch.bfloat16), branches[rank])
                loss.backward() if by_hand else optimizer.backward(loss)
            for value, branch in zip(values, branches, strict=True):
                for name in ("first", branch):
                    sums[name] += value / world_size
                    used.add(name)
        optimizer.step()
        for name, parameter in strategy.unwrap_model(model).named_parameters():
            assert (parameter in optimizer.state) == (name in used), (route, name)
            if name in used:
                assert torch.equal(master_of(optimizer, parameter), -sums[name]), (route, name)


class RoutedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, values: Tensor, branch: str) -> Tensor:
        return sum(block(values, branch) for block in self.blocks)


@on_ranks(2)
def test_sums_while_units_are_tried(rank: int, world_size: int) -> None:
    """A unit that is tried takes the sum over several reduced backwards while other gradients of its group arrive."""
    sections = {**UNCLIPPED, "optimizer_state": {"backend": "stream", "update": "overlap", "ring_mib": 0.01}}
    strategy, model, optimizer = made({**FSDP2, "wrap": ["Routed"]}, RoutedTwice(), SGD, 1.0, sections, momentum=0.5)
    expected, velocity = torch.zeros(5, 3), torch.zeros(5, 3)
    for _ in range(3):
        gradient = torch.zeros(5, 3)
        for micro in range(3):
            values, mean = slopes(micro, world_size)
            loss = model(values[rank].to(strategy.device, torch.bfloat16), "left")
            optimizer.backward(loss) if micro == 2 else loss.backward()  # units are tried in the optimizer's own
            gradient += mean
        optimizer.step()
        velocity = 0.5 * velocity + gradient
        expected -= velocity
    for block in strategy.unwrap_model(model).blocks:
        for parameter in (block.first, block.left):
            assert torch.equal(master_of(optimizer, parameter), expected)


@on_ranks(
    None,
    ("ranks", "sharding", "by_hand"),
    [(2, {**FSDP2, "wrap": ["Routed"]}, False), (4, {**HSDP, "wrap": ["Routed"]}, True), (2, DDP, False)],
)
def test_the_gradient_is_in_place(rank: int, world_size: int, sharding: dict[str, Any], by_hand: bool) -> None:
    """Between backward and step ``p.grad`` is the fp32 gradient over all ranks, and edits of it count."""
    strategy, model, optimizer = made(sharding, RoutedTwice(), SGD, 1.0, UNCLIPPED)
    inner = strategy.unwrap_model(model)
    trained = {name: p for name, p in inner.named_parameters() if "right" not in name}
    expected = {name: torch.zeros(5, 3) for name in trained}

    def backward(micro: int) -> Tensor:
        values, mean = slopes(micro, world_size)
        loss = model(values[rank].to(strategy.device, torch.bfloat16), "left")
        loss.backward() if by_hand else optimizer.backward(loss)
        return mean

    def check_step(sums: dict[str, Tensor]) -> None:
        for name, p in trained.items():
            assert p.grad is not None and p.grad.dtype == torch.float32 and torch.equal(full(p.grad).cpu(), sums[name])
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained.values()])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert torch.equal(lightstep.global_grad_norm(model.parameters()), norm)
        assert torch.equal(optimizer.step().grad_norm, norm)
        for name, p in trained.items():
            expected[name] -= sums[name]
            assert p.grad is None and torch.equal(master_of(optimizer, p), expected[name])

    first = "blocks.0.first"
    for _ in range(2 if sharding["kind"] == "ddp" else 1):  # it moves its buckets after the first backward
        sums = dict.fromkeys(trained, backward(0) + backward(1))
        check_step(sums)
        # edits after the last backward, in place and by assignment; one parameter's gradient is removed
        sums = {name: gradient / 3 for name, gradient in dict.fromkeys(trained, backward(0)).items()}
        for name, p in trained.items():
            if name == first:
                p.grad = p.grad / 3
            else:
                p.grad.div_(3)
        check_step(sums)
        # edits between two backwards, and a gradient that is dropped there
        sums = dict.fromkeys(trained, backward(1))
        sums[first] = sums[first] / 3
        trained[first].grad.div_(3)
        dropped = "blocks.1.left"
        trained[dropped].grad, sums[dropped] = None, torch.zeros(5, 3)
        gradient = backward(0)
        check_step({name: earlier + gradient for name, earlier in sums.items()})
    backward(0)
    model.zero_grad()
    with pytest.warns(UserWarning, match="no gradient on any"):
        optimizer.step()
    backward(0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    check_step(dict.fromkeys(trained, backward(1)))


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


class Single(nn.Module):
    """A block with one weight: FSDP2's buffer of its group is as long as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))

    def forward(self, values: Tensor) -> Tensor:
        return (self.weight * values).sum()


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Single(), Single(), Slope()])

    def forward(self, values: Tensor) -> Tensor:
        return sum(block(values) for block in self.blocks)


@on_ranks(
    None,
    ("ranks", "sharding"),
    [(2, {**FSDP2, "wrap": ["Single", "Slope"]}), (4, {**HSDP, "wrap": ["Single", "Slope"]})],
)
def test_a_penalty_on_the_shards(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """A loss of the shards themselves adds to the gradient in fp32: in the same backward or in one of its own."""
    strategy = load(sharding, clipping={"max_norm": None})
    for calls in (["both"], ["data", "penalty"], ["penalty", "data"], ["data", "both"], ["both", "penalty", "both"]):
        model = strategy.prepare_model(Penalized())
        optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=1.0)
        weights = [block.weight for block in model.blocks]
        values, mean = slopes(0, world_size)
        for call in calls:
            losses = []
            if call != "penalty":
                losses.append(model(values[rank].to(strategy.device, torch.bfloat16)))
            if call != "data":
                losses += [0.25 * weight.to_local().sum() for weight in weights]
            optimizer.backward(sum(losses))
        optimizer.step()
        expected = -mean * sum(call != "penalty" for call in calls)
        expected -= 0.25 * sum(call != "data" for call in calls)
        for weight in weights:
            found = master_of(optimizer, weight)
            assert torch.equal(found, expected), (calls, found, expected)


@on_ranks(
    None,
    ("ranks", "sharding", "parameters"),
    [
        (2, {**FSDP2, "wrap": ["Single", "Slope"]}, "float32"),
        (4, {**HSDP, "wrap": ["Single", "Slope"]}, "bfloat16"),
        (2, {"kind": "ddp"}, "float32"),
    ],
)
def test_gradients_that_were_not_reduced_are_refused(sharding: dict[str, Any], parameters: str) -> None:
    """Only a backward through the model's forward reduces what ``accumulate(last=False)`` has left."""
    strategy, model, optimizer = made(
        sharding, Penalized(), SGD, 1.0, {**UNCLIPPED, "precision": {"parameters": parameters}}
    )
    weights = [block.weight for block in strategy.unwrap_model(model).blocks]
    values = torch.ones(5, 3, device=strategy.device, dtype=strategy.parameter_dtype)

    def penalty() -> Tensor:
        return sum((weight.to_local() if isinstance(weight, DTensor) else weight).sum() for weight in weights)

    for in_last in (False, True):
        for direct in (False, True):
            with strategy.accumulate(model, last=False):
                optimizer.backward(model(values))
            with strategy.accumulate(model, last=True) if in_last else contextlib.nullcontext():
                penalty().backward() if direct else optimizer.backward(penalty())
            with pytest.raises(RuntimeError, match="have not been reduced over the ranks since"):
                optimizer.step()
            if parameters == "float32" and sharding["kind"] == "fsdp2" and torch.__version__.startswith("2.11."):
                return  # there FSDP2 has put the unreduced gradient into the shard's, and the next backward fails
            with strategy.accumulate(model, last=True):
                loss = model(values)
                loss.backward() if direct else optimizer.backward(loss)
                if in_last:
                    optimizer.step()
            if not in_last:
                with torch.no_grad():
                    model(values)
                optimizer.step()
    for weight in weights:
        master = optimizer.state[weight]["master"] if parameters == "bfloat16" else weight.detach()
        assert torch.equal(full(master).cpu(), torch.full((5, 3), -4.0 * (1 + 1 + 1)))


@on_ranks(
    2,
    ("sharding", "dtype", "by_hand"),
    [(FSDP2, "bfloat16", False), (DDP, "float32", False), (FSDP2, "bfloat16", True), (DDP, "bfloat16", True)],
)
def test_a_last_micro_batch_that_was_not_reduced(
    rank: int, sharding: dict[str, Any], dtype: str, by_hand: bool
) -> None:
    """A step after micro-batches of which the last was not reduced would leave it out, or let ranks drift apart."""
    strategy, model, optimizer = made(sharding, TinyTransformer(), sections={"precision": {"parameters": dtype}})
    before = weights_of(strategy, model)

    def backward(micro: int, last: bool) -> None:
        with strategy.accumulate(model, last=last):
            loss = loss_of(model, 0, micro, rank, strategy.device)
            loss.backward() if by_hand else optimizer.backward(loss)

    for lasts in ([False], [True, False]):
        for micro, last in enumerate(lasts):
            backward(micro, last)
        for refused in (optimizer.step, optimizer.grad_norm):
            with pytest.raises(RuntimeError, match=r"not been reduced.*last=True"):
                refused()
        same_tensors(weights_of(strategy, model), before)
    backward(2, last=True)
    assert optimizer.step()
    assert sharding["kind"] == "fsdp2" or same_on_all_ranks(model)


@on_ranks(
    2,
    ("sharding", "precision"),
    [
        (FSDP2, {"parameters": "bfloat16"}),
        (DDP, {"parameters": "float32"}),
        (FSDP2, {"parameters": "bfloat16", "reduce": "parameters"}),
    ],
)
def test_an_accumulation_can_be_dropped(sharding: dict[str, Any], precision: Any) -> None:
    """``zero_grad`` forgets all micro-batches, whether the last of them was reduced or not."""
    norms = []
    for lasts in ([], [False, False, True], [False, False], [True, False]):
        run = Training({"sharding": sharding, "precision": precision})
        for micro, last in enumerate(lasts):
            with run.accumulate(last):
                run.optimizer.backward(run.loss(micro) * 100)
        run.optimizer.zero_grad()
        run.step()
        norms.append(float(run.result.grad_norm))
    assert norms == norms[:1] * 4


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
def test_the_replica_is_found(rank: int) -> None:
    """The optimizer may be built from DDP's module, from the module in it, or before DDP was there."""

    def run(order: str, backend: str) -> dict[str, Tensor]:
        strategy = load(DDP, optimizer_state={"backend": backend})
        torch.manual_seed(0)
        model: nn.Module = TinyTransformer()
        early = strategy.create_optimizer(model, lr=1e-2) if order == "before" else None
        prepared = strategy.prepare_model(model)
        built_from = prepared if order == "wrapped" else strategy.unwrap_model(prepared)
        optimizer = early or strategy.create_optimizer(built_from, lr=1e-2)
        for step in range(2):
            for micro in range(2):
                with strategy.accumulate(built_from, last=micro == 1):
                    optimizer.backward(loss_of(prepared, step, micro, rank, strategy.device) / 2)
            assert optimizer.step()
        optimizer.synchronize()
        assert same_on_all_ranks(model), (order, backend)
        return weights_of(strategy, prepared)

    expected = run("wrapped", "resident")
    for order, backend in (("inner", "resident"), ("before", "resident"), ("inner", "stream"), ("before", "stream")):
        same_tensors(run(order, backend), expected)


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


@on_ranks(2)
def test_gradients_that_were_never_reduced(rank: int) -> None:
    """Steps whose gradients DDP never saw are refused; extra gradients after its reduction are added."""
    for micro_batches in (1, 2):
        strategy, model, optimizer = made(DDP, TinyTransformer())
        for micro in range(micro_batches):
            with strategy.accumulate(model, last=True):
                optimizer.backward(loss_of(strategy.unwrap_model(model), 0, micro, rank, strategy.device))
        with pytest.raises(RuntimeError, match=r"reduced.*last=True"):
            optimizer.step()
    strategy, model, optimizer = made(DDP, Slope(), SGD, 1.0)
    optimizer.backward(model(torch.full((5, 3), float(rank), device=strategy.device)))
    optimizer.backward(2 * strategy.unwrap_model(model).weight.sum())
    assert optimizer.step()
    assert same_on_all_ranks(model)


@on_ranks(2, "sharding", [FSDP2, DDP])
def test_a_backward_that_was_not_scaled_is_refused(sharding: dict[str, Any]) -> None:
    scale = {"kind": "dynamic", "init_scale": 256.0}
    run = Training({"sharding": sharding, "precision": {"parameters": "float16", "loss_scale": scale}})
    run.train(2)
    before = run.weights()
    run.loss().backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\)"):
        run.optimizer.step()
    same_tensors(run.weights(), before)
    run.optimizer.zero_grad()
    run.train(2)
