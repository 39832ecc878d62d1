"""Moments in bf16 and 8 bits, and weights without masters, on several ranks: codes and noise do not depend on how a
parameter is divided."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import lightstep
from lightstep.optimizer.moments import Moments
from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.training import DDP, FSDP2, HSDP, STREAM
from tests.reference.rounded_weights import (
    RoundedWeights,
    RoundedWithStochasticInt8Moments,
    RoundedWithStochasticMoments,
)
from tests.reference.short_moments import Int8Moments, NearestMoments, StochasticInt8Moments, StochasticMoments
from tests.reference.tiny_model import representable

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999)}
ADAFACTOR: dict[str, Any] = {
    "moments": "float32",
    "master_weights": "stochastic",
    "settings": {"lr": 1e-2},
    "optimizer_class": torch.optim.Adafactor,
}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(optimizer: Any, tested: list[Tensor], expected: list[Tensor], reference: Any = None) -> None:
    """Gradients that do not depend on the division; afterwards everything is equal to the loop on one device."""
    reference = reference or StochasticMoments([{"params": expected}], torch.optim.AdamW, rounding_seed=2, **SETTINGS)
    dtype = torch.bfloat16 if isinstance(reference, NearestMoments) else torch.float32
    dtype = torch.float32 if isinstance(reference, Int8Moments) else dtype
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for mine, theirs in zip(tested, expected, strict=True):
            theirs.grad = torch.randn(theirs.shape, generator=generator).to(theirs)
            mine.grad = placed_like(mine, theirs.grad)
        reference.collect()
        optimizer.step()
        reference.step()
    optimizer.synchronize()
    for mine, theirs in zip(tested, expected, strict=True):
        assert torch.equal(whole(mine).detach(), theirs)
        entries, wanted = dict(optimizer.state[mine]), reference.state(theirs)
        for key in sorted(wanted.keys() - {"step"}):  # all ranks gather in one order
            assert entries[key].dtype == dtype
            assert torch.equal(whole(entries[key]).cpu(), wanted[key].cpu()), f"{key} of shape {tuple(theirs.shape)}"


def placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value.clone()
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


class Rows(nn.Module):
    """Matrices with blocks of 128, 64, 32 and 16; no forward."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7, 384), (5, 64), (9, 96), (4, 3, 16)]
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


REFERENCES = {
    ("bfloat16", True): StochasticMoments,
    ("int8", True): StochasticInt8Moments,
    ("bfloat16", "stochastic"): RoundedWithStochasticMoments,
    ("int8", "stochastic"): RoundedWithStochasticInt8Moments,
    ("float32", "stochastic"): RoundedWeights,
}
"""By ``optimizer_state.moments`` and ``precision.master_weights``."""


def check_layout(
    sharding: dict[str, Any],
    state: dict[str, Any],
    moments: str = "bfloat16",
    master_weights: bool | str = True,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    settings: dict[str, Any] = SETTINGS,
    rounding_seed: int = 2,
) -> None:
    rounding = "stochastic" if moments == "bfloat16" else None  # that of int8
    state = {"moments": moments, "moments_rounding": rounding, **state}
    values = {"sharding": sharding, "clipping": {"max_norm": None}, "optimizer_state": state}
    precision = {"master_weights": master_weights, "rounding_seed": rounding_seed}
    strategy = lightstep.Strategy.load({**values, "precision": precision})
    torch.manual_seed(0)
    model = representable(TinyTransformer() if moments == "bfloat16" else Rows())
    twin = copy.deepcopy(model).to(strategy.device, torch.bfloat16)
    model = strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(model, optimizer_class, **settings)
    inner = strategy.unwrap_model(model)
    trained = [p for p in twin.parameters() if p.requires_grad]
    reference = REFERENCES[moments, master_weights]
    train(
        optimizer,
        [p for p in inner.parameters() if p.requires_grad],
        trained,
        reference([{"params": trained}], optimizer_class, rounding_seed=rounding_seed, **settings),
    )
    optimizer.close()


