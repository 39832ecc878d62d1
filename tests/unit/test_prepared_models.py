"""Prepared models: whoever reads a parameter, by any way, gets an updated one; what was never prepared is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, parametrize
from torch.optim.swa_utils import AveragedModel

import lightstep
from lightstep import ConfigError
from lightstep.optimizer import queue
from lightstep.sharding.parameter_reads import AwaitedParameters, DeferredUpdates, await_reads
from lightstep.sharding.prepared_model import PreparedModel
from tests.distributed.models import TinyTransformer
from tests.training import Training, made
from tests.unit.test_next_forward import OVERLAP

RESIDENT = {"backend": "resident"}


@pytest.fixture
def nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are updated when somebody waits for them, and no sooner: who does not wait reads old weights."""
    monkeypatch.setattr(queue, "SUBMIT_IN_STEP", 0)
    monkeypatch.setattr(queue, "SUBMIT_AHEAD", 0)


class EarlyExit(TinyTransformer):
    """Leaves the last block out when it evaluates, and reads the head's weight as fused cross entropies do."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for block in list(self.blocks)[: None if self.training else -1]:
            hidden = block(hidden)
        return functional.linear(hidden, self.head.weight, self.head.bias)


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def dumped(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return named(torch.load(file, weights_only=False))


def averaged(model: nn.Module) -> dict[str, Tensor]:
    average = AveragedModel(model)
    average.update_parameters(model)
    return named(average.module)


READERS: dict[str, Callable[[nn.Module], Any]] = {
    "attribute": lambda model: {"head.weight": model.head.weight},
    "get_parameter": lambda model: {"head.weight": model.get_parameter("head.weight")},
    "named_parameters": named,
    "backwards": lambda model: dict(reversed(list(model.named_parameters()))),
    "state_dict": lambda model: dict(model.state_dict()),
    "state_dict of a part": lambda model: {f"head.{key}": value for key, value in model.head.state_dict().items()},
    "copied dictionary": lambda model: {"weight": dict(model.head._parameters)["weight"]},
    "vector": lambda model: {"all": parameters_to_vector(model.parameters())},
    "deepcopy": lambda model: named(copy.deepcopy(model)),
    "pickle": lambda model: named(pickle.loads(pickle.dumps(model))),
    "torch.save": dumped,
    "AveragedModel": averaged,
    "to": lambda model: named(model.to(torch.float64)),
    "EMA": lambda model: {name: torch.zeros_like(p).lerp_(p.detach(), 0.5) for name, p in model.named_parameters()},
    "functional_call": lambda model: {
        "logits": torch.func.functional_call(model, {}, (torch.tensor([[1, 2]]),)),
    },
}


def saved(training: Training) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        training.strategy.save_checkpoint(f"{folder}/a", training.model, training.optimizer)
        other = Training(RESIDENT)
        other.strategy.load_checkpoint(f"{folder}/a", other.model, other.optimizer)
        return other.snapshot()


def after(do: Callable[[Training], Any]) -> Callable[[Training], Any]:
    """What is in memory then: the parameters are known from before."""

    def read(training: Training) -> dict[str, Tensor]:
        known = training.known  # type: ignore[attr-defined]
        do(training)
        return {name: parameter.detach().clone() for name, parameter in known.items()}

    return read


OF_A_RUN: dict[str, Callable[[Training], Any]] = {
    "an entry": lambda training: {"exp_avg": training.optimizer.state[training.known["head.weight"]]["exp_avg"]},
    "optimizer.state_dict": lambda training: training.optimizer.state_dict()["state"][0],
    "save": saved,
    "unwrap_model": after(lambda training: training.strategy.unwrap_model(training.model)),
    "evaluate": after(lambda training: training.loss(7)),
    "synchronize": after(lambda training: training.optimizer.synchronize()),
    "backward": after(lambda training: training.optimizer.backward(training.loss(7))),
    "load_state_dict": after(lambda training: training.model.load_state_dict(training.model.state_dict())),
}


@pytest.mark.parametrize("name", [*READERS, *OF_A_RUN])
def test_a_reader_gets_updated_parameters(name: str, nothing_by_itself: None) -> None:
    read = OF_A_RUN.get(name, lambda training: READERS[name](training.model))
    expected, tested = Training(RESIDENT), Training(OVERLAP)
    for training in (expected, tested):
        training.known = dict(training.model.named_parameters())  # type: ignore[attr-defined]
        training.train(3)
    assert tested.optimizer.has_deferred_updates
    wanted, found = read(expected), read(tested)
    assert wanted.keys() == found.keys()
    assert [key for key in wanted if not torch.equal(wanted[key].detach(), found[key].detach())] == []


def test_a_block_left_out_and_a_head_that_is_never_called(nothing_by_itself: None) -> None:
    losses = []
    for state in (RESIDENT, OVERLAP):
        training = Training(state, make=EarlyExit)
        training.train(3)
        training.model.eval()
        with torch.no_grad():
            losses.append(training.loss().item())
    assert losses[0] == losses[1]


def test_a_module_of_two_models_waits_for_the_optimizers_of_both(nothing_by_itself: None) -> None:
    found = []
    for state in (RESIDENT, OVERLAP):
        training = Training(state)
        body = training.strategy.create_optimizer(training.model.blocks, lr=1e-2)
        for group in training.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in {*training.model.head.parameters()}]
        for _ in range(3):
            training.optimizer.backward(training.loss())
            body.step()
            training.optimizer.step()
        found.append(copy.deepcopy(named(training.model)))
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_copies_have_plain_dictionaries() -> None:
    training = Training(OVERLAP)
    training.train(2)
    assert type(training.model.head._parameters) is AwaitedParameters
    for other in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        assert {type(module._parameters) for module in other.modules()} == {dict}
        assert type(training.model.head._parameters) is AwaitedParameters
        other(torch.tensor([[1]]))


def test_nothing_is_put_into_models_whose_updates_are_not_deferred() -> None:
    training = Training(RESIDENT)
    training.train(1)
    assert {type(module._parameters) for module in training.model.modules()} == {dict}
    assert not any(module._forward_pre_hooks for module in training.model.modules())


def test_hooks_go_with_the_last_optimizer_and_nothing_keeps_the_model() -> None:
    training = Training(OVERLAP)
    training.train(2)
    training.optimizer.synchronize()
    model, reference = training.model, weakref.ref(training.model)
    training.optimizer = None
    gc.collect()
    assert not any(module._forward_pre_hooks for module in model.modules())
    record = weakref.ref(PreparedModel.of(model))
    del training, model
    gc.collect()
    assert reference() is None and record() is None


def test_compiled_code_reads_without_interruption() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    await_reads(list(model.modules()), DeferredUpdates())
    assert type(model[0]._parameters) is AwaitedParameters
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs), expected)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(compiled(inputs), model(inputs)) and not torch.equal(model(inputs), expected)


# -- what was never prepared


def test_one_record_from_every_side() -> None:
    strategy = lightstep.Strategy.load("resident")
    model = strategy.prepare_model(TinyTransformer())
    compiled = torch.compile(model, backend="eager")
    assert PreparedModel.of(compiled) is PreparedModel.of(model) and PreparedModel.of(model).role == "trainer"
    assert PreparedModel.of(copy.deepcopy(model)) is not PreparedModel.of(model)


def trained_once(strategy: lightstep.Strategy, model: nn.Module) -> None:
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    dtype = next(model.parameters()).dtype
    optimizer.backward(model(torch.ones(2, 4, dtype=dtype)).float().sum())
    optimizer.step()


@pytest.mark.parametrize("name", ["resident", "stream", "stream-overlap", "fp16", "bulk"])
def test_an_unprepared_model_is_refused_before_it_trains_in_another_dtype(name: str) -> None:
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"Linear was never prepared: its weights are torch\.float32.*prepare_model"):
        trained_once(lightstep.Strategy.load(name), model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_preparing_in_place_is_enough() -> None:
    strategy, model = lightstep.Strategy.load("stream"), nn.Linear(4, 4)
    strategy.prepare_model(model)
    trained_once(strategy, model)
    trained_once(strategy, nn.Linear(4, 4).bfloat16())  # cast by hand
    trained_once(lightstep.Strategy.load("fp32"), nn.Linear(4, 4))


# -- masters start from what was given


def initial_masters(model: nn.Module) -> dict[str, Tensor | None]:
    record = PreparedModel.of(model)
    return {name: record.initial_master(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["resident", "stream", "fp16"])
def test_fp32_values_are_kept_until_an_optimizer_takes_them(name: str) -> None:
    model = TinyTransformer()
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    prepared = lightstep.Strategy.load(name).prepare_model(model)
    with torch.no_grad():
        prepared.head.weight[0, 0] += 1
    trained = {name: p.requires_grad for name, p in prepared.named_parameters()}
    assert not all(trained.values())
    for key, master in initial_masters(prepared).items():
        if not trained[key] or key == "head.weight":
            assert master is None
        else:
            assert master is not None and torch.equal(master, given[key])
    assert set(initial_masters(prepared).values()) == {None}  # they are the optimizer's now


@pytest.mark.filterwarnings("ignore:.*master_weights")
def test_nothing_is_kept_where_nothing_was_rounded_or_no_master_is_wanted() -> None:
    for values, model in (
        ("resident", TinyTransformer().bfloat16()),
        ("fp32", TinyTransformer()),
        ({"precision": {"master_weights": False}}, TinyTransformer()),
    ):
        assert set(initial_masters(lightstep.Strategy.load(values).prepare_model(model)).values()) == {None}
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    assert set(initial_masters(lightstep.Strategy.load("resident").prepare_model(meta)).values()) == {None}
    reference = lightstep.Strategy.load("resident").prepare_model(TinyTransformer(), role="reference")
    assert set(initial_masters(reference).values()) == {None}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_folder_with_other_values_for_tied_weights_is_refused(tmp_path: Path) -> None:
    values = {"embed.weight": torch.zeros(5, 4), "head.weight": torch.ones(5, 4)}
    save_file(values, tmp_path / "model.safetensors")
    strategy = lightstep.Strategy.load("fp32")
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight have different values, and the model ties"):
        strategy.prepare_model(Tied(), weights=tmp_path)
    save_file({name: torch.ones(5, 4) for name in values}, tmp_path / "model.safetensors")
    assert bool((strategy.prepare_model(Tied(), weights=tmp_path).head.weight == 1).all())


def test_quantised_weights_are_refused_and_unused_ones_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "weight_scale_inv": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors")
    strategy = lightstep.Strategy.load("fp32")
    strategy.prepare_model(nn.Linear(2, 2), weights=tmp_path)
    assert "1 of the 3 tensors in" in caplog.text and "were not loaded: weight_scale_inv" in caplog.text
    for dtype in (torch.float8_e4m3fn, torch.int8):
        save_file({**weights, "weight": torch.ones(2, 2).to(dtype)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="weight is quantised"):
            strategy.prepare_model(nn.Linear(2, 2), weights=tmp_path)


def test_masters_start_from_the_fp32_weights_of_a_folder(tmp_path: Path) -> None:
    saved = TinyTransformer()
    save_file({key: value.contiguous() for key, value in saved.state_dict().items()}, tmp_path / "model.safetensors")
    model = lightstep.Strategy.load("resident").prepare_model(TinyTransformer(), weights=tmp_path)
    for name, master in initial_masters(model).items():
        given = saved.get_parameter(name)
        assert (master is None) if not given.requires_grad else torch.equal(master, given)


# -- readers that come by other ways: another module, another thread


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


class HeadLoss(nn.Module):
    """As fused cross entropies that keep the head's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def trained() -> tuple[nn.Module, Any]:
    """After a first step, which makes state; lanes are slow from here on."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    _, model, optimizer = made({"optimizer_state": OVERLAP}, model, lr=1e-2)
    step(model, optimizer)
    optimizer._backend.lanes.delay = lambda lane: time.sleep(0.01)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
    optimizer.step()


@pytest.mark.parametrize("parametrized", [True, False])
def test_a_module_of_later_reads_what_is_up_to_date(parametrized: bool) -> None:
    """A parametrization of the model's layer, or a module beside the model."""
    model, optimizer = trained()
    if parametrized:
        parametrize.register_parametrization(model[3], "weight", Halved())
    reader = model[3] if parametrized else HeadLoss(model[3].weight)
    step(model, optimizer)
    found = reader.weight.detach().clone()
    optimizer.synchronize()
    assert torch.equal(found, model[3].weight)


