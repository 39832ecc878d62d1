"""The DeepSpeed strategy on two ranks: weights and masters bit for bit those of a plain loop, checkpoints, bad input."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep import Strategy
from lightstep.config import ConfigError
from lightstep.optimizer.deepspeed import DeepSpeedOptimizer
from lightstep.strategy.checkpoint import CheckpointError
from lightstep.strategy.deepspeed_weights import gathered
from tests.distributed.deepspeed_reference import DeepSpeedLoop
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool

HALF = {
    "bfloat16": "none",
    "float32": "none",
    "float16": {"kind": "dynamic", "init_scale": 2.0**18, "growth_interval": 2},
}
MICRO_BATCHES = 2
PLAIN = {"lr": 1e-3, "foreach": False}
"""Not fused: the last bits of torch's fused kernels on the CPU depend on where in a tensor a number stands (whole vectors,
or the rest), and DeepSpeed has all of a group in one."""


@contextlib.contextmanager
def _own_linear() -> Iterator[None]:
    """``deepspeed.zero.Init`` exchanges ``torch.nn.functional.linear`` for good; other tests need torch's."""
    linear = nn.functional.linear
    try:
        yield
    finally:
        nn.functional.linear = linear


def _alone(check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(check)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        gc.freeze()  # DeepSpeed collects garbage several times for each engine
        try:
            with _own_linear():
                return check(*arguments, **keywords)
        finally:
            gc.unfreeze()

    return guarded


def _strategy(stage: int, dtype: str = "bfloat16", max_norm: float | None = 0.3, **sections: Any) -> Any:
    values = {
        "sharding": {"kind": "deepspeed", "stage": stage, **sections.pop("sharding", {})},
        "precision": {"parameters": dtype, "loss_scale": HALF[dtype], **sections.pop("precision", {})},
        "clipping": {"max_norm": max_norm},
    }
    return Strategy.load({**values, **sections})


def _made(strategy: Any, optimizer_class: Any = torch.optim.AdamW) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, optimizer_class, param_groups=model.split(), **PLAIN)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def _train(strategy: Any, model: nn.Module, optimizer: Any, scheduler: Any, steps: Any, rank: int) -> list[Any]:
    results = []
    for step in steps:
        for micro in range(MICRO_BATCHES):
            with strategy.accumulate(model, last=micro == MICRO_BATCHES - 1):
                optimizer.backward(loss_of(model, step, micro, rank, strategy.device) / MICRO_BATCHES)
        results.append(optimizer.step())
        if results[-1]:
            scheduler.step()
    return [(result.applied, float(result.grad_norm), result.loss_scale) for result in results]


