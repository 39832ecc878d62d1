"""The Trainer and accelerate on two ranks: by DDP, sharded by the strategy, and sharded by accelerate."""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from lightstep import CheckpointError, ConfigError, Rule, Strategy
from lightstep.checkpoint import save
from lightstep.checkpoint.huggingface import full_weights
from lightstep.distributed import local_tensor
from lightstep.integrations.accelerate import connect, prepare
from lightstep.integrations.folders import PendingFolder, SavedFolders
from lightstep.integrations.transformers import LightstepMixin, LightstepTrainer
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.strategy.fsdp2 import FSDP2Strategy
from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import Pool, device_of, on_ranks
from tests.distributed.training import Training, full, same_tensors
from tests.patience import PATIENCE
from tests.reference import peft_stand_in
from tests.reference.pair import FP16_SCALE
from tests.reference.tiny_llama import ROWS, Rows, make_llama, training_arguments
from tests.reference.tiny_models import make_converted
from tests.reference.trl_stand_in import ReferenceTrainer
from tests.unit.test_stream import random_delays

OVERLAP = {"backend": "stream", "ring_mib": 0.05, "update": "next_forward"}
CLIPPING = {"max_norm": 0.5}
_SHARDED = {"sharding": {"kind": "fsdp2"}, "optimizer_state": OVERLAP, "clipping": CLIPPING}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {
        "sharding": {"kind": "ddp"},
        "optimizer_state": {"backend": "stream", "ring_mib": 0.05},
        "clipping": CLIPPING,
    },
    "strategy": _SHARDED,
    "accelerate": _SHARDED,
}
SAVES = {"save_strategy": "steps", "save_steps": 2}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}
STEPS = 3
CPU = device_of(0, 2).type == "cpu"


@contextlib.contextmanager
def fresh_state(kind: str) -> Iterator[None]:
    """accelerate keeps its state for the life of a process, and ranks run one test after the other.

    It shards with FSDP on accelerators only: the ranks pass for such. Without the variable it changes the number of
    threads, and with it the bits of what these ranks compute next.
    """
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        reset()
        PartialState(cpu=CPU)
        pass_for_accelerators(kind)
        try:
            yield
        finally:
            reset()


