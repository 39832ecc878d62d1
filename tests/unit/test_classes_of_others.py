"""Optimizer classes as others write them: what they see is their parameter, or they are refused by name."""

from __future__ import annotations

import collections
import copy
import functools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.checkpoint import CheckpointError
from lightstep.optimizer.arithmetic import BaseArithmetic
from tests import optimizer_classes
from tests.covering import every_value
from tests.optimizer_classes import examine
from tests.reference.own_classes import EachParameter

_STREAM: dict[str, Any] = {"backend": "stream", "ring_mib": 0.3}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": _STREAM,
    **{update: {**_STREAM, "update": update} for update in ("next_forward", "in_backward", "overlap")},
}


STEPS = 9


class CountsInState(EachParameter):
    """As MADGRAD: ``state["k"]`` is no parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state.setdefault("k", torch.zeros(1, dtype=torch.long))  # type: ignore[call-overload]
        super().step()
        self.state["k"] += 1  # type: ignore[index]

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = state.setdefault("total", torch.zeros_like(p))
        total.add_(grad, alpha=math.sqrt(float(self.state["k"]) + 1))  # type: ignore[index]
        p.add_(total, alpha=-group["lr"])


class CountsInStateFromTheStart(CountsInState):
    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.state["k"] = 3  # type: ignore[index, assignment]


class CountsInAttributes(EachParameter):
    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.t, self.rates = torch.zeros(()), [lr]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        self.rates.append(0.9 * self.rates[-1])
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(grad, alpha=-self.rates[-1] / float(self.t))


class CountsInItsGroup(EachParameter):
    """In a tensor, a number and a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("t", torch.zeros(())).add_(1)
            group["k"] = group.get("k", 0) + 1
            group.setdefault("counts", [0])[0] += 1
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] / (float(group["t"]) + group["k"] * group["counts"][0]))


class SetsUpItsGroup(EachParameter):
    """One of its defaults says whether a group has what the class puts there, as in torch-optimi."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, is_set_up=False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["is_set_up"]:
                group["t"], group["is_set_up"] = 0, True
            group["t"] += 1
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] / group["t"])


class ForLoopByDefault(EachParameter):
    """``foreach=False`` is a choice of the class, with other roundings than its ``None``."""

    def __init__(self, params: Any, lr: float = 1e-2, foreach: bool | None = False) -> None:
        super().__init__(params, lr, foreach=foreach)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(grad / 3 * group["lr"] if group["foreach"] is False else grad * (group["lr"] / 3))


class StableAdamW(EachParameter):
    """Divides the rate of a tensor by ``max(1, RMS(g / sqrt(v)))``."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        m, v = (state.setdefault(key, torch.zeros_like(p)) for key in "mv")
        m.lerp_(grad, 0.1)
        v.lerp_(grad.square(), 0.01)
        rms = (grad.square() / v.clamp(min=1e-12)).mean().sqrt().clamp(min=1)
        p.addcdiv_(m, v.sqrt() + 1e-6, value=-group["lr"] / float(rms))


class QueuesGradients(EachParameter):
    """As AdaShift: tensors in a container."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        queue = state.setdefault("queue", collections.deque(maxlen=3))
        queue.append(grad.clone())
        p.sub_(queue[0], alpha=group["lr"])


class QueuesTheGradientsThemselves(EachParameter):
    """Which are other tensors in each step of a plain loop."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        queue = state.setdefault("queue", collections.deque(maxlen=3))
        queue.append(grad)
        p.sub_(queue[0], alpha=group["lr"])


class KeepsOlderSums(EachParameter):
    """In a list, before it makes the next one."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        sums, total = state.setdefault("sums", []), state.get("total", grad)
        p.sub_(total if len(sums) < 2 else sums[-2], alpha=group["lr"])
        state["total"] = total * 0.9 + grad
        sums.append(total)


class SmallStates(EachParameter):
    """As bitsandbytes and torchao: state of fewer than 4096 elements is kept in fp32."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        dtype = torch.bfloat16 if p.numel() >= 4096 else torch.float32
        m = state.setdefault("m", torch.zeros_like(p, dtype=dtype))
        m.copy_(m.float().lerp(grad, 0.1))
        p.add_(m.float(), alpha=-group["lr"])


