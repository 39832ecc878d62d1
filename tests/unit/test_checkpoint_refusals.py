"""What is refused, by name, in a sentence that says what to do; and what was there is still there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightstep.checkpoint import (
    CheckpointError,
    export_model,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoints,
)
from lightstep.checkpoint.formats import convert_checkpoint, describe_checkpoint
from lightstep.extras import MissingLibraryError
from tests.checkpoint_runs import (
    Adapted,
    PartlyFrozen,
    Run,
    Tied,
    Unloadable,
    contents,
    model_of,
    values_of,
)
from tests.patience import PATIENCE
from tests.reference.pair import BACKENDS, same_tree

Trained = tuple[nn.Module, torch.optim.Optimizer | None]

# -- loads of what does not fit ----------------------------------------------------------------------------------------


def layers(value: float = 1.0, **changes: nn.Module) -> nn.Sequential:
    """Linear, BatchNorm, Linear; ``_2=module`` puts another one at a place, or one more."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    for number, module in changes.items():
        model.add_module(number.removeprefix("_"), module)
    return model


def counted(dtype: torch.dtype) -> nn.Module:
    """A whole number that an 8-bit buffer cannot hold."""
    model = layers()
    model[1].num_batches_tracked = torch.tensor(99, dtype=dtype)
    return model


def adam(parameters: str = "", kind: Any = torch.optim.AdamW) -> Trained:
    """The optimizer has the parameters of the whole model, or of one of its modules."""
    model = layers()
    return model, kind(model.get_submodule(parameters).parameters())


def sgd(*groups: int) -> Trained:
    """A group for the first so many layers, and so on."""
    model, first, listed = layers(), 0, []
    for number, count in enumerate(groups, 1):
        listed.append({"params": model[first : first + count].parameters(), "lr": 0.1 * number})
        first += count
    return model, torch.optim.SGD(listed)


def adapted(**modules: nn.Module | None) -> nn.Module:
    """With other modules."""
    model = Adapted()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


def frozen_in_part(steps: int, in_groups: bool, thawed: bool = False) -> Trained:
    run = PartlyFrozen("resident", 0 if thawed else steps, in_groups)
    if thawed:
        run.model[0].requires_grad_(True)
        run.optimizer = run.strategy.create_optimizer(run.model, torch.optim.AdamW)
        run.train(steps)
    return run.model, run.optimizer


def trained(backend: str = "resident", nan: bool = False) -> Trained:
    run = Run(backend)
    if nan:
        run.optimizer.state[run.model.weight]["exp_avg_sq"].view(-1)[-1] = torch.nan
    return run.model, run.optimizer