def pass_for_accelerators(kind: str) -> None:
    if kind == "accelerate":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, copied to the host; ranks may hold a part of the model each."""
    return {name: tensor.clone() for name, tensor in full_weights(model).items()}


# -- weights on the host


PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {"placement": "device"},
    "host": {"placement": "host", "device_mib": 0.005},
}


@contextlib.contextmanager
def reducing_each() -> Iterator[None]:
    """Every micro-batch is reduced, as where weights rest on the host."""
    with mock.patch.object(FSDP2Strategy, "_accumulate", return_value=contextlib.nullcontext()):
        yield


def slow_host(model: nn.Module, optimizer: Any, seed: int) -> None:
    """Random delays in every lane."""
    visits = PreparedModel.of(model).weight_visits
    assert visits is not None, "the weights are on the device"
    assert all(local_tensor(parameter).device.type == "cpu" for parameter in model.parameters())
    if CPU:
        for lanes in (visits.weights.lanes, optimizer._backend.lanes):
            random_delays(lanes, seed)


# -- the Trainer


def arguments(folder: str | Path, kind: str = "strategy", **changes: Any) -> Any:
    """One row a micro-batch, in order; accelerate shards if ``kind`` says so."""
    values = {"per_device_train_batch_size": 1, "use_cpu": CPU, "train_sampling_strategy": "sequential"}
    values |= {"fsdp": True if kind == "accelerate" else None, "max_steps": STEPS}
    args = training_arguments(folder, **values | changes)
    assert args.device.type == ("cpu" if CPU else "cuda")
    pass_for_accelerators(kind)
    return args


def trainer_of(args: Any, model: nn.Module, strategy: Any, **options: Any) -> LightstepTrainer:
    data = Rows()
    given = {"train_dataset": data, "eval_dataset": data, **options}
    trainer = LightstepTrainer(model, args, strategy=strategy, **given)
    assert trainer.is_fsdp_enabled is bool(args.fsdp)
    return trainer


def trained(
    folder: str | Path, kind: str, resume: str | None = None, values: dict[str, Any] | None = None, **options: Any
) -> LightstepTrainer:
    seed, saves = (0, SAVES) if resume is None else (1, {})
    args = arguments(folder, kind, **saves | options.pop("more", {}))
    evaluates_first = options.pop("evaluates_first", False)
    trainer = trainer_of(args, make_llama(seed), values or STRATEGIES[kind], **options)
    if evaluates_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same_in_folder(folder: str, weights: dict[str, Tensor]) -> None:
    saved = type(make_llama()).from_pretrained(folder, dtype="auto")
    same_tensors({name: parameter.detach() for name, parameter in saved.named_parameters()}, weights)


@contextlib.contextmanager
def late_writers(rank: int) -> Iterator[None]:
    """The ranks' writers begin at different moments, while training goes on."""
    write, moments = save.write_tensors, random.Random(rank)

    def late(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(moments.uniform(0.0, 0.1))
        return write(*arguments)

    with mock.patch.object(save, "write_tensors", late):
        yield


class SlowHost(TrainerCallback):
    """Delays wherever weights travel, once there are steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            slow_host(kwargs["model"], kwargs["optimizer"], args.process_index)


def seen(trainer: LightstepTrainer, rank: int) -> tuple[float, Any]:
    """The loss of an evaluation, and what shards write."""
    loss, model = trainer.evaluate()["eval_loss"], trainer.model.eval()
    if not isinstance(model, FSDPModule):
        return loss, None
    tokens = Rows()[rank]["input_ids"][None, :6].to(trainer.args.device)
    return loss, model.generate(input_ids=tokens, pad_token_id=0, max_new_tokens=2, do_sample=False).tolist()


class Loaded(TrainerCallback):
    """Masters and state, whole and on the host, as training begins with them."""

    def __init__(self) -> None:
        self.state: list[dict[str, Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        inner = kwargs["optimizer"].optimizer
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            entries = {key: value for key, value in inner.state[parameter].items() if key != "step"}
            self.state.append({key: full(value).cpu() for key, value in entries.items()})


def resume_plain(kind: str, folder: str) -> None:
    """What one process saved as a whole arrives in shards, its fp32 weights as masters."""
    with fresh_state(kind):
        loaded = Loaded()
        trainer = trainer_of(arguments(folder, kind), make_llama(1), STRATEGIES[kind], callbacks=[loaded])
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    saved = torch.load(f"{folder}/checkpoint-2/optimizer.pt", weights_only=True)
    weights = load_file(f"{folder}/checkpoint-2/model.safetensors")
    names = [name for name, _ in make_llama().named_parameters()]
    decayed = trainer.get_decay_parameter_names(make_llama())
    ordered = [n for n in names if n in decayed] + [n for n in names if n not in decayed]
    assert len(loaded.state) == len(ordered)
    for index, name in enumerate(ordered):
        same_tensors(
            loaded.state[index],
            {k: saved["state"][index][k] for k in ("exp_avg", "exp_avg_sq")} | {"master": weights[name]},
        )


def plain_loop(rank: int, world_size: int, values: dict[str, Any], logs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The same training as the README's loop; rows go to the ranks in turn, losses are over the tokens of all."""
    strategy, rows = Strategy.load(values), Rows()
    model = strategy.prepare_model(make_llama())
    names = dict(strategy.unwrap_model(model).named_parameters())
    groups = [
        {"params": [p for name, p in names.items() if ("norm" in name) is norm], "weight_decay": 0.0 if norm else 0.1}
        for norm in (False, True)
    ]
    optimizer = strategy.create_optimizer(model, param_groups=groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (STEPS - step) / STEPS))
    steps = [entry for entry in logs if "grad_norm" in entry]
    for step in range(STEPS):
        everybody = [rows[index] for index in range(4 * step, 4 * step + 4)]
        items = sum(item["labels"][1:].ne(-100).sum() for item in everybody)
        for micro in range(2):
            item = everybody[2 * micro + rank]
            batch = {key: value[None].to(strategy.device) for key, value in item.items()}
            with strategy.accumulate(model, last=micro == 1):
                optimizer.backward(model(**batch, num_items_in_batch=items).loss * world_size)
        result = optimizer.step()
        assert steps[step]["grad_norm"] == float(result.grad_norm)
        scheduler.step()
    return whole(model)


