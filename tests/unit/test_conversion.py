"""Conversions between lightstep and plain torch, in one process."""

from __future__ import annotations

import json
import pickle
import random
import weakref
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from transformers import Trainer
from typer.testing import CliRunner

from lightstep import Strategy
from lightstep.checkpoint import CheckpointError
from lightstep.checkpoint.formats import convert, convert_checkpoint, describe_checkpoint, read_checkpoint, zero
from lightstep.checkpoint.formats import dcp as from_dcp
from lightstep.checkpoint.formats.files import load_file
from lightstep.checkpoint.formats.state import Group, LazyTensor, TrainingState
from lightstep.cli import app
from lightstep.deepspeed.checkpoint import refuse_untrusted, trusted_loads
from tests.checkpoint_runs import Harmful, contents
from tests.reference.converted_run import (
    ADAMW,
    AFTER,
    BEFORE,
    SCALE,
    Net,
    Run,
    differences,
    make_groups,
    make_net,
    tokens,
)
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.tiny_llama import Rows, make_llama, training_arguments

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks


@pytest.fixture(scope="module", params=["bfloat16", "float16", "float32"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Any, Any]:
    """A checkpoint, the dtype, and the run's content at the checkpoint and after three more steps."""
    run = Run(request.param).train(BEFORE)
    path = run.save(tmp_path_factory.mktemp(request.param) / "step-3")
    at = run.content()
    return path, request.param, at, run.train(AFTER).content()


def test_a_run_goes_through_plain_torch_and_back(saved: tuple[Path, str, Any, Any], tmp_path: Path) -> None:
    path, dtype, at, after = saved
    between = convert_checkpoint(path, tmp_path / "there.pt", "torch")
    convert_checkpoint(tmp_path / "there.pt", tmp_path / "back", "lightstep")
    assert read_checkpoint(tmp_path / "back").scheduler_class == "StepLR"
    run = Run(dtype)
    random.seed(1)
    torch.manual_seed(1)
    extra = run.load(tmp_path / "back")
    told = any("settings of the dynamic loss scale" in note for note in between.notes)
    assert told == (dtype == "float16")
    assert not differences(run.content(), at)
    assert extra["epoch"] == 3
    assert torch.equal(extra["order"], torch.arange(4))
    fresh = Run(dtype)
    fresh.load(path)
    expected = (random.random(), torch.rand(2))
    run.load(tmp_path / "back")
    assert not differences((random.random(), torch.rand(2)), expected)
    assert not differences(run.train(AFTER).content(), after)


def test_a_class_that_counts_no_steps_gets_none(tmp_path: Path) -> None:
    strategy = Strategy.load("resident")
    model = strategy.prepare_model(nn.Linear(3, 3))
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    optimizer.step()
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    convert_checkpoint(tmp_path / "a", tmp_path / "b.pt", "torch")
    for name in ("a", "b.pt"):
        state = read_checkpoint(tmp_path / name)
        assert [set(own) for own in state.entries.values()] == [{"master", "momentum_buffer"}] * 2, name
        assert state.step is None, name


def test_a_plain_loop_loads_the_file_and_follows(saved: tuple[Path, str, Any, Any], tmp_path: Path) -> None:
    path, dtype, _, after = saved
    scale = Strategy.load({"precision": {"parameters": "float16", "loss_scale": SCALE}}).config.precision.loss_scale
    convert_checkpoint(path, tmp_path / "run.pt", "torch", loss_scale=scale if dtype == "float16" else None)
    file = torch.load(tmp_path / "run.pt", weights_only=True)
    model = make_net()
    model.load_state_dict(file["model"])
    masters = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    kind = SCALE if dtype == "float16" else "none"
    loop = ReferenceLoop(make_groups(model), torch.optim.AdamW, masters=masters, loss_scale=kind, **ADAMW)
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)
    loop.optimizer.load_state_dict(file["optimizer"])
    scheduler.load_state_dict(file["scheduler"])
    if dtype == "float16":
        torchs = torch.amp.GradScaler("cpu", init_scale=2.0)
        torchs.load_state_dict(file["scaler"])
        loop.loss_scale.scale, loop.loss_scale.good_steps = torchs.get_scale(), torchs.state_dict()["_growth_tracker"]
        found = loop.loss_scale.scale, loop.loss_scale.good_steps, torchs.get_growth_interval()
        assert found == (256.0, 3, SCALE["growth_interval"])
    for step in AFTER:
        loop.backward(model(tokens(step)))
        assert loop.step()
        scheduler.step()
    for name, entries in after["state"].items():
        assert torch.equal(loop.masters[model.get_parameter(name)], entries.get("master", after["model"][name])), name


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", list(convert.WRITERS))
def test_tensors_are_read_and_dropped_one_at_a_time(tmp_path: Path, to: str) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts = []

    def tensor(dtype: torch.dtype = torch.float32) -> LazyTensor:
        def load() -> Tensor:
            made = torch.ones(8, 8)
            alive.add(made)
            counts.append(len(alive))
            return made

        return LazyTensor(torch.float32, torch.Size([8, 8]), load).to(dtype)

    names = [str(number) for number in range(10)]
    state = TrainingState("test", {name: tensor(torch.bfloat16) for name in names})
    state.entries = {name: {"master": tensor(), "exp_avg": tensor(), "exp_avg_sq": tensor()} for name in names}
    state.groups = [Group(names, {"lr": 0.1, "betas": (0.9, 0.99)})]
    convert.WRITERS[to](state, tmp_path / "out")
    assert len(counts) == (30 if to == "torch" else 40)
    assert max(counts) == 1, "another tensor is still alive when one is read"