class DecaysMatrices(EachParameter):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if p.ndim > 1:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(grad, alpha=-group["lr"])


class DecaysUnmarked(EachParameter):
    """As Mamba marks ``A_log``."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not getattr(p, "_no_weight_decay", False):
            p.mul_(0.9)
        p.add_(grad, alpha=-group["lr"])


class ChecksRequiresGrad(EachParameter):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if p.requires_grad and p.is_leaf:
            p.add_(grad, alpha=-group["lr"])


class LooksAhead(EachParameter):
    """Goes back half-way every fifth step, by the norm of the tensor."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        slow = state.setdefault("slow", p.clone())
        p.add_(grad, alpha=-group["lr"])
        if state["t"] % 5 == 0:
            slow.lerp_(p, 0.5 / (1 + float(p.norm())))
            p.copy_(slow)


class Projects(EachParameter):
    """As GaLore: the leading singular vectors of a gradient, as columns of a larger matrix, and moments of columns."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        matrix = grad.view(len(grad), -1)
        if "basis" not in state or float(grad.norm()) > 0.1:
            state["basis"] = torch.linalg.svd(matrix, full_matrices=False).U[:, :7]
        basis, moment = state["basis"], state.setdefault("moment", torch.zeros_like(matrix.t()).t())
        moment.lerp_(basis @ (basis.t() @ matrix), 0.1)
        p.sub_(moment.view_as(p) * (group["lr"] / (1 + moment.norm()) / (1 + basis.norm())))


class TurnsItsState(EachParameter):
    """Leaves a view of its own state with its sides exchanged."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        turned = state.setdefault("turned", torch.zeros_like(p.t() if p.dim() == 2 else p))
        total = turned.t() if turned.shape != p.shape else turned
        p.sub_(total.mul_(0.9).add_(grad), alpha=group["lr"] / (1 + float(total.norm())))
        state["turned"] = total.t() if total.dim() == 2 else total


class KeepsASlice(EachParameter):
    """A row in four of a larger tensor, and what it does depends on the last bits of a sum over them."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        rows = state.setdefault("rows", grad.clone()[::4])
        last_bits = float(rows.sum()) * 2**20 % 1
        p.sub_(grad, alpha=group["lr"] * (1 + last_bits))


class KeepsOneTensorTwice(EachParameter):
    """What it writes into one entry it reads from another."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if "sum" not in state:
            state["sum"] = torch.zeros_like(p)
            state["again"] = self.seen_again(state["sum"])
        state["sum"].add_(grad)
        again = state["again"]
        p.sub_((again[0] if isinstance(again, list) else again).view(p.shape), alpha=group["lr"])

    def seen_again(self, total: Tensor) -> Any:
        return total


class KeepsAViewOfIt(KeepsOneTensorTwice):
    def seen_again(self, total: Tensor) -> Any:
        return total.view(-1)


class KeepsItInAList(KeepsOneTensorTwice):
    def seen_again(self, total: Tensor) -> Any:
        return [total]


class KeepsItsParameter(EachParameter):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(grad + 0.1 * state.setdefault("weight", p.detach()), alpha=group["lr"])


class ExchangesEntries(EachParameter):
    """The older sum is the newer one of the next step."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        new, old = (state.setdefault(key, torch.zeros_like(p)) for key in ("new", "old"))
        p.sub_(old.mul_(0.5).add_(grad).add_(new, alpha=0.3), alpha=group["lr"])
        state["new"], state["old"] = old, new


class ExchangesData(EachParameter):
    """As ``ExchangesEntries``, by assigning to the entries' data."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        new, old = (state.setdefault(key, torch.zeros_like(p)) for key in ("new", "old"))
        new.data, old.data = old.data, new.data
        p.sub_(new.mul_(0.5).add_(grad).add_(old, alpha=0.3), alpha=group["lr"])