@pytest.mark.parametrize(
    ("kind", "time", "places"),
    [
        *((kind, "next_forward", ("device", "device")) for kind in STRATEGIES),
        ("strategy", "overlap", ("host", "device")),
        ("accelerate", "next_forward", ("host", "host")),
    ],
)
@on_ranks(2)
def test_trainer(rank: int, world_size: int, kind: str, time: str, places: tuple[str, str], tmp_path: Path) -> None:
    """One run with checkpoints in it, those that continue from there, and the plain loop.

    accelerate's shards are saved while training goes on: replicas and others in ``test_programs.py``, as well.

    Args:
        places: of the weights, and of those of the run that continues.
    """
    values = STRATEGIES[kind] | ({} if kind == "ddp" else {"optimizer_state": {**OVERLAP, "update": time}})
    begun, later = (values | {"weights": PLACEMENTS[place]} for place in places)
    options: dict[str, Any] = {"eval_dataset": torch.utils.data.Subset(Rows(), range(5)), "more": EVALUATES}
    if kind == "accelerate":
        options |= {"asynchronous_saves": True, "more": EVALUATES | {"save_steps": 1, "save_total_limit": 2}}
    if places[0] == "host":
        options |= {"callbacks": [SlowHost()], "evaluates_first": kind == "strategy"}
    with reducing_each() if "host" in places else contextlib.nullcontext():
        with late_writers(rank), fresh_state(kind):
            first = trained(tmp_path, kind, values=begun, **options)
            inner = first.optimizer.optimizer
            assert isinstance(first.model, FSDPModule) is (kind != "ddp")
            assert (inner._backend._share is not None) is (kind == "ddp")
            first.save_model(f"{tmp_path}/saved")
            weights, expected = whole(first.model), seen(first, rank)
        for checkpoint in ("checkpoint-2", *(["checkpoint-3"] if kind == "accelerate" else [])):
            with fresh_state(kind):
                second = trained(
                    tmp_path, kind, resume=f"{tmp_path}/{checkpoint}", values=later, eval_dataset=first.eval_dataset
                )
                same_tensors(whole(second.model), weights)
                assert seen(second, rank) == expected
        same_tensors(plain_loop(rank, world_size, values, first.state.log_history), weights)
    same_in_folder(f"{tmp_path}/saved", weights)
    torch.distributed.barrier()
    assert not list(tmp_path.glob("checkpoint-2/optimizer*"))
    for each in ("lightstep/*.distcp", "rng_state_*.pth"):
        assert len(list(tmp_path.glob(f"checkpoint-2/{each}"))) == 2  # each rank wrote its part
    if kind == "accelerate":
        assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def save_as_before(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """The Trainer's before transformers 5.23."""
    if trainer.args.should_save:
        trainer._save(output_dir)


@on_ranks(2)
def test_older_versions_of_the_trainer_save(tmp_path: Path) -> None:
    """Only the first process writes, and may be the only one that is asked to; all of them gather."""
    with fresh_state("strategy"), mock.patch.object(Trainer, "save_model", save_as_before):
        trainer = trained(tmp_path, "strategy")
        weights = whole(trainer.model)
        trainer._save(f"{tmp_path}/direct")  # as a class in front of the Trainer may do
        torch.distributed.barrier()
    for name in (f"checkpoint-{STEPS}", "direct"):
        same_in_folder(f"{tmp_path}/{name}", weights)


@pytest.mark.parametrize("kind", ["ddp", "strategy"])
def test_a_checkpoint_of_one_process_is_continued(pool: Pool, tmp_path: Path, kind: str) -> None:
    args = training_arguments(tmp_path, **SAVES, max_steps=2)
    Trainer(make_llama(), args, train_dataset=Rows()).train()
    reset()
    pool.run(resume_plain, 2, kind=kind, folder=str(tmp_path))


@pytest.mark.parametrize("kind", ["strategy", "accelerate"])
@on_ranks(2)
def test_rules(kind: str, tmp_path: Path) -> None:
    """Muon beside AdamW on shards: as with an optimizer that the strategy made; under accelerate, continued."""
    found = {}
    for spelling in ("rules", "optimizers", *(["resumed"] if kind == "accelerate" else [])):
        with fresh_state(kind):
            saves = SAVES if spelling == "rules" else {}
            args = arguments(tmp_path, kind, **saves, weight_decay=0.01)  # AdamW's own
            strategy, model = Strategy.load(STRATEGIES[kind]), make_llama(spelling == "resumed")
            muon = Rule(torch.optim.Muon, kinds="hidden_matrices", lr=0.02)
            chosen: dict[str, Any] = {"rules": [muon, {"kinds": "rest"}]}
            if spelling == "optimizers":
                chosen = {"optimizers": (strategy.create_optimizer(model, rules=both_classes()), None)}
                if kind == "accelerate":  # FSDP replaces the parameters
                    with pytest.raises(RuntimeError, match="not allowed if PyTorch FSDP is enabled"):
                        LightstepTrainer(model, args, strategy=strategy, train_dataset=Rows(), **chosen)
                    continue
            trainer = trainer_of(args, model, strategy, **chosen)
            trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2" if spelling == "resumed" else None)
            found[spelling] = whole(trainer.model)
    for weights in found.values():
        same_tensors(weights, found["rules"])


# -- what stands in front of the Trainer


class Mixed(LightstepMixin, ReferenceTrainer):
    """Under a strategy, with a reference model that follows, and weights for vLLM."""


@on_ranks(2)
def test_a_reference_model_that_follows(tmp_path: Path) -> None:
    """The reference is sharded as the model is, and both are what the callbacks make of whole ones."""
    with fresh_state("strategy"):
        args = arguments(tmp_path)
        model, other = make_llama(), make_llama(1).bfloat16()
        expected = {name: p.detach().clone() for name, p in other.named_parameters()}
        strategy = {**STRATEGIES["strategy"], "precision": {"parameters": "bfloat16"}}
        trainer = Mixed(model, args, other, strategy=strategy, train_dataset=Rows(), eval_dataset=Rows())
        assert isinstance(trainer.reference, FSDPModule)
        assert getattr(AcceleratorState(), "fsdp_plugin", None) is None  # nobody else's state knows of one
        trainer.train()
        for weights in trainer.published.published:
            for name, average in expected.items():
                average.mul_(0.5).add_(weights[name].cpu(), alpha=0.5)
        same_tensors(whole(trainer.reference), expected)
        same_tensors(
            {name: weight.cpu() for name, weight in trainer.published.published[-1].items()},
            whole(trainer.model),
        )


WIDE = {"sharding": {"kind": "fsdp2", "compute": "bfloat16"}, "precision": {"parameters": "float32"}}


class Mixed2Seq(LightstepMixin, Seq2SeqTrainer):
    """Generates when it evaluates."""


@on_ranks(2, "values", [STRATEGIES["strategy"], STRATEGIES["strategy"] | WIDE])
def test_generation_from_shards(values: dict[str, Any], tmp_path: Path) -> None:
    """An encoder that ``generate`` calls by itself, with updates that are not waited for: the whole model's tokens."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 48}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    rows = Rows()
    with fresh_state("strategy"):
        given = arguments(tmp_path, max_steps=1).to_dict()
        keys = {"output_dir", "per_device_train_batch_size", "use_cpu", "max_steps", "learning_rate", "report_to"}
        args = Seq2SeqTrainingArguments(
            **{key: given[key] for key in keys}, save_strategy="no", predict_with_generate=True
        )
        trainer = Mixed2Seq(model, args, strategy=values, train_dataset=rows)
        trainer.train()
        batch = {key: tensor[None].to(args.device) for key, tensor in rows[0].items()}
        optimizer = trainer.optimizer.optimizer
        if CPU:
            optimizer._backend.lanes.delay = lambda lane: time.sleep(2e-3)
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # other tokens than with the weights before
        optimizer.backward(trainer.model(**batch).loss)
        assert optimizer.step() and optimizer.has_deferred_updates
        found = trainer.model.generate(batch["input_ids"], max_new_tokens=5)
        alike = T5ForConditionalGeneration(model.config).to(args.device, torch.bfloat16)
        alike.load_state_dict(whole(trainer.model), strict=False)
        assert torch.equal(found, alike.generate(batch["input_ids"], max_new_tokens=5))
        trainer.predict(torch.utils.data.Subset(rows, range(4)))  # calls generate itself


@pytest.mark.parametrize(("kind", "adapter"), [("strategy", True), ("strategy", False), ("ddp", False)])
@on_ranks(2)
def test_the_best_model_is_loaded(kind: str, adapter: bool, tmp_path: Path) -> None:
    """The best model goes into shards, from a checkpoint that has nothing else.

    That of an adapter holds the adapter alone; the weights of the other have the names that transformers stores.
    The best one is the first: larger losses count as better.
    """
    only_model = {"save_steps": 1, "save_only_model": True, "load_best_model_at_end": True}
    worst = {"metric_for_best_model": "loss", "greater_is_better": True, "max_steps": 2}
    stand_in = {"peft": peft_stand_in.module()} if adapter else {}
    with fresh_state(kind), mock.patch.dict(sys.modules, stand_in):
        model = peft_stand_in.make_adapted() if adapter else make_converted("mixtral")
        args = arguments(tmp_path, kind, **EVALUATES, **SAVES | only_model | worst)
        data = torch.utils.data.Subset(Rows(), range(8))
        trainer = trainer_of(args, model, STRATEGIES[kind], train_dataset=data, eval_dataset=data)
        if CPU and adapter:
            trainer.evaluate()  # prepares the model for itself: no reference
            assert not isinstance(trainer.model, FSDPModule)
            trainer.state.log_history.clear()
        trainer.train()
        losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        assert trainer.state.best_global_step == 1
        assert trainer.evaluate()["eval_loss"] == losses[1] != losses[2]
        if adapter:
            saved = load_file(Path(trainer.state.best_model_checkpoint) / peft_stand_in.FILE)
            weights = whole(trainer.model)
            same_tensors({name: weights[name.removeprefix("base_model.")].cpu() for name in saved}, saved)
            trainer.train()
            assert any(not torch.equal(tensor, weights[name]) for name, tensor in whole(trainer.model).items())


@pytest.mark.parametrize("kind", ["ddp", "resident"])
def test_accelerate_that_sees_one_process(pool: Pool, tmp_path: Path, kind: str) -> None:
    pool.run(alone, 2, cpu=True, group=kind == "ddp", kind=kind, folder=str(tmp_path))


def alone(kind: str, folder: str) -> None:
    """Without use_cpu accelerate sees one process, and gives all rows to each."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        reset()
        try:
            with pytest.raises(ConfigError, match=r"2 processes were started, and accelerate sees 1.*use_cpu=True"):
                LightstepTrainer(make_llama(), training_arguments(folder, use_cpu=False), strategy=kind)
        finally:
            reset()


# -- accelerate


ADAMW: dict[str, Any] = {"lr": 3e-3}


def both_classes() -> list[Rule]:
    return [
        Rule(torch.optim.Muon, kinds="hidden_matrices", lr=0.02),
        Rule(torch.optim.AdamW, kinds="rest", lr=3e-3),
    ]


def accelerated(
    kind: str, values: dict[str, Any], chosen: dict[str, Any] = ADAMW, **options: Any
) -> tuple[Accelerator, Strategy, Any, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(
        cpu=CPU, gradient_accumulation_steps=2, fsdp_plugin=plugin if kind == "accelerate" else None, **options
    )
    strategy, model = Strategy.load(values), make_llama()
    optimizer = strategy.create_optimizer(model, **chosen)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    prepared = prepare(accelerator, model, optimizer, scheduler, strategy=strategy)
    return accelerator, strategy, *prepared


def accelerated_steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> int:
    """accelerate's loop; how many steps were skipped. In step 1 a gradient of rank 1 overflows."""
    rows, skipped, rank = Rows(), 0, accelerator.process_index
    for step in steps:
        for micro in range(2):
            row = rows[(4 * step + 2 * micro + rank) % ROWS]
            batch = {key: value[None].to(accelerator.device) for key, value in row.items()}
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss * (math.inf if step == 1 and rank == 1 else 1.0))
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert norm is not None
        torch.testing.assert_close(norm, optimizer.result.grad_norm, rtol=0, atol=0, equal_nan=True)
        skipped += accelerator.optimizer_step_was_skipped
    return skipped


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        *((kind, ("device", "device")) for kind in STRATEGIES),
        ("accelerate", ("host", "device")),
    ],
)
@on_ranks(2)
def test_accelerate(rank: int, world_size: int, kind: str, places: tuple[str, str], tmp_path: Path) -> None:
    """Against the strategy's own loop, through save_state and load_state, which may continue at the other place.

    With two classes if accelerate shards.
    """
    values = STRATEGIES[kind] | {"precision": {"parameters": "float16", "loss_scale": FP16_SCALE}}
    chosen: dict[str, Any] = {"rules": both_classes()} if kind == "accelerate" else ADAMW
    with reducing_each() if "host" in places else contextlib.nullcontext():
        with fresh_state(kind):
            accelerator, strategy, *run = accelerated(kind, values | {"weights": PLACEMENTS[places[0]]}, chosen)
            model, optimizer, scheduler = run
            assert accelerator.mixed_precision == "no" and accelerator.is_fsdp2 is (kind == "accelerate")
            assert accelerated_steps(accelerator, *run, range(2)) == 1
            if places[0] == "host":
                slow_host(model, optimizer, rank)
            pending = accelerator.save_state(f"{tmp_path}/state", asynchronous=True)
            accelerated_steps(accelerator, *run, range(2, STEPS))
            assert pending.result(PATIENCE) == tmp_path / "state" and (tmp_path / "state").is_dir()
            weights, rate = whole(strategy.unwrap_model(model)), scheduler.get_last_lr()
            norm, loss = float(optimizer.result.grad_norm), loss_after(accelerator, model)
            given = accelerator.get_state_dict(model)
            if rank == 0:
                same_tensors({name: given[name].cpu() for name in weights}, weights)
            if places[0] == "host":
                accelerator.save_model(model, f"{tmp_path}/model")
        with fresh_state(kind):
            accelerator, strategy, *run = accelerated(kind, values | {"weights": PLACEMENTS[places[1]]}, chosen)
            model, optimizer, scheduler = run
            accelerator.load_state(f"{tmp_path}/state")
            accelerated_steps(accelerator, *run, range(2, STEPS))
            assert (float(optimizer.result.grad_norm), loss_after(accelerator, model)) == (norm, loss)
            accelerator.save_state(f"{tmp_path}/waited")
            with mock.patch("lightstep.integrations.accelerate._is_written_in_place", return_value=rank == 1):
                accelerator.save_state(f"{tmp_path}/waited")  # what one rank finds counts on all
            same_tensors(whole(strategy.unwrap_model(model)), weights)
            assert scheduler.get_last_lr() == rate
            assert rate[-1] == pytest.approx(3e-3 * 0.9 ** (world_size * (STEPS - 1)))  # accelerate counts per process
        same_tensors(own_loop(rank, world_size, values, chosen), weights)
    if places[0] == "host" and rank == 0:
        saved = load_file(f"{tmp_path}/model/model.safetensors")
        same_tensors({name: weights[name] for name in saved}, saved)