# -- from plain torch --------------------------------------------------------------------------------------------------


class Plain:
    """The textbook loop in fp32."""

    def __init__(self, named: bool = False, groups: bool = True) -> None:
        self.model = make_net()
        parameters: Any = make_groups(self.model) if groups else self.model.parameters()
        if named:
            parameters = list(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(parameters, **ADAMW)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def train(self, steps: range) -> Plain:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(tokens(step)).backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, path: Path, **more: Any) -> Path:
        model, optimizer, scheduler = (x.state_dict() for x in (self.model, self.optimizer, self.scheduler))
        torch.save({"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 7, **more}, path)
        return path


def dcp(folder: Path, content: dict[str, Any]) -> Path:
    distributed_checkpoint.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def torch_file(folder: Path, content: object) -> Path:
    torch.save(content, folder.with_suffix(".pt"))
    return folder.with_suffix(".pt")


def has_state_of(state: TrainingState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        found = {key: value.read() for key, value in state.entries.get(name, {}).items()}
        assert not differences(found, dict(optimizer.state.get(parameter, {}))), name


def names_of(plain: Plain) -> list[list[str]]:
    names = {parameter: name for name, parameter in plain.model.named_parameters()}
    return [[names[p] for p in group["params"]] for group in plain.optimizer.param_groups]


@pytest.mark.parametrize(
    "layout", ["in model order", "named in a file", "param_names", "fqns", "other keys", "wrapped", "dcp", "flat dcp"]
)
def test_layouts_that_name_their_parameters(tmp_path: Path, layout: str) -> None:
    plain = Plain(named=layout == "param_names", groups="dcp" in layout).train(BEFORE)
    model, packed = plain.model.state_dict(), plain.optimizer.state_dict()
    if layout in ("fqns", "dcp", "flat dcp"):
        options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat dcp")
        packed = get_optimizer_state_dict(plain.model, plain.optimizer, options=options)
    if layout in ("in model order", "other keys", "wrapped"):
        del model["seen"]  # a buffer cannot be told from a parameter
        packed["param_groups"][0]["lr"] = numpy.float64(packed["param_groups"][0]["lr"])
    if layout == "wrapped":
        model = {f"module._orig_mod.{name}": tensor for name, tensor in model.items()}
    suffix = "_state_dict" if layout == "other keys" else ""
    write = dcp if "dcp" in layout else torch_file
    file = write(tmp_path / "run", {f"model{suffix}": model, f"optimizer{suffix}": packed})
    names = tmp_path / "names.json" if layout == "named in a file" else None
    if names is not None:
        names.write_text(json.dumps(names_of(plain)))
    state = convert_checkpoint(file, tmp_path / "converted", "lightstep", names=names)
    assert "dcp" in layout or state.aliases == {"head.weight": "embedding.weight"}
    assert [sorted(group.names) for group in state.groups or ()] == [sorted(group) for group in names_of(plain)]
    for group, live in zip(state.groups or (), plain.optimizer.param_groups, strict=True):
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in group.settings.items()}
        assert settings == {k: v for k, v in live.items() if k not in ("params", "param_names")}
        assert type(group.settings["lr"]) is float
    has_state_of(state, plain.model, plain.optimizer)
    if layout == "flat dcp":
        part = next(file.glob("*.distcp"))
        part.write_bytes(part.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="is truncated"):
            read_checkpoint(file)


class Member:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enum."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, (self.kind, self.name)


def test_members_of_enums_from_any_python_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.runtime.zero.config as config
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    content = {"stage": Member(config.ZeroStageEnum, "gradients"), "on": [Member(Color, "RED")]}
    read = load_file(torch_file(tmp_path / "a", content))
    assert int(read["stage"]) == 2 and read["on"][0].arguments == ("RED",)
    refuse_untrusted(torch_file(tmp_path / "b", Member(config.ZeroStageEnum, "gradients")))
    with trusted_loads():
        assert torch.load(tmp_path / "b.pt", weights_only=False) is config.ZeroStageEnum.gradients
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    assert read_checkpoint(dcp(tmp_path / "dcp", {"model": W})).weights["w"].read().tolist() == [1, 1]


def test_nothing_but_members_of_enums_is_looked_up(tmp_path: Path) -> None:
    file = torch_file(tmp_path / "a", Member(dict, "fromkeys"))
    assert repr(load_file(file)) == "<builtins.dict>"  # a stand-in, whose class was not asked for anything
    with pytest.raises(CheckpointError, match="what must not be run"), trusted_loads():
        torch.load(file, weights_only=False)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Member(set, "pop")))
    with pytest.raises(CheckpointError, match="is not the member of an enum"):
        read_checkpoint(tmp_path / "dcp")


