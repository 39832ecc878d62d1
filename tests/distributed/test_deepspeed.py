"""The DeepSpeed strategy on two ranks: bit for bit what a plain loop gives, checkpoints, engines, the contract."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep import Strategy
from lightstep.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from lightstep.checkpoint.huggingface import full_weights
from lightstep.config import ConfigError
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer
from lightstep.distributed import Ranks
from lightstep.state.host_activations import HostActivations
from tests.distributed.deepspeed_reference import DeepSpeedLoop
from tests.distributed.deepspeed_runs import number_anew
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.training import same_tensors
from tests.faults import forge
from tests.reference.tiny_llama import VOCABULARY, make_llama

HALF = {
    "bfloat16": "none",
    "float32": "none",
    "float16": {"kind": "dynamic", "init_scale": 2.0**18, "growth_interval": 2},
}
MICRO_BATCHES = 2
PLAIN = {"lr": 1e-3, "foreach": False}
"""Not fused: the last bits of torch's fused kernels on the CPU depend on where in a tensor a number stands (in a whole
vector, or in the rest), and DeepSpeed has all of a group in one tensor."""


def _alone(check: Callable[..., Any]) -> Callable[..., Any]:
    """``deepspeed.zero.Init`` exchanges ``torch.nn.functional.linear`` for good; other tests need torch's."""

    @functools.wraps(check)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        number_anew()
        with mock.patch.object(nn.functional, "linear", nn.functional.linear):
            return check(*arguments, **keywords)

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
    found = {f"weight.{name}": value.clone() for name, value in full_weights(model).items()}
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{key}.{names[id(numbered[number])]}": torch.as_tensor(value) for key, value in entries.items()}
    return found


# -- the arithmetic


CASES = [
    "1 bfloat16 float32 none",
    "1 float16 float32 none",
    "1 bfloat16 float32 cpu",
    "2 bfloat16 float32 none",
    "2 float32 float32 none",
    "2 bfloat16 parameters none",
    "2 float16 float32 cpu",
    "3 float16 float32 none",
    "3 bfloat16 float32 cpu",
]
"""Stage, dtype, reduce, offload."""


@on_ranks(2, "case", CASES)
@_alone
def test_weights_and_masters_are_those_of_a_plain_loop(rank: int, case: str) -> None:
    number, dtype, reduce, offload = case.split()
    stage = int(number)
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
    results = []
    for step in range(6 if dtype == "float16" else 3):  # of which some are skipped
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
        results.append((result.applied, float(result.grad_norm), result.loss_scale))
    found = _everything(model, optimizer)
    for name, parameter in twin.named_parameters():
        assert torch.equal(found[f"weight.{name}"], parameter.detach().cpu()), name
        if parameter.requires_grad:
            assert torch.equal(found[f"master.{name}"], loop.masters[parameter].detach().cpu()), name
            assert torch.equal(found[f"exp_avg_sq.{name}"], loop.state(parameter)["exp_avg_sq"].cpu()), name
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.optimizer_class is torch.optim.AdamW
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [group["lr"] for group in loop.optimizer.param_groups]
    everybody = Ranks().gather(results)
    assert everybody[0] == everybody[1], "the ranks agree"
    applied, norms, scales = zip(*results, strict=True)
    assert max(norm for norm in norms if norm != float("inf")) > 0.3, "clipping was active"
    if dtype == "float16":
        assert set(applied) == {False, True} and len(set(scales)) > 1, "a step was skipped for overflow"
    strategy.close()


# -- checkpoints


