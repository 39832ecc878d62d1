"""The global norm of every mix of placements is the unsharded model's, with the promised number of collectives."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import lightstep
from lightstep.clipping import GradientNorm
from lightstep.distributed import like, local_gradient, local_tensor
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.training import collectives
from tests.reference.plain_loop import NORM_TOLERANCE

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
Layout = Callable[[torch.device, int], list[tuple[tuple[int, ...], DeviceMesh | None, list[Any]]]]


def plain(device: torch.device, world_size: int) -> list[Any]:
    """Nothing sharded."""
    return [((5, 3), None, []), ((7,), None, [])]


def fully_sharded(device: torch.device, world_size: int) -> list[Any]:
    """Shards: even, uneven, and empty on the last ranks."""
    mesh = init_device_mesh(device.type, (world_size,))
    return [((8, 3), mesh, [Shard(0)]), ((5, 3), mesh, [Shard(0)]), ((1, 4), mesh, [Shard(0)])]


def mixed(device: torch.device, world_size: int) -> list[Any]:
    """Plain, sharded along both dimensions, and replicated on one mesh."""
    mesh = init_device_mesh(device.type, (world_size,))
    return [
        ((5, 3), None, []),
        ((6, 5), mesh, [Shard(0)]),
        ((3, 7), mesh, [Shard(1)]),
        ((4, 2), mesh, [Replicate()]),
        ((9,), mesh, [Shard(0)]),
    ]


def hybrid(device: torch.device, world_size: int) -> list[Any]:
    """HSDP, with a parameter that is replicated on both dimensions."""
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    return [((5, 3), mesh, [Replicate(), Shard(0)]), ((4, 3), mesh, [Replicate(), Replicate()]), ((7,), None, [])]


def tensor_parallel(device: torch.device, world_size: int) -> list[Any]:
    """FSDP × TP: both dimensions shard, or only one of them."""
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("fsdp", "tp"))
    return [
        ((8, 6), mesh, [Shard(0), Shard(1)]),
        ((6, 4), mesh, [Shard(0), Replicate()]),
        ((6, 4), mesh, [Replicate(), Shard(0)]),
        ((3, 6), mesh["tp"], [Shard(1)]),
    ]


def experts(device: torch.device, world_size: int) -> list[Any]:
    """Dense parameters on all ranks; experts on a mesh of their own, sharded over it or whole on each part of it."""
    dense = init_device_mesh(device.type, (world_size,))
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("copies", "experts"))
    return [
        ((6, 5), dense, [Shard(0)]),
        ((4, 3, 2), mesh, [Shard(1), Shard(0)]),
        ((4, 3), mesh["experts"], [Shard(0)]),
        ((5,), None, []),
    ]


def sub_mesh(device: torch.device, world_size: int) -> list[Any]:
    """A two-dimensional slice, which has no process group of its own over all its ranks."""
    mesh = init_device_mesh(device.type, (world_size // 2, 1, 2), mesh_dim_names=("copies", "fsdp", "tp"))
    return [((6, 5), mesh["fsdp", "tp"], [Shard(0), Shard(1)]), ((4, 3), mesh["fsdp", "tp"], [Shard(0), Replicate()])]


def separate_meshes(device: torch.device, world_size: int) -> list[Any]:
    """One expert on the first half of the ranks, another one on the second half; neither has anything of the other."""
    half = world_size // 2
    first = DeviceMesh(device.type, list(range(half)))
    second = DeviceMesh(device.type, list(range(half, world_size)))
    whole = init_device_mesh(device.type, (world_size,))
    return [((6, 5), whole, [Shard(0)]), ((4, 3), first, [Shard(0)]), ((5, 3), second, [Shard(0)]), ((3,), None, [])]


LAYOUTS: dict[str, tuple[Layout, dict[int, int]]] = {
    "plain": (plain, {2: 0, 4: 0}),
    "fully_sharded": (fully_sharded, {2: 1, 4: 1}),
    "mixed": (mixed, {2: 1, 4: 1}),
    "hybrid": (hybrid, {2: 0, 4: 1}),
    "tensor_parallel": (tensor_parallel, {2: 2, 4: 2}),
    "experts": (experts, {2: 2, 4: 3}),
    "sub_mesh": (sub_mesh, {2: 1, 4: 1}),
    "separate_meshes": (separate_meshes, {2: 2, 4: 2}),
}
"""Layout, and by world size the all-reduces of one norm: one per distinct mesh that shards (on two ranks some meshes
are the same or shard nothing; the halves of ``separate_meshes`` share one)."""


def whole_values(layout: list[Any], device: torch.device, seed: int = 0) -> list[Tensor]:
    """The unsharded gradients, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape, _, _ in layout]