def _everything(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Weights, masters and moments, whole, by name."""
    names = {id(p): name for name, p in model.module.named_parameters()}
    found = {f"weight.{name}": value for name, value in gathered(model.module, keep=True).items()}
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{key}.{names[id(numbered[number])]}": torch.as_tensor(value) for key, value in entries.items()}
    return found


def _assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# -- the arithmetic


@_alone
def follows(rank: int, world_size: int, stage: int, dtype: str, reduce: str, offload: str) -> dict[str, Any]:
    strategy = _strategy(stage, dtype, precision={"reduce": reduce}, sharding={"offload": offload})
    model, optimizer, scheduler = _made(strategy)
    torch.manual_seed(0)
    twin = TinyTransformer().to(strategy.device)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(strategy.parameter_dtype)
    groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in twin.split()]
    rule = {"loss_scale": HALF[dtype], "max_norm": 0.3, "reduce": reduce, **PLAIN}
    loop = DeepSpeedLoop(twin, groups, torch.optim.AdamW, stage=stage, offload=offload == "cpu", **rule)
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0 / (1 + step))
    scales, applied, norms = [], [], []
    for step in range(6):
        for micro in range(MICRO_BATCHES):
            with strategy.accumulate(model, last=micro == MICRO_BATCHES - 1):
                optimizer.backward(loss_of(model, step, micro, rank, strategy.device) / MICRO_BATCHES)
            loop.backward(loss_of(twin, step, micro, rank, strategy.device) / MICRO_BATCHES)
        result = optimizer.step()
        unrounded = optimizer.engine.get_global_grad_norm() if result else result.grad_norm
        if stage == 3 and result:  # divided by the scale of this step, not by the one that has grown since
            assert float(unrounded) == pytest.approx(float(result.grad_norm), rel=1e-6)
        assert result.loss_scale == loop.loss_scale.scale
        assert bool(result) == loop.finish(result.grad_norm, torch.as_tensor(unrounded))
        if result:
            scheduler.step()
            schedule.step()
        assert all(parameter.grad is None for parameter in model.parameters())
        scales.append(result.loss_scale)
        applied.append(result.applied)
        norms.append(float(result.grad_norm))
    found = _everything(model, optimizer)
    for name, parameter in twin.named_parameters():
        assert torch.equal(found[f"weight.{name}"], parameter.detach().cpu()), name
        if parameter.requires_grad:
            assert torch.equal(found[f"master.{name}"], loop.masters[parameter].detach().cpu()), name
            assert torch.equal(found[f"exp_avg_sq.{name}"], loop.state(parameter)["exp_avg_sq"].cpu()), name
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.optimizer_class is torch.optim.AdamW
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [group["lr"] for group in loop.optimizer.param_groups]
    strategy.close()
    return {"applied": applied, "scales": scales, "norms": norms, "rates": rates}


@pytest.mark.parametrize(
    ("stage", "dtype", "reduce", "offload"),
    [
        (1, "bfloat16", "float32", "none"),
        (2, "bfloat16", "float32", "none"),
        (3, "bfloat16", "float32", "none"),
        (1, "float16", "float32", "none"),
        (2, "float16", "float32", "none"),
        (3, "float16", "float32", "none"),
        (2, "float32", "float32", "none"),
        (2, "bfloat16", "parameters", "none"),
        (1, "bfloat16", "float32", "cpu"),
        (2, "float16", "float32", "cpu"),
        (3, "bfloat16", "float32", "cpu"),
    ],
)
def test_weights_and_masters_are_those_of_a_plain_loop(
    pool: Pool, stage: int, dtype: str, reduce: str, offload: str
) -> None:
    first, second = pool.run(follows, 2, stage=stage, dtype=dtype, reduce=reduce, offload=offload)
    assert first == second, "the ranks agree"
    assert max(norm for norm in first["norms"] if norm != float("inf")) > 0.3, "clipping was active"
    if dtype == "float16":
        assert False in first["applied"] and True in first["applied"], "a step was skipped for overflow"
        assert sorted(first["scales"])[0] < first["scales"][-1] or len(set(first["scales"])) > 1


# -- checkpoints


@_alone
def resumes(rank: int, world_size: int, stage: int, dtype: str, folder: str) -> None:
    strategy = _strategy(stage, dtype)
    pieces = _made(strategy)
    _train(strategy, *pieces, range(3), rank)
    torch.manual_seed(17 + rank)
    strategy.save_checkpoint(folder, *pieces, extra={"epoch": 3, "numbers": [1.5]})
    saved, drawn = _everything(*pieces[:2]), torch.rand(3)
    whole = _train(strategy, *pieces, range(3, 6), rank)
    ends = _everything(*pieces[:2])

    again = _made(strategy)
    extra = strategy.load_checkpoint(folder, *again)
    assert extra == {"epoch": 3, "numbers": [1.5]} and torch.equal(torch.rand(3), drawn)
    _assert_same(_everything(*again[:2]), saved)
    assert again[2].last_epoch == pieces[2].last_epoch - sum(applied for applied, *_ in whole)
    assert _train(strategy, *again, range(3, 6), rank) == whole
    _assert_same(_everything(*again[:2]), ends)

    strategy.load_checkpoint(folder, *again)  # an engine that has trained goes back too
    _assert_same(_everything(*again[:2]), saved)
    assert _train(strategy, *again, range(3, 6), rank) == whole
    _assert_same(_everything(*again[:2]), ends)

    fresh = _made(strategy)
    strategy.load_checkpoint(folder, fresh[0])  # the weights alone, and masters from them
    found = _everything(*fresh[:2])
    for name, value in gathered(fresh[0].module, keep=True).items():
        assert torch.equal(value, saved[f"weight.{name}"])
        if f"master.{name}" in found:
            assert torch.equal(found[f"master.{name}"], value.float())


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16"), (2, "float16"), (3, "float16")]
)
def test_a_resumed_run_continues_bit_for_bit(pool: Pool, tmp_path: Path, stage: int, dtype: str) -> None:
    folder = tmp_path / "step-3"
    pool.run(resumes, 2, stage=stage, dtype=dtype, folder=str(folder))
    manifest = json.loads((folder / "lightstep.json").read_text())
    tag = manifest["deepspeed"]["tag"]
    assert (folder / "latest").read_text() == tag and (folder / "zero_to_fp32.py").is_file()
    assert {f"{tag}/{path.name}" for path in (folder / tag).iterdir()} <= manifest["files"].keys()
    assert len(list((folder / tag).glob("*optim_states.pt"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"], "nothing is left beside it"
    if (stage, dtype) != (1, "bfloat16"):  # DeepSpeed's tool does not know the files of that optimizer
        plain = _consolidated(folder)
        assert plain["head.weight"].dtype == torch.float32 and "blocks.2.down.weight" in plain


def _consolidated(folder: Path) -> dict[str, Tensor]:
    """What DeepSpeed's own tool makes of it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder))