def loss_after(accelerator: Accelerator, model: nn.Module) -> float:
    row = Rows()[accelerator.process_index]["input_ids"][None]
    with torch.no_grad():
        return float(model(input_ids=row.to(accelerator.device)).logits.float().sum())


def own_loop(rank: int, world_size: int, values: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Tensor]:
    strategy, rows = Strategy.load(values), Rows()
    model = strategy.prepare_model(make_llama())
    optimizer = strategy.create_optimizer(model, **chosen)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for step in range(STEPS):
        for micro in range(2):
            row = rows[(4 * step + 2 * micro + rank) % ROWS]
            batch = {key: value[None].to(strategy.device) for key, value in row.items()}
            with strategy.accumulate(model, last=micro == 1):
                loss = model(**batch).loss * (math.inf if step == 1 and rank == 1 else 1.0)
                optimizer.backward(loss / 2)
        if optimizer.step():
            for _ in range(world_size):
                scheduler.step()
    return whole(strategy.unwrap_model(model))


@on_ranks(2)
def test_plain_state(rank: int, tmp_path: Path) -> None:
    """What accelerate saved without lightstep goes into what DDP wraps; shards are refused in a sentence."""
    with fresh_state("ddp"):
        plain, model = Accelerator(cpu=CPU), make_llama()
        model, optimizer = plain.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        plain.backward(model(input_ids=Rows()[rank]["input_ids"][None].to(plain.device)).logits.square().mean())
        optimizer.step()
        plain.save_state(tmp_path)
        plain.wait_for_everyone()
        weights = whole(plain.unwrap_model(model))
    values = {"precision": {"parameters": "bfloat16"}}
    with fresh_state("ddp"):
        accelerator, strategy, model, _, _ = accelerated("ddp", STRATEGIES["ddp"] | values)
        accelerator._schedulers.clear()  # none was saved
        accelerator.load_state(tmp_path)
        same_tensors(whole(strategy.unwrap_model(model)), {name: tensor.bfloat16() for name, tensor in weights.items()})
    with fresh_state("strategy"):
        accelerator, *_ = accelerated("strategy", STRATEGIES["strategy"])
        accelerator._schedulers.clear()
        with pytest.raises(ConfigError, match="saved without lightstep"):
            accelerator.load_state(tmp_path)


