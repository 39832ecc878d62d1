"""What people do to ``optimizer.state``: write into it, delete and move entries, grow and prune parameters."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import lightstep
from tests.covering import every_value
from tests.reference.own_classes import EachParameter
from tests.reference.pair import BACKENDS, EVERY_TIME, IN_BACKWARD
from tests.training import random_delays

STATES = {**EVERY_TIME, **IN_BACKWARD}
every_time = pytest.mark.parametrize("state", ["resident", "stream-in-backward-and-forward", "stream-in-backward"])
backends = pytest.mark.parametrize("state", ["stream"])
BATCHES = torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(1))

Edit = Callable[[Any, nn.Module], object]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def prepared(
    state: str,
    model: nn.Module | None = None,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    parameters: str = "float32",
    placement: str = "device",
    **settings: Any,
) -> tuple[nn.Module, Any]:
    values = {
        "precision": {"parameters": parameters},
        "clipping": {"max_norm": None},
        "optimizer_state": STATES[state],
        "weights": {"placement": placement},
    }
    strategy = lightstep.Strategy.load(values)
    model = strategy.prepare_model(model or network())
    return model, strategy.create_optimizer(model, optimizer_class, **{"lr": 1e-2, **settings})


def plain(
    model: nn.Module | None = None, optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any
) -> tuple[nn.Module, Any]:
    model = model or network()
    fused = {} if optimizer_class is torch.optim.RMSprop else {"fused": True}
    return model, optimizer_class(model.parameters(), **{"lr": 1e-2, **fused, **settings})


def backward(optimizer: Any, loss: Tensor) -> None:
    optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()


def train(
    model: nn.Module, optimizer: Any, edit: Edit = lambda *_: None, *, steps: int = 6, between: bool = False
) -> list[Tensor]:
    """Trains, and edits before the fourth step: before its backward, or between backward and step."""
    for number in range(steps):
        if number == 3 and not between:
            edit(optimizer, model)
        backward(optimizer, model(BATCHES[number].to(next(model.parameters()).dtype)).float().square().mean())
        if number == 3 and between:
            edit(optimizer, model)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, optimizer)


def weights(model: nn.Module, optimizer: Any) -> list[Tensor]:
    getattr(optimizer, "synchronize", int)()
    return [parameter.detach().clone() for parameter in model.parameters()]


@functools.cache
def unedited(steps: int = 6) -> list[Tensor]:
    """The weights that plain torch trains."""
    return train(*plain(), steps=steps)


def assert_equal(tested: list[Tensor], expected: list[Tensor]) -> None:
    assert [number for number, (a, b) in enumerate(zip(tested, expected, strict=True)) if not torch.equal(a, b)] == []


def first(optimizer: Any, model: nn.Module) -> Any:
    return optimizer.state[model[0].weight]


# -- writes into what was read


def on_moment(write: Callable[[Tensor], object]) -> Edit:
    return lambda optimizer, model: write(first(optimizer, model)["exp_avg"])


def rewrite_rows(moment: Tensor) -> None:
    for row in moment:
        row.mul_(0.5)


def count_again(optimizer: Any, model: nn.Module) -> None:
    first(optimizer, model)["step"] += 5


def reset_all(optimizer: Any, model: nn.Module) -> None:
    for entries in optimizer.state.values():
        for value in entries.values():
            value.zero_()


def assign_elsewhere(optimizer: Any, model: nn.Module) -> None:
    for entries in list(optimizer.state.values()):
        for key, value in list(entries.items()):
            entries[key] = (value * 0.5).to("cpu")


def write_into_two_reads(optimizer: Any, model: nn.Module) -> None:
    one, other = first(optimizer, model)["exp_avg"], first(optimizer, model)["exp_avg"]
    one.zero_()
    other.add_(0.25)
    first(optimizer, model)["exp_avg"].mul_(2)


def write_into_what_was_assigned(optimizer: Any, model: nn.Module) -> None:
    entries = first(optimizer, model)
    given = torch.ones(8, 4)
    entries["exp_avg"] = given
    entries["exp_avg"][0] = 2
    entries["exp_avg_sq"].add_(1e-4)
    given[1] = 3


def write_into_a_whole_state(optimizer: Any, model: nn.Module) -> None:
    entries = {key: value.clone() for key, value in first(optimizer, model).items()}
    optimizer.state[model[0].weight] = entries
    entries["exp_avg"] = torch.ones(8, 4)
    first(optimizer, model)["exp_avg"].mul_(0.5)
    first(optimizer, model)["exp_avg_sq"] = torch.full((8, 4), 1e-4)


WRITES: dict[str, Edit] = {
    "in place": on_moment(lambda moment: moment.mul_(0.5)),
    "assigned row": on_moment(lambda moment: moment.__setitem__(0, 3.0)),
    "operator": on_moment(lambda moment: moment.__imul__(2)),
    "view": on_moment(lambda moment: moment.view(-1)[0].fill_(3)),
    "chunk": on_moment(lambda moment: moment.chunk(2)[0].zero_()),
    "split": on_moment(lambda moment: moment.split(3)[1].mul_(0)),
    "unbind": on_moment(lambda moment: moment.unbind()[0].zero_()),
    "tensor_split": on_moment(lambda moment: moment.tensor_split(2)[1].zero_()),
    "iteration": on_moment(rewrite_rows),
    "as_strided": on_moment(lambda moment: moment.as_strided((2,), (1,)).zero_()),
    "data": on_moment(lambda moment: moment.data.zero_()),
    "detach": on_moment(lambda moment: moment.detach()[1:].zero_()),
    "transposed": on_moment(lambda moment: moment.T[0].zero_()),
    "copy.copy": on_moment(lambda moment: copy.copy(moment).zero_()),
    "to where it is": on_moment(lambda moment: moment.to("cpu").cpu().float().contiguous().zero_()),
    "foreach": on_moment(lambda moment: torch._foreach_mul_([moment, torch.ones(2)], 0.5)),
    "out": on_moment(lambda moment: torch.mul(moment, 0.5, out=moment)),
    "masked": on_moment(lambda moment: moment[moment > 0].sum() and moment.masked_fill_(moment > 0, 0.0)),
    "index": on_moment(lambda moment: moment.index_copy_(0, torch.tensor([1]), torch.ones(1, 4))),
    "init": on_moment(lambda moment: nn.init.constant_(moment, 0.125)),
    "aten": on_moment(lambda moment: torch.ops.aten.mul_.Scalar(moment, 0.5)),
    "step": count_again,
    "everything": reset_all,
    "assigned": assign_elsewhere,
    "two reads": write_into_two_reads,
    "what was assigned": write_into_what_was_assigned,
    "a whole state": write_into_a_whole_state,
}


@every_value(way=WRITES, state=STATES)
def test_writes_into_what_was_read_change_the_state(state: str, way: str) -> None:
    expected = train(*plain(), WRITES[way])
    assert not torch.equal(expected[0], unedited()[0])
    assert_equal(train(*prepared(state), WRITES[way]), expected)


@every_value(state=EVERY_TIME, way=["iteration", "everything", "assigned"])
def test_writes_between_backward_and_step_change_the_state(state: str, way: str) -> None:
    assert_equal(train(*prepared(state), WRITES[way], between=True), train(*plain(), WRITES[way], between=True))


def refuse_writes_after_an_update(model: nn.Module, optimizer: Any, use: str) -> None:
    """In backward: the writes would come after the update, and by others than ``step()`` unseen."""
    backward(optimizer, model(BATCHES[2]).square().mean())
    first(optimizer, model)["exp_avg"].zero_()
    with pytest.raises(RuntimeError, match=r"state was changed between backward\(\) and step\(\)"):
        getattr(optimizer, use)()
    optimizer.step()  # can be called again


@pytest.mark.parametrize("state", IN_BACKWARD)
@pytest.mark.parametrize("use", ["step", "refresh_master_weights"])
def test_writes_after_an_update_in_backward_are_refused(state: str, use: str) -> None:
    model, optimizer = prepared(state)
    train(model, optimizer, steps=2)
    refuse_writes_after_an_update(model, optimizer, use)
    assert_equal(weights(model, optimizer), unedited(3))


def assign_masters(optimizer: Any, model: nn.Module) -> None:
    """In plain torch these are the weights themselves."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        master = torch.randn(parameter.shape, generator=generator)
        if hasattr(optimizer, "backward"):
            optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), "master": master}
        else:
            parameter.detach().copy_(master)


