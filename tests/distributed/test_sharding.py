"""What FSDP2 and DDP strategies do to a model, and what they send."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lightstep
from lightstep.config import ConfigError
from lightstep.distributed import like, local_tensor
from tests.distributed.collectives import collectives
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import TIMEOUT, Pool, device_of

REDUCTIONS = {"allreduce_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_", "reduce_"}

FSDP2 = {"kind": "fsdp2"}
HSDP = {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": "auto"}}
DDP = {"kind": "ddp", "find_unused_parameters": True}


def load(sharding: dict[str, Any], **sections: Any) -> lightstep.Strategy:
    return lightstep.Strategy.load({"sharding": sharding, **sections})


def train(
    strategy: lightstep.Strategy,
    model: nn.Module,
    optimizer: Any,
    steps: int = 2,
    micro_batches: int = 2,
    on_step: Callable[[Any], None] | None = None,
) -> list[Any]:
    results = []
    for step in range(steps):
        for micro in range(micro_batches):
            with strategy.accumulate(model, last=micro == micro_batches - 1):
                optimizer.backward(loss_of(model, step, micro, strategy.rank, strategy.device) / micro_batches)
        results.append(optimizer.step())
    return results


def full(parameter: Tensor) -> Tensor:
    whole = parameter.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole.clone()


def weights_of(strategy: lightstep.Strategy, model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in strategy.unwrap_model(model).named_parameters()}


def same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# -- gradients


class Slope(nn.Module):
    """A gradient that the caller dictates: ``loss = sum(weight * slope)``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5, bias=False)
        self.weight = nn.Parameter(torch.zeros(5, 3))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope.to(self.weight.dtype)).sum() + self.inner(
            slope.T[:1, :3].to(self.weight.dtype)
        ).sum()


def check_never_rounded(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """Ranks and micro-batches whose sum needs more than bf16's 8 bits."""
    for synced in ([False, False, True], [True, True], [True]):
        strategy = load(sharding, clipping={"max_norm": None})
        model = strategy.prepare_model(Slope())
        weight = strategy.unwrap_model(model).weight
        optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=1.0)
        expected = torch.zeros(5, 3)
        for micro, last in enumerate(synced):
            values = [torch.full((5, 3), 2.0 ** (-5 * micro - (0 if r == 0 else 9))) for r in range(world_size)]
            with strategy.accumulate(model, last=last):
                optimizer.backward(model(values[rank].to(strategy.device)))
            expected += torch.stack(values).sum(0) / world_size
        assert not torch.equal(expected, expected.bfloat16().float())
        optimizer.step()
        found = full(optimizer.state[weight]["master"]).cpu()
        assert torch.equal(-found, expected), (synced, found, expected)


@pytest.mark.parametrize("sharding", [FSDP2, HSDP, {"kind": "ddp"}], ids=["fsdp2", "hsdp", "ddp"])
def test_gradients_are_never_rounded(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_never_rounded, 4 if sharding is HSDP else 2, sharding=sharding)


def check_collectives(rank: int, world_size: int, sharding: dict[str, Any], reductions: int, norm: int) -> None:
    strategy = load(sharding)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model)
    train(strategy, model, optimizer)
    with collectives() as counted, strategy.accumulate(model, last=False):
        optimizer.backward(loss_of(model, 0, 0, rank, strategy.device))
    assert not REDUCTIONS & counted.keys(), counted
    if sharding["kind"] == "ddp":
        assert not counted, counted
    with collectives() as counted, strategy.accumulate(model, last=True):
        optimizer.backward(loss_of(model, 0, 1, rank, strategy.device))
    assert sum(counted[name] for name in REDUCTIONS) >= reductions, counted
    with collectives() as counted:
        optimizer.step()
    assert counted == Counter({"allreduce_": norm + 1}), counted


@pytest.mark.parametrize(
    ("sharding", "reductions", "norm"), [(FSDP2, 4, 1), (HSDP, 8, 1), (DDP, 1, 0)], ids=["fsdp2", "hsdp", "ddp"]
)
def test_what_is_sent(pool: Pool, sharding: dict[str, Any], reductions: int, norm: int) -> None:
    """No reduction before the last micro-batch; in ``step`` one all-reduce on the one mesh and one for the flag."""
    pool.run(check_collectives, 4, sharding=sharding, reductions=reductions, norm=norm)


