"""Muon on matrices that are sharded by rows, beside a loop that gathers every gradient on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Adafactor

import lightstep
from lightstep import Rule
from lightstep.bench.models import LlamaShape
from lightstep.bench.peers import TorchFsdp2
from lightstep.bench.step import StepTask, random_gradients
from lightstep.bench.strategies import StrategyContender
from lightstep.distributed.matrices import assign_owners, orthogonalization_cost
from lightstep.state.store import AHEAD
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, device_of, on_ranks
from tests.distributed.sharded_reference import GatheringLoop, ReplicatedLoop
from tests.reference.several_classes import SeveralClasses
from tests.reference.tiny_model import representable
from tests.unit.test_stream import random_delays, random_sleeps

STREAM = {"backend": "stream", "ring_mib": 0.02}
STATES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": STREAM,
    "stream, next forward": {**STREAM, "update": "next_forward"},
    "stream, overlap": {**STREAM, "update": "overlap"},
    "stream, short moments": {**STREAM, "update": "next_forward", "moments": "bfloat16"},
}
MUON = {"lr": 0.02, "weight_decay": 0.05}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}


class WithExperts(TinyTransformer):
    """Four experts, so that a rank of three has none; a matrix of one row, so that most have none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 7, 7))
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


def made(
    sharding: dict[str, Any], state: dict[str, Any], groups: Any = groups_of, clipping: Any = None
) -> tuple[Any, Any, Any]:
    clipping = clipping or {"max_norm": 0.5}
    strategy = lightstep.Strategy.load(
        {"sharding": {"kind": "fsdp2", **sharding}, "clipping": clipping, "optimizer_state": state}
    )
    torch.manual_seed(0)
    model = strategy.prepare_model(representable(WithExperts()))
    return strategy, model, strategy.create_optimizer(model, param_groups=groups(model))


def whole(value: Tensor) -> Tensor:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value.cpu()