def make_parameters(layout: list[Any], values: list[Tensor]) -> list[nn.Parameter]:
    """Parameters whose gradients are the values, placed as the layout says."""
    parameters = []
    for (shape, mesh, placements), value in zip(layout, values, strict=True):
        tensor = torch.zeros(shape, device=value.device)
        place = _placer(mesh, placements)
        parameter = nn.Parameter(place(tensor))
        if mesh is None or mesh.get_coordinate() is not None:  # elsewhere there is nothing to have a gradient of
            parameter.grad = place(value)
        parameters.append(parameter)
    return parameters


def _placer(mesh: DeviceMesh | None, placements: list[Any]) -> Callable[[Tensor], Tensor]:
    if mesh is None:
        return lambda tensor: tensor
    return lambda tensor: distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def exact(values: list[Tensor], norm_type: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([v.double().flatten().cpu() for v in values]), norm_type))


def close(norm: Tensor, expected: float) -> bool:
    return norm.dtype == torch.float32 and norm.dim() == 0 and abs(float(norm) - expected) <= NORM_TOLERANCE * expected


@on_ranks(
    None,
    ("ranks", "layout"),
    [
        *((4, layout) for layout in LAYOUTS),
        *((2, layout) for layout in ("hybrid", "tensor_parallel", "experts", "separate_meshes")),
    ],
)
def test_norm_of_every_layout(rank: int, world_size: int, layout: str) -> None:
    device = device_of(rank, world_size)
    make, expected_calls = LAYOUTS[layout]
    placed, all_reduces = make(device, world_size), expected_calls[world_size]
    values = whole_values(placed, device)
    parameters = make_parameters(placed, values)
    for norm_type in NORM_TYPES[1:]:  # the sum for p = 1 is that for p = 3
        expected = exact(values, norm_type)
        with collectives() as counted:
            norm = lightstep.global_grad_norm(parameters, norm_type)
        assert close(norm, expected), f"p = {norm_type}: {float(norm)}, expected {expected}"
        assert counted == Counter({"allreduce_": all_reduces} if all_reduces else {}), counted
        planned = GradientNorm(parameters, norm_type)
        planned([local_gradient(parameter) for parameter in parameters])  # compares copies on slices, once
        with collectives() as counted:
            norm, overflow = planned([local_gradient(parameter) for parameter in parameters])
        flag = 0 if layout == "plain" else 1
        own = 1 if layout == "separate_meshes" else 0  # its halves travel with the flag
        assert close(norm, expected)
        assert float(overflow) == 0.0
        assert sum(counted.values()) == counted["allreduce_"] == all_reduces - own + flag, counted
    check_clipping(parameters, values)
    check_overflow_anywhere(rank, world_size, placed, device)


def check_clipping(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    here = [parameter for parameter in parameters if parameter.grad is not None]
    before = [local_tensor(p.grad).clone() for p in here]
    norm = lightstep.clip_grad_norm_(parameters, 1.5)
    coefficient = torch.clamp(1.5 / (norm + 1e-6), max=1.0)
    for parameter, old in zip(here, before, strict=True):
        assert torch.equal(local_tensor(parameter.grad), old * coefficient)
    assert abs(float(lightstep.global_grad_norm(parameters)) - 1.5) < 1e-5


def check_overflow_anywhere(rank: int, world_size: int, placed: list[Any], device: torch.device) -> None:
    """An inf or NaN on one rank, in each parameter it has a part of, is an overflow on all."""
    sharded = [number for number, (_, mesh, _) in enumerate(placed) if mesh is not None]
    for number in sharded:
        for norm_type, value in ((2.0, math.inf), (2.0, math.nan), (math.inf, math.nan)):
            parameters = make_parameters(placed, whole_values(placed, device))
            gradient = parameters[number].grad
            local = torch.empty(0) if gradient is None else local_tensor(gradient)
            has_part = torch.tensor([float(local.numel() > 0)] * world_size, device=device)
            if rank == world_size - 1 and local.numel():
                local.view(-1)[0] = value
            dist.broadcast(has_part, src=world_size - 1)
            gradients = [local_gradient(parameter) for parameter in parameters]
            _, overflow = GradientNorm(parameters, norm_type)(gradients)
            assert float(overflow) == float(has_part[0]), (number, norm_type, value)


@on_ranks(None, "ranks", [1, 4])
def test_torchs_bits(rank: int, world_size: int) -> None:
    """Where torch has a norm of DTensors ours is that one, and so are the clipped gradients; one has no gradient."""
    device = device_of(rank, world_size)
    meshes = [(init_device_mesh(device.type, (world_size,)), [Shard(0)])]
    if world_size == 4:
        meshes.append((init_device_mesh(device.type, (2, 2)), [Replicate(), Shard(0)]))
    for mesh, placements in meshes:
        shapes = [(8, 3), (5, 3), (1, 4), (64, 33), (7,), (12, 5)] * 4
        placed = [(shape, mesh, placements) for shape in shapes]
        values = whole_values(placed, device)
        ours, theirs = (make_parameters(placed, values) for _ in range(2))
        ours[3].grad = theirs[3].grad = None
        for norm_type in (1.0, 2.0, 3.0):
            expected = torch.nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None], norm_type)
            assert torch.equal(lightstep.global_grad_norm(ours, norm_type), expected.full_tensor()), norm_type
            planned = GradientNorm(ours, norm_type)
            norm, _ = planned([local_gradient(parameter) for parameter in ours])
            assert torch.equal(norm, expected.full_tensor()), norm_type
        expected = torch.nn.utils.clip_grad_norm_(theirs, 1.5)
        assert torch.equal(lightstep.clip_grad_norm_(ours, 1.5), expected.full_tensor())
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.grad is None or torch.equal(local_tensor(mine.grad), local_tensor(other.grad))