MISFITS: dict[str, tuple[Callable[[], nn.Module | Trained], Callable[[], nn.Module | Trained], str]] = {
    "a weight of another shape, and two more": (
        layers,
        lambda: layers(_2=nn.Linear(4, 3), _3=nn.Linear(1, 1)),
        r"another model \(not in the checkpoint: 3\.weight, 3\.bias; "
        r"different: 2\.weight is \[2, 4\] in the checkpoint and \[3, 4\] in the model, 2\.bias",
    ),
    "fewer weights": (layers, lambda: layers()[:1], r"not in the model: 1\.bias, 1\.num_batches_tracked"),
    "whole numbers that do not fit": (
        lambda: counted(torch.int64),
        lambda: counted(torch.uint8),
        r"tracked is torch\.int64 in the checkpoint and torch\.uint8 in the",
    ),
    "different weights for tied ones": (
        lambda: Tied(tie=False),
        Tied,
        r"embed\.weight, head\.weight are tied in the model, and in the",
    ),
    "a base of another shape": (
        Adapted,
        lambda: adapted(base=nn.Linear(6, 7)),
        r"base.weight is \[6, 6\] in the checkpoint and \[7, 6\]",
    ),
    "no base": (Adapted, lambda: adapted(base=None), "not in the model: base.bias, base.weight"),
    "more than base and adapter": (
        Adapted,
        lambda: adapted(more=nn.Linear(1, 1)),
        "not in the checkpoint: more.weight",
    ),
    "an optimizer of fewer parameters": (adam, lambda: adam("0"), r"another optimizer \(not in the optimizer: 1\.bias"),
    "an optimizer of more parameters": (lambda: adam("0"), adam, r"another optimizer \(not in the checkpoint: 1\.bias"),
    "what was frozen is trained": (
        lambda: frozen_in_part(2, in_groups=False),
        lambda: frozen_in_part(0, in_groups=True, thawed=True),
        r"another optimizer \(not in the checkpoint: 0.bias, 0.weight\)",
    ),
    "what was trained is frozen": (
        lambda: frozen_in_part(1, in_groups=True, thawed=True),
        lambda: frozen_in_part(0, in_groups=False),
        r"another optimizer \(not in the optimizer: 0.bias, 0.weight\)",
    ),
    "an optimizer of another class": (
        adam,
        lambda: adam(kind=torch.optim.SGD),
        "holds the state of AdamW, the optimizer is SGD",
    ),
    "an optimizer of another model": (
        adam,
        lambda: (layers(), adam()[1]),
        r"6 parameters of the optimizer .* are not the model's",
    ),
    "groups that are joined": (
        lambda: sgd(1, 2),
        lambda: sgd(3),
        r"group 0 .* joins groups \[0, 1\] .* differ; build the groups as they were",
    ),
    **{
        f"state with NaN into {backend}": (
            lambda: trained(nan=True),
            partial(trained, backend),
            r"state 'exp_avg_sq' of weight holds 1 NaN .*load an",
        )
        for backend in BACKENDS
    },
}


def made(factory: Callable[[], nn.Module | Trained]) -> Trained:
    found = factory()
    return (found, None) if isinstance(found, nn.Module) else found


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path: Path, what: str) -> None:
    saved, loaded, sentence = MISFITS[what]
    save_checkpoint(tmp_path / "a", *made(saved))
    model, optimizer = made(loaded)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, drawn = None if optimizer is None else _copied(optimizer), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=rf"a was not loaded: .*{sentence}"):
        load_checkpoint(tmp_path / "a", model, optimizer)
    same_tree("model", dict(model.state_dict()), weights)
    assert optimizer is None or same_tree("state", _copied(optimizer), state) is None
    assert torch.equal(torch.get_rng_state(), drawn)
    save_checkpoint(tmp_path / "b", model)  # it counts as whole


