"""What people do to an optimizer between steps: edit weights, state and groups, freeze, cast, give a batch up."""

from __future__ import annotations

import collections
import copy
import gc
import io
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightstep.optimizer.managed_parameters import ManagedParameters
from tests import training
from tests.covering import every_value
from tests.reference.own_classes import FailingOnce
from tests.reference.pair import BACKENDS, EVERY_TIME, IN_BACKWARD, TWO_GROUPS, Pair
from tests.reference.tiny_model import representable
from tests.training import OnVectors, made

backends = pytest.mark.parametrize("backend", ["resident", "stream"])


def small_model() -> nn.Module:
    return representable(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)))


class Setup(OnVectors):
    """A small model under one strategy, which is not told of micro-batches."""

    def __init__(self, backend: str = "resident", parameters: str = "bfloat16", **settings: Any) -> None:
        defaults = {"state": EVERY_TIME[backend], "clipping": {"max_norm": None}, "make": small_model}
        super().__init__(parameters=parameters, **{**defaults, **settings})

    def backward(self, number: int, parts: int = 1) -> None:
        self.steps = number
        for part in range(parts):
            self.optimizer.backward(self.loss(part) / parts)

    def train(self, *numbers: int) -> Setup:  # type: ignore[override]
        for number in numbers:
            self.backward(number)
            assert self.optimizer.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


def assert_same(tested: Setup, expected: Setup) -> None:
    training.assert_same(tested.snapshot(), expected.snapshot())


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


# -- what leaves no trace


def look_under_other_weights(setup: Setup, folder: Path) -> None:
    """As averages of weights are swapped in and out."""
    stored = copy.deepcopy(setup.model.state_dict())
    halve(setup.model)
    setup.strategy.save_checkpoint(folder / "averages", setup.model, setup.optimizer)
    assert all(len(state) > 1 for state in setup.optimizer.state.values()) and setup.optimizer.state_dict()
    setup.model.load_state_dict(stored)


def cast_to_fp64(setup: Setup, _: Path) -> None:
    setup.model.double()
    setup.model[0].weight.grad = torch.zeros_like(setup.model[0].weight)
    with pytest.raises(TypeError, match="float64; bfloat16, float16 and float32"):
        setup.optimizer.step()
    setup.model.bfloat16()
    setup.optimizer.zero_grad()


def add_to_a_measured_norm(setup: Setup, _: Path) -> None:
    setup.backward(1)
    setup.optimizer.grad_norm()
    setup.model(torch.ones(1, 6, dtype=torch.bfloat16)).float().mean().backward()
    with pytest.raises(RuntimeError, match="between grad_norm"):
        setup.optimizer.step()
    setup.optimizer.zero_grad()


def step_while_frozen(setup: Setup, _: Path) -> None:
    setup.model.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"no gradient on any of [04] parameters"):
        assert setup.optimizer.step()
    with pytest.warns(UserWarning, match="no gradient"):
        assert setup.optimizer.grad_norm() == 0
    setup.optimizer.zero_grad()
    setup.model.requires_grad_(True)


def assign(name: str, value: Any, error: type[Exception], words: str) -> Callable[[Setup, Path], None]:
    def assigned(setup: Setup, _: Path) -> None:
        with pytest.raises(error, match=words):
            setattr(setup.optimizer, name, value)

    return assigned


AFTER_A_STEP = [
    step_while_frozen,
    look_under_other_weights,
    cast_to_fp64,
    add_to_a_measured_norm,
    assign("max_norm", -1.0, ValueError, "a positive number is needed"),
    assign("max_norm", True, ValueError, "a positive number is needed"),
    assign("loss_scale", "dynamic", TypeError, "DynamicLossScale"),
    assign("norm_type", math.inf, AttributeError, "make a new optimizer"),
    assign("clip_layers", True, AttributeError, "make a new optimizer"),
]