class AddsUpGradients(EachParameter):
    """Steps by the sum of four, and drops it."""

    period = 4

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        if state["t"] % self.period == 1:
            state["sum"] = torch.zeros_like(p)
        state["sum"].add_(grad)
        if state["t"] % self.period == 0:
            p.sub_(state.pop("sum"), alpha=group["lr"])


class DrawsNumbers(EachParameter):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(grad + 0.1 * torch.rand_like(p), alpha=-group["lr"])


class TableByParameter(EachParameter):
    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.buffers: dict[Any, Tensor] = {}

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(self.buffers.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(grad), alpha=-group["lr"])


class TableById(TableByParameter):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(self.buffers.setdefault(id(p), torch.zeros_like(p)).mul_(0.9).add_(grad), alpha=-group["lr"])


class MarksParameters(EachParameter):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p._momentum = getattr(p, "_momentum", 0) * 0.9 + grad  # type: ignore[attr-defined]
        p.sub_(p._momentum, alpha=group["lr"])  # type: ignore[attr-defined]


class KeepsSparseState(EachParameter):
    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(state.get("large", torch.zeros_like(p).to_sparse()).to_dense(), alpha=group["lr"])
        state["large"] = (grad * (grad.abs() > 1)).to_sparse()


class EstimatesARate(EachParameter):
    """As Prodigy: one estimate over all parameters of a group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norms = [p.grad.abs().sum() for p in group["params"] if p.grad is not None]
            group["d"] = max(group.get("d", 1e-6), float(sum(norms)))
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] / group["d"])


class DifferentiatesGradients(EachParameter):
    """As AdaHessian."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        with torch.enable_grad():
            (second,) = torch.autograd.grad(grad.sum(), p)
        p.add_(second, alpha=-group["lr"])


class NeedsAClosure(EachParameter):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("a closure is needed")


class NeedsAModel(EachParameter):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params.parameters(), lr)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(32), nn.Linear(32, 160), nn.Linear(160, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(self.norm(x)).tanh())


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 16))
    model[1].a.weight._no_weight_decay = True  # type: ignore[union-attr]
    return model


def train(model: nn.Module, backward: Any, optimizer: Any, start: int = 0, stop: int = STEPS) -> None:
    for number in range(start, stop):
        inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0 if number < 3 else 0.5
        backward(model(inputs).square().mean() * (1.0, 0.01, 30.0)[number % 3])
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def plain_run(optimizer_class: Any, stop: int = STEPS) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = optimizer_class(model.parameters())
    torch.manual_seed(1)
    train(model, lambda loss: loss.backward(), optimizer, stop=stop)
    return model, optimizer


def build(optimizer_class: Any, place: str, groups: Any = None) -> tuple[Any, nn.Module, Any]:
    settings = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": None}}
    strategy = lightstep.Strategy.load({**settings, "optimizer_state": PLACES[place]})
    model = strategy.prepare_model(network())
    return strategy, model, strategy.create_optimizer(model, optimizer_class, param_groups=groups and groups(model))


def assert_same(tested: nn.Module, expected: nn.Module) -> None:
    pairs = zip(tested.named_parameters(), expected.parameters(), strict=True)
    assert [name for (name, one), other in pairs if not torch.equal(one, other)] == []


class AssignsToData(EachParameter):
    """As classes of before ``torch.no_grad()`` do."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["total"] = state.get("total", 0) * 0.9 + grad
        p.data = p.data - group["lr"] * state["total"]


class ExchangesDataWithState(EachParameter):
    """The weights of the step before go into the state, and an average of weights comes out of it."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        average, previous = state.setdefault("average", p.clone()), state.get("previous", p.clone())
        p.data, state["average"] = average, p.data
        state["previous"] = p.data
        p.data = p.data + 0.1 * (p.data - previous) - group["lr"] * grad
        state["average"].lerp_(p.data, 0.3)


ELEMENT_WISE = [
    AssignsToData,
    ExchangesDataWithState,
    CountsInState,
    CountsInStateFromTheStart,
    CountsInAttributes,
    CountsInItsGroup,
    ForLoopByDefault,
    DecaysUnmarked,
    ChecksRequiresGrad,
    ExchangesEntries,
    ExchangesData,
]
WHOLE = [StableAdamW, QueuesGradients, SmallStates, DecaysMatrices, LooksAhead, Projects, TurnsItsState]


