"""Averages of the weights: bit for bit a plain loop's under every update time, saved, restored, swapped in and out."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from lightstep import Strategy, WeightAverage
from lightstep.checkpoint.formats import describe_checkpoint
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.reference.pair import IN_BACKWARD, TWO_GROUPS, Pair, scale_for
from tests.reference.plain_loop import ReferenceAverage
from tests.reference.tiny_model import loss_of


class Averaged(Pair):
    """A pair with an average of each, which is taken in right after a step or in the middle of the next."""

    average: WeightAverage

    def follow(self, late: bool) -> None:
        self.average = WeightAverage(self.model, 0.9)
        names = dict(self.reference_model.named_parameters())
        self.expected = ReferenceAverage([names[name] for name in self.average.tensors], 0.9)
        self.late = late

    def advance(self) -> None:
        before = self.steps
        self.step()
        if self.late:  # between a forward and its backward
            loss_of(self.model, before, 0)
        self.average.update()
        self.expected.update()

    def check_average(self) -> None:
        for (name, average), expected in zip(self.average.tensors.items(), self.expected.values, strict=True):
            assert average.dtype == torch.float32 and torch.equal(average, expected), name


@every_value(
    backend=["bulk", "stream-overlap-resident-in-part", "stream-in-backward-and-forward", "stream-in-backward"],
    parameters=["bfloat16", "float16", "float32"],
    late=[False, True],
)
def test_the_average_is_a_plain_loops(backend: str, parameters: str, late: bool) -> None:
    scale = {} if backend in IN_BACKWARD else scale_for(parameters)
    overflow = [3] if scale.get("loss_scale", "none") != "none" else []
    classes = TWO_GROUPS["AdamW"]
    pair = Averaged(*classes, backend=backend, parameters=parameters, overflow_at=overflow, **scale)
    pair.follow(late)
    for step in range(6):
        pair.advance()
        if step % 2:
            with pair.average.applied():
                for name, parameter in pair.model.named_parameters():
                    if name in pair.average.tensors:
                        assert torch.equal(parameter, pair.average.tensors[name].to(parameter.dtype)), name
                with torch.no_grad():
                    loss_of(pair.model, step, 0)
    pair.check_average()
    pair.check()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_holds_the_average(tmp_path: Path, asynchronous: bool) -> None:
    strategy = Strategy.load("stream-overlap")
    model, other, plain = (strategy.prepare_model(nn.Linear(5, 3)) for _ in range(3))
    optimizer = strategy.create_optimizer(model, lr=0.1)
    average = WeightAverage(model, 0.5)
    inputs = torch.ones(2, 5, dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.backward(model(inputs).float().sum())
        optimizer.step()
        average.update()
    pending = strategy.save_checkpoint(tmp_path / "step-3", model, optimizer, asynchronous=asynchronous)
    saved = {name: tensor.clone() for name, tensor in average.tensors.items()}
    average.update()
    if pending is not None:
        pending.result(PATIENCE)
    loaded = WeightAverage(other)
    strategy.load_checkpoint(tmp_path / "step-3", other)
    strategy.load_checkpoint(tmp_path / "step-3", plain)
    assert saved.keys() == loaded.tensors.keys() == {"weight", "bias"}
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.tensors.items())
    assert not torch.equal(saved["weight"], model.weight.float())
    assert "averages of the weights" in dict(describe_checkpoint(tmp_path / "step-3"))["note"]
    strategy.save_checkpoint(tmp_path / "step-4", plain)
    strategy.load_checkpoint(tmp_path / "step-4", other)
    assert torch.equal(loaded.tensors["weight"], plain.weight.float()), "without averages they begin as the weights"


def test_what_cannot_be_averaged_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"decay is 1.0; a number between 0 and 1"):
        WeightAverage(model, 1.0)
    with pytest.raises(ValueError, match="Linear has no trainable weights"):
        WeightAverage(nn.Linear(2, 2).requires_grad_(False))
    average = WeightAverage(model)
    with pytest.raises(ValueError, match="has a WeightAverage already"):
        WeightAverage(model)
    del average
    gc.collect()
    WeightAverage(model)


def test_weights_that_are_trained_later_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Strategy.load("fp32").prepare_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[0].requires_grad_(False)
    average = WeightAverage(model)
    average.update()
    assert not caplog.records
    model[0].requires_grad_(True)
    for _ in range(2):
        average.update()
    (record,) = caplog.records
    assert "2 weights are trained since the averages were made, and have none (0.weight, 0.bias)" in record.getMessage()


def test_parameters_that_are_exchanged_are_followed_or_refused() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.5)
    before = average.tensors["weight"].clone()
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, assign=True)
    average.update()
    assert torch.equal(average.tensors["weight"], torch.lerp(before, model.weight.detach(), 0.5))
    model.weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="weight was replaced by another parameter after its average was made"):
        average.update()