@_alone
def resumes(rank: int, stage: int, dtype: str, folder: str) -> None:
    strategy = _strategy(stage, dtype)
    pieces = _made(strategy)
    _train(strategy, *pieces, range(3), rank)
    torch.manual_seed(17 + rank)
    strategy.save_checkpoint(folder, *pieces, extra={"epoch": 3, "numbers": [1.5]})
    saved, drawn = _everything(*pieces[:2]), torch.rand(3)
    whole = _train(strategy, *pieces, range(3, 5), rank)
    ends = _everything(*pieces[:2])

    again = _made(strategy)
    for _ in range(2):  # an engine that has trained goes back too
        extra = strategy.load_checkpoint(folder, *again)
        assert extra == {"epoch": 3, "numbers": [1.5]} and torch.equal(torch.rand(3), drawn)
        same_tensors(_everything(*again[:2]), saved)
        assert again[2].last_epoch == pieces[2].last_epoch - sum(applied for applied, *_ in whole)
        assert _train(strategy, *again, range(3, 5), rank) == whole
        same_tensors(_everything(*again[:2]), ends)

    fresh = _made(strategy)
    strategy.load_checkpoint(folder, fresh[0])  # the weights alone, and masters from them
    found = _everything(*fresh[:2])
    for name, value in full_weights(fresh[0]).items():
        assert torch.equal(value, saved[f"weight.{name}"])
        if f"master.{name}" in found:
            assert torch.equal(found[f"master.{name}"], value.float())


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bfloat16"), (2, "float16"), (3, "float16")])
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
        from deepspeed.utils import zero_to_fp32

        plain = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))
        assert plain["head.weight"].dtype == torch.float32 and "blocks.2.down.weight" in plain


@_alone
def fails_to_save(rank: int, folder: str) -> list[str]:
    """The second rank's disk is full; then a checkpoint whole; then two that may not be loaded."""
    strategy = _strategy(2)
    pieces = _made(strategy)
    _train(strategy, *pieces, range(1), rank)
    strategy.save_checkpoint(folder, *pieces, extra={"step": 1})
    before = _everything(*pieces[:2])
    _train(strategy, *pieces, range(1, 2), rank)
    write = torch.save
    full = mock.patch.object(
        torch, "save", lambda value, file, **keywords: _full() if isinstance(file, str) else write(value, file)
    )
    with full if rank == 1 else contextlib.nullcontext(), pytest.raises(CheckpointError) as caught:
        strategy.save_checkpoint(folder, *pieces, extra={"step": 2})
    said = [str(caught.value)]
    assert strategy.load_checkpoint(folder, *pieces) == {"step": 1}, "the one before is kept"
    same_tensors(_everything(*pieces[:2]), before)
    for other in (_strategy(3), _strategy(2, "float32")):
        live = _made(other)
        kept = _everything(*live[:2])
        said.append(_refused(other, folder, *live))
        same_tensors(_everything(*live[:2]), kept)
    groups = strategy.prepare_model(TinyTransformer())
    return [*said, _refused(strategy, folder, groups, strategy.create_optimizer(groups, lr=1e-3))]


def _full() -> None:
    raise OSError(28, "No space left on device")


@_alone
def may_not_load(rank: int, folder: str) -> list[str]:
    """One rank in place of two; another model; another strategy; a file that asks for code."""
    strategy = _strategy(2)
    said = []
    model, optimizer, _ = _made(strategy)
    said.append(_refused(strategy, folder, model, optimizer))
    other = strategy.prepare_model(nn.Linear(3, 4))
    said.append(_refused(strategy, folder, other, strategy.create_optimizer(other, lr=1e-3)))
    plain = Strategy.load("resident")
    said.append(_refused(plain, folder, plain.prepare_model(TinyTransformer())))
    for name, saved in (("uneven", torch.optim.AdamW), ("whole", torch.optim.Adafactor)):
        twin = plain.prepare_model(TinyTransformer())
        other = plain.create_optimizer(twin, saved, lr=1e-3)
        other.backward(loss_of(twin, 0, 0, rank, plain.device))
        other.step()
        if name == "uneven":
            other.state[twin.gain]["step"] = torch.tensor(7.0)
        plain.save_checkpoint(f"{folder}-{name}", twin, other)
        alone = strategy.prepare_model(TinyTransformer())
        engine = strategy.create_optimizer(alone, lr=1e-3)
        said.append(_refused(strategy, f"{folder}-{name}", alone, engine))
        with pytest.raises(CheckpointError, match=r"load it with strategy\.load_checkpoint"):
            load_checkpoint(f"{folder}-uneven", alone, engine)
    model, optimizer, _ = _made(strategy)
    strategy.save_checkpoint(f"{folder}-own", model, optimizer)
    (weights,) = Path(f"{folder}-own").rglob("mp_rank_00_model_states.pt")
    content = bytearray(weights.read_bytes())
    content[-2000] ^= 1
    weights.write_bytes(content)
    assert f"{weights.name} is damaged: its checksum is" in _refused(strategy, f"{folder}-own", model, optimizer)
    torch.save({"module": _Code()}, weights)
    forge(Path(f"{folder}-own"))
    said.append(_refused(strategy, f"{folder}-own", model, optimizer))
    with mock.patch("lightstep.deepspeed.checkpoint.refuse_untrusted"):  # a scan that finds nothing
        said.append(_refused(strategy, f"{folder}-own", model, optimizer))
    assert not _Code.ran
    with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
        strategy.save_checkpoint(f"{folder}-again", model, optimizer)
    return said