@on_ranks(2)
def test_policies_and_refusals(rank: int) -> None:
    """Who is told bf16 keeps bf16 shards all the same; what contradicts accelerate's sharding is refused."""
    kind, reduced = "accelerate", torch.float32
    for parameters, kept in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        values = STRATEGIES[kind] | {"precision": {"parameters": str(parameters).removeprefix("torch.")}}
        with fresh_state(kind), mock.patch("lightstep.integrations.accelerate.logger.warning") as warning:
            accelerator, _, model, _, _ = accelerated(kind, values, mixed_precision="bf16")
            told = [call.args[0] % call.args[1:] for call in warning.call_args_list]
            assert ["would make fp32 shards; they are bfloat16" in text for text in told] == [True] * (
                rank == 0 and kept is None
            )
            assert {parameter.dtype for parameter in model.parameters()} == {parameters}
            policy = accelerator.state.fsdp_plugin.mixed_precision_policy
            assert (policy.param_dtype, policy.reduce_dtype) == (kept, reduced)
    refused: list[tuple[str, dict[str, Any], str]] = [
        (kind, {"sharding": {"kind": "ddp"}}, "sharding.kind of the strategy is ddp"),
        (kind, {"sharding": {"kind": "fsdp2", "reshard_after_forward": False}}, "sharding.reshard_after_forward False"),
        ("ddp", {"sharding": {"kind": "single"}}, r"sharding.kind single is for one process, and 2 are"),
    ]
    for own, values, message in refused:
        with fresh_state(own), pytest.raises(ConfigError, match=message):
            accelerated(own, values)
    with fresh_state(kind), pytest.raises(ConfigError, match=r"plugin has cpu_offload .*leave cpu_offload out"):
        connect(
            Accelerator(cpu=CPU, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)),
            Strategy.load({"sharding": {"kind": "fsdp2"}, "weights": {"placement": "host"}}),
        )
    with fresh_state("ddp"):  # nobody would be there for the steps of those that have more batches
        accelerator, _, model, _, _ = accelerated("ddp", STRATEGIES["ddp"])
        uneven = accelerator.join_uneven_inputs([model], even_batches=False)
        with pytest.raises(ConfigError, match="join_uneven_inputs"), uneven:
            pass
        with accelerator.join_uneven_inputs([model]):
            pass


