"""torch.equal to the textbook loop: weights, masters and all optimizer state, on every backend that has been built."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lightstep
from lightstep.optimizer import queue
from lightstep.state import segment
from lightstep.state.lanes import Lanes
from tests.covering import every_pair, every_value
from tests.reference.lion import Lion
from tests.reference.own_classes import Adding
from tests.reference.pair import DTYPES, FP16_SCALE, IN_BACKWARD, TWO_GROUPS, Pair, scale_for, strategy_values
from tests.reference.tiny_model import TinyModel, loss_of
from tests.training import random_delays, random_sleeps
from tests.unit.test_homes_and_times import HOMES as EVERY_HOME
from tests.unit.test_homes_and_times import TIMES

MAX_NORM = 0.35
SOME_BACKENDS = ["resident", "stream", "stream-overlap"]
AT_SOME_TIME = ["resident", "stream-overlap", "stream-in-backward"]
REDUCE = ["float32", "parameters"]
SUBMITTED = [(queue.SUBMIT_IN_STEP, queue.SUBMIT_AHEAD), (0, 0), (1, 1), (3, 2)]
"""Units in a deferred ``step()``, and ahead of what is waited for."""

OTHERS: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "AdamW-for-loop": (torch.optim.AdamW, {"lr": 3e-3}, {"lr": 1e-3}, {"fused": False}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 3e-3}, {"lr": 1e-3}, {"foreach": True}),
    "AdamW-not-foreach": (torch.optim.AdamW, {"lr": 3e-3}, {"lr": 1e-3}, {"foreach": False}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 3e-3}, {"lr": 1e-3}, {"fused": True}),
    "AdamW-maximize": (torch.optim.AdamW, {"lr": 3e-3}, {"lr": 1e-3}, {"maximize": True}),
    "SGD-plain": (torch.optim.SGD, {"lr": 0.05}, {"lr": 0.02}, {}),
    "SGD-foreach": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {"lr": 0.02}, {"foreach": True}),
    "Adagrad-started": (torch.optim.Adagrad, {"lr": 0.02}, {"lr": 0.05}, {"initial_accumulator_value": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 3e-3}, {"lr": 1e-3}, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 3e-3}, {"lr": 1e-3}, {}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}, {"lr": 0.1}, {}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}, {"lr": 0.02}, {}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}, {"lr": 0.02}, {}),
    "Lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 3e-4}, {}),
    "equal groups": (
        torch.optim.Adam,
        {"lr": 1e-2, "amsgrad": True},
        {"lr": 1e-2, "amsgrad": True},
        {"maximize": True},
    ),
    "padding is written to": (Adding, {}, {}, {}),
}
CLASSES = {**{name: (*own, {}) for name, own in TWO_GROUPS.items()}, **OTHERS}

# -- the table: every home of the state, every update time, every class, with what may happen in a run ----------------

HOMES = EVERY_HOME | {"stream, some resident": EVERY_HOME["stream"] | {"resident_gib": 2 / 2**20}}
DEVICE, HOST = {"placement": "device"}, {"placement": "host", "device_mib": 0.001}
PLACES = {
    "device": (DEVICE, DEVICE),
    "host": (HOST, HOST),
    "device, then host": (DEVICE, HOST),
    "host, then device": (HOST, DEVICE),
}
"""Of weights and gradients, before and after the resume."""
STEPS, OVERFLOWS, RESUMES_AT = 14, (0, 4, 11), 7


class Slow(Pair):
    """Lanes with random delays; a step reads no weights."""

    def finish(self) -> Any:
        result = self.optimizer.step()
        assert bool(result) is self.reference.step(result.grad_norm)
        return result

    def lanes(self) -> list[Lanes]:
        """Of state, and of weights on the host."""
        weights = self.optimizer.engine._host_weights
        return [self.optimizer._backend.lanes, *([] if weights is None else [weights.lanes])]

    def delay(self, seed: int) -> None:
        for lanes in self.lanes():
            if self.strategy.device.type == "cuda":
                random_sleeps(lanes, seed, 1_000_000)
            else:
                random_delays(lanes, seed, 1e-3)


def pair_for(
    name: str, home: str, time: str, parameters: str, micro_batches: int, make: type[Slow] = Slow, **strategy: Any
) -> Slow:
    """With overflows, and with layers that are always used, now and then, late, and never.

    Layers are clipped by themselves where updates in backward need it, and if there are several micro-batches with all
    others that are not tried in backward. All are clipped by one norm otherwise.
    """
    optimizer_class, first, second, common = CLASSES[name]
    state = HOMES[home] | ({"previous_weights": ["device", "host"][micro_batches % 2]} if time == "overlap" else {})
    scale = "none"
    if parameters == "float16":
        scale = {"kind": "constant", "scale": 256.0} if time == "in_backward" else FP16_SCALE
    return make(
        optimizer_class,
        first,
        second,
        common=common,
        parameters=parameters,
        micro_batches=micro_batches,
        max_norm=MAX_NORM,
        scope="unit" if time == "in_backward" or (micro_batches > 1 and time != "overlap") else "global",
        overflow_at=OVERFLOWS,
        late_from=5,
        intermittent=True,
        update=time,
        loss_scale=scale,
        **(state | strategy),
    )


def train(pair: Slow, seed: int, place: str = "device") -> None:
    """Clipped or not at random, while learning rates rise and a layer is frozen and another thawed.

    A new model and a new optimizer go on in the middle, perhaps in another place.
    """
    choose = random.Random(seed)
    base = [group["lr"] for group in pair.optimizer.param_groups]
    before = {key: value.clone() for key, value in pair.model.state_dict().items()}
    for step in range(STEPS):
        if step == RESUMES_AT:
            after = pair.model.state_dict()
            unchanged = {key for key in before if torch.equal(before[key], after[key])}  # bf16 hides small updates
            assert {"frozen.weight", "dead.weight", "dead.bias"} <= unchanged <= before.keys() - {"hidden.weight"}
            pair.values["weights"] = PLACES[place][1]
            pair.resume(choose.choice(["model first", "optimizer first"]))
        if step in (1, RESUMES_AT + 1):
            pair.delay(seed + step)
        for optimizer in (pair.optimizer, pair.reference.optimizer):
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * min(step / 3, 1)  # the first step moves nothing, but is a step
        if step == RESUMES_AT + 2:
            for model in (pair.model, pair.reference_model):
                model.frozen.requires_grad_(True)
                model.head.requires_grad_(False)
        forced = {2: 1e6, 3: 0.01, 9: 1e6, 10: 0.01}
        pair.optimizer.max_norm = pair.reference.max_norm = forced.get(step, choose.choice([1e6, 1e6, 0.05]))
        pair.step()
        if step % 4 == 3:
            pair.check()
    assert pair.reference.skipped_steps == len(OVERFLOWS)
    assert 0 < pair.reference.clipped_steps < STEPS
    pair.check()
    pair.optimizer.close()


@every_pair(
    name=TWO_GROUPS,
    home=HOMES,
    time=TIMES,
    parameters=DTYPES,
    micro_batches=[1, 2],
    reduce=REDUCE,
    place=PLACES,
    submitted=SUBMITTED,
)
@pytest.mark.usefixtures("small_units", "never_pauses")
def test_equal_to_the_textbook_loop(
    name: str,
    home: str,
    time: str,
    parameters: str,
    micro_batches: int,
    reduce: str,
    place: str,
    submitted: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "SUBMIT_IN_STEP", submitted[0])
    monkeypatch.setattr(queue, "SUBMIT_AHEAD", submitted[1])
    pair = pair_for(name, home, time, parameters, micro_batches, reduce=reduce, weights=PLACES[place][0])
    train(pair, zlib.crc32(f"{name} {home} {time}".encode()), place)
    if time == "overlap" and home != "resident":
        assert pair.optimizer.engine.queue.redone > 0


@every_value(
    name=OTHERS,
    home=["resident", "stream"],
    time=TIMES,
    parameters=["bfloat16", "float32"],
    place=["device, then host", "host", "host, then device"],
    vector=[1, segment.CPU_VECTOR],
)
def test_any_element_wise_optimizer(
    name: str, home: str, time: str, parameters: str, place: str, vector: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with gaps between parameters where no kernel is fused."""
    monkeypatch.setattr(segment, "CPU_VECTOR", vector)
    train(pair_for(name, home, time, parameters, 1, weights=PLACES[place][0]), seed=1, place=place)