@every_value(optimizer_class=[*ELEMENT_WISE, *WHOLE], place=PLACES)
def test_same_bits_as_in_a_plain_loop(optimizer_class: Any, place: str) -> None:
    expected, _ = plain_run(optimizer_class)
    _, model, optimizer = build(optimizer_class, place)
    assert optimizer.has_whole_tensors is (optimizer_class in WHOLE)
    train(model, optimizer.backward, optimizer)
    optimizer.synchronize()
    assert_same(model, expected)


@every_value(optimizer_class=[CountsInItsGroup, CountsInState, CountsInAttributes], place=PLACES)
def test_a_group_without_gradients_counts_the_step(optimizer_class: Any, place: str) -> None:
    """As in a plain loop: the first group has gradients in every third step, the second in the other ones."""

    def train_in_turns(model: Any, backward: Any, optimizer: Any) -> None:
        for number in range(STEPS):
            inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
            for at, parameter in enumerate(model.parameters()):
                parameter.requires_grad_((at < 6) == (number % 3 == 0))
            backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def halves(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [{"params": parameters[:6]}, {"params": parameters[6:]}]

    expected = network()
    optimizer = optimizer_class(halves(expected))
    train_in_turns(expected, lambda loss: loss.backward(), optimizer)
    _, model, tested = build(optimizer_class, place, halves)
    train_in_turns(model, tested.backward, tested)
    tested.synchronize()
    assert_same(model, expected)


@every_value(
    place=["resident", "stream", "overlap"],
    way=["state_dict", "checkpoint", "copy"],
    optimizer_class=[
        *(CountsInStateFromTheStart, CountsInAttributes, CountsInItsGroup),
        *(AddsUpGradients, ExchangesData, SmallStates, LooksAhead, Projects),
        *(torch.optim.Adafactor, SetsUpItsGroup),
    ],
)
def test_same_bits_after_a_resume(optimizer_class: Any, way: str, place: str, tmp_path: Path) -> None:
    expected, _ = plain_run(optimizer_class)
    strategy, model, optimizer = build(optimizer_class, place)
    train(model, optimizer.backward, optimizer, stop=4)
    if way == "copy":
        model, optimizer = copy.deepcopy((model, optimizer))
    else:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if way == "checkpoint":
            strategy.save_checkpoint(tmp_path / "saved", model, optimizer)
        other, model, optimizer = build(optimizer_class, place)
        if way == "checkpoint":
            other.load_checkpoint(tmp_path / "saved", model, optimizer)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    train(model, optimizer.backward, optimizer, start=4)
    optimizer.synchronize()
    assert_same(model, expected)


class SumsFromTheSecondStep(EachParameter):
    """Its entry is ``None`` after the first step."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = state.get("total")
        state["total"] = grad.clone() if "total" in state and total is None else total
        if total is not None:
            p.sub_(total.lerp_(grad, 0.5), alpha=group["lr"])


class SumsEveryOtherStep(EachParameter):
    """Its entry is a tensor after the first step, and ``None`` after the second."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = state.get("total")
        state["total"] = grad.clone() if total is None else None
        if total is not None:
            p.sub_(total.add_(grad), alpha=group["lr"])


class GrowsLater(EachParameter):
    """An entry of the parameter's shape and a 0-dim one come in the second step."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 2:
            state["total"], state["weight"] = grad.clone(), torch.tensor(0.0)
        if "total" in state:
            state["weight"] += 1
            p.sub_(state["total"].lerp_(grad, 0.5), alpha=group["lr"] / float(state["weight"]))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain, self.linear = nn.Parameter(torch.tensor(1.5)), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.linear(x)


@every_value(
    case=[(each, saved) for each in (SumsFromTheSecondStep, SumsEveryOtherStep, GrowsLater) for saved in (1, 2)],
    place=["resident", "bulk", "stream"],
    own=[0, 1, 2],
    way=["state_dict", "checkpoint"],
    whole=[False, True],
)
def test_a_0_dim_parameter_and_entries_that_come_and_go_after_a_resume(
    case: tuple[Any, int], place: str, own: int, way: str, whole: bool, tmp_path: Path
) -> None:
    written, saved = case
    optimizer_class: Any = type(written.__name__, (written,), {"whole_tensors": whole})
    expected = Scaled()
    train(expected, lambda loss: loss.backward(), optimizer_class(expected.parameters()), stop=6)

    def built(steps: int) -> tuple[Any, nn.Module, Any]:
        settings = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": None}}
        strategy = lightstep.Strategy.load({**settings, "optimizer_state": PLACES[place]})
        model = strategy.prepare_model(Scaled())
        optimizer = strategy.create_optimizer(model, optimizer_class)
        train(model, optimizer.backward, optimizer, stop=steps)
        return strategy, model, optimizer

    strategy, other, theirs = built(saved)
    resumed, model, optimizer = built(own)
    if way == "checkpoint":
        strategy.save_checkpoint(tmp_path / "saved", other, theirs)
        resumed.load_checkpoint(tmp_path / "saved", model, optimizer)
    else:
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(theirs.state_dict())
    train(model, optimizer.backward, optimizer, start=saved, stop=6)
    assert_same(model, expected)


@pytest.mark.parametrize("step", [None, "1", [1]])
@pytest.mark.parametrize("way", ["load", "edit"])
def test_a_counter_that_is_no_number_is_refused(step: Any, way: str) -> None:
    """The class makes a tensor of it, and the next update would fail halfway."""
    _, model, optimizer = build(torch.optim.AdamW, "stream")
    train(model, optimizer.backward, optimizer, stop=1)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = step
    if way == "edit":
        optimizer.state[next(model.parameters())]["step"] = step
    refused = partial(optimizer.load_state_dict, state) if way == "load" else optimizer.state_dict
    with pytest.raises(ValueError, match="and no step, which AdamW does not make again"):
        refused()
    if way == "load":  # and nothing has changed
        train(model, optimizer.backward, optimizer, start=1, stop=2)


class AddsUpWithATensor(AddsUpGradients):
    """Counts in a 0-dim tensor."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["t"] = int(state.get("t", 0))
        super().update(p, grad, group, state)
        state["t"] = torch.tensor(float(state["t"]))


@every_value(
    case=[(way, counts) for way in ("state_dict", "checkpoint") for counts in (AddsUpGradients, AddsUpWithATensor)],
    place=["resident", "stream"],
)
def test_whether_an_entry_that_the_class_drops_is_missing_depends_on_its_counter(
    case: tuple[str, Any], place: str, tmp_path: Path
) -> None:
    """After 30 steps a class makes it again that drops it then. After two steps it needs the one that it has."""
    way, counts = case
    late, early = (type("AddsUp", (counts,), {"period": period}) for period in (30, 2))
    expected, _ = plain_run(late, stop=33)
    for saving, steps in ((late, 30), (early, 2)):
        strategy, model, optimizer = build(saving, place)
        train(model, optimizer.backward, optimizer, stop=steps)
        strategy.save_checkpoint(tmp_path / "saved", model, optimizer)
        weights, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert all("sum" not in entries for entries in saved["state"].values())
        other, model, optimizer = build(late, place)
        load = functools.partial(optimizer.load_state_dict, saved)
        if way == "checkpoint":
            load = functools.partial(other.load_checkpoint, tmp_path / "saved", model, optimizer)
        if saving is late:
            load()
            model.load_state_dict(weights)
        else:
            with pytest.raises((ValueError, CheckpointError), match="has t and no sum, which AddsUp does not make"):
                load()
        train(model, optimizer.backward, optimizer, start=steps if saving is late else 0, stop=33)
        optimizer.synchronize()
        assert_same(model, expected)


def test_state_that_is_no_parameters_is_read_and_loaded_from_a_plain_optimizer() -> None:
    expected, _ = plain_run(CountsInState)
    plain, theirs = plain_run(CountsInState, stop=4)
    _, model, optimizer = build(CountsInState, "stream")
    assert "k" not in optimizer.state and optimizer.state.get("k") is None
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    assert int(optimizer.state["k"]) == 4
    train(model, optimizer.backward, optimizer, start=4)
    assert int(optimizer.state["k"]) == STEPS and "k" in optimizer.state
    assert_same(model, expected)


def test_random_numbers_get_whole_tensors_and_are_those_of_a_plain_loop() -> None:
    expected, _ = plain_run(DrawsNumbers)
    _, model, optimizer = build(DrawsNumbers, "resident")
    assert optimizer.has_whole_tensors
    optimizer.managed()
    torch.manual_seed(1)
    train(model, optimizer.backward, optimizer)
    assert_same(model, expected)


class SumsRows(EachParameter):
    """Of matrices only, with a sum for each row, and moments by columns."""

    def __init__(self, params: Any, lr: float = 1e-2, counts: bool = False) -> None:
        super().__init__(params, lr, counts=counts)
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("matrices only")

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        sums, moment = (
            state.setdefault("sums", grad.new_zeros(len(p))),
            state.setdefault("moment", grad.t().clone().t()),
        )
        sums.add_(grad.square().sum(1))
        moment.lerp_(grad, 0.3)
        p.sub_(moment / (sums[:, None].sqrt() + 1e-3), alpha=group["lr"] / (1 + float(moment.norm())))
        state["length"] = float(p.norm()) if group["counts"] else 0.0


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, step: int) -> Tensor:
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        return (torch.einsum("bi,eoi->beo", inputs, self.stack) * torch.arange(4.0)[:, None]).tanh().square().mean()


