"""State dicts of bitsandbytes' and torchao's 8-bit AdamW, loaded into torch's class under lightstep."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightstep
from lightstep.checkpoint.formats.convert import convert_checkpoint
from lightstep.optimizer.moments import Moments
from tests.training import made


def model() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((66, 100), (7,))]


def fill(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = 0.1 * torch.randn(parameter.shape, generator=generator)


def by_hand(wrapped: bool, size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """bitsandbytes' layout of one parameter of ``[66, 100]``, and its moments."""
    generator = torch.Generator().manual_seed(1)
    kept, expected = {}, {}
    for number, key in (("1", "exp_avg"), ("2", "exp_avg_sq")):
        table = torch.sort(torch.rand(256, generator=generator) - (0.5 if number == "1" else 0.0)).values
        codes = torch.randint(256, (66, 100), generator=generator)
        largest = torch.rand(-(-6600 // size), generator=generator)
        kept |= {f"state{number}": codes.to(torch.uint8), f"qmap{number}": table, f"absmax{number}": largest}
        values = [table[code] * largest[place // size] for place, code in enumerate(codes.view(-1).tolist())]
        expected[key] = torch.stack(values).view(66, 100)
    return {"step": 3, **({"__bnb_optimizer_quant_state__": kept} if wrapped else kept)}, expected


def optimizer_of(parameters: list[nn.Parameter], **options: Any) -> Any:
    return lightstep.MixedPrecisionOptimizer(parameters, torch.optim.AdamW, {"lr": 1.0}, **options)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("size", [256, 2048])
def test_codes_tables_and_scales(wrapped: bool, size: int) -> None:
    parameters = model()[:1]
    entries, expected = by_hand(wrapped, size)
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "alpha": 0.0, "t_alpha": None}
    optimizer = optimizer_of(parameters)
    optimizer.load_state_dict({"state": {0: entries}, "param_groups": [{**group, "params": [0]}]})
    found = dict(optimizer.state[parameters[0]])
    assert found.keys() == {"step", "exp_avg", "exp_avg_sq"} and float(found["step"]) == 3
    for key, value in expected.items():
        assert torch.equal(found[key], value)
    live = optimizer.param_groups[0]
    assert live["betas"] == (0.9, 0.99) and "alpha" not in live and "amsgrad" in live


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_loading_says_what_is_lost(moments: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    parameters = [nn.Parameter(torch.ones(66, 100)), nn.Parameter(torch.ones(66, 128))]
    codes, exact = by_hand(True, 256)
    in_fp32 = {"step": 3, "state1": torch.ones(66, 128), "state2": torch.ones(66, 128)}
    for first, decoded in ((codes, 1), (exact | {"step": torch.tensor(3.0)}, 0)):
        caplog.clear()
        optimizer = optimizer_of(parameters, moments=Moments(moments))
        optimizer.load_state_dict({"state": {0: first, 1: in_fp32}, "param_groups": [{"params": [0, 1]}]})
        lines = [record.message for record in caplog.records]
        said = sum(
            "are decoded to float32: exactly, but what these codes had lost stays lost" in line for line in lines
        )
        assert said == decoded
        kept = sum("kept in int8 from here on: rounded to the nearest codes" in line for line in lines)
        assert kept == (moments == "int8")


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_a_run_of_bitsandbytes_goes_on(moments: Any) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs, mine = model(), model()
    other = pytest.importorskip("bitsandbytes").optim.AdamW8bit(theirs, lr=1e-3, betas=(0.9, 0.95))
    for step in range(3):
        fill(theirs, step)
        other.step()
    optimizer = optimizer_of(mine, moments=Moments(moments))
    with torch.no_grad():
        for one, given in zip(mine, theirs, strict=True):
            one.copy_(given)
    optimizer.load_state_dict(other.state_dict())
    state, kept = dict(optimizer.state[mine[0]]), other.state[theirs[0]]
    if moments == "float32":
        for number, key in (("1", "exp_avg"), ("2", "exp_avg_sq")):
            scales, table = kept[f"absmax{number}"], kept[f"qmap{number}"]
            wanted = functional.dequantize_blockwise(kept[f"state{number}"], absmax=scales, code=table, blocksize=256)
            assert torch.equal(state[key], wanted)
            assert torch.equal(dict(optimizer.state[mine[1]])[key], other.state[theirs[1]][f"state{number}"])
    for parameters, each in ((mine, optimizer), (theirs, other)):
        fill(parameters, 3)
        each.step()
    for one, given in zip(mine, theirs, strict=True):
        assert (one - given).abs().max() < 2e-4  # of a step of 1e-3


def test_a_file_converts(tmp_path: Path) -> None:
    """As the Trainer writes it with ``optim="adamw_bnb_8bit"``."""
    weights = nn.Linear(100, 66, bias=False)
    entries, expected = by_hand(True, 256)
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "alpha": 0.0, "params": [0]}
    packed = {"state": {0: entries}, "param_groups": [group]}
    torch.save({"model": weights.state_dict(), "optimizer": packed}, tmp_path / "run.pt")
    names = tmp_path / "names.json"
    names.write_text('["weight"]')
    convert_checkpoint(tmp_path / "run.pt", tmp_path / "run", "lightstep", names=names)
    strategy, model, optimizer = made("fp32", nn.Linear(100, 66, bias=False), torch.optim.AdamW, lr=1.0)
    strategy.load_checkpoint(tmp_path / "run", model, optimizer)
    assert torch.equal(model.weight, weights.weight)
    for key, value in expected.items():
        assert torch.equal(dict(optimizer.state[model.weight])[key], value)
    assert "alpha" not in optimizer.param_groups[0]


class Coded(torch.Tensor):
    """A tensor that decodes itself, as torchao's."""

    codes = None

    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor) * 2


def test_tensors_that_decode_themselves() -> None:
    parameters = model()[1:]
    value = torch.rand(7)
    optimizer = optimizer_of(parameters)
    state = {"step": torch.tensor(2.0), "exp_avg": value.as_subclass(Coded), "exp_avg_sq": value.as_subclass(Coded)}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert torch.equal(dict(optimizer.state[parameters[0]])["exp_avg"], 2 * value)


def test_what_is_not_adams_is_refused_and_changes_nothing() -> None:
    parameters = model()[:1]
    optimizer = optimizer_of(parameters)
    entries, _ = by_hand(False, 256)
    groups = optimizer.state_dict()["param_groups"]
    one = {key: value for key, value in entries.items() if not key.endswith("2")}
    with pytest.raises(ValueError, match=r"has one moment \(state1\), that of Lion, SGD or another class"):
        optimizer.load_state_dict({"state": {0: one}, "param_groups": groups})
    other = {**entries, "absmax1": torch.ones(5)}
    with pytest.raises(ValueError, match=r"has 6600 codes and 5 scales; bitsandbytes' block-wise state"):
        optimizer.load_state_dict({"state": {0: other}, "param_groups": groups})
    assert not optimizer.state