class SomeLayersInFp32(Slow):
    """bf16 with two fp32 layers, as models with fp32 norms or heads have; the user casts after ``prepare_model``."""

    def build_model(self, strategy: Any) -> nn.Module:
        model = super().build_model(strategy)
        model.late.float()
        model.gain.data = model.gain.data.float()
        return model


@every_value(name=["AdamW", "SGD-momentum"], home=HOMES, time=TIMES)
def test_dtypes_may_be_mixed_in_one_model(name: str, home: str, time: str) -> None:
    pair = pair_for(name, home, time, "bfloat16", 2, SomeLayersInFp32)
    assert {p.dtype for p in pair.model.parameters()} == {torch.bfloat16, torch.float32}
    train(pair, seed=2)


# -- one thing at a time ----------------------------------------------------------------------------------------------


def adamw(parameters: str, backend: str, **settings: Any) -> Pair:
    scale = scale_for(parameters)
    return Pair(*TWO_GROUPS["AdamW"], parameters=parameters, backend=backend, max_norm=MAX_NORM, **scale, **settings)


@every_pair(norm_type=[1.0, 3.0, float("inf")], parameters=DTYPES, backend=AT_SOME_TIME)
def test_other_norms(norm_type: float, parameters: str, backend: str) -> None:
    pair = Pair(
        *TWO_GROUPS["AdamW"],
        parameters=parameters,
        backend=backend,
        max_norm={1.0: 0.5, 3.0: 0.1, float("inf"): 0.05}[norm_type],
        norm_type=norm_type,
        scope="unit" if backend in IN_BACKWARD else "global",
        overflow_at=(2,),
        loss_scale={"kind": "constant", "scale": 256.0} if parameters == "float16" else "none",
    )
    pair.train(6)
    assert pair.reference.clipped_steps > 2


