"""Roles without other processes: the colocated rollout, engines, transports, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep import ConfigError, RolloutEngine, Strategy, TransformersEngine, WeightInfo, WeightTransferError
from lightstep.rollout.transport import buckets_of, refuse_mismatch
from lightstep.trainer.session import join
from tests.reference.tiny_llama import make_llama
from tests.reference.tiny_model import TinyModel, loss_of
from tests.unit.test_publishing import Slow

FP32 = torch.float32


def llama() -> nn.Module:
    return make_llama(tie_word_embeddings=True, pad_token_id=0)


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# -- a rollout beside the trainer -------------------------------------------------------------------------------------


def test_a_colocated_engine_generates_with_the_weights_of_the_last_step() -> None:
    strategy = Strategy.load("stream-overlap", overrides={"roles.rollout.parameters": "float32"})
    model = strategy.prepare_model(llama)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    engine = TransformersEngine(strategy.prepare_model(llama, role="rollout"))
    assert (strategy.role, engine.version, strategy.fsdp_version(engine.model)) == ("trainer", None, 0)
    prompts = torch.randint(1, 48, (2, 5))
    for version in (1, 2):
        optimizer.backward(model(input_ids=prompts, labels=prompts).loss)
        optimizer.step()
        with strategy.release_device_memory():
            assert strategy.publish_weights(model, to=engine) == version == engine.version
            tokens = engine.generate(input_ids=prompts, max_new_tokens=3, do_sample=False)
        assert tokens.shape == (2, 8)
        for name, tensor in engine.model.state_dict().items():
            assert tensor.dtype == FP32 and torch.equal(tensor, model.state_dict()[name].float()), name
    with pytest.raises(ConfigError, match="a rollout model: it holds the inference weights and nothing else"):
        strategy.create_optimizer(engine.model)


def test_an_engine_follows_its_models_tensors() -> None:
    strategy = Strategy.load("fp32")
    trained = strategy.prepare_model(TinyModel())
    engine = TransformersEngine(strategy.prepare_model(TinyModel(), role="rollout"))
    engine.model.load_state_dict(bits(engine.model), assign=True)  # other tensors with the same values
    strategy.publish_weights(trained, to=engine)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], tensor), name


def test_a_reference_model_is_there_for_forwards_alone() -> None:
    strategy = Strategy.load("resident")
    reference = strategy.prepare_model(TinyModel, role="reference")
    assert loss_of(reference, 0).grad_fn is None and not reference.training
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    for call in (lambda: strategy.create_optimizer(reference), lambda: strategy.publish_weights(reference)):
        with pytest.raises(ConfigError, match="this TinyModel is a reference model"):
            call()


def test_publishing_to_nobody_and_receiving_without_workers() -> None:
    strategy = Strategy.load("resident")
    model = strategy.prepare_model(TinyModel)
    with pytest.raises(ConfigError, match=r"publish_weights\(model, to=engine\)"):
        strategy.publish_weights(model)
    with pytest.raises(TypeError, match="to is of type TinyModel"):
        strategy.publish_weights(model, to=model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"TransformersEngine\(model\)"):
        strategy.receive_weights(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="for ranks whose role is 'rollout'"):
        strategy.receive_weights(TransformersEngine(TinyModel()))
    with pytest.raises(ValueError, match="version is -1"):
        strategy.publish_weights(model, to=TransformersEngine(TinyModel()), version=-1)
    with pytest.raises(ValueError, match=r"\[3\] are no rollout workers"):
        strategy.drop_rollout_workers([3])


def test_another_model_than_the_engine_has_is_refused_before_anything_is_written() -> None:
    strategy = Strategy.load("fp32")
    model, other = strategy.prepare_model(llama), strategy.prepare_model(TinyModel, role="rollout")
    engine, before = TransformersEngine(other), bits(other)
    with pytest.raises(
        WeightTransferError, match=r"model.embed_tokens.weight .* unknown to the engine.*nothing was wri"
    ):
        strategy.publish_weights(model, to=engine)
    assert engine.complete and all(torch.equal(tensor, before[name]) for name, tensor in bits(other).items())


# -- other engines and transports -------------------------------------------------------------------------------------


class Loader(RolloutEngine):
    """As an engine with a ``load_weights`` of its own: takes any names, each of them once."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.calls, self.finished, self._fails_at = 0, 0, fails_at

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls += 1
        if self.calls == self._fails_at:
            raise OSError("no room")
        self.loaded |= {name: tensor.clone() for name, tensor in weights}

    def finish_loading(self) -> None:
        self.finished += 1