@on_ranks(4)
def test_missing_gradients(rank: int, world_size: int) -> None:
    """Ranks without a gradient take part in the collectives all the same."""
    device = device_of(rank, world_size)
    placed = [*mixed(device, world_size), *hybrid(device, world_size)]
    values = whole_values(placed, device)
    parameters = make_parameters(placed, values)
    squares = sum((local_tensor(p.grad).double() ** 2).sum() for p in parameters[1:3] if rank % 2 == 0)
    total = torch.as_tensor(squares, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    for number, parameter in enumerate(parameters):
        if number not in (1, 2) or rank % 2:
            parameter.grad = None
    assert close(lightstep.global_grad_norm(parameters), float(total.sqrt()))
    for parameter in parameters:
        parameter.grad = None
    assert float(lightstep.global_grad_norm(parameters)) == 0.0


@on_ranks(4)
def test_other_gradients_on_other_ranks(rank: int, world_size: int) -> None:
    """Ranks with gradients for different parameters: as many reductions on all of them, and the same norm."""
    device = device_of(rank, world_size)
    mesh = init_device_mesh(device.type, (world_size,))
    placed = [((8 + number, 3), mesh, [Shard(0)]) for number in range(6)]
    everything = set(range(6))
    for there, reductions in (
        ({1, 2} if rank % 2 else {2, 4}, 2),  # some are nowhere
        (everything if rank == 0 else {2}, 1),
        (everything - {rank}, 1),
        ({2} if rank == 1 else set(), 2),
        (set(), 1),
    ):
        parameters = make_parameters(placed, whole_values(placed, device))
        for number in everything - there:
            parameters[number].grad = None
        for norm_type in (1.0, 2.0, 3.0):
            powers = [
                local_tensor(p.grad).double().abs().pow(norm_type).sum() for p in parameters if p.grad is not None
            ]
            expected = torch.stack(powers).sum() if powers else torch.zeros((), dtype=torch.float64, device=device)
            dist.all_reduce(expected)
            with collectives() as counted:
                norm = lightstep.global_grad_norm(parameters, norm_type)
            assert counted == Counter({"allreduce_": reductions}), (there, counted)
            assert close(norm, float(expected.pow(1.0 / norm_type))), (there, norm_type)
            parts = [torch.empty_like(norm) for _ in range(world_size)]
            dist.all_gather(parts, norm)
            assert all(torch.equal(part, norm) for part in parts)
        largest = [
            local_tensor(p.grad).abs().max() for p in parameters if p.grad is not None and len(p.grad.to_local())
        ]
        expected = torch.stack(largest).amax() if largest else torch.zeros((), device=device)
        dist.all_reduce(expected, op=dist.ReduceOp.MAX)
        assert torch.equal(lightstep.global_grad_norm(parameters, math.inf), expected)
        if 2 in there:
            local_tensor(parameters[2].grad).view(-1)[:1] = -math.nan
        assert bool(lightstep.global_grad_norm(parameters).isnan()) == (there != set() or reductions == 2)


@on_ranks(4, ("layout", "dropped"), [(mixed, (1, 2)), (tensor_parallel, (1, 2)), (tensor_parallel, (3, 3))])
def test_gradients_of_some_ranks_alone_are_refused_on_mixed_meshes(
    rank: int, world_size: int, layout: Layout, dropped: tuple[int, int]
) -> None:
    """Each half of the ranks lacks another gradient; one that all ranks lack is none."""
    device = device_of(rank, world_size)
    placed = layout(device, world_size)
    for norm_type in NORM_TYPES:
        parameters = make_parameters(placed, whole_values(placed, device))
        norm_of = GradientNorm(parameters, norm_type, whole=True)
        gradients = [local_gradient(parameter, torch.float32) for parameter in parameters]
        everywhere, _ = norm_of([None if number in dropped else one for number, one in enumerate(gradients)])
        assert close(everywhere, exact(own_values(placed, device, dropped), norm_type))
        gradients[dropped[rank % 2]] = None
        if dropped[0] == dropped[1]:
            assert norm_of(gradients)
            continue
        with pytest.raises(RuntimeError, match="ranks have used different parameters of one FSDP module"):
            norm_of(gradients)


def own_values(placed: list[Any], device: torch.device, dropped: tuple[int, int]) -> list[Tensor]:
    return [value for number, value in enumerate(whole_values(placed, device)) if number not in dropped]


@on_ranks(2)
def test_partial_gradient(rank: int, world_size: int) -> None:
    """A partial gradient is added up over its mesh in fp32, without rounding on the way."""
    device = device_of(rank, world_size)
    mesh = init_device_mesh(device.type, (world_size,))
    parameter = nn.Parameter(
        distribute_tensor(torch.zeros(3, device=device, dtype=torch.bfloat16), mesh, [Replicate()])
    )
    parts = [torch.tensor([1.0, 2.0**-9, 3.0 + r], dtype=torch.bfloat16) for r in range(world_size)]
    partial = torch.distributed.tensor.DTensor.from_local(parts[rank].to(device), mesh, [Partial()])
    parameter.grad = partial
    expected = torch.stack([part.float() for part in parts]).sum(0).to(device)
    found = local_gradient(parameter, torch.float32)
    assert found is not None
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert close(lightstep.global_grad_norm([parameter]), exact([expected], 2.0))


@on_ranks(2)
def test_host_gradients(rank: int, world_size: int) -> None:
    """Shards on the host, on a mesh whose own group may know only GPUs."""
    device = device_of(rank, world_size)
    mesh = init_device_mesh(device.type, (world_size,))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 4, generator=generator)
    parameter = nn.Parameter(distribute_tensor(torch.zeros(6, 4, device=device), mesh, [Shard(0)], src_data_rank=None))
    local = distribute_tensor(whole.to(device), mesh, [Shard(0)], src_data_rank=None).to_local().cpu()
    host = nn.Parameter(like(parameter, torch.zeros_like(local)).detach())
    host.grad = like(host, local)
    for norm_type in NORM_TYPES:
        norm = lightstep.global_grad_norm([host], norm_type)
        assert norm.device.type == "cpu"
        assert close(norm, exact([whole], norm_type))