def content(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    optimizer.synchronize()
    found = {}
    for name, parameter in model.named_parameters():
        entries = dict(optimizer.state[parameter]) if parameter in optimizer.state else {}
        found |= {f"{name}.{key}": whole(torch.as_tensor(v)) for key, v in {"weight": parameter, **entries}.items()}
    return found


def train(strategy: Any, model: Any, optimizer: Any, rank: int, steps: range, loop: Any = None) -> None:
    """Of one micro-batch, and of two."""
    short = strategy.config.optimizer_state.moments == "bfloat16"
    for step in steps:
        for micro in range(1 + step % 2):
            with strategy.accumulate(model, last=micro == step % 2):
                optimizer.backward(loss_of(model, step, micro, rank, strategy.device) / 2)
            if loop is not None:
                loop.backward(loss_of(loop.model, step, micro, rank, strategy.device) / 2)
        result = optimizer.step()
        if loop is not None:
            assert loop.step(result.grad_norm)
            if short:
                round_moments(loop)


def round_moments(loop: Any) -> None:
    for state in loop.optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                value.copy_(value.bfloat16())


def few_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """Between two units that ranks update together there are several others."""
    muon, adamw = groups_of(model)
    chosen = [p for p in muon["params"] if p.dim() == 3 or p.shape[0] < p.shape[1]]
    others = [p for p in [*muon["params"], *adamw["params"]] if all(p is not one for one in chosen)]
    return [{**muon, "params": chosen}, {**adamw, "params": others}]


def other_settings(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of Muon, neither of which has torch's defaults."""
    muon, adamw = groups_of(model)
    changed = {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "lr": 3e-3}
    newton_schulz = {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"}
    tall = [p for p in muon["params"] if p.dim() == 2 and p.shape[0] > p.shape[1]]
    others = [p for p in muon["params"] if all(p is not one for one in tall)]
    return [{**muon, **changed, "params": tall}, {**muon, **newton_schulz, "params": others}, adamw]


def beside_a_loop(
    rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any], groups: Any = groups_of
) -> tuple[Any, Any, Any, Any]:
    """Strategy, model and optimizer, in several units; and the loop."""
    replica: Any = representable(_seeded()).to(device_of(rank, world_size), torch.bfloat16)
    strategy, model, optimizer = made(sharding, state, groups)
    blocks = [list(block.parameters()) for block in replica.blocks]
    inside = {id(parameter) for block in blocks for parameter in block}
    rest = [parameter for parameter in replica.parameters() if id(parameter) not in inside]
    trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups(replica)]
    optimizer._backend.WHOLE_UNIT = optimizer._backend._ring_plan.BULK_UNIT = (
        150  # several units, which are begun before others are updated
    )
    loop = GatheringLoop(
        replica, trained, units=[*blocks, rest], max_norm=0.5, shard=sharding.get("mesh", {}).get("shard")
    )
    return strategy, model, optimizer, loop


def slow_lanes(strategy: Any, optimizer: Any, rank: int) -> None:
    (random_delays if strategy.device.type == "cpu" else random_sleeps)(optimizer._backend.lanes, rank)


def assert_same(model: Any, optimizer: Any, loop: Any) -> None:
    found = content(model, optimizer)
    for name, parameter in loop.model.named_parameters():
        assert torch.equal(found[f"{name}.weight"], parameter.cpu()), f"{name} differs"
        for key, value in loop.state(parameter).items() if parameter in loop.masters else ():
            if isinstance(value, Tensor):
                assert torch.equal(found[f"{name}.{key}"].to(value.dtype), value.cpu()), f"{key} of {name} differs"


def check_exact(
    rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any], groups: Any = groups_of
) -> None:
    strategy, model, optimizer, loop = beside_a_loop(rank, world_size, sharding, state, groups)
    train(strategy, model, optimizer, rank, range(1), loop)
    if state["backend"] == "stream":
        slow_lanes(strategy, optimizer, rank)
    train(strategy, model, optimizer, rank, range(1, 2), loop)
    optimizer.synchronize()
    for exchange in optimizer.engine.classes.exchanges.values():
        exchange.retain(frozenset(optimizer.engine.managed))  # as for new parameters
    train(strategy, model, optimizer, rank, range(2, 3), loop)
    optimizer.synchronize()
    if world_size > 1:
        _check_exchange(optimizer)
    assert_same(model, optimizer, loop)
    optimizer.close()


def _check_exchange(optimizer: Any) -> None:
    """Several units were on their way among the ranks at a time, and their memory is told."""
    (exchange,) = optimizer.engine.classes.exchanges.values()
    units = [unit for unit in optimizer._backend.units() if unit.parts[0][0].rows is not None]
    assert len(exchange._all) == min(AHEAD + 1, len(units)) > 1
    elements = sum(item.param.numel() for item in optimizer.engine.managed)
    assert 0 < optimizer.memory_report()["exchange_bytes"] < 2 * 4 * elements
    optimizer.release_device_memory()
    assert optimizer.memory_report()["exchange_bytes"] == 0


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return WithExperts()


@pytest.mark.parametrize(
    ("world_size", "state", "sharding", "groups"),
    [
        (1, STATES["stream, overlap"], {}, groups_of),
        (2, STATES["bulk"], {}, groups_of),
        (3, STATES["stream, short moments"], {}, groups_of),
        (2, STATES["resident"], {}, other_settings),
        (4, STATES["stream, overlap"], {"mesh": {"replicate": 2, "shard": 2}}, groups_of),
        (2, {**STATES["stream, next forward"], "ring_mib": 0.006}, {}, few_matrices),
    ],
)
def test_the_bits_of_whole_matrices(
    pool: Pool, world_size: int, state: dict[str, Any], sharding: dict[str, Any], groups: Any
) -> None:
    pool.run(check_exact, world_size, sharding=sharding, state=state, groups=groups)


