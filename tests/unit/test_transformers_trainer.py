"""LightstepTrainer on one device: the textbook loop's weights, the Trainer's conventions, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

import lightstep
from lightstep import CheckpointError, ConfigError, Strategy
from lightstep.integrations.accelerate import LightstepOptimizer
from lightstep.integrations.checks import check_arguments
from lightstep.integrations.folders import load_adapters
from lightstep.integrations.transformers import LightstepMixin, LightstepTrainer
from lightstep.optimizer.in_backward import FinalUpdates
from tests.reference.lion import Lion
from tests.reference.pair import FP16_SCALE, same_tree
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.tiny_llama import Rows, make_llama, training_arguments
from tests.reference.trl_stand_in import ReferenceTrainer

BF16: dict[str, Any] = {"sharding": {"kind": "single"}, "clipping": {"max_norm": 0.5}}
FP16: dict[str, Any] = {
    "sharding": {"kind": "single"},
    "precision": {"parameters": "float16", "loss_scale": FP16_SCALE},
    "clipping": {"max_norm": 0.5},
}
STREAM = {"backend": "stream", "ring_mib": 0.05}
NEXT_FORWARD = BF16 | {"optimizer_state": {**STREAM, "update": "next_forward"}}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, if there is one, is left alone."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)


class Overflow(TrainerCallback):
    """An inf in one gradient of these steps."""

    def __init__(self, model: nn.Module, steps: set[int]) -> None:
        self.steps, self.now = steps, False
        bias = model.model.norm.weight
        bias.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf) if self.now else None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now = state.global_step in self.steps


def trainer_of(
    folder: Path, strategy: Any = "resident", *, options: Any = None, model: Any = None, **arguments: Any
) -> LightstepTrainer:
    args = training_arguments(folder, **{"train_sampling_strategy": "sequential"} | arguments)
    model = make_llama() if model is None else model
    data = Rows()
    given = {"train_dataset": data, "eval_dataset": data, **(options or {})}
    return LightstepTrainer(model, args, strategy=strategy, **given)


def trained(folder: Path, *arguments: Any, resume: str | None = None, **given: Any) -> LightstepTrainer:
    """``resume``: from this checkpoint in ``folder``, and other weights at first."""
    if resume is not None:
        given = {"model": make_llama(1), **given}
    trainer = trainer_of(folder, *arguments, **given)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    return trainer


class Ran:
    """A Trainer that has trained, and what it logged at each step."""

    def __init__(self, folder: Path, strategy: Any, *, overflow: set[int] = frozenset(), **arguments: Any) -> None:
        self.model = make_llama()
        options = {"callbacks": [Overflow(self.model, set(overflow))]}
        self.trainer = trained(folder, strategy, options=options, model=self.model, **arguments)
        self.logs = [entry for entry in self.trainer.state.log_history if "grad_norm" in entry]


def same_weights(tested: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(tested.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs"


def decay_groups(trainer: Trainer, model: nn.Module) -> list[dict[str, Any]]:
    decayed = trainer.get_decay_parameter_names(model)
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": trainer.args.weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def micro_batches(step: int) -> list[dict[str, Tensor]]:
    """Two batches of two rows, as a sequential sampler gives them; the 13 batches of an epoch end in a step of one."""
    per_epoch = 7
    first = step % per_epoch * 2
    rows = Rows()
    return [
        {key: torch.stack([rows[2 * batch + i][key] for i in range(2)]) for key in ("input_ids", "labels")}
        for batch in range(first, min(first + 2, 13))
    ]


def textbook(ran: Ran, values: dict[str, Any], dtype: torch.dtype, overflow: set[int] = frozenset()) -> ReferenceLoop:
    """The same training without lightstep and without a Trainer; its losses and learning rates must be the logged."""
    args = ran.trainer.args
    model = make_llama()
    given = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    for parameter in model.parameters():  # and not the rotary frequencies
        parameter.data = parameter.data.to(dtype)
    watch = Overflow(model, set(overflow))
    loop = ReferenceLoop(
        decay_groups(ran.trainer, model),
        torch.optim.AdamW,
        lr=args.learning_rate,
        loss_scale=values.get("precision", {}).get("loss_scale", "none"),
        max_norm=0.5,
        model=model.parameters(),
        masters=given,
    )
    scheduler = get_scheduler("linear", loop.optimizer, 0, args.max_steps)
    for step, logged in enumerate(ran.logs):
        batches = micro_batches(step)
        items = sum(batch["labels"][..., 1:].ne(-100).sum() for batch in batches)
        watch.now = step in watch.steps
        total = torch.tensor(0.0)
        for batch in batches:
            loss = model(**batch, num_items_in_batch=items).loss
            loop.backward(loss)
            total += loss.detach()
        assert logged["loss"] == float(total)
        assert logged["learning_rate"] == scheduler.get_last_lr()[0]
        assert logged["loss_scale"] == loop.loss_scale.scale
        if loop.step(torch.tensor(logged["grad_norm"], dtype=torch.float32)):
            scheduler.step()
    same_weights(ran.model, model)
    return loop


@pytest.mark.parametrize("state", [{"backend": "resident"}, {**STREAM, "update": "next_forward"}], ids=str)
def test_weights_losses_and_norms_are_the_textbook_loop_s(tmp_path: Path, state: dict[str, Any]) -> None:
    """Over the end of an epoch, whose last step has one micro-batch."""
    ran = Ran(tmp_path, BF16 | {"optimizer_state": state}, max_steps=8)
    assert not ran.trainer.optimizer.has_deferred_updates, "the caller may read what no callback has waited for"
    assert textbook(ran, BF16, torch.bfloat16).clipped_steps > 5
    assert isinstance(ran.trainer.optimizer, LightstepOptimizer)


def test_a_skipped_step_does_not_advance_the_scheduler(tmp_path: Path) -> None:
    ran = Ran(tmp_path, FP16, overflow={1, 2})
    loop = textbook(ran, FP16, torch.float16, overflow={1, 2})
    assert loop.skipped_steps == 2
    assert ran.trainer.lr_scheduler.last_epoch == 3
    assert [entry["loss_scale"] for entry in ran.logs] == [1024, 1024, 512, 256, 256]


def test_updates_in_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are updated in the last micro-batch, and only there: the weights are those of updates at the step."""
    begun: list[int] = []
    updating = FinalUpdates.updating
    monkeypatch.setattr(FinalUpdates, "updating", lambda self, *args: (begun.append(1), updating(self, *args))[1])
    values = {"sharding": {"kind": "single"}, "clipping": {"max_norm": None}}
    late = Ran(tmp_path, values | {"optimizer_state": {"backend": "resident"}})
    early = Ran(tmp_path, values | {"optimizer_state": {"backend": "resident", "update": "in_backward"}})
    same_weights(early.model, late.model)
    assert len(begun) == 5
    # Each layer's part of the norm is added up in the order of backward: another last bit.
    assert [e["grad_norm"] for e in early.logs] == pytest.approx([e["grad_norm"] for e in late.logs], rel=2e-6)