@every_value(
    backend=["resident", "stream", "stream-overlap"],
    moment=[(0, step_while_frozen), *((1, act) for act in AFTER_A_STEP)],
)
def test_what_leaves_no_trace(backend: str, moment: tuple[int, Callable[[Setup, Path], None]], tmp_path: Path) -> None:
    """What is refused, given up or taken back: training goes on with the bits of one that saw none of it."""
    steps, act = moment
    setup, expected = (
        Setup(state=EVERY_TIME[backend], clipping={"max_norm": 1.0}).train(*range(steps)) for _ in range(2)
    )
    act(setup, tmp_path)
    assert_same(setup.train(1, 2), expected.train(1, 2))


@every_value(kind=[*EVERY_TIME, *IN_BACKWARD], parameters=["bfloat16", "float32"])
def test_a_parameter_of_another_shape_starts_anew_or_is_refused(kind: str, parameters: str) -> None:
    """As ``resize_token_embeddings`` of transformers does it: other data in the same parameter."""
    state = {**EVERY_TIME, **IN_BACKWARD}[kind]
    setup, expected = (Setup(parameters=parameters, state=state).train(0, 1) for _ in range(2))
    setup.optimizer.synchronize()
    last = setup.model[2]
    small = last.weight.data, last.bias.data
    last.weight.data, last.bias.data = (torch.cat([data, data[:2]]) for data in small)
    with pytest.raises(ValueError, match=r"2.weight has shape \(5, 40\) now .* state has \(3, 40\)"):
        setup.train(2)
    setup.optimizer.zero_grad()
    large = last.weight.data, last.bias.data
    last.weight.data, last.bias.data = small
    assert_same(setup.train(2), expected.train(2))
    last.weight.data, last.bias.data = (data.clone() for data in large)
    for parameter in last.parameters():
        del setup.optimizer.state[parameter]
    setup.train(3).optimizer.synchronize()
    assert setup.optimizer.state[last.weight]["exp_avg"].shape == (5, 40)
    assert float(setup.optimizer.state[last.weight]["step"]) == 1
    assert float(setup.optimizer.state[setup.model[0].weight]["step"]) == 4
    assert not torch.equal(last.bias[3:], large[1][3:])


@every_value(backend=BACKENDS, to=[torch.float32, torch.float16])
def test_state_may_be_read_between_a_cast_and_the_next_step(backend: str, to: torch.dtype) -> None:
    pair = Pair(*TWO_GROUPS["AdamW"], backend=backend)
    pair.train(2)
    pair.model.to(to)
    assert len(pair.optimizer.state_dict()["state"]) == len(pair.optimizer.state) > 5
    for parameter, entries in pair.optimizer.state.items():
        assert entries["master"].shape == entries["exp_avg"].shape == parameter.shape


def test_weights_of_before_a_cast_take_no_memory() -> None:
    setups, before = [], {}
    for kind, state in {**EVERY_TIME, **IN_BACKWARD}.items():
        setup = Setup(state=state).train(0, 1)
        setup.optimizer.synchronize()
        before[kind] = [weakref.ref(item) for item in setup.optimizer.managed()]
        setup.model.float()
        setup.train(2, 3).optimizer.synchronize()
        setups.append(setup)
    gc.collect()
    assert [kind for kind, items in before.items() if any(item() for item in items)] == []