class _Code:
    ran: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return (_run, ("this would be any code",))


def _run(code: str) -> None:
    _Code.ran.append(code)


def _refused(strategy: Any, folder: str, *pieces: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        strategy.load_checkpoint(folder, *pieces)
    return str(caught.value)


def test_a_checkpoint_is_whole_or_refused(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    first, second = pool.run(fails_to_save, 2, folder=folder)
    full, stage, dtype, groups = first
    assert "No space left" in full and "rank 1" in full and "was not saved" in second[0]
    assert "sharding.stage is 2, and this strategy's is 3" in stage
    assert "precision.parameters is bfloat16, and this strategy's is float32" in dtype
    assert "parameter groups" in groups
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    ((ranks, model, other, uneven, whole, code, unseen),) = pool.run(may_not_load, 1, folder=folder)
    assert "saved it is 2, here it is 1" in ranks and "checkpoint convert" in ranks
    assert "another model" in model and "not in the model: blocks.0.down" in model
    assert "DeepSpeed's own files" in other and "--to lightstep" in other
    assert "step is " in uneven and "7.0 of gain" in uneven and "one for a whole parameter group" in uneven
    assert "is not element-wise, and DeepSpeed divides it" in whole
    assert "asks for" in code and "_run" in code
    assert "_run" in unseen and "asks for" not in unseen


# -- models


@on_ranks(2)
@_alone
def test_models_made_divided_are_the_same(rank: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    strategy = _strategy(3)
    torch.manual_seed(3)
    with strategy.device:
        whole = TinyTransformer().to(torch.bfloat16)
    torch.manual_seed(3 + rank)  # the first rank's weights count
    model = strategy.prepare_model(TinyTransformer)
    assert all(p.numel() == 0 for p in model.parameters() if hasattr(p, "ds_id")), "nobody holds all of it"
    for name, value in full_weights(model).items():
        assert torch.equal(value, whole.state_dict()[name].cpu()), name
    with pytest.raises(RuntimeError, match="create_optimizer"):
        model(torch.zeros(1, 2, dtype=torch.long, device=strategy.device))
    with pytest.raises(CheckpointError, match="create_optimizer"):
        strategy.save_checkpoint(tmp_path / "early", model)

    settings = make_llama(tie_word_embeddings=True).config
    with pytest.raises(ConfigError, match="from_config"):
        strategy.prepare_model(lambda: LlamaForCausalLM(settings))
    torch.manual_seed(4)
    if rank == 0:
        LlamaForCausalLM(settings).save_pretrained(tmp_path / "llama")
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.bfloat16).state_dict()
    read = strategy.prepare_model(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "llama"))
    filled = strategy.prepare_model(lambda: AutoModelForCausalLM.from_config(settings), weights=tmp_path / "llama")
    for llama in (read, filled):
        assert llama.config.vocab_size == VOCABULARY and strategy.unwrap_model(llama) is llama.module
        assert next(llama.buffers()).dtype == torch.float32, "rotary frequencies are not rounded"
        for name, value in full_weights(llama).items():
            assert torch.equal(value, saved[name]), name
    optimizer = strategy.create_optimizer(read, torch.optim.AdamW, lr=1e-2)
    tokens = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(rank)).to(strategy.device)
    losses = []
    for _ in range(3):
        losses.append(read(input_ids=tokens, labels=tokens, use_cache=False).loss)
        optimizer.backward(losses[-1])
        assert optimizer.step()
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigError, match="publish_weights with sharding"):
        strategy.publish_weights(read)
    strategy.export_model(tmp_path / "exported", read)
    dist.barrier()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    trained = full_weights(read)
    assert all(torch.equal(value, trained[name]) for name, value in exported.items() if name in trained)
    assert not all(torch.equal(value, saved[name]) for name, value in trained.items())
    with pytest.raises(ValueError, match="one engine per model"):
        strategy.create_optimizer(read, lr=1e-2)
    with pytest.raises(ConfigError, match="wrapped already"):
        strategy.prepare_model(read)