@every_value(state=EVERY_TIME, placement=["device", "host"])
def test_masters_of_fp32_weights_are_written_by_the_step(state: str, placement: str) -> None:
    """The backward before it still needs the old weights, whether it begins updates or not."""
    expected = train(*plain(), assign_masters, between=True)
    assert_equal(train(*prepared(state, placement=placement), assign_masters), expected)
    assert_equal(train(*prepared(state, placement=placement), assign_masters, between=True), expected)


@every_value(state=EVERY_TIME, placement=["device", "host"])
def test_masters_of_fp32_weights_are_written_by_the_first_step_too(state: str, placement: str) -> None:
    """They are all the state that there is then; as state that is loaded they count at once."""
    model, optimizer = plain()
    backward(optimizer, model(BATCHES[0]).square().mean())
    assign_masters(optimizer, model)
    optimizer.step()
    expected = weights(model, optimizer)
    tested, optimizer = prepared(state, placement=placement)
    assign_masters(optimizer, tested)
    assert_equal(train(tested, optimizer, steps=1), expected)

    source = prepared("resident", parameters="bfloat16")
    packed = source[1].state_dict()
    masters = torch.randn(64, generator=torch.Generator().manual_seed(4))
    numbers = range(len(packed["param_groups"][0]["params"]))
    shapes = [parameter.shape for parameter in source[0].parameters()]
    packed["state"] = {n: {"master": masters[: shapes[n].numel()].view(shapes[n]).clone()} for n in numbers}
    tested, optimizer = prepared(state, placement=placement)
    optimizer.load_state_dict(packed)
    assert_equal(weights(tested, optimizer), [packed["state"][number]["master"] for number in numbers])


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("state", IN_BACKWARD)
def test_masters_of_fp32_weights_that_backward_would_write_are_refused(state: str, placement: str) -> None:
    model, optimizer = prepared(state, placement=placement)
    train(model, optimizer, steps=2)
    assign_masters(optimizer, model)
    loss = model(BATCHES[2]).square().mean()
    with pytest.raises(RuntimeError, match=r"its parameter is its own master.*set update: at_step"):
        optimizer.backward(loss)
    optimizer.backward(loss)
    optimizer.step()
    assert_equal(weights(model, optimizer), unedited(3))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_masters_of_fp32_weights_that_come_between_forward_and_backward_are_refused(placement: str) -> None:
    """As any other write to a weight there."""
    model, optimizer = prepared("resident", placement=placement)
    train(model, optimizer, steps=2)
    loss = model(BATCHES[2]).square().mean()
    assign_masters(optimizer, model)
    optimizer.state_dict()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.backward(loss)


