"""Shards that rest on the host get their memory there, and their weights group by group, with the bits of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightstep import Strategy
from lightstep.distributed import is_sharded, local_tensor, ranks_on_this_host
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_memory import CHECK_VARIABLE, HostMemoryError, HostSlab
from tests.covering import every_value
from tests.distributed.models import TinyTransformer, loss_of, tiny_llama
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.training import same_tensors

UNITS = {"wrap": ["Block", "embed", "head"]}
RANDOM = ("normal", "uniform", "rand", "bernoulli")


def strategy_of(placement: str, **sharding: Any) -> Strategy:
    return Strategy.load(
        {
            "sharding": {"kind": "fsdp2", **sharding},
            "optimizer_state": {"backend": "stream", "update": "next_forward"},
            "weights": {"placement": placement},
        }
    )


class Last(nn.Module):
    """Its initialisation writes to weights of other groups, in ways that keep hold of them."""

    def __init__(self, model: TinyTransformer) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.parts = (model,)

    def reset_parameters(self) -> None:
        (model,) = self.parts
        nn.init.uniform_(self.scale)
        listed = dict(model.blocks.named_parameters())
        for name, parameter in listed.items():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02)
        for first, second in zip(model.blocks[0].parameters(), model.blocks[2].parameters(), strict=True):
            with torch.no_grad():
                second.copy_(first)
        model.blocks[1].norm.weight.data.fill_(0.5)
        with torch.no_grad():
            model.embed.weight.mul_(2).add_(model.embed.weight)
            listed["1.up.bias"].fill_(0.25)


class Awkward(TinyTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(3))
        self.last = Last(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.steps.copy_(torch.arange(3))


def gpt2() -> nn.Module:
    """Its blocks initialise weights of their parts a second time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 31, "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def tied() -> nn.Module:
    return TinyTransformer(tied=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny": TinyTransformer,
    "awkward": Awkward,
    "tied": tied,
    "llama": tiny_llama,
    "gpt2": gpt2,
}


class Watch(TorchDispatchMode):
    """Every operation of the body.

    Attributes:
        most: the most bytes of memory that the model's shards had outside of slabs.
        drawn: operations that have drawn random values.
    """

    def __init__(self, model: nn.Module, slabs: list[HostSlab]) -> None:
        super().__init__()
        self.most, self.drawn = 0, list[str]()
        self._model, self._slabs = model, slabs

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if any(word in str(function) for word in RANDOM) and not result.is_meta:
            self.drawn.append(str(function))
        self.most = max(self.most, sum(self._elsewhere()))
        return result

    def _elsewhere(self) -> Iterator[int]:
        """Bytes of each shard."""
        for parameter in set(self._shards()):
            local = parameter._local_tensor
            if not local.is_meta and local.stride() == parameter.stride():  # others have no memory yet
                yield 0 if any(slab.place_of(local) is not None for slab in self._slabs) else local.nbytes

    def _shards(self) -> Iterator[Any]:
        for module in self._model.modules():
            yield from filter(is_sharded, dict.values(vars(module)["_parameters"]))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def set_up(
    strategy: Strategy, make: Callable[[], nn.Module], folder: Path | None, patch: pytest.MonkeyPatch
) -> tuple[nn.Module, Watch]:
    slabs, plain = list[HostSlab](), HostSlab.__init__

    def recorded(slab: HostSlab, *arguments: Any, **named: Any) -> None:
        plain(slab, *arguments, **named)
        slabs.append(slab)

    patch.setattr(HostSlab, "__init__", recorded)
    torch.manual_seed(strategy.rank + 5)
    made, before = on_meta(make), torch.get_rng_state()
    with Watch(made, slabs) as watch:
        model = strategy.prepare_model(made, weights=folder)
    assert torch.equal(torch.get_rng_state(), before)
    return model, watch


def values_of(model: nn.Module) -> dict[str, Tensor]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: local_tensor(tensor).detach().cpu().clone() for name, tensor in tensors}