@every_value(backend=BACKENDS, parameters=["bfloat16", "float32"])
def test_a_model_that_is_moved_keeps_its_state(backend: str, parameters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one device here: what the optimizer knows says that the weights were on another one.

    Their old memory has no elements there, so the state is read before.
    """
    setup, expected = Setup(backend, parameters).train(0, 1), Setup(backend, parameters).train(0, 1)
    setup.optimizer.synchronize()
    store, old = setup.optimizer._backend, setup.optimizer.managed()
    state = {item: store.gather(item) for item in old}
    monkeypatch.setattr(store, "gather", lambda item: state.get(item) or type(store).gather(store, item))
    monkeypatch.setattr(store, "_device", torch.device("meta"))
    for item in old:
        item.local = item.local.to("meta")
    assert_same(setup.train(2, 3), expected.train(2, 3))


def test_a_model_on_two_devices_is_refused_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, expected = Setup("stream").train(0, 1), Setup("stream").train(0, 1)
    item = setup.optimizer.managed()[0]
    here, item.local = item.local, item.local.to("meta")
    setup.backward(2)
    register = setup.optimizer._backend.register

    def on_two(managed: Sequence[Any]) -> None:
        managed[-1].local, local = managed[-1].local.to("meta"), managed[-1].local
        try:
            register(managed)
        finally:
            managed[-1].local = local

    with monkeypatch.context() as patch:
        patch.setattr(setup.optimizer._backend, "register", on_two)
        patch.setattr(setup.optimizer._backend, "gather", lambda item: {})
        with pytest.raises(ValueError, match=r"parameters are on cpu, meta; .* needs all of them on one device"):
            setup.optimizer.step()
    item.local = here
    assert setup.optimizer.step()
    expected.train(2)
    assert_same(setup.train(3), expected.train(3))


# -- state


@backends
def test_entries_are_a_mapping(backend: str) -> None:
    setup = Setup(backend).train(0)
    entries = setup.optimizer.state[setup.model[0].bias]
    entries.setdefault("exp_avg", None)
    assert entries.pop("nothing", 7) == 7
    entries |= {"exp_avg": torch.zeros(40)}
    assert not setup.optimizer.state[setup.model[0].bias]["exp_avg"].any()
    entries.clear()
    assert setup.model[0].bias not in setup.optimizer.state


@backends
def test_assigning_an_empty_mapping_resets_all_state(backend: str) -> None:
    setup = Setup(backend).train(0, 1)
    setup.optimizer.state = collections.defaultdict(dict)
    assert len(setup.optimizer.state) == 0 and setup.optimizer.state_dict()["state"] == {}
    setup.train(2)
    assert float(setup.optimizer.state[setup.model[0].weight]["step"]) == 1
    assert len(setup.optimizer.state_dict()["state"]) == 4


def resume(way: str, original: Setup, resumed: Setup, folder: Path) -> Setup:
    if way == "deepcopy":
        resumed.model, resumed.optimizer = copy.deepcopy((original.model, original.optimizer))
    elif way == "state_dict":
        resumed.model.load_state_dict(original.model.state_dict())
        resumed.optimizer.load_state_dict(original.optimizer.state_dict())
    else:
        original.strategy.save_checkpoint(folder / "saved", original.model, original.optimizer)
        resumed.strategy.load_checkpoint(folder / "saved", resumed.model, resumed.optimizer)
    return resumed


WITHOUT: dict[str, dict[str, Any]] = {
    "masters, AdamW": {"master_weights": False, "lr": 1e-2},
    "masters, SGD": {"master_weights": False, "optimizer_class": torch.optim.SGD, "lr": 1e-2, "momentum": 0.9},
    "masters, RMSprop": {"master_weights": False, "optimizer_class": torch.optim.RMSprop, "lr": 1e-2, "momentum": 0.9},
    "state": {"optimizer_class": torch.optim.SGD, "lr": 1e-3},
}


@every_value(backend=BACKENDS, without=WITHOUT, way=["state_dict", "deepcopy", "checkpoint"])
def test_optimizers_without_masters_or_state_survive_load_and_save(
    backend: str, without: str, way: str, tmp_path: Path
) -> None:
    original, *others = (Setup(backend, **WITHOUT[without]) for _ in range(3))
    twice = original.train(*range(5))
    for other in others:
        twice = resume(way, twice, other, tmp_path)
    assert_same(twice.train(*range(5, 11)), original.train(*range(5, 11)))


# -- groups


@backends
def test_a_parameter_does_not_move_to_a_group_of_another_class(backend: str) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters()}, {"params": [model[2].bias], "optimizer_class": torch.optim.SGD}]

    setup, expected = Setup(backend, groups=groups).train(0), Setup(backend, groups=groups).train(0)
    first, second = setup.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())
    with pytest.raises(ValueError, match="bias was moved to a parameter group of SGD, and its state is that of AdamW"):
        setup.train(1)
    first["params"].append(second["params"].pop(0))
    setup.optimizer.step()
    assert_same(setup.train(2), expected.train(1, 2))


def test_numpy_numbers_become_plain_ones(tmp_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters()), "weight_decay": numpy.float32(0.1)}]

    setup = Setup(groups=groups, lr=numpy.float64(1e-2), betas=(numpy.float64(0.9), 0.99)).train(0)
    group = setup.optimizer.param_groups[0]
    assert [type(group[key]) for key in ("lr", "weight_decay")] == [float, float]
    group["lr"] = numpy.float64(1e-3)  # as a home-made schedule would
    buffer = io.BytesIO()
    torch.save(setup.optimizer.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["param_groups"][0]["lr"] == 1e-3
    setup.strategy.save_checkpoint(tmp_path / "saved", setup.model, setup.optimizer)


def test_groups_that_are_refused_as_torch_does() -> None:
    setup = Setup()
    with pytest.raises(TypeError, match="param_group must be a dict"):
        setup.optimizer.add_param_group([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="more than one"):
        setup.optimizer.add_param_group({"params": list(setup.model.parameters())})


def test_one_tensor_is_a_group_and_a_frozen_model_is_counted() -> None:
    setup = Setup(groups=lambda model: model[0].weight)
    assert [len(group["params"]) for group in setup.optimizer.param_groups] == [1]
    setup.model.requires_grad_(False)
    with pytest.raises(ValueError, match="none of the 4 parameters is trainable"):
        setup.strategy.create_optimizer(setup.model, lr=1e-2)


# -- limits


@pytest.mark.parametrize("backend", ["resident", "stream", "stream-in-backward-and-forward"])
def test_a_closed_optimizer_says_so(backend: str) -> None:
    setup = Setup(backend).train(0)
    optimizer = setup.optimizer
    optimizer.close()
    uses = [lambda: setup.backward(1), optimizer.step, optimizer.state_dict]
    uses += [lambda: optimizer.state[setup.model[0].weight], optimizer.release_device_memory]
    for use in [*uses, lambda: optimizer.set_residency(1)]:
        with pytest.raises(RuntimeError, match="is closed"):
            use()


# -- what goes wrong


@every_value(backend=BACKENDS, at=[0, 1])
def test_a_failure_in_the_very_first_step_is_cleared_by_the_state_before_it(
    backend: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightstep.state.store.Store.WHOLE_UNIT", 1)
    monkeypatch.setattr("lightstep.state.units.RingPlan.BULK_UNIT", 1)
    monkeypatch.setattr(FailingOnce, "left", -1)
    setup, expected = (Setup(backend, optimizer_class=FailingOnce, lr=1e-2) for _ in range(2))
    weights, state = setup.weights(), setup.optimizer.state_dict()
    setup.optimizer.managed()  # set-up tries the class out
    setup.backward(0)
    FailingOnce.left = at
    with pytest.raises(RuntimeError, match="the base optimizer fails"):
        setup.optimizer.step()
    FailingOnce.left = -1
    with pytest.raises(RuntimeError, match="half updated"):
        setup.optimizer.step()
    setup.model.load_state_dict(weights)
    setup.optimizer.load_state_dict(state)
    assert_same(setup.train(0, 1), expected.train(0, 1))


def test_a_refused_set_up_changes_nothing_and_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, expected = Setup("stream"), Setup("stream")
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "0.0000001")
    for _ in range(2):
        setup.backward(0)
        with pytest.raises(MemoryError, match=r"optimizer state on the host: 0\.00 GiB .*needed"):
            setup.optimizer.step()
        setup.optimizer.zero_grad()
    monkeypatch.delenv("LIGHTSTEP_HOST_MEMORY_CHECK")
    setup.train(0)
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "0.0000001")
    extra = nn.Parameter(torch.zeros(900, dtype=torch.bfloat16))
    setup.optimizer.add_param_group({"params": [extra]})
    with pytest.raises(MemoryError, match=r"optimizer state on the host: 0\.00 GiB .*needed"):
        setup.optimizer.step()
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "off")
    assert_same(setup.train(1), expected.train(0, 1))


# -- settings


def test_a_norm_to_clip_to_may_be_assigned_and_goes_along_in_copies() -> None:
    setup = Setup(clipping={"max_norm": 1.0}).train(0)
    setup.optimizer.max_norm = 0.25
    assert copy.deepcopy(setup.optimizer).max_norm == 0.25 and setup.optimizer.norm_type == 2.0


# -- all or nothing


@backends
def test_parameters_over_one_storage_are_refused(backend: str) -> None:
    setup = Setup(backend)
    setup.model[0].weight.data = setup.model[2].weight.data.view(3, 40)
    setup.model[2].bias.data = setup.model[0].bias.data[:3]
    for parameter in setup.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        with pytest.raises(ValueError, match="share memory"):
            setup.optimizer.step()


# -- frozen and thawed


def test_state_dicts_whose_groups_hold_no_frozen_parameters_load() -> None:
    setups = []
    for _ in range(2):
        setup = Setup()
        setup.model[0].requires_grad_(False)
        setups.append(setup)
    saved = setups[0].train(0).optimizer.state_dict()
    saved["param_groups"][0]["params"] = [0, 1]  # as earlier versions wrote it
    saved["state"] = {0: saved["state"][2], 1: saved["state"][3]}
    setups[1].model.load_state_dict(setups[0].model.state_dict())
    setups[1].optimizer.load_state_dict(saved)
    assert_same(setups[1].train(1), setups[0].train(1))


def test_names_are_kept_and_loaded_into_an_optimizer_without() -> None:
    named = Setup(groups=lambda model: [{"params": list(model.named_parameters())}]).train(0)
    plain = Setup()
    plain.optimizer.load_state_dict(named.optimizer.state_dict())
    for setup in (named, plain):
        assert setup.optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@backends
def test_a_parameter_that_was_never_updated_is_not_in_the_state(backend: str) -> None:
    """``get`` has the default then, as in torch; ``state[p]`` has ``{}``, or the master that the model came with."""
    setup = Setup(backend)
    first, *_, last = setup.model.parameters()
    assert first not in setup.optimizer.state and setup.optimizer.state.get(first) is None
    for parameter in setup.model.parameters():
        parameter.grad = None if parameter is last else torch.ones_like(parameter)
    setup.optimizer.step()
    assert last not in setup.optimizer.state and setup.optimizer.state.get(last, {}) == {}
    assert set(setup.optimizer.state.get(first)) == {"master", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_sharded_state_may_be_written_to(backend: str) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(6, 3)
        _, model, optimizer = made(
            {"sharding": {"kind": "fsdp2"}, "optimizer_state": {"backend": backend}}, model, lr=1e-2
        )

        def step() -> None:
            optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum())
            optimizer.step()

        step()
        ways: list[Callable[[Any], Any]] = [
            lambda moment: moment,
            lambda moment: moment.detach(),
            lambda moment: moment.to_local(),
            lambda moment: moment.to_local().chunk(2)[0],
        ]
        for number, way in enumerate(ways, 2):
            written = way(optimizer.state[model.weight]["exp_avg"])
            written.fill_(number)
            optimizer.state_dict()  # applies it
            assert (optimizer.state[model.weight]["exp_avg"].to_local()[:2] == number).all()
        step()
        with pytest.raises(RuntimeError, match="Read it again"):
            written.zero_()
        entries = optimizer.state[model.weight]
        entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])
        assert not optimizer.state[model.weight]["exp_avg"].full_tensor().any()
    finally:
        torch.distributed.destroy_process_group()


# -- where weights are not compared with their masters in every step


def load_the_state_of_another_run(setup: Setup) -> None:
    """Its masters belong to other weights."""
    setup.optimizer.load_state_dict(Setup().train(7, 8, 9).optimizer.state_dict())


def load_its_own_state(setup: Setup) -> None:
    setup.optimizer.load_state_dict(copy.deepcopy(setup.optimizer.state_dict()))


def write_in_place(setup: Setup) -> None:
    with torch.no_grad():
        setup.model[0].weight.mul_(0.5)


def replace_a_master(setup: Setup) -> None:
    state = setup.optimizer.state[setup.model[2].weight]
    state["master"] = state["master"] * 2


def give_a_master_and_change_the_weight(setup: Setup) -> None:
    """What the master was rounded to is not the weight any more."""
    weight = setup.model[0].weight
    setup.optimizer.state[weight] = {"master": weight.detach().float() * (1 + 2**-12)}
    write_in_place(setup)


BETWEEN = [load_the_state_of_another_run, load_its_own_state, write_in_place, replace_a_master]


@every_value(backend=BACKENDS, between=[*BETWEEN, give_a_master_and_change_the_weight])
def test_writes_are_found_by_their_versions_too(
    backend: str, between: Callable[[Setup], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator. On a CPU every step finds them by comparing weights with masters."""
    found, look = [], ManagedParameters._look
    for compares in (True, False):
        if not compares:
            monkeypatch.setattr(ManagedParameters, "_look", lambda own, items: look(own, items)._replace(compared=[]))
        setup = Setup(backend)
        if between is not give_a_master_and_change_the_weight:
            setup.train(0, 1)
        between(setup)
        setup.train(2, 3)
        found.append(setup.snapshot())
        setup.optimizer.close()
    training.assert_same(*found)


def deep_copy(setup: Setup) -> None:
    setup.model, setup.optimizer = copy.deepcopy((setup.model, setup.optimizer))


def assign_what_was_read(setup: Setup) -> None:
    for parameter in setup.model.parameters():
        setup.optimizer.state[parameter] = dict(setup.optimizer.state[parameter])


@pytest.mark.parametrize("backend", ["resident", "stream"])
@pytest.mark.parametrize("between", [load_its_own_state, deep_copy, assign_what_was_read])
def test_loaded_state_is_read_as_it_was_loaded_until_its_weights_come(
    backend: str, between: Callable[[Setup], None]
) -> None:
    """Else masters would lose the bits that weights do not have, if state is copied before its weights are loaded."""
    other, setup = Setup(backend).train(7, 8), Setup(backend).train(0, 1)
    saved = other.optimizer.state_dict()
    setup.optimizer.load_state_dict(saved)
    for index, entries in setup.optimizer.state_dict()["state"].items():
        assert torch.equal(entries["master"].cpu(), saved["state"][index]["master"].cpu())
    between(setup)
    setup.model.load_state_dict(other.weights())
    setup.train(2)
    assert_same(setup, other.train(2))


@pytest.mark.parametrize("backend", ["resident", "stream-in-backward-and-forward"])
def test_a_parameter_starts_anew_with_its_master(backend: str) -> None:
    """What docs/streaming.md says: the master is part of the state, and can be assigned again."""
    pair = Pair(*TWO_GROUPS["AdamW"], backend=backend)
    pair.train(3)
    parameter, other = pair.model.head.weight, pair.reference_model.head.weight
    master = pair.optimizer.state[parameter]["master"].clone()
    del pair.optimizer.state[parameter]
    pair.optimizer.state[parameter]["master"] = master
    del pair.reference.optimizer.state[pair.reference.masters[other]]
    pair.train(3)


# -- before the first update a master is what the user gave


@pytest.mark.parametrize("kind", ["resident", "stream-in-backward-and-forward"])
def test_plain_torchs_state_is_that_of_the_weights_that_were_given(kind: str) -> None:
    """It holds no masters."""
    expected = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    reference = torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    def set_gradients(model: nn.Module, value: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)

    set_gradients(expected, 0.25)
    reference.step()
    values = {"clipping": {"max_norm": None}, "optimizer_state": EVERY_TIME[kind]}
    _, model, optimizer = made(values, copy.deepcopy(expected), lr=1e-2, weight_decay=0.1)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for value in (0.125, 0.5):
        set_gradients(expected, value)
        reference.step()
        set_gradients(model, value)
        optimizer.step()
    for parameter, master in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert torch.equal(optimizer.state[parameter]["master"].cpu(), master)


def test_looking_leaves_the_optimizer_free_to_be_sharded() -> None:
    optimizer = Setup(make=lambda: nn.Linear(6, 3)).optimizer
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [0, 1] and all([*own] == ["master"] for own in state["state"].values())
    optimizer.load_state_dict(state)
    assert not optimizer.is_set_up and not optimizer.state