def _imports_transformers_before_it_divides(strategy: Any) -> None:
    """Importing its models makes modules, which are no part of the model."""
    imported, made = importlib.import_module, []

    def imports(name: str, *arguments: Any) -> Any:
        made.extend([nn.Linear(2, 2)] if name == "transformers.modeling_utils" else [])
        return imported(name, *arguments)

    with mock.patch.object(importlib, "import_module", imports):
        model = strategy.prepare_model(lambda: nn.Linear(4, 4))
    assert hasattr(model.module.weight, "ds_id") and [hasattr(one.weight, "ds_id") for one in made] == [False]


@on_ranks(2)
@_alone
def test_models_that_were_divided_elsewhere() -> None:
    import deepspeed

    strategy = _strategy(3)
    _imports_transformers_before_it_divides(strategy)
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        other = TinyTransformer()
    with pytest.raises(ConfigError, match=r"was partitioned in torch\.bfloat16.*precision\.parameters is float32"):
        _strategy(3, "float32").prepare_model(other)
    with deepspeed.zero.Init(config_dict_or_path=strategy.deepspeed_config):
        alike = TinyTransformer()
    strategy.create_optimizer(strategy.prepare_model(alike), lr=1e-2)
    whole = _strategy(3, "float32").prepare_model(TinyTransformer)
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}


def _starts_alike(rank: int) -> None:
    """Whole models at stage 2: on the meta device, and different on every rank."""
    strategy = _strategy(2)
    torch.manual_seed(rank)
    for model in (nn.Linear(4, 4), nn.Linear(4, 4, device="meta")):
        prepared = strategy.prepare_model(model)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, prepared.weight.detach().float().cpu())
        assert torch.equal(*both) and prepared.weight.dtype == torch.bfloat16
    ones = torch.ones(1, 4, dtype=torch.bfloat16, device=strategy.device)
    assert prepared(ones).shape == (1, 4), "usable before there is an optimizer"


# -- engines made elsewhere