@on_ranks(2)
def test_layers_that_are_clipped_by_themselves() -> None:
    """Each layer's momentum has its own factor; later units' communication starts with the factors of their layers."""
    runs = {"streamed": "stream, next forward", "resident": "resident", "whole": "resident"}
    first, last = {}, {}
    for run, state in runs.items():
        sharding = {"kind": "single" if run == "whole" else "fsdp2"}
        strategy, model, optimizer = made(sharding, STATES[state], clipping={"max_norm": 0.05, "scope": "unit"})
        optimizer._backend.WHOLE_UNIT = optimizer._backend._ring_plan.BULK_UNIT = 150
        train(strategy, model, optimizer, 0, range(1))
        first[run] = content(model, optimizer)
        if run != "whole":
            train(strategy, model, optimizer, 0, range(1, 3))
            last[run] = content(model, optimizer)
        optimizer.close()
    for name, value in first["whole"].items():
        if name.endswith("momentum_buffer"):
            torch.testing.assert_close(first["resident"][name], value, rtol=1e-2, atol=1e-7)
    assert [name for name, value in last["resident"].items() if not torch.equal(last["streamed"][name], value)] == []


def two_dimensions(model: nn.Module) -> list[dict[str, Any]]:
    muon, adamw = groups_of(model)
    return [
        {**muon, "params": [p for p in model.parameters() if p.dim() == 2]},
        {**adamw, "params": [p for p in model.parameters() if p.dim() != 2]},
    ]


@on_ranks(2, "state", [STATES["stream, overlap"], STATES["resident"]])
def test_replicas_of_whole_matrices(rank: int, world_size: int, state: dict[str, Any]) -> None:
    """Every rank has whole matrices: DDP's replicas beside torch's two optimizers on every rank."""
    replica: Any = representable(_seeded()).to(device_of(rank, world_size), torch.bfloat16)
    strategy, model, optimizer = made({"kind": "ddp", "find_unused_parameters": True}, state, two_dimensions)
    trained = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in two_dimensions(replica)]
    loop = ReplicatedLoop(replica, trained, SeveralClasses, units=[list(replica.parameters())], max_norm=0.5)  # type: ignore[arg-type]
    train(strategy, model, optimizer, rank, range(1), loop)
    if state["backend"] == "stream":
        slow_lanes(strategy, optimizer, rank)
    train(strategy, model, optimizer, rank, range(1, 3), loop)
    assert_same(strategy.unwrap_model(model), optimizer, loop)
    optimizer.close()


class Lamb(torch.optim.Optimizer):
    """Scales the update of each tensor by its norm, and keeps its moment in bf16."""

    whole_tensors = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter, dtype=torch.bfloat16))
                moment.mul_(0.9).add_(parameter.grad, alpha=0.1)
                ratio = parameter.norm() / (moment.float().norm() + 1e-6)
                parameter.sub_(moment * (group["lr"] * ratio))


CLASSES = {
    "adafactor": (Adafactor, {"lr": 1e-2, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1}),
    "adafactor, by its own rate": (Adafactor, {}),
    "lamb": (Lamb, {}),
}


def check_gathered(rank: int, world_size: int, optimizer_class: Any, settings: dict[str, Any], state: Any) -> None:
    """Any class that needs whole tensors: matrices, biases, and experts; some ranks have nothing of some of them."""
    device = device_of(rank, world_size)
    torch.manual_seed(0)
    model = representable(WithExperts()).to(device, torch.bfloat16)
    expected = {n: torch.nn.Parameter(p.detach().float()) for n, p in model.named_parameters() if p.requires_grad}
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": None}, "optimizer_state": state})
    optimizer, plain = strategy.create_optimizer(model, optimizer_class, **settings), None
    for step in range(3):
        loss_of(model, step, 0, rank, device).backward()
        used = {n: p for n, p in model.named_parameters() if p.grad is not None}
        plain = plain or optimizer_class([expected[n] for n in used], **settings)
        for name, parameter in used.items():
            expected[name].grad = parameter.grad.full_tensor().float()
        assert optimizer.step()
        plain.step()
    optimizer.synchronize()
    for name, parameter in used.items():
        assert torch.equal(parameter.full_tensor(), expected[name].bfloat16()), name
        entries, theirs = dict(optimizer.state[parameter]), plain.state[expected[name]]
        assert torch.equal(whole(entries.pop("master")), expected[name].detach().cpu()), name
        assert list(entries) == list(theirs)
        for key, value in entries.items():
            assert torch.equal(whole(torch.as_tensor(value)), torch.as_tensor(theirs[key]).cpu()), (name, key)
    optimizer.close()