def check_same_norms(rank: int, world_size: int) -> None:
    """FSDP2's and HSDP's norms are DDP's, over ten iterations that clip."""
    for norm_type in (1.0, 2.0, "inf"):
        norms = []
        for sharding in (DDP, FSDP2, HSDP):
            sections = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": 1.0, "norm_type": norm_type}}
            strategy = load(sharding, **sections)
            torch.manual_seed(0)
            model = strategy.prepare_model(TinyTransformer())
            optimizer = strategy.create_optimizer(model, lr=1e-2)
            norms.append([float(r.grad_norm) for r in train(strategy, model, optimizer, steps=10, micro_batches=1)])
        for other in norms[1:]:
            assert other == pytest.approx(norms[0], rel=1e-5)


def test_norms_are_those_of_ddp(pool: Pool) -> None:
    pool.run(check_same_norms, 4)


def check_overflow_on_one_rank(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """An inf that only the last rank has, in its shard or in its copy."""
    strategy = load(sharding)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    train(strategy, model, optimizer, steps=1)
    before = weights_of(strategy, model)
    for name, parameter in strategy.unwrap_model(model).named_parameters():
        if name.startswith(("dead", "frozen")):
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
        same_weights(before, weights_of(strategy, model))


@pytest.mark.parametrize("sharding", [FSDP2, HSDP, DDP], ids=["fsdp2", "hsdp", "ddp"])
def test_overflow_on_one_rank_skips_on_all(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_overflow_on_one_rank, 4, sharding=sharding)


def check_deterministic(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    runs = []
    for _ in range(2):
        strategy = load(sharding)
        torch.manual_seed(0)
        model = strategy.prepare_model(TinyTransformer())
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        results = train(strategy, model, optimizer, steps=3)
        runs.append((weights_of(strategy, model), [result.grad_norm for result in results]))
    same_weights(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("sharding", [FSDP2, HSDP, DDP], ids=["fsdp2", "hsdp", "ddp"])
def test_two_runs_are_equal(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_deterministic, 4, sharding=sharding)


def check_deepcopy(rank: int, world_size: int, sharding: dict[str, Any], backend: str) -> None:
    strategy = load(sharding, optimizer_state={"backend": backend})
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    train(strategy, model, optimizer)
    twin = copy.deepcopy(optimizer)
    pairs = [
        (p, q)
        for group, other in zip(optimizer.param_groups, twin.param_groups, strict=True)
        for p, q in zip(group["params"], other["params"], strict=True)
    ]
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


@pytest.mark.parametrize("backend", ["resident", "bulk", "stream"])
@pytest.mark.parametrize("sharding", [FSDP2, HSDP], ids=["fsdp2", "hsdp"])
def test_a_deep_copy_goes_on_by_itself(pool: Pool, sharding: dict[str, Any], backend: str) -> None:
    pool.run(check_deepcopy, 4 if sharding is HSDP else 2, sharding=sharding, backend=backend)


def check_ddp_unused(rank: int, world_size: int) -> None:
    """A parameter used on one rank only, one used in an early micro-batch only, and one used nowhere."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.first_rank, self.early, self.never = (nn.Parameter(torch.ones(3)) for _ in range(4))

        def forward(self, early: bool) -> Tensor:
            loss = self.always.sum()
            if rank == 0:
                loss = loss + 3 * self.first_rank.sum()
            return loss + (rank + 1) * self.early.sum() if early else loss

    strategy = load(DDP, clipping={"max_norm": None})
    model = strategy.prepare_model(Branches())
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=1.0, momentum=0.5)
    for _ in range(2):
        for micro in range(2):
            with strategy.accumulate(model, last=micro == 1):
                optimizer.backward(model(early=micro == 0))
        optimizer.step()
    inner = strategy.unwrap_model(model)
    master = {name: optimizer.state[p].get("master") for name, p in inner.named_parameters() if p in optimizer.state}
    assert master.keys() == {"always", "first_rank", "early"}
    for name, gradient in {"always": 2.0, "first_rank": 6.0 / world_size, "early": (world_size + 1) / 2}.items():
        expected = 1.0 - gradient - 1.5 * gradient
        assert torch.allclose(master[name], torch.full((3,), expected, device=strategy.device)), (name, master[name])


def test_ddp_with_unused_parameters(pool: Pool) -> None:
    pool.run(check_ddp_unused, 2)


# -- the model


def units_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


class Named(TinyTransformer):
    _no_split_modules = ("LayerNorm",)


def check_units(rank: int, world_size: int) -> None:
    blocks = [f"blocks.{i}" for i in range(3)]
    assert units_of(load(FSDP2).prepare_model(TinyTransformer())) == ["", *blocks]
    assert units_of(load(FSDP2).prepare_model(Named())) == ["", *(f"{block}.norm" for block in blocks)]
    chosen = load({**FSDP2, "wrap": ["Block", "embed", "blocks.1.up"]}).prepare_model(TinyTransformer())
    assert units_of(chosen) == ["", "embed", "blocks.0", "blocks.1", "blocks.1.up", "blocks.2"]
    checkpointed = load({**FSDP2, "activation_checkpointing": True}).prepare_model(TinyTransformer())
    assert units_of(checkpointed) == ["", *blocks]
    tied = load(FSDP2).prepare_model(TinyTransformer(tied=True))
    assert tied.head.weight is tied.embed.weight
    with pytest.raises(
        ConfigError, match="'Blok' is neither a class nor a module of TinyTransformer, did you mean 'Block'"
    ):
        load({**FSDP2, "wrap": ["Blok"]}).prepare_model(TinyTransformer())
    with pytest.raises(ConfigError, match=r"embed shares a weight with head\.weight"):
        load({**FSDP2, "wrap": ["embed"]}).prepare_model(TinyTransformer(tied=True))


def test_units(pool: Pool) -> None:
    pool.run(check_units, 2)


def check_meshes(rank: int, world_size: int) -> None:
    sizes = {
        (1, "auto"): (4,),
        (2, "auto"): (2, 2),
        ("auto", 1): (4, 1),
        ("auto", 4): (4,),
    }
    for (replicate, shard), expected in sizes.items():
        strategy = load({**FSDP2, "mesh": {"replicate": replicate, "shard": shard}})
        assert tuple(strategy.mesh().shape) == expected
        model = strategy.prepare_model(TinyTransformer())
        optimizer = strategy.create_optimizer(model)
        assert all(train(strategy, model, optimizer))
    for mesh, message in {
        (3, "auto"): "mesh.replicate is 3, which does not divide the 4 ranks",
        ("auto", 3): "mesh.shard is 3, which does not divide the 4 ranks",
        (2, 4): r"mesh is 2 × 4 \(replicate × shard\) = 8 ranks, and 4 are running",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load({**FSDP2, "mesh": {"replicate": mesh[0], "shard": mesh[1]}}).prepare_model(TinyTransformer())
    for bad in (3, 4):
        with pytest.raises(ConfigError, match=f"reshard_after_forward is {bad}; true, false or a divisor"):
            load({**FSDP2, "reshard_after_forward": bad}).prepare_model(TinyTransformer())
    halves = load({**FSDP2, "reshard_after_forward": 2})
    model = halves.prepare_model(TinyTransformer())
    assert all(train(halves, model, halves.create_optimizer(model)))


def test_meshes(pool: Pool) -> None:
    pool.run(check_meshes, 4)


def check_first_rank_wins(rank: int, world_size: int) -> None:
    """Ranks that built different weights, or none, train rank 0's."""
    torch.manual_seed(0)
    expected = {name: p.detach().bfloat16() for name, p in TinyTransformer().named_parameters()}
    for sharding in (FSDP2, HSDP, DDP):
        torch.manual_seed(rank)
        strategy = load(sharding)
        made = weights_of(strategy, strategy.prepare_model(TinyTransformer()))
        same_weights({name: value.cpu() for name, value in made.items()}, expected)
    for tied in (False, True):
        torch.manual_seed(0)
        expected = {name: p.detach().bfloat16() for name, p in TinyTransformer(tied=tied).named_parameters()}
        torch.manual_seed(0)
        with torch.device("cpu" if rank == 0 else "meta"):
            model = TinyTransformer(tied=tied)
        strategy = load(FSDP2)
        made = weights_of(strategy, strategy.prepare_model(model))
        same_weights({name: value.cpu() for name, value in made.items()}, expected)
    with torch.device("meta" if rank == 0 else "cpu"):
        model = TinyTransformer()
    with pytest.raises(ValueError, match="rank 0 has the model on the meta device"):
        load(FSDP2).prepare_model(model)


def test_weights_of_the_first_rank(pool: Pool) -> None:
    pool.run(check_first_rank_wins, 4)


def check_meta(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    torch.manual_seed(rank)
    strategy = load(sharding)
    with torch.device("meta"):
        model = TinyTransformer()
    prepared = strategy.prepare_model(model)
    shapes = {name: parameter.shape for name, parameter in TinyTransformer().named_parameters()}
    made = weights_of(strategy, prepared)
    assert {name: value.shape for name, value in made.items()} == shapes
    for name, value in made.items():
        everybody = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(everybody, value)
        assert all(torch.equal(value, other) for other in everybody), name
        if value.dim() == 2:
            assert 0 < value.float().std() < 2, name
            assert len({tuple(row.tolist()) for row in value}) == len(value), f"{name} repeats rows"
    assert all(train(strategy, prepared, strategy.create_optimizer(prepared)))


@pytest.mark.parametrize("sharding", [FSDP2, HSDP, DDP], ids=["fsdp2", "hsdp", "ddp"])
def test_meta_device(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_meta, 4, sharding=sharding)


def check_factory(rank: int, world_size: int) -> None:
    strategy = load(FSDP2)
    model = strategy.prepare_model(TinyTransformer)
    assert isinstance(model, TinyTransformer)
    assert isinstance(model, FSDPModule)


def test_factory(pool: Pool) -> None:
    pool.run(check_factory, 2)


def tiny_llama(tied: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama_step(strategy: lightstep.Strategy, model: nn.Module, optimizer: Any) -> Any:
    tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(strategy.rank)).to(strategy.device)
    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
    return optimizer.step()


def check_hugging_face_folder(rank: int, world_size: int, folder: str, sharding: dict[str, Any], tied: bool) -> None:
    """From the meta device and a folder: the same weights and the same training as from a loaded model."""
    torch.manual_seed(rank)
    path = Path(folder)
    if rank == 0:
        tiny_llama(tied).save_pretrained(path, max_shard_size="4KB")
    dist.barrier()
    runs = []
    for on_meta in (True, False):
        strategy = load(sharding)
        if on_meta:
            with torch.device("meta"):
                empty = tiny_llama(tied)
            model = strategy.prepare_model(empty, weights=path)
        else:
            model = strategy.prepare_model(type(tiny_llama()).from_pretrained(path))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        first = weights_of(strategy, model)
        results = [llama_step(strategy, model, optimizer) for _ in range(2)]
        runs.append((first, weights_of(strategy, model), [float(r.grad_norm) for r in results]))
    same_weights(runs[0][0], runs[1][0])
    same_weights(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "sharding",
    [FSDP2, {**FSDP2, "activation_checkpointing": True}],
    ids=["fsdp2", "checkpointed"],
)
def test_hugging_face_folder(pool: Pool, tmp_path: Path, sharding: dict[str, Any], tied: bool) -> None:
    pool.run(check_hugging_face_folder, 2, folder=str(tmp_path), sharding=sharding, tied=tied)


def check_wrong_folder(rank: int, world_size: int, folder: str) -> None:
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load(FSDP2).prepare_model(model, weights=folder)


def test_wrong_folder(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_wrong_folder, 2, folder=str(tmp_path))


def check_compute_dtype(rank: int, world_size: int) -> None:
    """fp32 shards that compute in bf16: fp32 gradients, no masters, the weights of a plain FSDP2 run."""
    strategy = load({**FSDP2, "compute": "bfloat16"}, precision={"parameters": "float32"}, clipping={"max_norm": None})
    torch.manual_seed(0)
    model = strategy.prepare_model(TinyTransformer())
    seen = []
    model.blocks[0].up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    train(strategy, model, optimizer)
    assert set(seen) == {torch.bfloat16}
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert "master" not in optimizer.state[parameter]

    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    plain = TinyTransformer().to(strategy.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*plain.blocks, plain]:
        fully_shard(module, mesh=strategy.mesh(), mp_policy=policy)
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for step in range(2):
        for micro in range(2):
            plain.set_requires_gradient_sync(micro == 1)
            (loss_of(plain, step, micro, rank, strategy.device) / 2).backward()
        reference.step()
        reference.zero_grad()
    same_weights(weights_of(strategy, model), weights_of(strategy, plain))


def test_fp32_shards_that_compute_in_bf16(pool: Pool) -> None:
    pool.run(check_compute_dtype, 2)


def check_compiled(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """``model.compile()`` and ``torch.compile(model)``, before and after; the backend runs the graph as it is."""

    def run(before: Callable[[nn.Module], nn.Module], after: Callable[[nn.Module], nn.Module]) -> dict[str, Tensor]:
        torch._dynamo.reset()
        strategy = load(sharding)
        torch.manual_seed(0)
        model = after(strategy.prepare_model(before(TinyTransformer())))
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        assert all(train(strategy, model, optimizer))
        return weights_of(strategy, model)

    def nothing(model: nn.Module) -> nn.Module:
        return model

    def in_place(model: nn.Module) -> nn.Module:
        model.compile(backend="eager")
        return model

    def wrapped(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="eager")

    expected = run(nothing, nothing)
    for before, after in ((in_place, nothing), (nothing, in_place), (wrapped, nothing), (nothing, wrapped)):
        same_weights(run(before, after), expected)


@pytest.mark.parametrize("sharding", [FSDP2, {"kind": "ddp", "find_unused_parameters": True}], ids=["fsdp2", "ddp"])
def test_compiled_before_and_after(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_compiled, 2, sharding=sharding)


def check_compiled_with_deferred_updates(rank: int, world_size: int, sharding: dict[str, Any], update: str) -> None:
    """Forwards that were compiled before there was an optimizer wait for its updates too."""

    def run(compiled: Callable[[nn.Module], nn.Module]) -> dict[str, Tensor]:
        torch._dynamo.reset()
        strategy = load(
            sharding,
            optimizer_state={"backend": "stream", "update": update},
            clipping={"max_norm": 0.5, "scope": "unit" if update == "in_backward" else "global"},
        )
        torch.manual_seed(0)
        model = compiled(strategy.prepare_model(TinyTransformer()))
        with torch.no_grad():
            loss_of(model, 0, 0, rank, strategy.device)
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        assert all(train(strategy, model, optimizer, steps=3))
        return weights_of(strategy, model)

    def blocks(model: nn.Module) -> nn.Module:
        for block in lightstep.Strategy.load({}).unwrap_model(model).blocks:  # type: ignore[union-attr]
            block.compile(backend="eager")
        return model

    expected = run(lambda model: model)
    same_weights(run(lambda model: torch.compile(model, backend="eager")), expected)
    same_weights(run(blocks), expected)


@pytest.mark.parametrize(
    ("sharding", "update"),
    [(FSDP2, "next_forward"), (FSDP2, "in_backward"), (DDP, "next_forward")],
    ids=["fsdp2", "fsdp2 in backward", "ddp"],
)
def test_compiled_with_deferred_updates(pool: Pool, sharding: dict[str, Any], update: str) -> None:
    pool.run(check_compiled_with_deferred_updates, 2, sharding=sharding, update=update)


def check_swapped_by_hand(rank: int, world_size: int) -> None:
    """An optimizer built before sharding, given the sharded parameters afterwards, as accelerate does."""
    from torch.distributed.fsdp import fully_shard

    runs = []
    for late in (False, True):
        strategy = load(FSDP2, precision={"parameters": "float32"})
        torch.manual_seed(0)
        if late:
            model: nn.Module = TinyTransformer()
            optimizer: Any = lightstep.MixedPrecisionOptimizer(
                model.parameters(), hyperparameters={"lr": 1e-2}, max_norm=1.0
            )
            model.to(strategy.device)
            for module in [*model.blocks, model]:  # type: ignore[misc]
                fully_shard(module, mesh=strategy.mesh())
            optimizer.param_groups[0]["params"] = list(model.parameters())
        else:
            model = strategy.prepare_model(TinyTransformer())
            optimizer = strategy.create_optimizer(model, lr=1e-2)
        train(strategy, model, optimizer)
        runs.append(weights_of(strategy, model))
    same_weights(*runs)


def check_swapped_parameters(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """16-bit weights: gradients are not rounded when the optimizer was built first, or for another model."""

    def run(order: str) -> dict[str, Tensor]:
        strategy = load(sharding)
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
    same_weights(run("optimizer first"), expected)
    same_weights(run("another model's optimizer"), expected)


def test_parameters_swapped_after_building(pool: Pool) -> None:
    pool.run(check_swapped_by_hand, 2)


@pytest.mark.parametrize("sharding", [FSDP2, HSDP, DDP], ids=["fsdp2", "hsdp", "ddp"])
def test_16_bit_parameters_swapped_after_building(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_swapped_parameters, 2, sharding=sharding)


def same_on_all_ranks(model: nn.Module) -> bool:
    flat = torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])
    everybody = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, flat)
    return all(torch.equal(flat, other) for other in everybody)


def check_replica_is_found(rank: int, world_size: int) -> None:
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
        same_weights(run(order, backend), expected)


def test_the_replica_is_found(pool: Pool) -> None:
    pool.run(check_replica_is_found, 2)


def check_unknown_replica(rank: int, world_size: int) -> None:
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


def test_a_replica_that_is_not_known(pool: Pool) -> None:
    pool.run(check_unknown_replica, 2)


def tensor_parallel(model: nn.Module, world_size: int, device: torch.device) -> None:
    """``nn.Sequential(LayerNorm, Linear, Tanh, Linear)`` over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh(device.type, (world_size,), mesh_dim_names=("tp",)), plan)


def check_tensor_parallel(rank: int, world_size: int, dtype: str) -> None:
    """Plain modules whose parameters ``parallelize_module`` made DTensors: the unsharded model's norm and training."""
    sections = {"precision": {"parameters": dtype}, "clipping": {"max_norm": 0.1}}
    strategy = load({"kind": "single"}, **sections)
    device = device_of(rank, world_size)
    models, norms = [], []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)).to(device)
        model.register_buffer("steps", torch.ones(3))
        if parallel:
            tensor_parallel(model, world_size, device)
            model[1].bias.mark = "kept"
        given = list(model.parameters())
        model = strategy.prepare_model(model)
        assert all(after is before for after, before in zip(model.parameters(), given, strict=True))
        assert {p.dtype for p in model.parameters()} == {local_tensor(p).dtype for p in model.parameters()}
        assert next(model.parameters()).dtype == strategy.parameter_dtype
        assert model.steps.dtype == torch.float32  # a buffer
        assert not parallel or model[1].bias.mark == "kept"
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        found = []
        for step in range(3):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(
                device, strategy.parameter_dtype
            )
            if parallel:
                inputs = inputs.chunk(world_size)[rank]
            loss = model(inputs).float().square().mean()
            optimizer.backward(loss)
            found.append(float(optimizer.step().grad_norm))
        norms.append(found)
        models.append(weights_of(strategy, model))
    precise = dtype == "float32"
    assert norms[1] == pytest.approx(norms[0], rel=1e-5 if precise else 2e-2)
    for name, value in models[0].items():
        assert torch.allclose(value, models[1][name], atol=1e-5 if precise else 1e-2), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel(pool: Pool, dtype: str) -> None:
    pool.run(check_tensor_parallel, 2, dtype=dtype)


def check_never_reduced(rank: int, world_size: int) -> None:
    """Steps whose gradients DDP never saw are refused; extra gradients after its reduction are added."""
    strategy = load(DDP)
    for micro_batches, by_inner in ((1, False), (3, False), (1, True), (2, True)):
        model = strategy.prepare_model(TinyTransformer())
        optimizer = strategy.create_optimizer(model)
        called = strategy.unwrap_model(model) if by_inner else model
        for micro in range(micro_batches):
            with strategy.accumulate(model, last=by_inner):
                optimizer.backward(loss_of(called, 0, micro, rank, strategy.device))
        with pytest.raises(RuntimeError, match=r"no backward since the last step was reduced.*last=True"):
            optimizer.step()
    model = strategy.prepare_model(Slope())
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=1.0)
    inner = strategy.unwrap_model(model)
    optimizer.backward(model(torch.full((5, 3), float(rank), device=strategy.device)))
    optimizer.backward(2 * inner.weight.sum())
    assert optimizer.step()
    assert same_on_all_ranks(model)