def test_an_engine_that_loads_names_and_tensors() -> None:
    strategy = Strategy.load("resident")
    model, engine = strategy.prepare_model(llama), Loader()
    strategy.publish_weights(model, to=engine, version=41)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]  # tied: goes by its first name
    assert list(engine.loaded) == names and engine.finished == 1
    assert engine.calls == 2 + 2, "layer by layer: embedding, two blocks, norm"
    assert all(torch.equal(engine.loaded[name], model.state_dict()[name]) for name in names)
    assert (engine.version, strategy.publish_weights(model, to=engine)) == (41, 42)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_engine_with_half_of_a_set_generates_after_a_complete_one(fails_at: int) -> None:
    """The first bucket may have been loaded in part."""
    strategy = Strategy.load("resident")
    model, engine = strategy.prepare_model(llama), Loader(fails_at)
    with pytest.raises(WeightTransferError, match="OSError: no room"):
        strategy.publish_weights(model, to=engine)
    assert not engine.complete and engine.version is None and engine.finished == 0
    with pytest.raises(WeightTransferError, match="half of a set"):
        engine.check_complete()
    strategy.publish_weights(model, to=engine)
    engine.check_complete()


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        (None, ["begin", "send", "send", "send", "send", "finish"]),
        ("begin", ["begin", "abort"]),
        ("send", ["begin", "send", "abort"]),
        ("finish", ["begin", "send", "send", "send", "send", "finish", "abort"]),
    ],
)
def test_a_transport_of_ones_own(fails: str | None, calls: list[str]) -> None:
    strategy, transport = Strategy.load("resident"), Slow(fails_at=fails)
    transport.go.set()
    model = strategy.prepare_model(llama)
    before = bits(model)
    if fails is None:
        assert strategy.publish_weights(model, to=transport) == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in transport.received[1].items())
        assert before.keys() - transport.received[1].keys() == {"lm_head.weight"}, "a tied one goes by its first name"
    else:
        with pytest.raises(WeightTransferError, match="TimeoutError: the server is gone"):
            strategy.publish_weights(model, to=transport)
    assert transport.calls == calls
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(model).items())


def info(name: str, elements: int = 4, dtype: torch.dtype = FP32) -> WeightInfo:
    return WeightInfo(tuple(name.split("=")), (elements,), dtype)


def test_buckets_end_with_their_layer_and_at_the_limit() -> None:
    infos = [info("a", 1), info("b", 2), info("c", 2), info("d", 9), info("e", 1), info("f", 1)]
    found = buckets_of(infos, ["x", "x", "x", "x", "x", "y"], limit=16)
    assert [[one.name for one in bucket] for bucket in found] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]


@pytest.mark.parametrize(
    ("offered", "expected", "message"),
    [
        (["a"], ["a", "b"], "the engine has b float32[4], which is not published"),
        (["a", "b"], ["a"], "b float32[4] is published and unknown to the engine"),
        (["a", "b"], ["a=b"], "a and b are published, and are one tensor in the engine"),
        (["a=b"], ["a", "b"], None),
        (["a=b"], ["b"], None),
        (["a=b"], ["b=a"], None),
    ],
)
def test_names_are_compared_with_what_is_tied(offered: list[str], expected: list[str], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        refuse_mismatch([info(name) for name in offered], [info(name) for name in expected])


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"mode": "async"}, "lightstep train has nothing to generate"),
        ({"servers": {"kind": "sglang", "urls": ["http://host"]}}, r"rollout.servers is set.* publishes to nobody"),
    ],
)
def test_training_from_a_file_is_without_rollouts(rollout: dict[str, Any], message: str) -> None:
    strategy = Strategy.load("fsdp2", overrides={"roles.rollout": rollout})
    with pytest.raises(ConfigError, match=message):
        join(strategy)


# -- the strategy file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"roles": {"rollout": {"ranks": 1}}}, "rollout ranks 1 with mode sync"),
        ({"roles": {"rollout": {"timeout_s": 5}}}, "rollout timeout_s 5.0 with mode sync"),
        ({"roles": {"rollout": {"mode": "asynchronous"}}}, "did you mean 'async' or 'sync'"),
        ({"roles": {"rollout": {"mode": "async", "ranks": []}}}, "at least one rank is needed"),
        ({"roles": {"rollout": {"mode": "async", "ranks": [1, 1]}}}, "each once"),
        ({"roles": {"rolout": {}}}, "unknown key 'roles.rolout'"),
    ],
)
def test_roles_that_are_refused_in_a_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="roles") as error:
        Strategy.load(values)
    assert message in str(error.value)


def test_roles_need_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    strategy = Strategy.load({"roles": {"rollout": {"mode": "async"}}})
    with pytest.raises(ConfigError, match="needs a process for each worker, and torchrun did not start this one"):
        strategy.prepare_model(TinyModel)
    with pytest.raises(ConfigError, match=r"roles.rollout.ranks is 1 and 1 is running"):
        _ = strategy.role
