"""What FSDP2 and DDP strategies do to a model."""

from __future__ import annotations

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
from lightstep.distributed import local_tensor
from tests.distributed.models import Slope, TinyTransformer, loss_of, tiny_llama
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.training import DDP, FSDP2, HSDP, Training, load, same_tensors, train, weights_of

# -- weights


@on_ranks(4)
def test_weights_of_the_first_rank(rank: int) -> None:
    """Ranks that built different weights, or none, train rank 0's."""
    torch.manual_seed(0)
    expected = {name: p.detach().bfloat16() for name, p in TinyTransformer().named_parameters()}
    for sharding in (FSDP2, HSDP, DDP):
        torch.manual_seed(rank)
        strategy = load(sharding)
        made = weights_of(strategy, strategy.prepare_model(TinyTransformer()))
        same_tensors({name: value.cpu() for name, value in made.items()}, expected)
    for tied in (False, True):
        torch.manual_seed(0)
        expected = {name: p.detach().bfloat16() for name, p in TinyTransformer(tied=tied).named_parameters()}
        torch.manual_seed(0)
        with torch.device("cpu" if rank == 0 else "meta"):
            model = TinyTransformer(tied=tied)
        strategy = load(FSDP2)
        made = weights_of(strategy, strategy.prepare_model(model))
        same_tensors({name: value.cpu() for name, value in made.items()}, expected)
    with torch.device("meta" if rank == 0 else "cpu"):
        model = TinyTransformer()
    with pytest.raises(ValueError, match="rank 0 has the model on the meta device"):
        load(FSDP2).prepare_model(model)


