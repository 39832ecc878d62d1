"""torch.equal to the textbook loop: weights, masters and all optimizer state, on every backend that has been built."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightstep.precision.loss_scale import ConstantLossScale, DynamicLossScale
from tests.covering import every_pair, every_value
from tests.reference.lion import Lion
from tests.reference.pair import DTYPES, EVERY_TIME, FP16_SCALE, TWO_GROUPS, Pair, scale_for
from tests.reference.plain_loop import ReferenceScale
from tests.reference.tiny_model import TinyModel, loss_of

OVERFLOWS = (3, 10, 11, 20)
MAX_NORM = 0.35

backends = pytest.mark.parametrize("backend", list(EVERY_TIME))
SOME_OPTIMIZERS = ["AdamW", "SGD-momentum", "NAdam"]
SOME_BACKENDS = ["resident", "stream", "stream-overlap"]


def adamw(parameters: str, backend: str) -> Pair:
    return Pair(
        *TWO_GROUPS["AdamW"], parameters=parameters, backend=backend, max_norm=MAX_NORM, **scale_for(parameters)
    )


@every_pair(name=TWO_GROUPS, parameters=DTYPES, micro_batches=[1, 4], backend=EVERY_TIME)
def test_thirty_steps_equal_the_textbook_loop(name: str, parameters: str, micro_batches: int, backend: str) -> None:
    pair = Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=backend,
        micro_batches=micro_batches,
        max_norm=MAX_NORM,
        overflow_at=OVERFLOWS,
        late_from=10,
        intermittent=True,
        **scale_for(parameters),
    )
    before = {key: value.clone() for key, value in pair.model.state_dict().items()}
    pair.train(30, after_each=lambda step: pair.check() if step % 10 == 4 else None)

    # The run went where it was meant to go: clipped and unclipped steps, every overflow skipped, only the frozen and
    # the dead layer where they were.
    assert pair.reference.skipped_steps == len(OVERFLOWS)
    assert 5 <= pair.reference.clipped_steps <= 30 - len(OVERFLOWS)
    after = pair.model.state_dict()
    unchanged = {key for key in before if torch.equal(before[key], after[key])}
    assert unchanged == {"frozen.weight", "dead.weight", "dead.bias"}


@every_value(name=SOME_OPTIMIZERS, parameters=DTYPES, backend=EVERY_TIME)
def test_save_and_resume_in_the_middle(name: str, parameters: str, backend: str) -> None:
    pair = Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=backend,
        micro_batches=2,
        max_norm=MAX_NORM,
        overflow_at=(5, 9),
        late_from=10,
        intermittent=True,
        **scale_for(parameters),
    )
    pair.train(7)
    pair.resume()
    pair.check()
    pair.train(7)


@every_value(parameters=DTYPES, backend=EVERY_TIME)
def test_resume_may_load_the_optimizer_before_the_model(parameters: str, backend: str) -> None:
    pair = adamw(parameters, backend)
    pair.train(5)
    pair.resume("optimizer first")
    pair.train(5)


@every_value(name=SOME_OPTIMIZERS, parameters=DTYPES, backend=EVERY_TIME)
def test_first_gradient_at_step_ten(name: str, parameters: str, backend: str) -> None:
    pair = Pair(*TWO_GROUPS[name], parameters=parameters, backend=backend, late_from=10, **scale_for(parameters))
    pair.train(10)
    late = pair.model.late.weight
    untouched = late.detach().clone()
    pair.train(5)
    assert not torch.equal(late, untouched)


@every_value(name=SOME_OPTIMIZERS, parameters=DTYPES, backend=EVERY_TIME)
def test_gradients_added_in_the_parameters_dtype(name: str, parameters: str, backend: str) -> None:
    pair = Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=backend,
        micro_batches=4,
        max_norm=MAX_NORM,
        overflow_at=(4,),
        intermittent=True,
        reduce="parameters",
        **scale_for(parameters),
    )
    pair.train(10)


@pytest.mark.parametrize("parameters", ["bfloat16", "float16"])
def test_the_two_ways_of_adding_differ(parameters: str) -> None:
    def weights(reduce: str) -> torch.Tensor:
        sgd = TWO_GROUPS["SGD-momentum"]
        pair = Pair(*sgd, parameters=parameters, micro_batches=4, reduce=reduce, **scale_for(parameters))
        pair.train(5)
        return pair.reference.masters[pair.reference_model.hidden.weight]

    assert not torch.equal(weights("float32"), weights("parameters"))


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
}


@every_value(name=OTHERS, parameters=["bfloat16", "float32"], backend=SOME_BACKENDS)
def test_any_element_wise_optimizer(name: str, parameters: str, backend: str) -> None:
    optimizer_class, first, second, common = OTHERS[name]
    pair = Pair(
        optimizer_class,
        first,
        second,
        common=common,
        parameters=parameters,
        backend=backend,
        max_norm=MAX_NORM,
        overflow_at=(0, 6),
        intermittent=True,
    )
    pair.train(8)
    pair.resume()
    pair.train(6)


@every_value(norm_type=[1.0, 3.0, float("inf")], parameters=DTYPES, backend=EVERY_TIME)
def test_other_norms(norm_type: float, parameters: str, backend: str) -> None:
    max_norm = {1.0: 2.0, 3.0: 0.2, float("inf"): 0.1}[norm_type]
    pair = Pair(
        *TWO_GROUPS["AdamW"],
        parameters=parameters,
        backend=backend,
        max_norm=max_norm,
        norm_type=norm_type,
        overflow_at=(2,),
        **scale_for(parameters),
    )
    pair.train(8)
    assert pair.reference.clipped_steps > 0


LOSS_SCALES: dict[str, dict[str, Any]] = {
    "power of two": {"kind": "constant", "scale": 128.0},
    "not a power of two": {"kind": "constant", "scale": 1000.0},
    "hysteresis": {**FP16_SCALE, "hysteresis": 2},
}


@every_pair(name=["AdamW", "RMSprop"], loss_scale=LOSS_SCALES, parameters=DTYPES, backend=SOME_BACKENDS)
def test_every_loss_scale(name: str, loss_scale: str, parameters: str, backend: str) -> None:
    """1000 is no power of two: dividing by it and multiplying by the clip coefficient are two roundings, not one."""
    pair = Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=backend,
        micro_batches=2,
        max_norm=MAX_NORM,
        overflow_at=(2, 3, 6),
        loss_scale=LOSS_SCALES[loss_scale],
    )
    pair.train(12)
    assert pair.reference.clipped_steps > 0


@every_value(change=["none dynamic", "dynamic none", "dynamic constant"], backend=EVERY_TIME)
def test_a_loss_scale_may_be_exchanged(change: str, backend: str) -> None:
    first, then = change.split()
    settings = {"none": "none", "dynamic": FP16_SCALE, "constant": {"kind": "constant", "scale": 1000.0}}
    pair = Pair(*TWO_GROUPS["AdamW"], backend=backend, max_norm=MAX_NORM, loss_scale=settings[first])
    pair.train(3)
    pair.optimizer.loss_scale = {
        "none": ConstantLossScale,
        "dynamic": lambda: DynamicLossScale(**{k: v for k, v in FP16_SCALE.items() if k != "kind"}),
        "constant": lambda: ConstantLossScale(1000.0),
    }[then]()
    pair.reference.loss_scale = ReferenceScale(settings[then])
    pair.train(6)


@backends
def test_a_scale_that_overflows_by_itself_comes_down(backend: str) -> None:
    """No inf is written by hand: fp16 gradients overflow under a scale that is far too large."""
    scale = {**FP16_SCALE, "init_scale": 2.0**24, "max_scale": 2.0**24, "growth_interval": 100}
    pair = Pair(*TWO_GROUPS["AdamW"], parameters="float16", backend=backend, loss_scale=scale)
    pair.train(20)
    assert 3 <= pair.reference.skipped_steps <= 15
    assert pair.optimizer.loss_scale.scale == 2.0**24 / 2**pair.reference.skipped_steps


@every_value(parameters=DTYPES, backend=EVERY_TIME)
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


@every_value(name=["AdamW", "SGD-momentum"], parameters=DTYPES, backend=EVERY_TIME)
def test_gradients_written_by_hand(name: str, parameters: str, backend: str) -> None:
    """A step does not care who wrote ``.grad``; with a loss scale they are scaled gradients, as for GradScaler."""
    pair = Pair(*TWO_GROUPS[name], parameters=parameters, backend=backend, max_norm=MAX_NORM, **scale_for(parameters))
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for _, tested, expected in pair.named():
            if tested.requires_grad and step % 3 != tested.dim():
                grad = torch.randn(tested.shape, generator=generator).to(tested)
                tested.grad, expected.grad = grad.clone(), grad
        if step == 4:
            pair.model.gain.grad.fill_(torch.inf)
            pair.reference_model.gain.grad.fill_(torch.inf)
        pair.reference.collect()
        pair.finish()
        pair.check()
    assert pair.reference.skipped_steps == 1


@every_value(name=["AdamW", "RMSprop"], parameters=DTYPES, backend=EVERY_TIME)
def test_learning_rates_may_change_every_step(name: str, parameters: str, backend: str) -> None:
    """Warm-up starts at 0: that step moves no weight but is a step, and its moments count."""
    pair = Pair(*TWO_GROUPS[name], parameters=parameters, backend=backend, **scale_for(parameters))
    base = [group["lr"] for group in pair.optimizer.param_groups]
    for step in range(8):
        for optimizer in (pair.optimizer, pair.reference.optimizer):
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * step / 4
        pair.train(1)


@every_value(parameters=DTYPES, backend=EVERY_TIME)
def test_a_layer_may_be_frozen_and_thawed(parameters: str, backend: str) -> None:
    pair = adamw(parameters, backend)
    for thawed, frozen in [("frozen", "head"), ("head", "hidden"), ("hidden", "frozen")]:
        for model in (pair.model, pair.reference_model):
            model.get_submodule(thawed).requires_grad_(True)
            model.get_submodule(frozen).requires_grad_(False)
        pair.train(3)


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


@every_pair(
    make_model=[Transposed, Sliced, ChannelsLast, Tied],
    name=["AdamW", "SGD-momentum"],
    micro_batches=[1, 2],
    parameters=DTYPES,
    backend=SOME_BACKENDS,
)
def test_odd_memory_layouts(
    make_model: type[TinyModel], name: str, micro_batches: int, parameters: str, backend: str
) -> None:
    pair = Pair(
        *TWO_GROUPS[name],
        make_model=make_model,
        parameters=parameters,
        backend=backend,
        micro_batches=micro_batches,
        max_norm=MAX_NORM,
        overflow_at=(3,),
        **scale_for(parameters),
    )
    pair.train(5)
    pair.resume()
    pair.train(3)


class SomeLayersInFp32(Pair):
    """bf16 with two fp32 layers, as models with fp32 norms or heads have; the user casts after ``prepare_model``."""

    def build_model(self, strategy: Any) -> nn.Module:
        model = super().build_model(strategy)
        model.late.float()
        model.gain.data = model.gain.data.float()
        return model


@every_value(name=TWO_GROUPS, backend=EVERY_TIME)
def test_dtypes_may_be_mixed_in_one_model(name: str, backend: str) -> None:
    pair = SomeLayersInFp32(
        *TWO_GROUPS[name], backend=backend, micro_batches=3, max_norm=MAX_NORM, overflow_at=(4,), intermittent=True
    )
    assert {p.dtype for p in pair.model.parameters()} == {torch.bfloat16, torch.float32}
    pair.train(7)
    pair.resume()
    pair.train(5)


@every_value(name=SOME_OPTIMIZERS, parameters=DTYPES, backend=EVERY_TIME)
def test_the_division_into_units_changes_nothing(
    name: str, parameters: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightstep.state.store.Store.WHOLE_UNIT", 64)
    pair = Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=backend,
        micro_batches=2,
        max_norm=MAX_NORM,
        overflow_at=(3,),
        late_from=5,
        intermittent=True,
        **scale_for(parameters),
    )
    pair.train(10)


@pytest.mark.parametrize("backend", ["resident", "stream-overlap"])
def test_a_long_run(backend: str) -> None:
    pair = Pair(
        *TWO_GROUPS["AdamW"], backend=backend, max_norm=MAX_NORM, overflow_at=range(30, 150, 37), intermittent=True
    )
    pair.train(150)


@every_value(parameters=DTYPES, backend=EVERY_TIME)
def test_the_same_optimizer_on_the_default_group(parameters: str, backend: str) -> None:
    """No ``param_groups``: one group of everything that is trainable."""

    class OneGroup(Pair):
        def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
            return [{"params": [p for p in model.parameters() if p.requires_grad], **copy.deepcopy(self.groups[0])}]

        def build_optimizer(self, strategy: Any, model: nn.Module) -> Any:
            return strategy.create_optimizer(model, self.optimizer_class, **self.groups[0])

    first = TWO_GROUPS["AdamW"][1]
    scale = scale_for(parameters)
    pair = OneGroup(torch.optim.AdamW, first, first, parameters=parameters, backend=backend, max_norm=MAX_NORM, **scale)
    pair.train(6)
    pair.resume()
    pair.train(4)


@every_value(parameters=DTYPES, backend=EVERY_TIME)
def test_gradients_that_share_memory(parameters: str, backend: str) -> None:
    """Gradients written by hand may be one tensor for two parameters, or a broadcast view of one number."""
    pair = Pair(*TWO_GROUPS["AdamW"], parameters=parameters, backend=backend, max_norm=0.01, **scale_for(parameters))
    for model in (pair.model, pair.reference_model):
        shared = torch.linspace(-1, 1, 5).to(model.head.bias)
        model.head.bias.grad, model.late.bias.grad = shared, shared
        model.hidden.bias.grad = torch.ones_like(model.gain).expand(13)
    pair.reference.collect()
    pair.finish()
    pair.check()