@pytest.mark.parametrize(
    ("name", "world_size", "state"),
    [
        ("adafactor", 3, "stream, next forward"),
        ("adafactor, by its own rate", 2, "stream, overlap"),
        ("lamb", 2, "resident"),
    ],
)
def test_other_classes_see_whole_tensors(pool: Pool, name: str, world_size: int, state: str) -> None:
    optimizer_class, settings = CLASSES[name]
    pool.run(check_gathered, world_size, optimizer_class=optimizer_class, settings=settings, state=STATES[state])


@on_ranks(4, "name", ["muon", "adafactor"])
def test_under_tensor_parallelism(rank: int, world_size: int, name: str) -> None:
    """FSDP2 over tensor parallelism, whose first matrix and bias are divided twice by rows, and the second by both
    dimensions."""
    device, is_muon = device_of(rank, world_size), name == "muon"
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7, bias=False), nn.Linear(7, 5)).to(device)
    wanted = [nn.Parameter(p.detach().bfloat16().float()) for p in model.parameters() if not is_muon or p.dim() == 2]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model.bfloat16(), mesh=mesh["dp"])
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": None}, "optimizer_state": STATES["stream, overlap"]})
    optimizer_class, settings = (torch.optim.Muon, MUON) if is_muon else CLASSES[name]
    rules = [Rule(torch.optim.Muon, dims=2, **MUON), Rule(torch.optim.AdamW, dims=1, **ADAMW)]
    rules = rules if is_muon else [Rule(optimizer_class, **settings)]
    optimizer, plain = strategy.create_optimizer(model, rules=rules), optimizer_class(wanted, **settings)
    tested = [p for p in model.parameters() if not is_muon or p.dim() == 2]
    for step in range(2):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
        optimizer.accumulating = False  # the last backward of the step: units are tried in it
        optimizer.backward(model(inputs).float().square().mean())
        assert bool(optimizer.engine.queue.early._has_shared) == (is_muon and step > 0)
        for whole_one, parameter in zip(wanted, tested, strict=True):
            whole_one.grad = parameter.grad.full_tensor().float()
        assert optimizer.step()
        plain.step()
    optimizer.synchronize()
    for whole_one, parameter in zip(wanted, tested, strict=True):
        assert torch.equal(parameter.full_tensor(), whole_one.bfloat16())
        entries = dict(optimizer.state[parameter])
        assert torch.equal(whole(entries.pop("master")), whole_one.detach().cpu())
        theirs = plain.state[whole_one]
        assert is_muon or entries.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(whole(torch.as_tensor(entries[key])), torch.as_tensor(value).cpu()), key
    optimizer.close()


def adafactors(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "optimizer_class": Adafactor, **CLASSES["adafactor"][1]}]


@on_ranks(4)
def test_other_classes_with_copies_of_the_shards(rank: int) -> None:
    """With copies of the shards, each of which has a share under stream."""
    found = []
    for state in ("resident", "stream, next forward"):
        run = made({"mesh": {"replicate": 2, "shard": 2}}, STATES[state], adafactors)
        train(*run, rank, range(2))
        found.append(content(*run[1:]))
        run[2].close()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


@on_ranks(2)
def test_the_benchs_loop_by_hand_does_the_same(rank: int, world_size: int) -> None:
    task = StepTask(device_of(rank, world_size), 0, LlamaShape.nearest(60_000, 2), optimizer="muon")
    ours = StrategyContender(task, lightstep.Strategy.load("fsdp2"), "fsdp2")
    by_hand = TorchFsdp2(task)
    for step in range(2):
        for contender in (ours, by_hand):
            drawn = random_gradients(contender.gradient_weights(), contender.gradient_dtype, task.device, step)[0]
            contender.step(contender.placed(drawn))
    for mine, theirs in zip(ours.weights(), by_hand.weights(), strict=True):
        assert (mine.float() - theirs).abs().max() <= 2**-9, "beyond a rounding to bf16"
    ours.close()