@on_ranks(2)
@_alone
def test_an_engine_made_elsewhere_is_checked_and_taken_over(rank: int) -> None:
    import deepspeed

    strategy = _strategy(2, max_norm=0.3)
    own = _made(strategy)
    expected = _train(strategy, *own, range(2), rank)

    def engine(**changes: Any) -> Any:
        torch.manual_seed(0)
        model = TinyTransformer()
        groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in model.split()]
        settings = {**copy.deepcopy(strategy.deepspeed_config), **changes}
        return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, **PLAIN), config=settings)[0]

    model, optimizer = strategy.adopt_engine(engine())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    assert _train(strategy, model, optimizer, schedule, range(2), rank) == expected
    same_tensors(_everything(model, optimizer), _everything(*own[:2]))
    accumulating = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}
    for changes, *messages in (
        (
            {"gradient_clipping": 1.0, **accumulating},
            "gradient_clipping is 1.0, and the strategy needs 0.3 (clipping.max_norm)",
            "gradient_accumulation_steps is 2, and the strategy needs 1 (strategy.accumulate",
        ),
        (
            {"communication_data_type": "bf16", "data_types": {}},
            "communication_data_type is 'bf16', and the strategy needs 'fp32' (precision.reduce)",
            "data_types.grad_accum_dtype is 'bf16'",
        ),
        (
            {"zero_optimization": {"stage": 1}},
            "zero_optimization.stage is 1, and the strategy needs 2 (sharding.stage)",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            strategy.adopt_engine(engine(**changes))
        assert [message for message in messages if message not in str(caught.value)] == []
    with pytest.raises(ConfigError, match="adopt_engine"):
        strategy.prepare_model(optimizer.engine)


# -- the contract


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
@_alone
def test_the_contract_is_kept(rank: int, world_size: int, stage: int) -> None:
    strategy = _strategy(stage)
    model, optimizer, _ = _made(strategy)
    device = strategy.device
    assert isinstance(optimizer, DeepSpeedOptimizer) and optimizer.loss_scale.is_identity
    with pytest.warns(UserWarning, match="no gradient"):
        optimizer.step()
    optimizer.zero_grad()
    with strategy.accumulate(model, last=False):
        optimizer.backward(loss_of(model, 0, 0, rank, device))
    for broken, message in (
        (optimizer.step, "last=False"),
        (optimizer.zero_grad, "Finish the step"),
        (optimizer.release_device_memory, "step"),
        (optimizer.state_dict, "call step"),
        (lambda: strategy.save_checkpoint("nowhere", model, optimizer), "call step"),
    ):
        with pytest.raises((RuntimeError, CheckpointError), match=message):
            broken()
    optimizer.backward(loss_of(model, 0, 1, rank, device))
    with pytest.raises(RuntimeError, match="last micro-batch"):
        optimizer.backward(loss_of(model, 0, 1, rank, device))
    assert optimizer.step() and all(p.grad is None for p in model.parameters())
    optimizer.zero_grad()
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    unsupported: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: optimizer.add_param_group(group), RuntimeError, "create_optimizer"),
        (lambda: optimizer.set_residency(1.0), ValueError, r"sharding\.offload"),
        (lambda: optimizer.load_state_dict({}), NotImplementedError, "load_checkpoint"),
        (lambda: optimizer.step(lambda: None), ValueError, "without a closure"),
        (lambda: copy.deepcopy(optimizer), TypeError, "save a checkpoint"),
        (lambda: save_checkpoint("nowhere", model, optimizer), CheckpointError, r"strategy\.save_checkpoint"),
        (lambda: optimizer.backward(torch.zeros(3, requires_grad=True)), ValueError, "one element"),
    ]
    for call, kind, message in unsupported:
        with pytest.raises(kind, match=message):
            call()
    optimizer.synchronize()
    optimizer.wait_for_update()
    assert not optimizer.has_deferred_updates
    report = optimizer.memory_report()
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    assert trained / world_size <= report["parameters"] <= trained / world_size + 32, "but for what fills up"
    assert report["device_bytes_per_parameter"] + report["host_bytes_per_parameter"] == 12.0

    twin = _made(strategy)
    expected = _train(strategy, *twin, range(3), rank)
    again = _made(strategy)
    found = _train(strategy, *again, range(2), rank)
    again[1].release_device_memory()
    again[1].release_device_memory()
    assert found + _train(strategy, *again, range(2, 3), rank) == expected
    same_tensors(_everything(*twin[:2]), _everything(*again[:2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostActivations, "SMALLEST", 1)
        for wanted in (True, "host"):
            recomputing = _strategy(stage, sharding={"activation_checkpointing": wanted})
            assert _train(recomputing, *_made(recomputing), range(3), rank) == expected
    loss = loss_of(again[0], 9, 0, rank, device)
    again[1].backward(loss)
    assert again[1].step()
    with pytest.raises(RuntimeError, match="second time"):
        again[1].backward(loss)
    with pytest.raises(RuntimeError, match="make a new model"):
        again[1].step()
    again[1].close()
    with pytest.raises(RuntimeError, match="closed"):
        again[1].step()


@on_ranks(2)
@_alone
def test_outside_changes_reach_the_masters(rank: int) -> None:
    """Weights that somebody loads or edits after the optimizer was made are not reverted by its masters."""
    _starts_alike(rank)
    for stage in (1, 2):
        strategy = _strategy(stage)
        model, optimizer, scheduler = _made(strategy)
        _train(strategy, model, optimizer, scheduler, range(1), rank)
        before = _everything(model, optimizer)
        with torch.no_grad():
            model.module.head.weight.fill_(0.5)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        scheduler.base_lrs = [0.0, 0.0]
        _train(strategy, model, optimizer, scheduler, range(1, 2), rank)
        after = _everything(model, optimizer)
        assert torch.equal(after["master.head.weight"], torch.full_like(after["master.head.weight"], 0.5))
        assert torch.equal(after["master.embed.weight"], before["master.embed.weight"]), "others keep all their bits"
        optimizer.refresh_master_weights()
        rounded = _everything(model, optimizer)["master.embed.weight"]
        assert torch.equal(rounded, before["master.embed.weight"].to(torch.bfloat16).float())
        with torch.no_grad():
            model.module.head.weight.fill_(-0.0)
        optimizer.refresh_master_weights()
        assert _everything(model, optimizer)["master.head.weight"].signbit().all(), "a sum of parts would be 0.0"


@on_ranks(2)
@_alone
def test_a_save_raises_the_error_of_the_one_that_was_pending(rank: int, world_size: int, tmp_path: Path) -> None:
    """Weights alone are saved by a thread, and all else by DeepSpeed's engine: one is pending at a time."""
    strategy = _strategy(1)
    model, optimizer, _ = _made(strategy)
    with mock.patch("lightstep.checkpoint.save.write_tensors", side_effect=OSError(28, "No space left on device")):
        pending = strategy.save_checkpoint(
            tmp_path / "weights-1", model, optimizer, weights_only=True, asynchronous=True
        )
        pending.exception()
    with pytest.raises(CheckpointError, match="weights-1 was not saved: No space left"):
        strategy.save_checkpoint(tmp_path / "step-1", model, optimizer)
    dist.barrier()
    assert not (tmp_path / "step-1").exists()
    strategy.save_checkpoint(tmp_path / "step-1", model, optimizer)
    strategy.load_checkpoint(tmp_path / "step-1", model, optimizer)
    optimizer.close()


@on_ranks(2)
@_alone
def test_ranks_are_told_that_their_extra_is_not_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    strategy = _strategy(1)
    model, optimizer, _ = _made(strategy)
    with mock.patch("lightstep.checkpoint.save.logger.warning") as warning:
        strategy.save_checkpoint(tmp_path / "a", model, optimizer, extra={"rank": 0})
        assert not warning.called
        strategy.save_checkpoint(tmp_path / "a", model, optimizer, extra={"rank": rank})
        assert warning.called == (rank == 0)
    assert strategy.load_checkpoint(tmp_path / "a", model, optimizer) == {"rank": 0}
    optimizer.close()


@on_ranks(2)
@_alone
def test_the_error_of_a_damaged_checkpoint_names_an_older_one(rank: int, world_size: int, tmp_path: Path) -> None:
    strategy = _strategy(1)
    model, optimizer, _ = _made(strategy)
    for step in (1, 2):
        strategy.save_checkpoint(tmp_path / f"step-{step}", model, optimizer)
    if rank == 0:
        (tmp_path / "step-2" / "state.pt").write_bytes(b"damaged")
    dist.barrier()
    message = "step-1 is undamaged: load that one" if rank == 0 else "step-2 is not a complete checkpoint"
    with pytest.raises(CheckpointError, match=message):
        strategy.load_checkpoint(tmp_path / "step-2", model, optimizer)
    strategy.load_checkpoint(tmp_path / "step-1", model, optimizer)
    optimizer.close()
