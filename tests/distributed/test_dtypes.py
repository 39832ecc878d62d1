"""What models keep in fp32 and what quantisers pack, when ranks shard or replicate it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.testing import assert_close

from lightstep import ConfigError
from lightstep.distributed import local_tensor
from tests.distributed.ranks import on_ranks
from tests.distributed.training import DDP, FSDP2, full, load

COPIES = {**FSDP2, "mesh": {"replicate": 2, "shard": 1}}
WIDTH = 6
NO_CLIPPING = {"clipping": {"max_norm": None}}  # norms of shards are added up in another order


class Router(nn.Module):
    """A trainable weight and, in a child, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.statics = nn.Module()
        self.statics.bias = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype == torch.float32
        return (functional.linear(x.float(), self.weight) + self.statics.bias.float()).softmax(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        shares = self.router(hidden).to(hidden.dtype).split(1, -1)
        for expert, share in zip(self.experts, shares, strict=True):
            x = x + expert(hidden) * share
        return x


class Routed(nn.Module):
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["router", "tail"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tail = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)])  # kept beside others in the root
        self.register_buffer("scale", torch.tensor([0.3]))

    def reset_parameters(self) -> None:
        self.scale.fill_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.to(self.scale.dtype)) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.tail[1](self.tail[0](hidden.float()))


def run(strategy: Any, make: Any, rank: int, steps: int = 3) -> tuple[nn.Module, list[Tensor]]:
    model = strategy.prepare_model(make)
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    losses = []
    for step in range(steps):
        for micro in range(2):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            with strategy.accumulate(model, last=micro == 1):
                losses.append(model(x.to(strategy.device)).square().mean() / 2)
                optimizer.backward(losses[-1])
        assert optimizer.step()
    optimizer.synchronize()
    return strategy.unwrap_model(model), losses


@on_ranks(2, ("sharding", "backend"), [(FSDP2, "resident"), (COPIES, "stream")])
def test_kept_parameters_are_sharded_and_gathered_in_fp32(
    rank: int, sharding: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    """The same losses and weights as under DDP, whose parameters are whole; and the same after a checkpoint."""
    sections = {**NO_CLIPPING, "optimizer_state": {"backend": backend}}
    expected, losses = run(load(DDP, **sections), Routed, rank)
    strategy = load(sharding, **sections)
    model, found = run(strategy, Routed, rank)
    assert_close(torch.stack(found), torch.stack(losses), rtol=1e-5, atol=0)
    for (name, tensor), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        kept = "router" in name or "tail" in name
        assert tensor.dtype == other.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert_close(full(tensor), other, rtol=1e-5, atol=1e-6)  # fused AdamW's last bit depends on a shard's length
    assert model.scale.dtype == torch.bfloat16
    strategy.export_model(tmp_path / backend, model)
    again = strategy.prepare_model(Routed, weights=tmp_path / backend)
    for tensor, other in zip(strategy.unwrap_model(again).parameters(), model.parameters(), strict=True):
        assert tensor.dtype == other.dtype and torch.equal(local_tensor(tensor), local_tensor(other))


@on_ranks(2)
def test_what_is_kept_is_not_rounded_by_the_gathering(rank: int) -> None:
    """fp32 shards that are gathered in bf16, but for what the model keeps, frozen parameters included."""
    strategy = load({**FSDP2, "compute": "bfloat16"}, precision={"parameters": "float32"}, **NO_CLIPPING)
    seen: dict[str, torch.dtype] = {}

    class Watched(Routed):
        def forward(self, x: Tensor) -> Tensor:
            self.scale.data = self.scale.data.to(torch.bfloat16)
            for name, module in self.named_modules():
                for key, parameter in module.named_parameters(recurse=False):
                    if isinstance(module, nn.Linear | Router | nn.LayerNorm):
                        module.register_forward_pre_hook(
                            lambda own, _, path=f"{name}.{key}", key=key: seen.update({path: getattr(own, key).dtype})
                        )
                    del parameter
            return super().forward(x)

    model, _ = run(strategy, Watched, rank, steps=1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for path, dtype in seen.items():
        assert dtype == (torch.float32 if "router" in path or "tail" in path else torch.bfloat16), path
    assert any("router" in path for path in seen)


@on_ranks(2)
def test_reference_models_and_models_without_memory() -> None:
    """Without gradients one group may have two dtypes; the same for a model on the meta device."""
    strategy = load(FSDP2)
    with torch.no_grad():
        whole = Routed()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(strategy.device)
        plain = load(DDP).prepare_model(copy.deepcopy(whole), role="reference")
        assert torch.equal(strategy.prepare_model(whole, role="reference")(x), plain(x))
    with torch.device("meta"):
        empty = Routed()
    for block in empty.blocks:
        block.router.reset_parameters = lambda own=block.router: nn.init.ones_(own.weight)
        block.router.statics.reset_parameters = lambda own=block.router.statics: nn.init.zeros_(own.bias)
    model = strategy.prepare_model(empty)
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == {
        n for n, _ in model.named_parameters() if "router" in n or "tail" in n
    }


class Mixed(nn.Module):
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["sinks"]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.sinks = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x.to(self.up.weight.dtype)).float() * self.sinks


@on_ranks(2)
def test_a_module_with_parameters_of_both_kinds_is_refused(rank: int) -> None:
    strategy = load(FSDP2)
    with pytest.raises(ConfigError, match=r"Mixed keeps its own sinks in float32.*sharding.kind ddp"):
        strategy.prepare_model(Mixed())
    model = Mixed()
    model.sinks.requires_grad_(False)
    strategy.prepare_model(model)(torch.ones(2, 4, device=strategy.device)).sum().backward()
    run(load(DDP, **NO_CLIPPING), Mixed, rank)


class Packed(nn.Module):
    """Frozen float8 numbers, and 16-bit storage of packed ones."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(4, 2)
        self.packed = nn.Module()
        numbers = torch.randint(100, (8, 4), dtype=torch.uint8).view(storage)
        self.packed.weight = nn.Parameter(numbers, requires_grad=False)
        if storage.itemsize > 1:
            self.packed.weight.quant_state = "nf4"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.to(self.head.weight.dtype)).float()


@on_ranks(2, "sharding", [DDP, FSDP2])
def test_packed_storage_is_sent_and_sharded_as_it_is(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    numbers = [torch.bfloat16, torch.float16] + [torch.float8_e4m3fn] * (
        sharding["kind"] == "fsdp2"
    )  # gloo's DDP has no float8
    for storage in numbers:
        for parameters in ("bfloat16", "float16", "float32"):
            strategy = load(sharding, precision={"parameters": parameters})
            expected = Packed(storage).packed.weight.detach().view(torch.uint8).to(strategy.device)
            model, _ = run(strategy, lambda storage=storage: Packed(storage), rank, steps=1)
            found = local_tensor(model.packed.weight.detach())
            assert found.dtype == storage
            own = expected.chunk(world_size)[rank] if isinstance(model, FSDPModule) else expected
            assert torch.equal(found.view(torch.uint8), own), (storage, parameters)
            assert isinstance(model, FSDPModule) == (sharding["kind"] == "fsdp2")
    dist.barrier()