def check_checkpoints(rank: int, folder: str, saves: bool) -> None:
    for groups in (groups_of, adafactors):
        check_checkpoint(rank, Path(folder, groups.__name__), saves, groups)


def check_checkpoint(rank: int, folder: Path, saves: bool, groups: Any) -> None:
    run = made({}, STATES["stream" if saves else "stream, next forward"], groups)
    strategy, model, optimizer = run
    kept = folder / "content.pt"
    if saves:
        train(*run, rank, range(1))
        strategy.save_checkpoint(folder / "a", model, optimizer)
        found = content(model, optimizer)
        if rank == 0:
            torch.save(found, kept)
        return
    strategy.load_checkpoint(folder / "a", model, optimizer)
    expected = torch.load(kept)
    assert all(torch.equal(value, expected[key]) for key, value in content(model, optimizer).items())
    train(*run, rank, range(2, 3))


def test_a_checkpoint_goes_to_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_checkpoints, 3, folder=str(tmp_path), saves=True)
    pool.run(check_checkpoints, 2, folder=str(tmp_path), saves=False)


class CountingLamb(Lamb):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step()


class OddLamb(Lamb):
    """Keeps what looks like a shard: of six rows each of two ranks has three."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = torch.zeros(3, 6)


class DoubleLamb(Lamb):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["double"] = torch.zeros_like(parameter, dtype=torch.float64)


@on_ranks(
    2,
    ("optimizer_class", "update", "message"),
    [
        (torch.optim.Muon, "in_backward", "in_backward cannot do: set at_step"),
        (CountingLamb, "at_step", "CountingLamb counts in its groups .* only the rank"),
        (
            OddLamb,
            "at_step",
            r"keeps 'odd' of 0.weight, which is sharded, in shape \(3, 6\), "
            "which is also the shape of a rank's part",
        ),
        (DoubleLamb, "at_step", "keeps 'double' of 0.weight, which is sharded, in torch.float64"),
    ],
)
def test_what_does_not_go_on_shards(optimizer_class: Any, update: str, message: str) -> None:
    state = {"backend": "resident", "update": update}
    strategy = lightstep.Strategy.load(
        {"sharding": {"kind": "fsdp2"}, "clipping": {"max_norm": None}, "optimizer_state": state}
    )
    model = strategy.prepare_model(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    rules = [Rule(optimizer_class, dims=2), Rule(torch.optim.AdamW, dims=1)]
    optimizer = strategy.create_optimizer(model, rules=rules)

    def first_step() -> None:
        optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16, device=strategy.device)).sum())
        optimizer.step()

    with pytest.raises((ValueError, RuntimeError), match=message):
        first_step()


@on_ranks(2, "optimizer_class", [torch.optim.Muon, Lamb])
def test_experts_that_are_cut_are_refused(rank: int, world_size: int, optimizer_class: Any) -> None:
    device = device_of(rank, world_size)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(3, 6, 6, device=device, dtype=torch.bfloat16))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), shard_placement_fn=lambda _: Shard(1))
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": None}})
    optimizer = strategy.create_optimizer(model, rules=Rule(optimizer_class))
    model.experts.grad = torch.ones_like(model.experts)
    with pytest.raises(
        ValueError, match=r"experts of shape \(3, 6, 6\) is sharded along another dimension than the firs"
    ):
        optimizer.step()


def test_the_work_is_shared_evenly() -> None:
    shapes = [torch.Size(shape) for shape in ((8, 8), (8, 8), (4, 4), (32, 8), (32, 8), (8, 32))]
    loads = [0, 0]
    owners = [assign_owners(shapes, loads) for _ in range(4)]  # of four units
    assert sum(loads) == 4 * sum(map(orthogonalization_cost, shapes)) and max(loads) <= 1.05 * min(loads)
    assert owners[0] != owners[1], "who had more in one unit has less in the next"
    assert assign_owners(shapes, [0]) == [0] * 6
