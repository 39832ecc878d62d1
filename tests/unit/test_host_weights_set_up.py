"""Weights that rest on the host are loaded from a folder into the memory where they rest, with no second copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightstep import Strategy
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_memory import CHECK_VARIABLE, HostMemoryError
from lightstep.trainer.config import TrainConfig
from tests.covering import every_value
from tests.python import python
from tests.reference.tiny_llama import VOCABULARY, make_llama
from tests.training import assert_same, made
from tests.unit.test_trainer import MODEL, _train, configured, text
from tests.unit.test_trainer_data import word_tokenizer

__all__ = ["configured", "text"]

HOST: dict[str, Any] = {
    "sharding": {"kind": "single"},
    "optimizer_state": {"backend": "stream", "update": "next_forward"},
    "weights": {"placement": "host"},
}
DEVICE: dict[str, Any] = {**HOST, "weights": {}}


def on_meta(**changes: Any) -> nn.Module:
    with torch.device("meta"):
        return make_llama(**changes)


def train(strategy: Strategy, model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    for seed in range(3):
        words = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
        optimizer.backward(model(input_ids=words, labels=words).loss)
        optimizer.step()
    optimizer.synchronize()
    return {name: value.clone() for name, value in model.state_dict().items()}


@every_value(stored=[torch.float32, torch.bfloat16], tied=[False, True], shards=["5GB", "3KB"])
def test_a_folder_is_loaded_as_from_pretrained_loads_it(
    stored: torch.dtype, tied: bool, shards: str, tmp_path: Path
) -> None:
    make_llama(3, tie_word_embeddings=tied).to(stored).save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shards == "3KB")
    loaded, tested = Strategy.load(DEVICE), Strategy.load(HOST)
    expected = train(loaded, loaded.prepare_model(make_llama().from_pretrained(tmp_path, dtype=stored)))
    made, before = on_meta(tie_word_embeddings=tied), torch.get_rng_state()
    model = tested.prepare_model(made, weights=tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "no weights were drawn at random"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    plain = make_llama()
    for (name, buffer), wanted in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer.float(), wanted.float()), name
    assert_same(train(tested, model), expected)


def test_an_optimizer_may_be_there_before(tmp_path: Path) -> None:
    make_llama(3).bfloat16().save_pretrained(tmp_path)
    strategy, found = Strategy.load(HOST), []
    for early in (False, True):
        model = on_meta()
        optimizer = strategy.create_optimizer(model, lr=1e-2) if early else None
        model = strategy.prepare_model(model, weights=tmp_path)
        optimizer = optimizer or strategy.create_optimizer(model, lr=1e-2)
        words = torch.arange(8)[None]
        optimizer.backward(model(input_ids=words, labels=words).loss)
        optimizer.step()
        optimizer.synchronize()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same(found[1], found[0])


class WithInitWeights(nn.Module):
    """A name that models of transformers have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    made = WithInitWeights().bfloat16()
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = WithInitWeights()
    assert_same(Strategy.load(HOST).prepare_model(empty, weights=tmp_path).state_dict(), made.state_dict())


def test_a_folder_without_all_weights_is_refused(tmp_path: Path) -> None:
    make_llama(3, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no model\.layers\.1"):
        Strategy.load(HOST).prepare_model(on_meta(), weights=tmp_path)


def test_too_little_memory_for_gradients_is_refused_before_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the host give their own memory back, one by one."""
    strategy, model = Strategy.load(HOST), make_llama().bfloat16()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    monkeypatch.setenv(CHECK_VARIABLE, repr(0.95 * (max(sizes) + sum(sizes)) / 2**30))
    with pytest.raises(HostMemoryError, match=r"^weights and gradients.* Set weights.placement: device"):
        strategy.prepare_model(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    monkeypatch.setenv(CHECK_VARIABLE, repr(1.05 * (max(sizes) + sum(sizes)) / 2**30))
    strategy.prepare_model(model)


@pytest.mark.parametrize("accumulates", [False, True])
def test_too_little_memory_for_state_and_gradients_is_refused_before_backward(
    accumulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would have room, and the host has none for both. A sum in fp32 needs twice as much as a gradient."""
    strategy, model, optimizer = made(HOST, make_llama(), lr=1e-2)
    words = torch.arange(8)[None]
    loss = model(input_ids=words, labels=words).loss
    weights = sum(parameter.nbytes for parameter in model.parameters())  # in bf16: state has five times as much
    monkeypatch.setenv(CHECK_VARIABLE, repr((5.5 + accumulates) * weights / 2**30))
    with (
        strategy.accumulate(model, last=not accumulates),
        pytest.raises(HostMemoryError, match=r"^optimizer state and gradients on the host: .* Lower it"),
    ):
        optimizer.backward(loss)
    visits = PreparedModel.of(model).weight_visits
    assert visits is not None
    assert all(group.fields == [group.weights] for group in visits.weights.groups)
    monkeypatch.setenv(CHECK_VARIABLE, repr((6.5 + accumulates) * weights / 2**30))
    with strategy.accumulate(model, last=not accumulates):
        optimizer.backward(loss)
    optimizer.step()
    optimizer.close()


SCRIPT = """
import sys, threading
import torch
from transformers import AutoConfig, LlamaForCausalLM
from lightstep import Strategy

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024

folder, how = sys.argv[1:]
config = AutoConfig.from_pretrained(folder)
strategy = Strategy.load({"sharding": {"kind": "single"}, "weights": {"placement": "host"}})
torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
before, most, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.0005):
        most[0] = max(most[0], anonymous())
watching = threading.Thread(target=watch)
watching.start()
if how == "meta":
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = strategy.prepare_model(model, weights=folder)
else:
    model = strategy.prepare_model(LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
done.set()
watching.join()
print(max(most[0], anonymous()) - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc")
@pytest.mark.parametrize("how", ["meta", "from_pretrained"])
def test_the_peak_is_the_weights_and_a_tensor(how: str, tmp_path: Path) -> None:
    """Peak anonymous memory of a child process, which reads the files as pages of the system's cache."""
    changes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 3}
    model = make_llama(vocab_size=2048, tie_word_embeddings=True, **changes).bfloat16()
    largest = max(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="25MB")
    del model
    done = python("-c", SCRIPT, str(tmp_path), how, cwd=Path.cwd(), imported="transformers.trainer")
    assert done.returncode == 0, done.stderr
    peak, weights = map(int, done.stdout.split()[-2:])
    assert weights > 8 * largest
    # One tensor as it is read, whole huge pages for each of the slabs, and what modules that are imported now take.
    assert weights <= peak <= weights + 2 * largest + (30 << 20), (peak / weights, peak - weights, largest)


def test_the_command_loads_it_so(configured: Any, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "pretrained"
    keys = {key: value for key, value in MODEL.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **keys)).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    text.write_text("red green blue " * 400)
    outcomes = []
    for name, strategy in (("device", DEVICE), ("host", HOST)):
        config: TrainConfig = configured(name=name, model=str(folder), strategy=strategy)
        if name == "host":
            monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded whole"))
        outcome, _ = _train(config)
        outcomes.append((outcome.losses, outcome.validation_before, outcome.validation_after))
    assert outcomes[0] == outcomes[1]


def test_each_weight_has_a_storage_of_its_own() -> None:
    """Savers take tensors that share one for tied weights."""
    model = Strategy.load(HOST).prepare_model(make_llama())
    assert PreparedModel.of(model).weight_visits is not None
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert [s.nbytes() for s in storages] == [parameter.nbytes for parameter in model.parameters()]