def test_a_read_while_another_thread_collects_the_optimizer() -> None:
    for _ in range(3):
        model, optimizer = trained()
        step(model, optimizer)
        optimizer.me = optimizer
        gc.disable()
        del optimizer
        collector = threading.Thread(target=gc.collect)
        collector.start()
        time.sleep(0.01)
        found = model[3].weight.detach().clone()
        collector.join()
        gc.enable()
        assert torch.equal(found, model[3].weight)


def test_what_a_deleted_optimizer_has_left_is_done_before_a_forward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last block there may be compiled code, whose reads nobody sees."""
    model, optimizer = trained()
    monkeypatch.setattr(DeferredUpdates, "shut_down_orphaned", lambda self: None)  # another thread would do it
    step(model, optimizer)
    weight, before = model[3].weight, optimizer.engine.queue
    del optimizer
    assert before.pending
    PreparedModel.of(model).gates._updates.wait()
    assert not before.pending and torch.isfinite(weight).all()


def test_buffers_that_a_folder_does_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.BatchNorm1d(2)
    save_file(
        {"weight": torch.ones(2), "bias": torch.ones(2), "running_mean": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    lightstep.Strategy.load("fp32").prepare_model(model, weights=tmp_path)
    assert f"{tmp_path} has no running_var, num_batches_tracked: these buffers keep" in caplog.text
    assert "were not loaded" not in caplog.text
