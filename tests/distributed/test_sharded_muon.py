"""Muon on matrices that are sharded by rows, beside a loop that gathers every gradient on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lightstep
from lightstep import Rule
from lightstep.bench.llama import LlamaShape
from lightstep.bench.peers import TorchFsdp2
from lightstep.bench.step import StepTask, random_gradients
from lightstep.bench.strategies import StrategyContender
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, device_of
from tests.distributed.sharded_reference import GatheringLoop
from tests.reference.tiny_model import representable

STREAM = {"backend": "stream", "ring_mib": 0.05}
STATES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": STREAM,
    "stream, next forward": {**STREAM, "update": "next_forward"},
    "stream, overlap": {**STREAM, "update": "overlap"},
}
MUON = {"lr": 0.02, "weight_decay": 0.05}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}


class WithExperts(TinyTransformer):
    """Three experts, so that a rank of four has none; a matrix of one row, so that most have none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 7, 7))
        self.row = nn.Linear(7, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        logits = super().forward(tokens)
        mixed = torch.einsum("bld,edh->blh", hidden, self.experts).tanh()
        return logits + mixed[..., : logits.shape[-1]] + self.row(hidden)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, **MUON},
        {"params": others, "optimizer_class": torch.optim.AdamW, **ADAMW},
    ]


def made(sharding: dict[str, Any], state: dict[str, Any]) -> tuple[Any, Any, Any]:
    strategy = lightstep.Strategy.load(
        {"sharding": {"kind": "fsdp2", **sharding}, "clipping": {"max_norm": 0.5}, "optimizer_state": state}
    )
    torch.manual_seed(0)
    model = strategy.prepare_model(representable(WithExperts()))
    return strategy, model, strategy.create_optimizer(model, param_groups=groups_of(model))


def whole(value: Tensor) -> Tensor:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value.cpu()


def content(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    optimizer.synchronize()
    found = {}
    for name, parameter in model.named_parameters():
        entries = dict(optimizer.state[parameter]) if parameter in optimizer.state else {}
        found |= {f"{name}.{key}": whole(value) for key, value in {"weight": parameter, **entries}.items()}
    return found


def train(strategy: Any, model: Any, optimizer: Any, rank: int, steps: range, loop: Any = None) -> None:
    for step in steps:
        for micro in range(2):
            with strategy.accumulate(model, last=micro == 1):
                optimizer.backward(loss_of(model, step, micro, rank, strategy.device) / 2)
            if loop is not None:
                loop.backward(loss_of(loop.model, step, micro, rank, strategy.device) / 2)
        result = optimizer.step()
        if loop is not None:
            assert loop.step(result.grad_norm)


def check_exact(rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any]) -> None:
    replica: Any = representable(_seeded()).to(device_of(rank, world_size), torch.bfloat16)
    strategy, model, optimizer = made(sharding, state)
    blocks = [list(block.parameters()) for block in replica.blocks]
    inside = {id(parameter) for block in blocks for parameter in block}
    rest = [parameter for parameter in replica.parameters() if id(parameter) not in inside]
    trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups_of(replica)]
    loop = GatheringLoop(
        replica, trained, units=[*blocks, rest], max_norm=0.5, shard=sharding.get("mesh", {}).get("shard")
    )
    train(strategy, model, optimizer, rank, range(4), loop)
    found = content(model, optimizer)
    for name, parameter in replica.named_parameters():
        assert torch.equal(found[f"{name}.weight"], parameter.cpu()), f"{name} differs"
        for key, value in loop.state(parameter).items() if parameter in loop.masters else ():
            if isinstance(value, Tensor):
                assert torch.equal(found[f"{name}.{key}"], value.cpu()), f"{key} of {name} differs"
    optimizer.close()


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return WithExperts()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("state", list(STATES))
def test_the_bits_of_whole_matrices(pool: Pool, state: str, world_size: int) -> None:
    pool.run(check_exact, world_size, sharding={}, state=STATES[state])


def test_with_copies_of_the_shards(pool: Pool) -> None:
    sharding = {"mesh": {"replicate": 2, "shard": 2}}
    pool.run(check_exact, 4, sharding=sharding, state=STATES["resident"])


def check_bench(rank: int, world_size: int) -> None:
    task = StepTask(device_of(rank, world_size), 0, LlamaShape.near(60_000, 2), optimizer="muon")
    ours = StrategyContender(task, lightstep.Strategy.load("fsdp2"), "fsdp2")
    by_hand = TorchFsdp2(task)
    for step in range(2):
        for contender in (ours, by_hand):
            contender.step(
                random_gradients(contender.gradient_weights(), contender.gradient_dtype, task.device, step)[0]
            )
    for mine, theirs in zip(ours.weights(), by_hand.weights(), strict=True):
        assert (mine.float() - theirs).abs().max() <= 2**-9, "beyond a rounding to bf16"
    ours.close()


def test_the_benchs_loop_by_hand_does_the_same(pool: Pool) -> None:
    pool.run(check_bench, 2)


def check_checkpoint(rank: int, world_size: int, folder: str, saves: bool) -> None:
    run = made({}, STATES["stream" if saves else "stream, next forward"])
    strategy, model, optimizer = run
    kept = Path(folder, "content.pt")
    if saves:
        train(*run, rank, range(2))
        strategy.save_checkpoint(Path(folder, "a"), model, optimizer)
        found = content(model, optimizer)
        if rank == 0:
            torch.save(found, kept)
        return
    strategy.load_checkpoint(Path(folder, "a"), model, optimizer)
    expected = torch.load(kept)
    assert all(torch.equal(value, expected[key]) for key, value in content(model, optimizer).items())
    train(*run, rank, range(2, 3))


def test_a_checkpoint_goes_to_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_checkpoint, 3, folder=str(tmp_path), saves=True)
    pool.run(check_checkpoint, 2, folder=str(tmp_path), saves=False)


def check_refusal(rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any], message: str) -> None:
    strategy = lightstep.Strategy.load(
        {"sharding": {"kind": "fsdp2", **sharding}, "clipping": {"max_norm": None}, "optimizer_state": state}
    )
    model = strategy.prepare_model(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = strategy.create_optimizer(
        model, rules=[Rule(torch.optim.Muon, dims=2), Rule(torch.optim.AdamW, dims=1)]
    )

    def first_step() -> None:
        optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16, device=strategy.device)).sum())
        optimizer.step()

    with pytest.raises(ValueError, match=message):
        first_step()


@pytest.mark.parametrize(
    ("world_size", "sharding", "state", "message"),
    [
        (2, {}, {"backend": "resident", "update": "in_backward"}, "in_backward cannot: set at_step"),
        (4, {"mesh": {"replicate": 2, "shard": 2}}, STREAM, r"is sharded and has copies, .*\.backend resident or bulk"),
    ],
    ids=["in backward", "streamed with copies"],
)
def test_what_it_does_not_go_with(
    pool: Pool, world_size: int, sharding: dict[str, Any], state: dict[str, Any], message: str
) -> None:
    pool.run(check_refusal, world_size, sharding=sharding, state=state, message=message)


def test_the_work_is_shared_evenly() -> None:
    from lightstep.distributed.matrices import owners_of

    shapes = [torch.Size(shape) for shape in ((8, 8), (8, 8), (16, 8), (4, 4), (32, 8), (8, 32))]
    owners = owners_of(shapes, 2)
    loads = [sum(s.numel() * min(s) for s, owner in zip(shapes, owners, strict=True) if owner == r) for r in range(2)]
    assert max(loads) <= 1.1 * min(loads)
    assert owners_of(shapes, 1) == [0] * 6