@pytest.mark.parametrize("update", ["at_step", "in_backward"])
def test_a_smaller_batch_after_a_backward_without_memory(tmp_path: Path, update: str) -> None:
    """It has the weights of a run with that batch from the first. Layers that are updated already end the run."""
    values = BF16 | {"clipping": {"max_norm": None}, "optimizer_state": {"backend": "resident", "update": update}}
    trainer = trainer_of(tmp_path, values, auto_find_batch_size=True, max_steps=3)
    fails = [False, True]  # in the last micro-batch of the first step

    def fail(_: Tensor) -> None:
        if fails and fails.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
    if update == "in_backward":
        with pytest.raises(RuntimeError, match="tries no smaller batch: an update has failed halfway"):
            trainer.train()
        return
    trainer.train()
    expected = trained(tmp_path, values, per_device_train_batch_size=1, max_steps=3)
    same_weights(trainer.model, expected.model)


def test_the_norm_is_read_only_when_it_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    class Unread(Tensor):
        """A norm that notices being read."""

        def item(self) -> Any:
            reads.append(1)
            return super().item()

    plain = lightstep.MixedPrecisionOptimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        result = plain(self, closure)
        result.grad_norm = result.grad_norm.as_subclass(Unread)
        return result

    monkeypatch.setattr(lightstep.MixedPrecisionOptimizer, "step", step)
    ran = Ran(tmp_path, BF16, max_steps=4, logging_steps=2)
    assert len(ran.logs) == 2
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("values", "file"),
    [(FP16 | {"optimizer_state": {"backend": "resident"}}, "optimizer.pt"), (NEXT_FORWARD, "lightstep")],
    ids=["optimizer.pt", "lightstep"],
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, values: dict[str, Any], file: str) -> None:
    """Shuffled rows, dropout, a skipped step before the checkpoint and the end of an epoch behind it.

    In a crash between the two renames the folder has another name. Without it no run goes on with a new optimizer.
    """
    options = {"max_steps": 8, **SAVES, "save_steps": 3, "train_sampling_strategy": "random"}
    runs, saved = [], tmp_path / "checkpoint-3"
    for seed in (0, 1):
        model = make_llama(seed, attention_dropout=0.2)
        runs.append(trainer_of(tmp_path, values, options={"callbacks": [Overflow(model, {1})]}, model=model, **options))
    whole, resumed = runs
    whole.train()
    assert (saved / file).exists()
    if file == "lightstep":
        missing, incomplete = (shutil.copytree(saved, tmp_path / name / saved.name) for name in ("a", "b"))
        (saved / file).rename(saved / ".lightstep.replaced-0123abcd")
        shutil.rmtree(missing / file)
        (incomplete / file / "state.pt").unlink()
        for checkpoint, message in ((missing, "lightstep is missing"), (incomplete, "state.pt is missing")):
            with pytest.raises(CheckpointError, match=message):
                resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.train(resume_from_checkpoint=str(saved))
    same_weights(resumed.model, whole.model)
    names = ("loss", "grad_norm", "learning_rate", "loss_scale")
    figures = [[[e[name] for name in names] for e in one.state.log_history[:8]] for one in runs]
    assert figures[0] == figures[1]
    same_tree("state", *(one.optimizer.optimizer.state_dict() for one in (resumed, whole)))