def test_gradients_that_were_never_reduced(pool: Pool) -> None:
    pool.run(check_never_reduced, 2)


class WithExpert(Slope):
    """With a second weight that is another one on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts = nn.ParameterList([torch.full((2, 2), float(rank))])
        self.experts[0].differs_across_ranks = True

    def forward(self, slope: Tensor) -> Tensor:
        return super().forward(slope) + (self.experts[0] * slope[:2, :2].to(self.weight.dtype)).sum()


def check_expert_beside_replica(rank: int, world_size: int, backend: str) -> None:
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


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_an_expert_beside_the_replica(pool: Pool, backend: str) -> None:
    pool.run(check_expert_beside_replica, 2, backend=backend)


def check_dropped_accumulation(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """``zero_grad`` after a last micro-batch forgets those before it."""
    strategy = load(sharding)
    norms = []
    for dropped in (False, True):
        torch.manual_seed(0)
        model = strategy.prepare_model(TinyTransformer())
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        for micro in range(3 if dropped else 0):
            with strategy.accumulate(model, last=micro == 2):
                optimizer.backward(loss_of(model, 9, micro, rank, strategy.device) * 100)
        optimizer.zero_grad()
        norms.append([float(result.grad_norm) for result in train(strategy, model, optimizer)])
    assert norms[0] == norms[1]


@pytest.mark.parametrize("sharding", [FSDP2, DDP], ids=["fsdp2", "ddp"])
def test_an_accumulation_can_be_dropped(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_dropped_accumulation, 2, sharding=sharding)


def check_evaluated_first(rank: int, world_size: int) -> None:
    """An evaluation leaves the root gathered: what is built after it trains the shards all the same."""

    def run(precision: dict[str, Any], when: str) -> dict[str, Tensor]:
        strategy = load(FSDP2, precision=precision)
        torch.manual_seed(0)
        model = strategy.prepare_model(TinyTransformer())
        optimizer = strategy.create_optimizer(model, lr=1e-2) if when != "before building" else None
        if when != "never":
            with torch.no_grad():
                loss_of(model, 0, 0, rank, strategy.device)
        optimizer = optimizer or strategy.create_optimizer(model, lr=1e-2)
        if when == "before set-up":
            assert "embed.weight" in {item.name for item in optimizer.managed()}
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        assert all(train(strategy, model, optimizer))
        return weights_of(strategy, model)

    for precision in ({"parameters": "float32"}, {"parameters": "bfloat16"}, {"reduce": "parameters"}):
        expected = run(precision, "never")
        for when in ("before building", "before set-up"):
            same_weights(run(precision, when), expected)

    strategy = load(FSDP2)
    model = strategy.prepare_model(TinyTransformer())
    loss_of(model, 0, 0, rank, strategy.device)
    gathered = list(model.parameters())
    with pytest.raises(ValueError, match=r"not the model's.*model\.reshard\(\)"):
        strategy.create_optimizer(model, param_groups=gathered)
    optimizer = strategy.create_optimizer(model)
    optimizer.param_groups[0]["params"] = gathered
    with pytest.raises(ValueError, match=r"not the sharded model's.*model\.reshard\(\)"):
        optimizer.step()


def test_evaluated_before_the_optimizer_is_built(pool: Pool) -> None:
    pool.run(check_evaluated_first, 2)


def check_refused_models(rank: int, world_size: int) -> None:
    device = device_of(rank, world_size)
    for sharding, again in ((FSDP2, "is sharded already"), (DDP, "is a DistributedDataParallel in this")):
        strategy = load(sharding)
        with pytest.raises(ConfigError, match=again):
            strategy.prepare_model(strategy.prepare_model(TinyTransformer()))
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)).to(device)
        tensor_parallel(model, world_size, device)
        with pytest.raises(ConfigError, match=r"DTensor.*sharding.kind single"):
            strategy.prepare_model(model)
    from torch.distributed.fsdp import fully_shard

    model = TinyTransformer().to(device)
    fully_shard(model.blocks[0], mesh=load(FSDP2).mesh())
    with pytest.raises(ConfigError, match=r"blocks.0.norm.weight was sharded by fully_shard in torch.float32"):
        load(FSDP2).prepare_model(model)
    static = load({"kind": "ddp", "static_graph": True})
    model = static.prepare_model(Slope())
    with pytest.raises(ConfigError, match=r"last=False\) with sharding.static_graph true"):
        static.accumulate(model, last=False)


def test_models_that_cannot_be_prepared(pool: Pool) -> None:
    pool.run(check_refused_models, 2)


# -- the process group


def check_process_group(rank: int, world_size: int) -> None:
    """Started by the strategy from torchrun's environment, and ended by it; left alone when it was somebody else's."""
    strategy = load(FSDP2)
    assert (strategy.rank, strategy.world_size, strategy.is_main) == (rank, world_size, rank == 0)
    assert not dist.is_initialized()
    with strategy:
        model = strategy.prepare_model(TinyTransformer())
        assert dist.is_initialized()
        train(strategy, model, strategy.create_optimizer(model))
    assert not dist.is_initialized()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo")
    with load(FSDP2) as other:
        other.start()
    assert dist.is_initialized()


def test_process_group(pool: Pool) -> None:
    pool.run(check_process_group, 2, group=False)


def check_dying_rank(rank: int, world_size: int, folder: str, sharding: dict[str, Any]) -> None:
    """The last rank goes away without a word in the second step; the first one writes down what it is told."""
    strategy = load(sharding)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model)
    train(strategy, model, optimizer, steps=1)
    if rank == world_size - 1:
        os._exit(1)
    began = time.monotonic()
    try:
        train(strategy, model, optimizer, steps=1)
        strategy.save_checkpoint(Path(folder, "after"), model, optimizer)
    except Exception as error:
        Path(folder, f"{rank}.json").write_text(json.dumps([type(error).__name__, time.monotonic() - began]))
        raise


@pytest.mark.parametrize("sharding", [FSDP2, DDP], ids=["fsdp2", "ddp"])
def test_a_rank_that_dies_ends_the_others(pool: Pool, tmp_path: Path, sharding: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="the process ended"):
        pool.run(check_dying_rank, 2, folder=str(tmp_path), sharding=sharding)
    assert not (tmp_path / "after").exists()
    if torch.cuda.device_count() < 2:  # nccl's watchdog ends the process itself
        _, seconds = json.loads((tmp_path / "0.json").read_text())
        assert seconds < TIMEOUT.total_seconds()


def check_unscaled_backward(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    strategy = load(
        sharding, precision={"parameters": "float16", "loss_scale": {"kind": "dynamic", "init_scale": 256.0}}
    )
    torch.manual_seed(0)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    train(strategy, model, optimizer)
    before = weights_of(strategy, model)
    loss_of(model, 2, 0, rank, strategy.device).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\)"):
        optimizer.step()
    same_weights(weights_of(strategy, model), before)
    optimizer.zero_grad()
    train(strategy, model, optimizer)


@pytest.mark.parametrize("sharding", [FSDP2, DDP], ids=["fsdp2", "ddp"])
def test_a_backward_that_was_not_scaled_is_refused(pool: Pool, sharding: dict[str, Any]) -> None:
    pool.run(check_unscaled_backward, 2, sharding=sharding)