def _copied(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    packed = optimizer.state_dict()
    state = {n: {k: torch.as_tensor(v).clone() for k, v in own.items()} for n, own in packed["state"].items()}
    return {"state": state, "param_groups": packed["param_groups"]}


def test_a_base_that_was_not_saved_cannot_be_asked_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", Adapted())
    with pytest.raises(CheckpointError, match="holds only what was trained, and trainable_only=False"):
        load_checkpoint(tmp_path / "a", Adapted(), trainable_only=False)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("none", "none does not exist"),
        ("", r"it has no lightstep\.json"),
        ("run", r"run is a folder of checkpoints; the newest is .*run/a"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, path: str, sentence: str) -> None:
    for name in ("b", "a"):
        save_checkpoint(tmp_path / "run" / name, model_of(0.0))
    with pytest.raises(CheckpointError, match=sentence):
        load_checkpoint(tmp_path / path, model_of(0.0))


# -- saves -------------------------------------------------------------------------------------------------------------


NO_CHECKPOINT = "exists and is not a checkpoint; choose another path or remove it"


class Planned:
    """A scheduler."""

    def state_dict(self) -> dict[str, Any]:
        return {"last": 3, "plan": Unloadable()}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "a",
            {"extra": {"a": {"b": [1, Unloadable()]}}},
            r"a was not saved: extra\['a'\]\['b'\]\[1\] is a .*Unloadable",
        ),
        ("a", {"extra": {"loss": numpy.float64(0.5)}}, r"a was not saved: extra\['loss'\] is a numpy\.float64"),
        ("a", {"extra": {"hook": lambda: 0}}, r"a was not saved: extra\['hook'\] is a builtins\.function"),
        ("a", {"extra": {"where": Path("a")}}, r"a was not saved: extra\['where'\] is a pathlib"),
        ("a", {"scheduler": Planned()}, r"a was not saved: scheduler\['plan'\] is a .*Unloadable"),
        ("step", {"keep_last": 1}, "a path that ends in a number"),
        ("step-1", {"keep_last": 0}, "keep_last is 0"),
        ("step-1", {"keep_every": 5}, "keep_every is 5 without keep_last"),
        ("nonsense://a/b", {}, r"nonsense://a/b was not saved: .*nonsense"),
        ("user/folder", {}, NO_CHECKPOINT),
        ("user/file", {}, NO_CHECKPOINT),
        ("file://USER/user/folder", {}, NO_CHECKPOINT),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, options: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "user" / "folder").mkdir(parents=True)
    (tmp_path / "user" / "folder" / "thesis.tex").write_text("precious")
    (tmp_path / "user" / "file").write_text("precious")
    path = name.replace("USER", str(tmp_path)) if "://" in name else tmp_path / name
    for asynchronous in (False, True):
        with pytest.raises((CheckpointError, TypeError), match=sentence):
            save_checkpoint(path, model_of(1.0), **options, asynchronous=asynchronous).result(PATIENCE)
        assert contents(tmp_path) == ["user"] and contents(tmp_path / "user") == ["file", "folder"]
        assert contents(tmp_path / "user" / "folder") == ["thesis.tex"]


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises((CheckpointError, MissingLibraryError), match=r"pip install 'lightstep-optim\[urls\]'"):
        save_checkpoint("memory://a/b", model_of(1.0))


# -- places ------------------------------------------------------------------------------------------------------------

S3 = Path("s3://bucket/run/step-1")
NO_PLACES: dict[str, list[Callable[[], object]]] = {
    "is a pathlib.Path that was made of a URL; pass the URL as a string": [
        lambda: save_checkpoint(S3, model_of(1.0)),
        lambda: load_checkpoint(S3, model_of(1.0)),
        lambda: latest_checkpoint(S3),
        lambda: verify_checkpoints(S3),
        lambda: convert_checkpoint(S3, "x", "lightstep"),
        lambda: describe_checkpoint(S3),
    ],
    "is a URL, and save_pretrained writes to local folders; ": [
        lambda: export_model("s3://bucket/model", nn.Linear(2, 2)),
        lambda: export_model("memory://model", nn.Linear(2, 2)),
        lambda: export_model(S3, nn.Linear(2, 2)),
    ],
    "file was not exported: ": [lambda: export_model("file", nn.Linear(2, 2))],
    "file exists and is not a folder; ": [lambda: export_model("file", nn.Linear(2, 2))],
    "is the working directory, which cannot be replaced; choose": [
        lambda: export_model(".", nn.Linear(2, 2)),
        lambda: save_checkpoint(".", nn.Linear(2, 2)),
    ],
}


@pytest.mark.parametrize("sentence", NO_PLACES)
def test_a_place_that_cannot_be_written_to_is_named_before_anything_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str
) -> None:
    """A path made of a URL would be a local folder named ``s3:``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for call in NO_PLACES[sentence]:
        with pytest.raises(CheckpointError, match=re.escape(sentence)):
            call()
        assert contents(tmp_path) == ["file"]


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    export_model(tmp_path / "link", nn.Linear(2, 2))
    save_checkpoint(tmp_path / "link" / "a", model_of(1.0))
    load_checkpoint(tmp_path / "here" / "a", model := model_of(0.0))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "here" / "model.safetensors").is_file()
    assert values_of(model) == {1.0}