def train(strategy: Strategy, model: nn.Module, rank: int, device: torch.device) -> list[float]:
    optimizer: Any = strategy.create_optimizer(model, lr=1e-2)
    losses = []
    for step in range(2):
        if isinstance(model, TinyTransformer):
            loss = loss_of(model, step, 0, rank, device)
        else:
            words = torch.arange(8, device=device)[None] + step
            loss = model(input_ids=words, labels=words).loss
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    optimizer.synchronize()
    return losses


Outcome = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]
"""Weights, losses, and weights after them."""


def check_runs(runs: list[Outcome]) -> None:
    (wanted, losses, trained), (found, found_losses, found_trained) = runs
    same_tensors(found, wanted)
    assert found_losses == losses
    same_tensors(found_trained, trained)


def check_peak(model: nn.Module, watch: Watch, at_a_time: int) -> None:
    """No more shards than those of so many groups were anywhere but in their slabs at a time."""
    visits = PreparedModel.of(model).weight_visits
    assert visits is not None
    sizes = sorted(sum(shard.nbytes for shard in group.weights.on_host) for group in visits.weights.groups)
    assert len(sizes) > 2
    assert watch.most <= sum(sizes[-at_a_time:]) < sum(sizes), (watch.most, sizes)
    assert all(local_tensor(parameter).device.type == "cpu" for parameter in model.parameters())


@on_ranks(
    None,
    ("ranks", "name", "sharding", "at_a_time"),
    [
        (2, "tiny", UNITS, 1),
        (2, "tied", {}, 1),
        (2, "gpt2", {"activation_checkpointing": True}, 1),
        (3, "awkward", UNITS, 2),  # some shards are uneven, and others empty
    ],
)
def test_initial_weights(rank: int, name: str, sharding: dict[str, Any], at_a_time: int) -> None:
    runs = list[Outcome]()
    for placement in ("device", "host"):
        watch, model = run(rank, placement, MODELS[name], None, runs, **sharding)
        assert watch.drawn
    check_runs(runs)
    assert watch.most > 0
    check_peak(model, watch, at_a_time)


def run(
    rank: int, placement: str, make: Callable[[], nn.Module], folder: Path | None, runs: list[Outcome], **sharding: Any
) -> tuple[Watch, nn.Module]:
    """Set-up and training; ``runs`` get the outcome."""
    strategy = strategy_of(placement, **sharding)
    with pytest.MonkeyPatch.context() as patch:
        model, watch = set_up(strategy, make, folder, patch)
    first = values_of(model)
    runs.append((first, train(strategy, model, rank, strategy.device), values_of(model)))
    return watch, model


def check_loaded(rank: int, folder: Path, name: str) -> None:
    runs = list[Outcome]()
    for placement in ("device", "host"):
        watch, model = run(rank, placement, MODELS[name], folder, runs)
        assert bool(watch.drawn) is (name == "tiny"), "no weights of transformers were drawn at random"
    check_runs(runs)
    check_peak(model, watch, 1)


@on_ranks(2, ("reduce", "widths"), [("float32", 2 + 4), ("parameters", 2 + 2)])
def test_gradients_are_counted_as_they_are_reduced(world_size: int, reduce: str, widths: int) -> None:
    strategy = Strategy.load(
        {"sharding": {"kind": "fsdp2"}, "precision": {"reduce": reduce}, "weights": {"placement": "host"}}
    )
    elements = sum(parameter.numel() for parameter in tiny_llama().parameters())
    own = elements / world_size * ranks_on_this_host()
    for free, refused in ((widths - 0.2, True), (widths + 0.2, False)):  # bytes per element
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CHECK_VARIABLE, repr(free * own / 2**30))
            with pytest.raises(HostMemoryError, match="weights and gradients: ") if refused else nullcontext():
                strategy.prepare_model(on_meta(tiny_llama))


@every_value(name=["llama", "tiny"], stored=[torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_into_the_slabs(pool: Pool, name: str, stored: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model: Any = MODELS[name]().to(stored)
    if name == "tiny":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    else:
        model.save_pretrained(tmp_path, max_shard_size="4KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    pool.run(check_loaded, 2, folder=tmp_path, name=name)