UNSEEN: dict[str, tuple[type[Exception], Callable[[Tensor], object]]] = {
    "numpy": (ValueError, lambda moment: moment.numpy().fill(0)),
    "a row of numpy": (ValueError, lambda moment: moment.numpy()[0].__setitem__(0, 1.0)),
    "asarray": (ValueError, lambda moment: numpy.asarray(moment).fill(0)),
    "dlpack": (RuntimeError, lambda moment: torch.from_dlpack(moment).zero_()),
    "numpy's dlpack": (RuntimeError, lambda moment: numpy.from_dlpack(moment)),
    "data": (RuntimeError, lambda moment: setattr(moment, "data", torch.zeros(8, 4))),
    "set_": (RuntimeError, lambda moment: moment.set_(torch.zeros(8, 4))),
    "resize_": (RuntimeError, lambda moment: moment.resize_(2, 2)),
}


@every_value(way=UNSEEN, state=BACKENDS)
def test_writes_that_nobody_would_see_are_errors(state: str, way: str) -> None:
    error, write = UNSEEN[way]

    def edit(optimizer: Any, model: nn.Module) -> None:
        with pytest.raises(error):
            write(first(optimizer, model)["exp_avg"])

    assert_equal(train(*prepared(state), edit), unedited())


@every_time
def test_what_was_read_is_a_copy_of_that_moment(state: str) -> None:
    """Writing into it after an update would be lost, and raises; reading it shows what was there."""
    model, optimizer = prepared(state)
    train(model, optimizer, steps=2)
    held = first(optimizer, model)
    moment, row, frozen = held["exp_avg"], held["exp_avg"][0], held["exp_avg"].clone()
    train(model, optimizer, steps=1)
    assert torch.equal(moment, frozen) and not torch.equal(moment, first(optimizer, model)["exp_avg"])
    before = {key: value.clone() for key, value in first(optimizer, model).items()}
    for write in (moment.zero_, row.zero_, held["step"].zero_):
        with pytest.raises(RuntimeError, match=r"Read it again: optimizer\.state"):
            write()
    for key, value in first(optimizer, model).items():
        assert torch.equal(value, before[key])
    held["exp_avg"] = torch.ones(8, 4)  # assigning is possible at any time
    held["exp_avg"][0] = 2.0
    assert first(optimizer, model)["exp_avg"].sum() == 28 + 8
    assert torch.equal(first(optimizer, model)["exp_avg_sq"], before["exp_avg_sq"])