LOSS_SCALES: dict[str, dict[str, Any]] = {
    "power of two": {"kind": "constant", "scale": 128.0},
    "not a power of two": {"kind": "constant", "scale": 1000.0},
    "hysteresis": {**FP16_SCALE, "hysteresis": 2},
}


@every_pair(loss_scale=LOSS_SCALES, parameters=DTYPES, backend=AT_SOME_TIME)
def test_every_loss_scale(loss_scale: str, parameters: str, backend: str) -> None:
    """1000 is no power of two: dividing by it and multiplying by the clip coefficient are two roundings, not one.

    The last bit of a layer's norm is then the order of its additions.
    """
    in_backward = backend in IN_BACKWARD
    pair = Pair(
        *TWO_GROUPS["AdamW"],
        parameters=parameters,
        backend=backend,
        micro_batches=2,
        max_norm=0.1,
        scope="unit" if in_backward else "global",
        overflow_at=(2, 3),
        loss_scale=LOSS_SCALES["power of two" if in_backward and loss_scale == "hysteresis" else loss_scale],
    )
    pair.train(6)
    assert pair.reference.clipped_steps > 0


@pytest.mark.parametrize("backend", SOME_BACKENDS)
def test_a_class_that_is_not_fused_any_more_still_skips(backend: str) -> None:
    """A fused class skips on the device, and any other needs the host to read the flag."""
    pair = Pair(*TWO_GROUPS["AdamW"], backend=backend, overflow_at=(3, 5))
    for optimizer in (pair.optimizer, pair.reference.optimizer):
        assert optimizer.param_groups[0].get("fused") is not False
    pair.train(3)
    for optimizer in (pair.optimizer, pair.reference.optimizer):
        for group in optimizer.param_groups:
            group["fused"] = False
    pair.train(4)