# -- an optimizer that was made before its model was sharded


class ShardedAfterwards(Training):
    """The embedding and the head are gathered together, by the call of the embedding."""

    def begin(self, values: Mapping[str, Any]) -> None:
        self.strategy = Strategy.load(values)
        torch.manual_seed(0)
        self.model = self.inner = self.make().to(self.device, self.strategy.parameter_dtype)
        groups = self.model.split()
        self.optimizer = self.strategy.create_optimizer(self.model, param_groups=groups, **self.arguments)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with self.strategy.preparing(self.model):
            for unit in (*self.model.blocks, [self.model.embed, self.model.head], self.model):
                fully_shard(unit, mp_policy=policy)


@on_ranks(2, "parameters", ["bfloat16", "float32"])
def test_modules_that_fsdp2_gathers_together(parameters: str) -> None:
    """As accelerate does with the last norm and the head. fp32 shards are read early, before they are gathered."""
    values = {"sharding": {"kind": "fsdp2"}, "precision": {"parameters": parameters}, "clipping": CLIPPING}
    at_step, deferred = ShardedAfterwards(values), ShardedAfterwards(values | {"optimizer_state": OVERLAP})
    for step in range(3):
        assert deferred.step() == at_step.step()
        if step == 0 and CPU:  # each job of each lane waits: on the GPU sleep kernels do
            deferred.optimizer._backend.lanes.delay = lambda lane: time.sleep(2e-3)
        elif step == 0:
            deferred.delay(seed=0, longest=5e-3)
        assert deferred.evaluate() == at_step.evaluate()
    same_tensors(deferred.snapshot(), at_step.snapshot())