def with_experts(place: str, **settings: Any) -> tuple[nn.Module, Any]:
    values = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": None}, "optimizer_state": PLACES[place]}
    strategy = lightstep.Strategy.load(values)
    model = strategy.prepare_model(Experts())
    return model, strategy.create_optimizer(model, SumsRows, **settings)


@pytest.mark.parametrize("place", PLACES)
def test_each_matrix_of_a_stack_has_state_of_its_own(place: str) -> None:
    expected, (model, optimizer) = Experts(), with_experts(place)
    matrices = [nn.Parameter(matrix.detach()) for matrix in expected.stack]
    plain = SumsRows(matrices)
    for step in range(5):
        expected.zero_grad()
        expected(step).backward()
        for matrix, gradient in zip(matrices, expected.stack.grad, strict=True):  # type: ignore[arg-type]
            matrix.grad = gradient
        plain.step()
        optimizer.backward(model(step))
        optimizer.step()
    optimizer.synchronize()
    assert_same(model, expected)


def test_values_that_differ_between_the_matrices_of_a_stack_are_refused() -> None:
    model, optimizer = with_experts("resident", counts=True)
    optimizer.backward(model(0))
    with pytest.raises(
        RuntimeError, match=r"state 'length' differs between the matrices of stack, of shape \(4, 8, 6\)"
    ):
        optimizer.step()