def test_a_scale_that_overflows_by_itself_comes_down() -> None:
    """No inf is written by hand: fp16 gradients overflow under a scale that is far too large."""
    scale = {**FP16_SCALE, "init_scale": 2.0**24, "max_scale": 2.0**24, "growth_interval": 100}
    pair = Pair(*TWO_GROUPS["AdamW"], parameters="float16", backend="stream-overlap", loss_scale=scale)
    pair.train(14)
    assert 3 <= pair.reference.skipped_steps <= 12
    assert pair.optimizer.loss_scale.scale == 2.0**24 / 2**pair.reference.skipped_steps


@every_value(parameters=DTYPES, backend=SOME_BACKENDS)
def test_nan_skips_as_inf_does(parameters: str, backend: str) -> None:
    pair = adamw(parameters, backend)
    pair.train(3)
    poison = loss_of(pair.model, 99) * torch.nan
    pair.optimizer.backward(poison)
    kept = [p.detach().clone() for p in pair.model.parameters()]
    assert not pair.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(pair.model.parameters(), kept, strict=True))
    pair.reference.loss_scale.update(overflow=True)
    pair.train(3)


@every_value(parameters=DTYPES, backend=SOME_BACKENDS)
def test_gradients_written_by_hand(parameters: str, backend: str) -> None:
    """A step does not care who wrote ``.grad``; with a loss scale they are scaled gradients, as for GradScaler.

    They may be one tensor for two parameters, or a broadcast view of one number.
    """
    pair = adamw(parameters, backend)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for _, tested, expected in pair.named():
            if tested.requires_grad and step % 3 != tested.dim():
                grad = torch.randn(tested.shape, generator=generator).to(tested)
                tested.grad, expected.grad = grad.clone(), grad
        for model in (pair.model, pair.reference_model):
            if step == 4:
                model.gain.grad.fill_(torch.inf)
            if step == 5:
                shared = torch.linspace(-1, 1, 5).to(model.head.bias)
                model.head.bias.grad, model.late.bias.grad = shared, shared
                model.hidden.bias.grad = torch.ones_like(model.gain).expand(13)
        pair.reference.collect()
        pair.finish()
        pair.check()
    assert pair.reference.skipped_steps == 1


@every_value(parameters=DTYPES, backend=[*SOME_BACKENDS, "stream-in-backward-and-forward"])
def test_gradients_may_have_gaps(parameters: str, backend: str) -> None:
    """By the largest element, since the order of additions depends on gaps, and the reference has none."""
    scale = scale_for(parameters)
    largest = {"max_norm": 0.05, "norm_type": float("inf")}
    pair = Pair(*TWO_GROUPS["AdamW"], parameters=parameters, backend=backend, **largest, **scale)
    for model in (pair.model, pair.reference_model):
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.register_post_accumulate_grad_hook(_leave_gaps)
    pair.train(4)


def _leave_gaps(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = torch.stack([parameter.grad, parameter.grad + 7], -1)[..., 0]


@every_value(parameters=DTYPES, backend=[*SOME_BACKENDS, "stream-in-backward-and-forward"], weights=[DEVICE, HOST])
def test_a_weight_may_be_transposed_in_its_memory(parameters: str, backend: str, weights: dict[str, Any]) -> None:
    pair = adamw(parameters, backend, weights=weights)
    for transpose in (_transposed_in_place, _transposed_data):
        pair.train(2)
        pair.optimizer.synchronize()
        for model in (pair.model, pair.reference_model):
            transpose(model.sometimes.weight)
        if weights == HOST:  # they rest in row-major order, and a GPU adds a norm up in the order of memory
            pair.reference_model.sometimes.weight.data = pair.reference_model.sometimes.weight.data.contiguous()
        pair.reference.adopt(pair.reference_model.sometimes.weight)
        pair.train(2)


@torch.no_grad()
def _transposed_in_place(weight: torch.Tensor) -> None:
    weight.t_()


def _transposed_data(weight: torch.Tensor) -> None:
    weight.data = weight.data.t()


@every_value(kind=IN_BACKWARD, late=["frozen", "in no group"])
def test_a_gradient_that_backward_could_not_know_of_is_refused(kind: str, late: str) -> None:
    pair = Pair(*TWO_GROUPS["AdamW"], backend=kind)
    pair.train(2)
    parameter = pair.model.frozen.weight
    if late == "in no group":
        parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device=pair.strategy.device))
    pair.optimizer.backward(loss_of(pair.model, pair.steps))
    pair.reference.backward(loss_of(pair.reference_model, pair.steps))
    if late == "in no group":
        pair.optimizer.add_param_group({"params": [parameter]})
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="were frozen or in no group when backward began"):
        pair.optimizer.step()
    parameter.grad = None
    pair.finish()
    pair.steps += 1
    pair.train(2)