class Color(Enum):
    RED = 1


def test_a_checkpoint_of_trainer_is_read_without_being_told_the_names(tmp_path: Path) -> None:
    arguments = training_arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=1, weight_decay=0.1)
    trainer = Trainer(make_llama(tie_word_embeddings=True), arguments, train_dataset=Rows())
    trainer.train()
    converted = convert_checkpoint(tmp_path / "checkpoint-1", tmp_path / "converted", "lightstep")
    assert converted.notes == ["the Trainer's random states (rng_state) are pickles, and were left out"]
    state = read_checkpoint(tmp_path / "converted")
    assert state.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert state.extra == {"trainer_state": json.loads((tmp_path / "checkpoint-1/trainer_state.json").read_text())}
    assert state.scheduler == trainer.lr_scheduler.state_dict()
    has_state_of(state, trainer.model, trainer.optimizer)
    assert all(torch.equal(state.weights[name].read(), p) for name, p in trainer.model.named_parameters())


def test_the_order_of_safetensors_names_no_parameters(tmp_path: Path) -> None:
    """They are sorted by name, ``layers.10`` before ``layers.2``: no order of a model."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(11))
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full((4, 4), float(number))
    optimizer.step()
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"does not name them\. Pass --names FILE"):
        read_checkpoint(folder)
    (tmp_path / "names.json").write_text(json.dumps([name for name, _ in model.named_parameters()]))
    state = convert_checkpoint(folder, tmp_path / "x", "lightstep", names=tmp_path / "names.json")
    has_state_of(state, model, optimizer)


# -- what is beside the model: source -> notes, and what is read -------------------------------------------------------


def trainer_folder(folder: Path, content: dict[str, Any]) -> Path:
    """One weight, and files of torch.save beside it."""
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    for name, value in {"optimizer.pt": PACKED, **content}.items():
        torch.save(value, folder / name)
    return folder


W, STEP = {"w": torch.ones(2)}, {"step": torch.tensor(7)}
SCALER = {"scale": 4096.0, "_growth_tracker": 5, "growth_interval": 2000}
OWN = {"epoch": 3, "order": torch.arange(4), "seen": [torch.ones(2), {"a": (1, 2)}]}
FLAT = {"model.layers.0.weight": torch.ones(2), "lm_head.weight": torch.ones(3)}
PACKED = {"state": {}, "param_groups": [{"params": [0], "param_names": ["w"], "lr": 0.1}]}
SQUARE = torch.arange(9.0).view(3, 3)

BESIDE: dict[str, tuple[Callable[[Path, Any], Path], dict[str, Any], dict[str, Any]]] = {
    "all that dcp may have": (
        dcp,
        {
            "model": W,
            "scheduler": {"last_epoch": 3},
            "scaler": SCALER,
            "extra": OWN,
            "train_state": STEP,
            "name": "run",
        },
        {
            "weights": ["w"],
            "scheduler": {"last_epoch": 3},
            "scale": (4096.0, 5),
            "extra": {**OWN, "train_state": STEP, "name": "run"},
        },
    ),
    "torchtitan's layout of dcp": (
        dcp,
        FLAT | {"train_state": STEP, "lr_scheduler": {"last_epoch": 7}, "dataloader": {"rank_0": b"1"}},
        {
            "weights": [*FLAT],
            "scheduler": {"last_epoch": 7},
            "extra": {"train_state": STEP, "dataloader": {"rank_0": b"1"}},
        },
    ),
    "a flat dcp": (
        dcp,
        {"layers.0.weight": torch.ones(2), "train_state.step": torch.tensor(7), "lr_scheduler.last_epoch": 7},
        {"weights": ["layers.0.weight"], "scheduler": {"last_epoch": 7}, "extra": {"train_state": STEP}},
    ),
    "a dcp with prefixes": (
        dcp,
        {"model.w": torch.ones(2), "optim.param_groups.w.lr": 0.1},
        {"weights": ["w"], "optimized": ["w"]},
    ),
    "what extra cannot hold": (
        dcp,
        {"model": {"w": torch.ones(2), "_extra_state": 1}, "ema": {"w": torch.ones(300)}, "color": Color.RED},
        {
            "weights": ["w"],
            "extra": {},
            "notes": [
                "_extra_state of the model is not a tensor",
                "ema was left out: it has 0.0 GiB of",
                "extra['color'] was left",
            ],
        },
    ),
    "extra of a torch file": (
        torch_file,
        {"model": W, "extra": {"epoch": 3}, "best": 0.5},
        {"extra": {"epoch": 3, "best": 0.5}},
    ),
    "extra that clashes": (
        torch_file,
        {"model": W, "extra": {"epoch": 3}, "best": 0.5, "epoch": 4},
        {"extra": {"extra": {"epoch": 3}, "best": 0.5, "epoch": 4}},
    ),
    "a class in a torch file": (
        torch_file,
        {"model": W, "sampler": Net},
        {"extra": {}, "notes": ["extra['sampler'] was left"]},
    ),
    "a transposed view": (
        torch_file,
        {"model": {"a": SQUARE, "b": SQUARE.t(), "c": SQUARE}},
        {"weights": ["a", "b"], "aliases": {"c": "a"}},
    ),
    "the Trainer's scaler": (trainer_folder, {"scaler.pt": SCALER}, {"scale": (4096.0, 5)}),
    "the loss scale of lightstep's optimizer": (
        trainer_folder,
        {"optimizer.pt": {**PACKED, "loss_scale": {"scale": 16384.0, "good_steps": 1, "hysteresis_left": 1}}},
        {"scale": (16384.0, 1)},
    ),
}


@pytest.mark.parametrize("what", BESIDE)
def test_what_is_beside_the_model_is_kept_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    write, content, expected = BESIDE[what]
    notes = expected.get("notes", [])
    monkeypatch.setattr(from_dcp, "_LARGEST_EXTRA", 1000)
    state = convert_checkpoint(write(tmp_path / "source", content), tmp_path / "converted", "lightstep")
    assert len(state.notes) == len(notes) and all(map(str.startswith, sorted(state.notes), sorted(notes))), state.notes
    scale = state.loss_scale or {}
    found: dict[str, Any] = {
        "notes": notes,
        "weights": list(state.weights),
        "aliases": state.aliases,
        "optimized": state.optimized(),
        "scheduler": state.scheduler,
        "extra": state.extra,
        "scale": (scale.get("scale"), scale.get("good_steps")),
    }
    assert not differences({key: found[key] for key in expected}, expected)
    back = read_checkpoint(tmp_path / "converted")
    assert back.scheduler == state.scheduler and not differences(back.extra, state.extra)
    for name, weight in state.weights.items():
        assert torch.equal(back.weights[name].read(), weight.read())


# -- refusal × sentence; test_checkpoint_faults.py has faults at each change of a file ---------------------------------


def files(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def unnamed(folder: Path, names: list[str] | None) -> Path:
    if names is not None:
        (folder.parent / "names.json").write_text(json.dumps(names))
    return Plain().train(BEFORE).save(folder.with_suffix(".pt"))


ALIKE = {
    "model": {name: torch.ones(2) for name in "abc"},
    "optimizer": {
        "state": {number: {"exp_avg": torch.ones(2)} for number in range(2)},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    },
}
NAMELESS = r"does not name them. Pass --names FILE"

REFUSED: dict[str, tuple[Callable[[Path, Any], Path], Any, str]] = {
    "nothing": (lambda folder, _: folder, None, "does not exist"),
    "an empty folder": (files, {}, "holds no checkpoint in a known format"),
    "a name of nothing": (files, {"latest": b"global_step7"}, "names 'global_step7', which is not there"),
    "a file that is cut off": (files, {"mp_rank_00_model_states.pt": b"PK\x03\x04 cut off"}, "cannot be read"),
    "a missing file": (
        files,
        {"zero_pp_rank_0_mp_rank_00_optim_states.pt": b""},
        "mp_rank_00_model_states.pt is missing",
    ),
    "parts of layers": (files, {"mp_rank_01_model_states.pt": b""}, "tensor, pipeline or expert parallelism"),
    "a function in an index": (
        files,
        {".metadata": b"\x80\x04cos\nsystem\n."},
        "os.system does not belong in an index",
    ),
    "an empty file of LightRFT": (files, {"_rank0": b""}, "cannot be read"),
    "no model": (dcp, {"net": W, "step": 3}, "has no model: it has net, step, and model or a flat state dict"),
    "what would be run": (torch_file, {"model": W, "harm": Harmful()}, r"must not be run \("),
    "parameters without names": (unnamed, None, NAMELESS),
    "two of three weights that are alike": (torch_file, ALIKE, NAMELESS),
    "other names": (unnamed, sorted(dict(make_net().named_parameters()))[:8], "and --names does not fit them"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    write, content, sentence = REFUSED[what]
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "source", dict(content) if isinstance(content, dict) else content)
    before, names = sorted(tmp_path.iterdir()), tmp_path / "names.json"
    with pytest.raises(CheckpointError, match=sentence) as caught:
        convert_checkpoint(source, tmp_path / "x", "lightstep", names=names if names.exists() else None)
    assert "weights_only" not in str(caught.value), "torch's advice to run it all the same"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("source", "destination", "to", "sentence"),
    [
        ("a", "a/inside", "lightstep", "lie in each other"),
        ("file://HERE/a", "file://HERE", "lightstep", "lie in each other"),
        ("a", "thesis", "lightstep", "choose another path or remove it"),
        ("a", "thesis", "torch", "choose another path or remove it"),
    ],
)
def test_destinations_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, destination: str, to: str, sentence: str
) -> None:
    """Source and destination in each other, and a stranger's folder, which stays."""
    monkeypatch.chdir(tmp_path)
    Run("bfloat16").save(Path("a"))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=sentence):
        convert_checkpoint(source.replace("HERE", str(tmp_path)), destination.replace("HERE", str(tmp_path)), to)
    assert contents(tmp_path) == ["a", "thesis"] and contents(tmp_path / "thesis") == ["thesis.txt"]
    read_checkpoint(tmp_path / "a")