class Transposed(nn.Module):
    """A weight and a buffer whose memory is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("shift", torch.randn(3, 2).t())


@on_ranks(2, "role", ["trainer", "reference"])
def test_replicas_have_weights_and_buffers_of_the_first_rank(rank: int, role: str) -> None:
    torch.manual_seed(0)
    expected = Transposed().bfloat16().state_dict()
    torch.manual_seed(rank)
    strategy = load(DDP)
    made = strategy.unwrap_model(strategy.prepare_model(Transposed(), role=role)).state_dict()
    same_tensors({name: value.cpu() for name, value in made.items()}, expected)


@on_ranks(None, ("ranks", "sharding"), [(3, FSDP2), (4, HSDP), (2, DDP)])
def test_meta_device(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
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


def llama_step(strategy: lightstep.Strategy, model: nn.Module, optimizer: Any) -> Any:
    tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(strategy.rank)).to(strategy.device)
    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
    return optimizer.step()


@on_ranks(2, ("sharding", "tied"), [(FSDP2, True), ({**FSDP2, "activation_checkpointing": True}, False)])
def test_hugging_face_folder(rank: int, tmp_path: Path, sharding: dict[str, Any], tied: bool) -> None:
    """From the meta device and a folder: the same weights and the same training as from a loaded model."""
    torch.manual_seed(rank)
    path = tmp_path / str(tied)
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
    same_tensors(runs[0][0], runs[1][0])
    same_tensors(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]
    with torch.device("meta"):
        empty = tiny_llama(tied)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load(sharding).prepare_model(empty, weights=tmp_path)


# -- units and meshes


def units_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


class Named(TinyTransformer):
    _no_split_modules = ("LayerNorm",)


@on_ranks(2)
def test_units() -> None:
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


@on_ranks(4)
def test_meshes() -> None:
    sizes = {
        (1, "auto"): (4,),
        (2, "auto"): (2, 2),
        ("auto", 1): (4, 1),
        ("auto", 4): (4,),
    }
    for (replicate, shard), expected in sizes.items():
        strategy = load({**FSDP2, "mesh": {"replicate": replicate, "shard": shard}})
        assert tuple(strategy.mesh().shape) == expected
    for mesh, message in {
        (3, "auto"): "mesh.replicate is 3, which does not divide the number of ranks, 4",
        ("auto", 3): "mesh.shard is 3, which does not divide the number of ranks, 4",
        (2, 4): r"mesh is 2 × 4 \(replicate × shard\) = 8 ranks, and 4 are running",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load({**FSDP2, "mesh": {"replicate": mesh[0], "shard": mesh[1]}}).prepare_model(TinyTransformer())
    for bad in (3, 4):
        with pytest.raises(ConfigError, match=f"reshard_after_forward is {bad}; true, false or a divisor"):
            load({**FSDP2, "reshard_after_forward": bad}).prepare_model(TinyTransformer())
    for more in ({"mesh": {"replicate": "auto", "shard": 1}}, {"reshard_after_forward": 2}):
        strategy = load({**FSDP2, **more})
        model = strategy.prepare_model(TinyTransformer())
        assert all(train(strategy, model, strategy.create_optimizer(model)))


# -- models that were compiled, sharded or run before


@on_ranks(2, "sharding", [FSDP2, DDP])
def test_compiled_before_and_after(sharding: dict[str, Any]) -> None:
    """``model.compile()`` and ``torch.compile(model)``, before and after; the backend runs the graph as it is.

    FSDP2 and what is compiled after it as a whole: :func:`test_compiled_with_deferred_updates`.
    """

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
    chosen = [(in_place, nothing), (nothing, in_place)] if sharding is FSDP2 else [(nothing, wrapped)]
    for before, after in ((wrapped, nothing), *chosen):
        same_tensors(run(before, after), expected)


@on_ranks(2, ("sharding", "update", "whole"), [(FSDP2, "in_backward", True), (DDP, "next_forward", False)])
def test_compiled_with_deferred_updates(rank: int, sharding: dict[str, Any], update: str, whole: bool) -> None:
    """Forwards that were compiled before there was an optimizer wait for its updates too."""
    scope = "unit" if update == "in_backward" else "global"
    values = {"optimizer_state": {"backend": "stream", "update": update}, "clipping": {"max_norm": 0.5, "scope": scope}}

    class Compiled(Training):
        def prepare(self, model: nn.Module) -> nn.Module:
            prepared = super().prepare(model)
            for block in self.strategy.unwrap_model(prepared).blocks if not whole else ():  # type: ignore[union-attr]
                block.compile(backend="eager")
            if whole:
                prepared = torch.compile(prepared, backend="eager")
            with torch.no_grad():
                loss_of(prepared, 0, 0, rank, self.device)
            return prepared

    torch._dynamo.reset()
    whole_model = {"groups": lambda model: None}
    tested, expected = (kind({"sharding": sharding, **values}, **whole_model) for kind in (Compiled, Training))
    assert tested.train(3) == expected.train(3)
    same_tensors(tested.snapshot(), expected.snapshot())


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


@on_ranks(2, "dtype", ["float32", "bfloat16"])
def test_tensor_parallel(rank: int, world_size: int, dtype: str) -> None:
    """Plain modules whose parameters ``parallelize_module`` made DTensors: the unsharded model's norm and training."""
    sections = {"precision": {"parameters": dtype}, "clipping": {"max_norm": 0.1}}
    strategy = load({"kind": "single"}, **sections)
    device = device_of(rank, world_size)
    models, norms = [], []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)).to(device)
        model.register_buffer("inv_freq", torch.ones(3))
        if parallel:
            tensor_parallel(model, world_size, device)
            model[1].bias.mark = "kept"
        given = list(model.parameters())
        model = strategy.prepare_model(model)
        assert all(after is before for after, before in zip(model.parameters(), given, strict=True))
        assert {p.dtype for p in model.parameters()} == {local_tensor(p).dtype for p in model.parameters()}
        assert next(model.parameters()).dtype == strategy.parameter_dtype
        assert model.inv_freq.dtype == torch.float32
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


@on_ranks(2)
def test_evaluated_before_the_optimizer_is_built(rank: int) -> None:
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

    for precision, when in (
        ({"parameters": "float32"}, "before building"),
        ({"parameters": "bfloat16"}, "before set-up"),
        ({"reduce": "parameters"}, "before building"),
    ):
        same_tensors(run(precision, when), run(precision, "never"))

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


@on_ranks(2)
def test_models_that_cannot_be_prepared(rank: int, world_size: int) -> None:
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
    refused = pytest.raises(ConfigError, match=r"last=False\) with sharding.static_graph true")
    with refused, static.accumulate(model, last=False):
        pass