@on_ranks(4)
def test_marked_experts(rank: int, world_size: int) -> None:
    """Plain tensors that are a different expert on each rank, when they say so."""
    device = device_of(rank, world_size)
    shared, expert = nn.Parameter(torch.zeros(3, device=device)), nn.Parameter(torch.zeros(2, 2, device=device))
    expert.differs_across_ranks = True  # type: ignore[attr-defined]
    shared.grad = torch.tensor([1.0, 2.0, 3.0], device=device)
    expert.grad = torch.full((2, 2), float(rank + 1), device=device)
    values = [shared.grad, *(torch.full((2, 2), float(r + 1)) for r in range(world_size))]
    for norm_type in NORM_TYPES:
        assert close(
            lightstep.global_grad_norm([shared, expert], norm_type), exact([v.cpu() for v in values], norm_type)
        )


@on_ranks(4)
def test_experts_on_slices(rank: int, world_size: int) -> None:
    """Experts that FSDP shards over a slice of a mesh: one norm when they say that they differ, else refused."""
    from torch.distributed.fsdp import fully_shard

    device = device_of(rank, world_size)
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("ep", "dp"))
    own = rank // (world_size // 2)

    def run(seed: int, marked: bool) -> Any:
        torch.manual_seed(0)
        router = nn.Linear(4, 4)
        torch.manual_seed(seed)
        model = nn.Sequential(OrderedDict(router=router, expert=nn.Linear(4, 4))).to(device)
        fully_shard(model.expert, mesh=mesh["dp"])
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
        strategy = lightstep.Strategy.load("fp32")
        for parameter in model.expert.parameters():
            if marked:
                parameter.differs_across_ranks = True  # type: ignore[attr-defined]
        optimizer = strategy.create_optimizer(model)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + own if marked and "expert" in name else 1.0)
        return optimizer.step

    assert float(run(seed=1, marked=False)().grad_norm) == pytest.approx(40**0.5)  # one expert, in copies
    assert float(run(seed=own, marked=True)().grad_norm) == pytest.approx((20 + 20 + 4 * 20) ** 0.5)
    step = run(seed=own, marked=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shape \(4, 4\) .* between ranks 0 and 2, .*differs_across_ranks = True"):
            step()