def test_a_checkpoint_of_the_plain_trainer_is_continued(tmp_path: Path) -> None:
    """Its AdamW's state and its weights: what comes is what lightstep's fp32 strategy would have made of all steps."""
    options = {**SAVES, "max_steps": 3, "max_grad_norm": 0.5, "train_sampling_strategy": "random"}
    plain = Trainer(make_llama(), training_arguments(tmp_path, **options), train_dataset=Rows())
    plain.train()
    values = BF16 | {"precision": {"parameters": "float32"}}
    ours = trained(tmp_path, values, resume="checkpoint-2", **options)
    # torch's clipping multiplies by a factor from a norm of norms: the last bit of the weights may differ.
    for p, q in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


DTYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"precision": {"parameters": "float16", "loss_scale": FP16_SCALE}},
    "float32": {"precision": {"parameters": "float32"}},
}


@pytest.mark.parametrize(
    ("saved", "loaded"), [("bfloat16", "float16"), ("float16", "float32"), ("float32", "bfloat16")]
)
def test_weights_change_dtype_through_fp32(tmp_path: Path, saved: str, loaded: str) -> None:
    """From `optimizer.pt` as from `lightstep/`, bit for bit: masters become weights, fp32 weights become masters."""
    options = {"max_steps": 2, **SAVES, "save_steps": 1}
    found = []
    for backend in ({"backend": "resident"}, STREAM):
        folder, values = tmp_path / backend["backend"], BF16 | {"optimizer_state": backend}
        trained(folder, values | DTYPES[saved], **options)
        found.append(trained(folder, values | DTYPES[loaded], resume="checkpoint-1", **options))
    same_weights(found[0].model, found[1].model)
    same_tree("state", *(trainer.optimizer.optimizer.state_dict()["state"] for trainer in found))