@on_ranks(
    None,
    ("ranks", "sharding", "update", "given"),
    [
        (2, FSDP2, None, {"rounding_seed": 0}),
        (3, FSDP2, "next_forward", {}),
        (3, FSDP2, "at_step", {"moments": "int8"}),
        (4, HSDP, "next_forward", {"moments": "int8"}),
        (2, FSDP2, None, {"moments": "int8", "master_weights": "stochastic"}),
        (3, FSDP2, "next_forward", {"master_weights": "stochastic"}),
        (2, DDP, "at_step", {"moments": "int8", "master_weights": "stochastic"}),
        (4, HSDP, "at_step", {"master_weights": "stochastic", "rounding_seed": 1}),
        # a class that needs whole tensors
        (2, FSDP2, None, ADAFACTOR),
        (2, FSDP2, "at_step", ADAFACTOR),
    ],
)
def test_codes_and_noise_do_not_depend_on_the_division(
    sharding: dict[str, Any], update: str | None, given: dict[str, Any]
) -> None:
    """``update``: of a streamed state; ``None``: a resident one."""
    streamed = {**STREAM, "ring_mib": 0.2 if given is ADAFACTOR else 0.02, "update": update}
    check_layout(sharding, {} if update is None else streamed, **given)


@on_ranks(2)
def test_a_shard_that_cuts_blocks_is_refused(rank: int, world_size: int) -> None:
    ranks = init_device_mesh(device_of(rank, world_size).type, (world_size,))
    whole = torch.randn(4, 64, device=device_of(rank, world_size))
    cut = nn.Parameter(distribute_tensor(whole, ranks, [Shard(1)]))
    optimizer = lightstep.MixedPrecisionOptimizer([cut], torch.optim.AdamW, SETTINGS, moments=Moments("int8"))
    cut.grad = torch.ones_like(cut)
    with pytest.raises(ValueError, match=r"sharded along its last dimension, 32 of 64, which cuts blocks of 64"):
        optimizer.step()


@on_ranks(
    None,
    ("ranks", "mesh", "placements", "refused"),
    [
        (3, (3,), [Shard(1)], False),
        (2, (2,), [Shard(2)], False),
        (4, (2, 2), [Shard(0), Shard(1)], False),
        (4, (2, 2), [Shard(0), Shard(0)], False),
        (4, (2, 2), [Shard(1), Shard(2)], True),
    ],
)
def test_other_dimensions(
    rank: int, world_size: int, mesh: tuple[int, ...], placements: list[Placement], refused: bool
) -> None:
    tested, expected = placed(device_of(rank, world_size), mesh, placements, [(5, 7, 6), (2, 9, 4)])
    moments = Moments("bfloat16", "stochastic")
    optimizer = lightstep.MixedPrecisionOptimizer(tested, torch.optim.AdamW, SETTINGS, moments=moments, rounding_seed=2)
    if not refused:
        train(optimizer, tested, expected)
        return
    tested[0].grad = placed_like(tested[0], expected[0].detach())
    with pytest.raises(ValueError, match=r"is stochastic, and .* is sharded along 2 dimensions behind"):
        optimizer.step()


def placed(
    device: torch.device, mesh: tuple[int, ...], placements: list[Placement], shapes: list[tuple[int, ...]]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters on a mesh, and the same ones whole."""
    generator = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(device)) for shape in shapes]
    ranks = init_device_mesh(device.type, mesh)
    return [nn.Parameter(distribute_tensor(value.detach(), ranks, placements)) for value in whole], whole


@on_ranks(4)
def test_8_bits_are_rounded_to_nearest_by_default_where_elements_have_no_numbers(rank: int, world_size: int) -> None:
    tested, expected = placed(device_of(rank, world_size), (2, 2), [Shard(1), Shard(2)], [(5, 8, 256)])
    optimizer = lightstep.MixedPrecisionOptimizer(tested, torch.optim.AdamW, SETTINGS, moments=Moments("int8"))
    with mock.patch.object(logging.getLogger("lightstep.optimizer.moments"), "info") as info:
        train(optimizer, tested, expected, Int8Moments([{"params": expected}], torch.optim.AdamW, **SETTINGS))
    assert ["rounded to nearest" in call.args[0] for call in info.call_args_list] == [True]