@pytest.mark.skipif(not CPU, reason="accelerate wants the weights on the CPU first")
@on_ranks(2)
def test_masters_start_from_what_the_first_process_loaded(rank: int) -> None:
    """``cpu_ram_efficient_loading``: the other processes' weights are anything."""
    with fresh_state("accelerate"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
        accelerator, model = Accelerator(cpu=CPU, fsdp_plugin=plugin), make_llama()
        torch.manual_seed(0)
        given = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.data.copy_(given[name] if rank == 0 else torch.zeros(()))
        strategy = Strategy.load({"sharding": {"kind": "fsdp2"}})
        model, optimizer = prepare(accelerator, model, strategy.create_optimizer(model, lr=1e-3), strategy=strategy)
        masters = optimizer.state_dict()["state"]
        assert len(masters) == len(given)
        for (name, value), entries in zip(given.items(), masters.values(), strict=True):
            assert torch.equal(full(entries["master"]).cpu(), value), name


# -- a rank that fails inside a pending folder


FOLDERS = SavedFolders("a test's folder", "saved-", ("*.txt",), lambda _: True, lambda _: True)
KEPT: list[PendingFolder] = []
"""So that no collector removes their hidden folders."""
PLACES = ["before the checkpoint", "after the checkpoint", "without a checkpoint"]


def save_in(path: Path, run: tuple[Strategy, Any, Any], place: str, fails: bool, asynchronous: bool) -> PendingFolder:
    strategy, model, optimizer = run
    with PendingFolder(path, FOLDERS, lambda: None) as pending:
        KEPT.append(pending)
        if fails and place != "after the checkpoint":
            raise OSError(28, "No space left on device")
        (pending.folder / f"{strategy.rank}.txt").parent.mkdir(exist_ok=True)
        (pending.folder / f"{strategy.rank}.txt").write_text("small")
        if place != "without a checkpoint":
            where = pending.folder / "lightstep"
            pending.checkpoint = strategy.save_checkpoint(where, model, optimizer, asynchronous=asynchronous)
        if fails:
            raise OSError(28, "No space left on device")
    return pending


@on_ranks(2)
def test_a_rank_that_fails(rank: int, tmp_path: Path) -> None:
    """Inside a pending folder: the others raise, wherever they wait, and nothing is left."""
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    strategy = Strategy.load("ddp")
    model = strategy.prepare_model(TinyTransformer())
    run = strategy, model, strategy.create_optimizer(model, torch.optim.AdamW)
    path = folder / "saved"
    for place in PLACES:
        for asynchronous in (False, True):
            for failing in ({0}, {1}) if asynchronous else ({1}, {0, 1}):
                fails = rank in failing
                error = OSError if fails else CheckpointError
                with pytest.raises(error, match="No space left on device"):
                    save_in(path, run, place, fails, asynchronous)
                torch.distributed.barrier()
                assert not list(folder.iterdir()), f"{place}, {failing}"
                torch.distributed.barrier()
            pending = save_in(path, run, place, False, asynchronous)
            assert pending.result(PATIENCE) == path
            pending.finish()
            torch.distributed.barrier()
            assert {file.name for file in path.glob("*.txt")} == {"0.txt", "1.txt"}
            torch.distributed.barrier()
            if rank == 0:
                path.rename(tmp_path / f"{place}, {asynchronous}")
            torch.distributed.barrier()


@on_ranks(2)
def test_a_rank_that_fails_under_accelerate(rank: int, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")

    values: dict[str, Any] = {**STRATEGIES["strategy"], "precision": {"parameters": "bfloat16"}}
    with fresh_state("strategy"):
        accelerator, *_ = accelerated("strategy", values, {"lr": 1e-3})
        hook = accelerator.register_save_state_pre_hook(full)
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            accelerator.save_state(f"{tmp_path}/state")
        hook.remove()
        torch.distributed.barrier()
        assert not list(tmp_path.iterdir())
        torch.distributed.barrier()
        accelerator.save_state(f"{tmp_path}/state")
        assert (tmp_path / "state").is_dir()