@every_value(
    case=[
        (TableByParameter, "TableByParameter keeps buffers in attributes of its own.*self.state"),
        (TableById, "TableById"),
        (MarksParameters, "MarksParameters sets _momentum on its parameters.*self.state"),
        (KeepsSparseState, "KeepsSparseState keeps 'large' as a tensor of layout torch.sparse_coo"),
        (QueuesTheGradientsThemselves, "keeps tensors that it was given.*in 'queue'.*clone"),
        (KeepsOlderSums, "KeepsOlderSums keeps tensors that it was given.*in 'sums'.*clone"),
        (KeepsASlice, "KeepsASlice keeps 'rows' as a slice of a larger tensor.*clone"),
        (KeepsOneTensorTwice, "KeepsOneTensorTwice has the same memory in 'again' and 'sum', and .*clone"),
        (KeepsAViewOfIt, "KeepsAViewOfIt has the same memory in 'again' and 'sum'"),
        (KeepsItInAList, "KeepsItInAList has the same memory in 'again' and 'sum'"),
        (KeepsItsParameter, "KeepsItsParameter has the same memory in 'weight' and the parameter"),
        (EstimatesARate, "EstimatesARate computes something over all its parameters together; it writes 'd' into"),
        (DifferentiatesGradients, "DifferentiatesGradients failed in the trial.*gradients that have no graph"),
        (NeedsAClosure, "NeedsAClosure failed in the trial.*a closure is needed.*without a closure"),
        (NeedsAModel, "NeedsAModel cannot be made from a list of tensors"),
    ],
    declared=[None, True, False],
)
def test_what_cannot_be_exact_is_refused_by_name(case: tuple[Any, str], declared: bool | None) -> None:
    optimizer_class, message = case
    attributes = {} if declared is None else {"whole_tensors": declared}
    with pytest.raises(TypeError, match=message):
        build(type(optimizer_class.__name__, (optimizer_class,), attributes), "stream")