class Strict(torch.optim.SGD):
    """As torch's fused kernels on a GPU: gradients have the strides of their parameters."""

    def step(self, closure: Any = None) -> Any:
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                raise ValueError(f"strides {parameter.grad.stride()} and {parameter.stride()}")
        return super().step(closure)


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_gradients_of_up_to_one_element_may_have_any_stride(backend: str) -> None:
    """FSDP2's empty shards have 0."""
    strategy = lightstep.Strategy.load(strategy_values("float32", backend))
    model: Any = strategy.prepare_model(nn.ParameterList([torch.ones(0), torch.ones(1), torch.ones(3)]))
    groups = [{"params": [parameter]} for parameter in model]
    optimizer = strategy.create_optimizer(model, Strict, param_groups=groups, lr=1.0)
    for size in range(3):
        ones = torch.ones(3, device=strategy.device)
        model[0].grad, model[1].grad, model[2].grad = ones.as_strided((0,), (0,)), ones.clone()[::3], ones * size
        optimizer.step()
    optimizer.synchronize()
    assert [parameter.tolist() for parameter in model] == [[], [-2.0], [-2.0] * 3]


# -- models that expose what the tiny one does not --------------------------------------------------------------------


class Transposed(TinyModel):
    """A dense parameter in column-major order."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.weight = nn.Parameter(self.hidden.weight.detach().t().contiguous().t())


class Sliced(TinyModel):
    """A parameter that is a window of a larger tensor: not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight = nn.Parameter(torch.randn(11, 9)[:, 2:8])


class ChannelsLast(TinyModel):
    """A convolution as vision code keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    def forward(self, tokens: torch.Tensor, *, sometimes: bool = True, late: bool = True) -> torch.Tensor:
        logits = super().forward(tokens, sometimes=sometimes, late=late)
        image = torch.arange(27.0, device=logits.device).sin().view(1, 3, 3, 3).to(logits.dtype)
        return logits + self.conv(image.contiguous(memory_format=torch.channels_last)).mean() * logits


class Tied(TinyModel):
    """Two layers share one weight, and a parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.late.weight = self.head.weight
        self.empty = nn.Parameter(torch.zeros(0, 13))

    def forward(self, tokens: torch.Tensor, *, sometimes: bool = True, late: bool = True) -> torch.Tensor:
        return super().forward(tokens, sometimes=sometimes, late=late) + self.empty.sum()


@every_value(
    make_model=[Transposed, Sliced, ChannelsLast, Tied],
    name=["AdamW", "SGD-momentum"],
    parameters=DTYPES,
    backend=[*SOME_BACKENDS, "stream-in-backward-and-forward"],
    micro_batches=[2, 1],
    weights=[DEVICE, HOST],
)
def test_odd_memory_layouts(
    make_model: type[TinyModel], name: str, parameters: str, backend: str, micro_batches: int, weights: dict[str, Any]
) -> None:
    """The norm adds up elements in the order of their memory."""
    pair = Pair(
        *TWO_GROUPS[name],
        make_model=make_model,
        parameters=parameters,
        backend=backend,
        micro_batches=micro_batches,
        max_norm=MAX_NORM,
        overflow_at=(3,),
        weights=weights,
        **scale_for(parameters),
    )
    pair.train(4)
    pair.resume()
    pair.train(2)