@backends
def test_copies_behave_like_tensors_otherwise(state: str, tmp_path: Any) -> None:
    model, optimizer = prepared(state)
    train(model, optimizer, steps=2)
    moment = first(optimizer, model)["exp_avg"]
    assert first(optimizer, model)["exp_avg"].untyped_storage().data_ptr() == moment.untyped_storage().data_ptr()
    assert type(moment * 2) is type(moment.clone()) is type(copy.deepcopy(moment)) is Tensor
    assert moment.clone().zero_().sum() == 0 and len(moment.numpy()) == 8 and moment.tolist() == moment.clone().tolist()
    assert float(moment.norm()) > 0 and [float(part.sum()) for part in moment.chunk(2)] and len(list(moment)) == 8
    torch.save(dict(first(optimizer, model)), tmp_path / "entries")
    assert torch.equal(torch.load(tmp_path / "entries")["exp_avg"], moment)
    with torch.inference_mode():
        first(optimizer, model)["exp_avg"].view(-1)[0] = 7
        first(optimizer, model)["exp_avg_sq"] = torch.ones(8, 4)
        first(optimizer, model)["exp_avg_sq"].mul_(2)
    assert moment[0, 0] == 7 and (first(optimizer, model)["exp_avg_sq"] == 2).all()
    packed = optimizer.state_dict()["state"]
    assert all(type(value) is Tensor for entries in packed.values() for value in entries.values())
    packed[0]["exp_avg"].zero_()
    assert first(optimizer, model)["exp_avg"][0, 0] == 7


@backends
def test_reading_keeps_no_memory(state: str) -> None:
    model, optimizer = prepared(state)
    train(model, optimizer, steps=2)
    gc.disable()
    try:
        entries = first(optimizer, model)
        alive = [weakref.ref(value._copy) for value in entries.values()]
        entries["exp_avg"].norm()
        del entries
        assert [reference for reference in alive if reference() is not None] == []
    finally:
        gc.enable()


# -- state that is deleted


def keep_on_cpu(entries: Any) -> None:
    for key in list(entries):
        entries[key] = entries[key].cpu().clone()


def halve_one(entries: Any) -> None:
    entries["exp_avg"] = entries["exp_avg"] / 2


def drop_one(entries: Any) -> None:
    del entries["exp_avg_sq"]


def write_in_place(entries: Any) -> None:
    for value in entries.values():
        value.zero_()
    entries["exp_avg"][0] = 3.0