class Average(TrainerCallback):
    """An EMA: it keeps the parameters from the beginning, and reads them at the end of each step and of more."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.read: list[list[Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.parameters = list(kwargs["model"].parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        assert isinstance(optimizer, LightstepOptimizer) and not optimizer.has_deferred_updates
        self.read.append([parameter.detach().clone() for parameter in self.parameters])

    on_log = on_optimizer_step = on_epoch_end = on_save = on_train_end = on_step_end


def test_callbacks_see_updated_weights(tmp_path: Path) -> None:
    """Through parameters that they have kept, too: nobody asks the module for those. And so does the caller."""
    read = []
    for update in ("at_step", "next_forward"):
        average, values = Average(), BF16 | {"optimizer_state": {**STREAM, "update": update}}
        trainer = trained(tmp_path / update, values, options={"callbacks": [average]}, **SAVES)
        assert not trainer.optimizer.has_deferred_updates
        read.append(average.read)
    assert len(read[0]) == len(read[1]) > 15
    for expected, found in zip(*read, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))


def test_nothing_waits_for_callbacks_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(LightstepOptimizer, "wait_for_update", lambda _: waits.append(1), raising=False)
    trainer = trained(tmp_path, BF16)
    assert not waits
    trainer.add_callback(Average())
    trainer.train()
    assert waits


class Following(LightstepMixin, ReferenceTrainer):
    pass


def test_a_reference_model_and_vllm_get_updated_weights(tmp_path: Path) -> None:
    """TRL's callback and iterator, at the end of each step."""
    reference = make_llama(1).bfloat16()
    expected = [parameter.detach().clone() for parameter in reference.parameters()]
    args = training_arguments(tmp_path, max_steps=3)
    trainer = Following(make_llama(), args, reference=reference, strategy=NEXT_FORWARD, train_dataset=Rows())
    trainer.train()
    for weights in trainer.published.published:
        for average, weight in zip(expected, weights.values(), strict=True):
            average.mul_(0.5).add_(weight, alpha=0.5)
    assert all(torch.equal(p, q) for p, q in zip(reference.parameters(), expected, strict=True))
    last = trainer.published.published[-1]
    assert all(torch.equal(p, last[name]) for name, p in trainer.model.named_parameters())