def test_checkpoints_are_converted_from_and_to_urls(tmp_path: Path) -> None:
    url = "memory://conversions"
    convert_checkpoint(Run("bfloat16").train(range(1)).save(tmp_path / "a"), f"{url}/step-1", "lightstep")
    convert_checkpoint(f"{url}/step-1", tmp_path / "run.pt", "torch")
    convert_checkpoint(tmp_path / "run.pt", f"{url}/step-2", "lightstep")
    assert dict(describe_checkpoint(f"{url}/step-2"))["format"] == "lightstep"
    run = Run("bfloat16")
    assert run.load(f"{url}/step-2")["epoch"] == 3
    with pytest.raises(ValueError, match="is a URL, and torch is written to local paths; write to one, and copy"):
        convert_checkpoint(f"{url}/step-1", f"{url}/converted", "torch")
    with pytest.raises(CheckpointError, match="no checkpoint of lightstep; copy one of another format to a local"):
        convert_checkpoint(url, tmp_path / "x", "lightstep")


def test_the_commands(tmp_path: Path) -> None:
    def call(*words: str, exit_code: int = 0) -> str:
        done = CliRunner().invoke(app, ["checkpoint", *words])
        assert done.exit_code == exit_code, done.output
        return done.output

    source, file = str(Run("float16").train(BEFORE).save(tmp_path / "a")), str(tmp_path / "u.pt")
    convert_it = ("convert", source, file, "--to", "torch")
    without_scale = ("convert", str(Run("bfloat16").save(tmp_path / "b")), str(tmp_path / "w.pt"), "--to", "torch")
    assert "'fp61' is neither a strategy" in call(*convert_it, "--strategy", "fp61", exit_code=2)
    assert contents(tmp_path) == ["a", "b"]
    assert "note: the settings of the dynamic loss scale are not in the checkpoint" in call(*convert_it)
    shown = call("inspect", file)
    assert "torch (converted)" in shown and "8 float16" in shown and "lr 0.001" in shown
    assert "256, dynamic: 3 good steps" in shown and "head.weight = embedding" in shown
    assert "the strategy's settings were not used" in call(*without_scale, "--strategy", "fp16")
    assert "nothing was not read: " in call("inspect", str(tmp_path / "nothing"), exit_code=2)
    refused = call("convert", source, str(tmp_path / "y"), "--to", "jax", exit_code=2)
    assert refused == "lightstep: 'jax' is not a format to convert to; allowed: lightstep, torch\n"


def test_what_is_no_tensor_in_the_files_of_deepspeed_is_named() -> None:
    module = {"weight": torch.ones(2), "norm._extra_state": {"scale": 1.0}}
    opened: Any = SimpleNamespace(model_states=[{"module": module}], stage=2, dtype=torch.bfloat16, notes=[])
    assert set(zero._weights(opened, {})) == {"weight"}
    assert opened.notes == ["norm._extra_state of the model is not a tensor and was left out"]