@every_value(
    way=["pop", "del", "assigned", "load_state_dict"],
    use=[keep_on_cpu, halve_one, drop_one, write_in_place],
    state=["resident", "bulk", "stream-overlap", "stream-in-backward"],
)
def test_entries_of_deleted_state_are_the_users_own(state: str, way: str, use: Callable[[Any], None]) -> None:
    def edit(optimizer: Any, model: nn.Module) -> None:
        for parameter in model.parameters():
            entries, saved = optimizer.state[parameter], copy.deepcopy(optimizer.state_dict())
            if way == "pop":
                optimizer.state.pop(parameter)
            elif way == "del":
                del optimizer.state[parameter]
            elif way == "assigned":
                optimizer.state[parameter] = {key: value.clone() for key, value in entries.items()}
            else:
                optimizer.load_state_dict(saved)
            use(entries)

    assert_equal(train(*prepared(state), edit), train(*plain(), edit))


@every_time
def test_state_without_an_entry_is_refused_before_the_step_changes_anything(state: str) -> None:
    model, optimizer = prepared(state)
    train(model, optimizer, steps=3)
    kept, entries = weights(model, optimizer), copy.deepcopy(dict(first(optimizer, model)))
    del first(optimizer, model)["exp_avg_sq"]
    assert "exp_avg_sq" not in first(optimizer, model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.weight has exp_avg, step and no exp_avg_sq.*del optimizer\.state"):
            train(model, optimizer, steps=1)
    if state not in IN_BACKWARD:
        with pytest.raises(ValueError, match="no exp_avg_sq"):
            optimizer.state_dict()
    assert_equal(weights(model, optimizer), kept)
    first(optimizer, model)["exp_avg_sq"] = entries["exp_avg_sq"]
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], entries["exp_avg"])
    train(model, optimizer, steps=1)
    optimizer.state[model[0].weight] = {"step": torch.tensor(3.0)}
    with pytest.raises(ValueError, match="no exp_avg and no exp_avg_sq"):
        train(model, optimizer, steps=1)
    del optimizer.state[model[0].weight]
    train(model, optimizer, steps=1)
    assert float(first(optimizer, model)["step"]) == 1


class Lazy(EachParameter):
    """Makes each entry when it is missing."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        for key in ("one", "two"):
            if key not in state:
                state[key] = torch.zeros_like(p)
            state[key].mul_(0.9).add_(grad)
        p.add_(state["one"] + state["two"], alpha=-group["lr"])


@backends
def test_classes_that_make_an_entry_again_do_so(state: str) -> None:
    def edit(optimizer: Any, model: nn.Module) -> None:
        first(optimizer, model)["one"] = torch.ones(8, 4)
        del first(optimizer, model)["one"]

    expected = network()
    assert_equal(
        train(*prepared(state, optimizer_class=Lazy), edit), train(expected, Lazy(expected.parameters()), edit)
    )


@backends
def test_groups_without_an_entry_of_another_group_are_complete(state: str) -> None:
    def edit(optimizer: Any, model: nn.Module) -> None:
        for entries in optimizer.state.values():
            entries["square_avg"].mul_(2)

    results = []
    for make in (lambda *a, **k: prepared(state, *a, **k), plain):
        model = network()
        groups = [{"params": [*model[0].parameters()], "momentum": 0.9}, {"params": [*model[2].parameters()]}]
        if make is plain:
            optimizer: Any = torch.optim.RMSprop(groups, lr=1e-2)
        else:
            model, optimizer = make(model, torch.optim.RMSprop, param_groups=groups)
        results.append(train(model, optimizer, edit))
    assert_equal(*results)


# -- parameters that grow and shrink


NAMES = {"xyz": 1e-2, "color": 5e-3, "opacity": 0.1}
"""Parameters of a :class:`Cloud`, and their learning rates."""


class Cloud(nn.Module):
    """In bf16, or in fp32; ``rounds``: fp32 weights that are masters of bf16 ones."""

    def __init__(self, dtype: torch.dtype = torch.float32, rounds: bool = False) -> None:
        super().__init__()
        self.rounds = rounds
        generator = torch.Generator().manual_seed(0)
        for name in NAMES:
            values = torch.randn(10, 3, generator=generator).bfloat16().to(dtype)
            setattr(self, name, nn.Parameter(values))

    def forward(self, shift: float) -> Tensor:
        own = (getattr(self, name) for name in NAMES)
        xyz, color, opacity = (value.bfloat16() for value in own) if self.rounds else own
        return ((xyz.sin() * color - shift) * opacity.sigmoid()).float().square().mean()


def grow(value: Tensor, fill: float) -> Tensor:
    return torch.cat([value, torch.full((4, 3), fill, dtype=value.dtype)])


def prune(value: Tensor, fill: float) -> Tensor:
    return value[torch.arange(len(value)) % 2 == 0]


def graphdeco(optimizer: Any, group: dict[str, Any], new: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """graphdeco-inria/gaussian-splatting, ``cat_tensors_to_optimizer``."""
    stored_state = optimizer.state.get(group["params"][0], None)
    for key in [key for key in stored_state if key != "step"]:
        stored_state[key] = change(stored_state[key])
    del optimizer.state[group["params"][0]]
    group["params"][0] = new
    optimizer.state[group["params"][0]] = stored_state


def gsplat(optimizer: Any, group: dict[str, Any], new: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """nerfstudio's gsplat, ``_update_param_with_optimizer``."""
    p_state = optimizer.state[group["params"][0]]
    del optimizer.state[group["params"][0]]
    for key in p_state:
        if key != "step":
            p_state[key] = change(p_state[key])
    group["params"] = [new]
    optimizer.state[new] = p_state