def test_the_trial_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            whole = BaseArithmetic(type("Fresh", (DrawsNumbers,), {}), {}).whole_tensors
            assert torch.empty(1).is_meta and torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert whole and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("key", ["adapt", "rank"])
def test_groups_whose_settings_change_the_verdict(key: str) -> None:
    """A default of the class, or a key that it looks for (GaLore, APOLLO)."""

    class Adapts(EachParameter):
        def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, adapt: bool = False) -> None:
            super().__init__(params, lr, weight_decay, adapt=adapt)

        def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            adapts = group["adapt"] or "rank" in group
            p.add_(grad, alpha=-group["lr"] * (float(p.norm()) if adapts else 1.0))

    def one_adapts(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [*model.parameters()][:2], key: True}, {"params": [*model.parameters()][2:]}]

    strategy, model, optimizer = build(Adapts, "stream")
    assert not optimizer.has_whole_tensors
    assert strategy.create_optimizer(model, Adapts, adapt=True).has_whole_tensors
    named = [{"params": [p], "name": name, "rank_of": 1} for name, p in model.named_parameters()]
    assert not strategy.create_optimizer(model, Adapts, param_groups=named).has_whole_tensors
    optimizer, expected = strategy.create_optimizer(model, Adapts, param_groups=one_adapts(model)), network()
    assert optimizer.has_whole_tensors
    train(expected, lambda loss: loss.backward(), Adapts(one_adapts(expected)))
    train(model, optimizer.backward, optimizer)
    optimizer.synchronize()
    assert_same(model, expected)


def test_a_group_whose_settings_take_matrices_only() -> None:
    """GaLore and APOLLO keep moments of fewer rows in a group with ``rank``, and fail on vectors there."""

    class ByRank(EachParameter):
        def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            shape = (group["rank"], grad.shape[1]) if "rank" in group else grad.shape
            moment = state.setdefault("moment", torch.zeros(shape))
            moment.mul_(0.9).add_(grad.mean(0) if "rank" in group else grad)
            p.sub_(moment.sum(0) if "rank" in group else moment, alpha=group["lr"])

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = [*model.parameters()]
        matrices = [p for p in parameters if p.dim() == 2]
        return [{"params": matrices, "rank": 2}, {"params": [p for p in parameters if p.dim() != 2]}]

    expected, (_, model, optimizer) = network(), build(ByRank, "overlap", groups)
    train(expected, lambda loss: loss.backward(), ByRank(groups(expected)))
    train(model, optimizer.backward, optimizer)
    optimizer.synchronize()
    assert_same(model, expected)


def test_a_class_that_reads_other_groups_is_refused_if_they_differ() -> None:
    class ReadsFirst(EachParameter):
        def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            p.add_(grad, alpha=-self.param_groups[0]["lr"])

    strategy, model, _ = build(ReadsFirst, "stream")
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.2}]
    with pytest.raises(TypeError, match="ReadsFirst computes something over all its parameters"):
        strategy.create_optimizer(model, ReadsFirst, param_groups=groups)


# -- the command that tries published classes


@pytest.mark.parametrize(("name", "outcome"), [("AdamW", "equal"), ("Adafactor", "whole"), ("LBFGS", "not run")])
def test_a_class_of_torch(name: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_classes, "STEPS", 3)
    assert examine(name, getattr(torch.optim, name)).outcome == outcome