def test_evaluation_and_saved_weights_are_up_to_date(tmp_path: Path) -> None:
    """With updates that wait for the next forward; `load_best_model_at_end` brings weights that masters follow.

    `save_total_limit` leaves the best checkpoint and the last one.
    """
    best_and_last = {"load_best_model_at_end": True, "save_total_limit": 1, "save_steps": 1, "max_steps": 4}
    trainer = trained(tmp_path, NEXT_FORWARD, **EVALUATES, **SAVES | best_and_last)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=lambda step: losses[step])
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert {path.parent.name for path in tmp_path.glob("*/lightstep")} == {f"checkpoint-{best}", "checkpoint-4"}
    assert trainer.evaluate()["eval_loss"] == losses[best]
    assert trainer.predict(Rows()).metrics["test_loss"] == losses[best]
    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(trainer.model).from_pretrained(tmp_path / "saved", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    same_weights(loaded, trainer.model)


def test_weights_that_are_half_updated_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the second step, and then ``save_model()``, as in a notebook."""
    trainer, update, updates = trainer_of(tmp_path, BF16 | {"optimizer_state": STREAM}), torch.optim.AdamW.step, [0]

    def interrupted(optimizer: torch.optim.AdamW, closure: Any = None) -> Any:
        updates[0] += trainer.state.global_step
        if updates[0] == 2:
            raise KeyboardInterrupt
        return update(optimizer, closure)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    for save in (trainer.save_model, partial(trainer.accelerator.save_model, trainer.model)):
        with pytest.raises(RuntimeError, match=r"half updated\. Load a checkpoint before saving its weights"):
            save(str(tmp_path / "saved"))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_a_step_takes_is_said_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ran(tmp_path, BF16, reports=True, max_steps=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("planned:", "measured:", "no"))]
    assert [line.split(":")[0] for line in lines] == ["planned", "measured"]
    assert re.search(r"MB of memory for weights, gradients, optimizer state and activations; no time", lines[0])
    assert re.search(r" GB of memory at the peak of the whole process, \d+ ms per step$", lines[1])


# -- PEFT


def peft_model() -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(make_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.parametrize(("backend", "only_model"), [("resident", True), ("stream", False)])
def test_the_best_adapter_is_trained_on(tmp_path: Path, backend: str, only_model: bool) -> None:
    """PEFT would put other parameters, of another dtype, in the place of those that the optimizer has."""
    model = peft_model()
    best = {"load_best_model_at_end": True, "save_only_model": only_model, "max_steps": 4}
    values = BF16 | {"optimizer_state": {"backend": backend}}
    trainer = trained(tmp_path, values, model=model, **EVALUATES | {"eval_steps": 2}, **SAVES, **best)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in adapters.values()} == {torch.bfloat16}
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert trainer.evaluate()["eval_loss"] == min(losses.values())

    before = {name: p.detach().clone() for name, p in adapters.items()}
    trainer.train()
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)
    assert not all(torch.equal(p, before[name]) for name, p in adapters.items())
    if not only_model:
        checkpoint = tmp_path / "checkpoint-2"
        if backend == "stream":
            index = json.loads((checkpoint / "lightstep" / "tensors.json").read_text())["tensors"]
            saved = {key.removeprefix("model.") for key in index if key.startswith("model.")}
            assert not saved & {name for name, p in model.named_parameters() if not p.requires_grad}
            assert saved >= adapters.keys()
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert all(p is adapters[name] for name, p in model.named_parameters() if p.requires_grad)


def test_an_adapter_file_that_lacks_a_trained_weight_changes_nothing(tmp_path: Path) -> None:
    model = peft_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    saved, before = load_file(file), {name: p.detach().clone() for name, p in model.named_parameters()}
    name, *others = sorted(saved)
    lacking = {other: torch.zeros_like(saved[other]) for other in others}
    for content, message in (
        (lacking, r"has no .*lora.* \(1 of the trained parameters\)"),
        (lacking | {name: torch.zeros(3)}, "is not a weight of this model"),
    ):
        save_file(content, file)
        with pytest.raises(ValueError, match=message):
            load_adapters(model, tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# -- the Trainer's ways to choose an optimizer


def test_the_arguments_or_a_class_choose_the_optimizer(tmp_path: Path) -> None:
    trainer = trained(tmp_path, BF16, max_steps=1, optim="adagrad", optim_args=None)
    assert trainer.optimizer.optimizer.optimizer_class is torch.optim.Adagrad
    assert [(g["weight_decay"], len(g["params"])) for g in trainer.optimizer.param_groups] == [(0.1, 16), (0.0, 5)]
    given = (Lion, {"lr": 1e-3})
    trainer = trained(tmp_path, BF16, options={"optimizer_cls_and_kwargs": given}, max_steps=1)
    assert trainer.optimizer.optimizer.optimizer_class is Lion and trainer.optimizer_cls_and_kwargs == given


def test_an_optimizer_and_a_scheduler_that_the_strategy_made(tmp_path: Path) -> None:
    strategy, model = Strategy.load(BF16), make_llama()
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    options = {"optimizers": (optimizer, scheduler)}
    trainer = trained(tmp_path, strategy, options=options, model=model, max_steps=2)
    assert trainer.optimizer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert next(model.parameters()).dtype == torch.bfloat16


class Own(Trainer):
    """Its own constructor, backward and log, as TRL's; and groups, as those of ``SentenceTransformerTrainer``: they are
    the loss's, which has the model in it and may have weights."""

    loss: nn.Module

    def __init__(self, model: Any, args: Any, beta: float = 0.5, **kwargs: Any) -> None:
        self.beta = beta
        super().__init__(model=model, args=args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with self.compute_loss_context_manager():
            loss = self.beta * self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "beta": self.beta}, start_time)

    def get_optimizer_cls_and_kwargs(self, args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        kind, values = Trainer.get_optimizer_cls_and_kwargs(args, self.loss)
        return kind, {**values, "optimizer_dict": own_groups(self.loss)}

    def _load_from_checkpoint(self, checkpoint: str) -> None:
        super()._load_from_checkpoint(checkpoint)


class Mixed(LightstepMixin, Own):
    pass


def own_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    slow, rest = ([p for name, p in named.items() if ("norm" in name) is wanted] for wanted in (True, False))
    return [{"params": rest, "weight_decay": 0.1}, {"params": slow, "weight_decay": 0.0, "lr": 1e-4}]


def mixed(args: TrainingArguments, values: Any, seed: int = 0, **more: nn.Module) -> Mixed:
    trainer = Mixed(model := make_llama(seed), args, beta=1.0, strategy=values, train_dataset=Rows())
    trainer.loss = nn.ModuleDict({"model": model, **more})
    return trainer


def test_the_mixin_stands_in_front_of_other_trainers(tmp_path: Path) -> None:
    """Bit for bit as with an optimizer that the user has made, with the same groups."""
    values = {"optimizer_state": STREAM}
    args = training_arguments(tmp_path, train_sampling_strategy="sequential", max_steps=3, **SAVES)
    trainer = mixed(args, values)
    trainer.train()
    assert [(g["weight_decay"], g["initial_lr"]) for g in trainer.optimizer.param_groups] == [(0.1, 3e-3), (0.0, 1e-4)]
    strategy, expected = Strategy.load(values), make_llama()
    optimizer = strategy.create_optimizer(expected, torch.optim.AdamW, param_groups=own_groups(expected), lr=3e-3)
    given = {"train_dataset": Rows(), "optimizers": (optimizer, None)}
    plain = LightstepTrainer(expected, args, strategy=strategy, **given)
    plain.train()
    same_weights(trainer.model, expected)
    found, wanted = trainer.state.log_history[0], plain.state.log_history[0]
    assert found["beta"] == 1.0 and found["grad_norm"] == wanted["grad_norm"]
    resumed = mixed(args, values, seed=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same_weights(resumed.model, expected)


def test_weights_of_a_loss_are_refused(tmp_path: Path) -> None:
    trainer = mixed(training_arguments(tmp_path), "resident", head=nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"2 of the parameters to train \(shapes .*\) are .* of the loss, ModuleDict"):
        trainer.train()


def test_bf16_is_autocast_around_the_forward(tmp_path: Path) -> None:
    """The dtype of the weights stays the strategy's."""
    values = BF16 | {"precision": {"parameters": "float32"}}
    ran = Ran(tmp_path, values, bf16=True, max_steps=1)
    assert ran.model.dtype == torch.float32
    plain = Ran(tmp_path, values, max_steps=1)
    assert ran.logs[0]["loss"] != plain.logs[0]["loss"]
    # bfloat16 has 8 bits: rounding errors of a forward are of the order of 2^-8.
    assert ran.logs[0]["loss"] == pytest.approx(plain.logs[0]["loss"], rel=2**-8)


# -- what is refused


def test_checkpoints_of_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node the argument changes nothing."""
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    args = training_arguments(tmp_path, save_on_each_node=True)
    check_arguments(args, Strategy.load("ddp"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="save_on_each_node=True on several nodes"):
        check_arguments(args, Strategy.load("ddp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_grad_norm": 0.3}, r"max_grad_norm=0.3 .* clipping.max_norm 1.0 .*'clipping.max_norm': 0.3"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0.0 .*'clipping.max_norm': None"),
    ],
    ids=str,
)
def test_arguments_that_contradict_the_strategy(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    """What is written there counts: in a mapping as in a file, and in an override that says what the preset says."""
    (tmp_path / "own.yaml").write_text("clipping: {max_norm: 1.0}")
    for strategy in (
        {"clipping": {"max_norm": 1.0}},
        tmp_path / "own.yaml",
        Strategy.load("resident", {"clipping.max_norm": 1.0}),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_of(tmp_path, strategy, **arguments)


def test_ddp_arguments_are_the_strategy_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ddp_bucket_cap_mb=50 .* sharding.bucket_mib 25"):
        trainer_of(tmp_path, "ddp", ddp_bucket_cap_mb=50)


def test_the_norm_of_a_preset_gives_way(tmp_path: Path) -> None:
    """And a mapping's that says none. The weights are those of the strategy that has the norm."""
    expected = Ran(tmp_path, Strategy.load("resident", {"clipping.max_norm": 0.05}))
    for strategy in ("resident", {}):
        ran = Ran(tmp_path, strategy, max_grad_norm=0.05)
        assert ran.trainer.optimizer.optimizer.max_norm == 0.05
        same_weights(ran.model, expected.model)
    for nothing in (0.0, -1.0):
        made, model = Strategy.load("resident"), make_llama()
        optimizer = made.create_optimizer(model, lr=3e-3)
        trainer_of(tmp_path, made, options={"optimizers": (optimizer, None)}, model=model, max_grad_norm=nothing)
        assert optimizer.max_norm is None


def test_optimizers_that_were_made_elsewhere(tmp_path: Path) -> None:
    model, class_of_another = make_llama(), r"torch.optim.adamw.AdamW.*strategy.create_optimizer\(model, AdamW"
    theirs, other = torch.optim.AdamW(model.parameters()), Strategy.load("resident").create_optimizer(model, lr=1e-3)
    for optimizer, error, message in (
        (theirs, TypeError, class_of_another),
        (other, ValueError, "was not made by this strategy for this"),
    ):
        with pytest.raises(error, match=message):
            trainer_of(tmp_path, options={"optimizers": (optimizer, None)}, model=model)
    with pytest.raises(TypeError, match="strategy"):
        LightstepTrainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))

    class Half:  # a factory, as the Trainer takes them
        def __call__(self, model: nn.Module, **kwargs: Any) -> Any:
            raise AssertionError

    factory = {"optimizer_cls_and_kwargs": (Half, {"lr": 0.1})}
    with pytest.raises(ConfigError, match=r"is Half .* any element-wise torch.optim.Optimizer"):
        trainer_of(tmp_path, options=factory).train()