def popped(optimizer: Any, group: dict[str, Any], new: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """The state first, the group last."""
    optimizer.state[new] = optimizer.state.pop(group["params"][0])
    for key, value in optimizer.state[new].items():
        if value.dim():
            optimizer.state[new][key] = change(value)
    group["params"][0] = new


def copied(optimizer: Any, group: dict[str, Any], new: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """The group first; what the old parameter had stays where it is."""
    old, group["params"][0] = group["params"][0], new
    optimizer.state[new] = {k: change(v) if v.dim() else v for k, v in dict(optimizer.state[old]).items()}


def at_once(optimizer: Any, model: nn.Module, form: Callable[[Tensor, float], Tensor]) -> None:
    """All parameters first, then all states."""
    old = [group["params"][0] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"][0] = nn.Parameter(form(group["params"][0].detach(), 0.5))
        setattr(model, group["name"], group["params"][0])
    for before, group in zip(old, optimizer.param_groups, strict=True):
        state = optimizer.state.pop(before)
        optimizer.state[group["params"][0]] = {k: form(v, fill(k)) if v.dim() else v for k, v in state.items()}


def fill(key: str) -> float:
    return 0.5 if key == "master" else 0.0


IDIOMS = {"graphdeco": graphdeco, "gsplat": gsplat, "popped": popped, "copied": copied, "at once": at_once}


def operate(optimizer: Any, model: nn.Module, idiom: str, form: Callable[[Tensor, float], Tensor]) -> None:
    if idiom == "at once":
        at_once(optimizer, model, form)
        return
    for group in optimizer.param_groups:
        old = group["params"][0]
        new = nn.Parameter(form(old.detach(), 0.5))
        if "master" in optimizer.state[old]:
            optimizer.state[old]["master"] = form(optimizer.state[old]["master"], 0.5)
        IDIOMS[idiom](
            optimizer, group, new, lambda value, old=old: form(value, 0.0) if len(value) == len(old) else value
        )
        setattr(model, group["name"], new)


def groups_of(model: Cloud) -> list[dict[str, Any]]:
    return [{"params": [getattr(model, name)], "lr": lr, "name": name} for name, lr in NAMES.items()]


def splat(model: nn.Module, optimizer: Any, idiom: str, *, delayed: bool = False) -> list[Tensor]:
    for number in range(9):
        if number in (3, 6):
            getattr(optimizer, "synchronize", int)()  # weights are read through param_groups
            operate(optimizer, model, idiom, grow if number == 3 else prune)
        backward(optimizer, model(0.1 * number))
        if delayed and number and hasattr(optimizer, "_backend") and optimizer._backend.supports_lanes:
            random_delays(optimizer._backend.lanes, number, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, optimizer)


@every_value(state=STATES, idiom=IDIOMS, parameters=["float32", "bfloat16"])
def test_parameters_grow_and_shrink_with_their_state(state: str, idiom: str, parameters: str) -> None:
    is_short = parameters == "bfloat16"
    plain_model = Cloud(rounds=is_short)
    plain_optimizer = torch.optim.Adam(groups_of(plain_model), lr=0.0, eps=1e-15, fused=True)
    expected = splat(plain_model, plain_optimizer, idiom)
    model = Cloud(getattr(torch, parameters))
    settings = {"parameters": parameters, "param_groups": groups_of(model), "lr": 0.0, "eps": 1e-15}
    model, optimizer = prepared(state, model, torch.optim.Adam, **settings)
    tested = splat(model, optimizer, idiom, delayed=True)
    assert [len(weight) for weight in tested] == [7, 7, 7]
    assert_equal(tested, [master.to(weight.dtype) for weight, master in zip(tested, expected, strict=True)])
    for group, master in zip(optimizer.param_groups, expected, strict=True):
        assert not is_short or torch.equal(optimizer.state[group["params"][0]]["master"], master)
    assert len(optimizer.managed()) == 3 and len(optimizer.state) == len(plain_optimizer.state)
    assert optimizer.memory_report()["parameters"] == 3 * 21


@every_value(state=STATES, parameters=["float32", "bfloat16"])
def test_state_of_another_shape_is_refused_by_name_before_anything_changes(state: str, parameters: str) -> None:
    model = Cloud(getattr(torch, parameters))
    settings = {"parameters": parameters, "param_groups": groups_of(model), "lr": 0.0}
    model, optimizer = prepared(state, model, torch.optim.Adam, **settings)

    def step() -> None:
        optimizer.backward(model(0.1))
        optimizer.step()

    step()
    step()
    optimizer.synchronize()
    key = "exp_avg" if parameters == "float32" else "master"
    entries, kept = optimizer.state[model.xyz], optimizer.state[model.color]["exp_avg"].clone()
    entries[key] = grow(entries[key], 0.0)
    kept_weights = weights(model, optimizer)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"'{key}' of xyz has shape \(14, 3\).*\(10, 3\).*del optimizer.state"):
            step()
        optimizer.zero_grad()
    assert_equal(weights(model, optimizer), kept_weights)
    assert torch.equal(optimizer.state[model.color]["exp_avg"], kept)
    del optimizer.state[model.xyz][key]
    if key == "exp_avg":
        del optimizer.state[model.xyz]
    step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (10, 3)


@backends
def test_state_of_a_parameter_in_no_group_waits_for_its_group(state: str) -> None:
    model, optimizer = prepared(state)
    train(model, optimizer, steps=2)
    late = nn.Parameter(torch.ones(3))
    entries = {"step": torch.tensor(4.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    optimizer.state[late] = entries
    train(model, optimizer, steps=1)
    assert len(optimizer.state_dict()["state"]) == 4
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    twin = nn.Parameter(torch.ones(3))
    reference = torch.optim.AdamW([twin], lr=1e-2, fused=True)
    reference.state[twin], twin.grad = copy.deepcopy(entries), torch.ones(3)
    optimizer.step()
    reference.step()
    assert_equal([late, optimizer.state[late]["exp_avg"]], [twin, reference.state[twin]["exp_avg"]])


@pytest.mark.parametrize("state", IN_BACKWARD)
def test_state_of_a_parameter_in_no_group_waits_without_stopping_updates_in_backward(state: str) -> None:
    model, optimizer = prepared(state)
    late = nn.Parameter(torch.ones(3))
    entries = {name: torch.ones(3) for name in ("exp_avg", "exp_avg_sq", "master")} | {"step": torch.tensor(4.0)}
    train(model, optimizer, steps=2)
    optimizer.state[late] = entries
    refuse_writes_after_an_update(model, optimizer, "step")
    assert torch.equal(optimizer.state[late]["exp_avg"], torch.ones(3))
