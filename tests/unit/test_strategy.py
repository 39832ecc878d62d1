"""Strategies: loading by name, path, mapping and overrides, with one clear sentence for each mistake; the presets."""

from __future__ import annotations

import math
import operator
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import BaseModel
from torch import nn

import lightstep
from lightstep import ConfigError, Strategy, available_strategies
from lightstep.config import StrategyConfig
from tests.python import python
from tests.reference.tiny_model import TinyModel, loss_of

RESIDENT = Strategy.load("resident")
PRESETS = ["bulk", "fp16", "fp32", "resident"]
YAML = """
description: a file of my own
precision: {parameters: float32}
clipping: {max_norm: 2.5}
optimizer_state: {backend: bulk}
"""


CROSSED = {"kind": "dynamic", "min_scale": 64, "max_scale": 2, "init_scale": 16}


def refusal(source: Any, overrides: Any = None) -> str:
    """The sentence with which ``source`` is refused; warnings on the way are not the point."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError) as error:
            Strategy.load(source, overrides=overrides)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 600, text
    assert not any(word in text.lower() for word in ("pydantic", "dictionary", "instance of", "object to extract"))
    assert "errors.pydantic.dev" not in text
    assert error.value.__suppress_context__ or error.value.__cause__ is not None or error.value.__context__ is None
    return text


def one_step(strategy: Strategy) -> Any:
    model = strategy.prepare_model(TinyModel())
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-3)
    before = model.head.weight.detach().clone()
    with strategy.accumulate(model, last=True):
        optimizer.backward(loss_of(model, 0))
    result = optimizer.step()
    assert result
    assert not torch.equal(model.head.weight, before)
    return model, optimizer, result


# -- loading ----------------------------------------------------------------------------------------------------------


def test_the_ready_strategies_are_listed() -> None:
    names = available_strategies()
    assert set(PRESETS) <= set(names) and names == sorted(names)


def test_a_file_a_string_path_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    configs = [Strategy.load(source).config for source in (path, str(path), yaml.safe_load(YAML))]
    assert configs[0] == configs[1] == configs[2] and configs[0].clipping.max_norm == 2.5


def test_every_key_is_optional(tmp_path: Path) -> None:
    (tmp_path / "defaults.yaml").write_text("{}")
    defaults = {
        "sharding": {"kind": "single"},
        "precision": {"parameters": "bfloat16", "master_weights": True, "reduce": "float32"},
        "clipping": {"max_norm": 1.0, "norm_type": 2.0},
        "optimizer_state": {"backend": "resident", "update": "at_step"},
    }
    for source in ({}, tmp_path / "defaults.yaml"):
        found = Strategy.load(source).config.model_dump()
        assert all(found[section].items() >= expected.items() for section, expected in defaults.items())


def test_overrides_by_dotted_key_and_by_nested_mapping() -> None:
    """And they do not stay."""
    mapping, before = {"clipping": {"max_norm": 2.0}}, Strategy.load("bulk").config
    for norm in (0.5, None):
        for overrides in ({"clipping.max_norm": norm}, {"clipping": {"max_norm": norm}}):
            config = Strategy.load("bulk", overrides=overrides).config
            assert config.clipping.max_norm == norm and config.optimizer_state.backend == "bulk"
            assert Strategy.load(mapping, overrides=overrides).config.clipping.max_norm == norm
    assert mapping == {"clipping": {"max_norm": 2.0}} and Strategy.load("bulk").config == before


def test_a_loss_scale_may_be_exchanged_by_an_override() -> None:
    config = Strategy.load("fp16", overrides={"precision.loss_scale": {"kind": "constant", "scale": 64}}).config
    assert (config.precision.loss_scale.kind, config.precision.loss_scale.scale) == ("constant", 64)


@pytest.mark.parametrize(
    ("preset", "kind", "key", "value"),
    [
        ("ddp", {"sharding.kind": "fsdp2"}, "sharding.wrap", ["Block"]),
        ("ddp", {"sharding": {"kind": "fsdp2"}}, "sharding.wrap", ["Block"]),
        ("resident", {"precision.loss_scale.kind": "dynamic"}, "precision.loss_scale.init_scale", 1024.0),
        ("resident", {"precision": {"loss_scale.kind": "dynamic"}}, "precision.loss_scale.init_scale", 1024.0),
        ("fp16", {"precision.loss_scale.kind": "constant"}, "precision.loss_scale.scale", 64.0),
    ],
)
def test_the_order_of_overrides_does_not_matter(preset: str, kind: dict[str, Any], key: str, value: Any) -> None:
    """A key of the new kind is kept, whether it stands before the kind or behind it."""
    for overrides in ({key: value} | kind, kind | {key: value}):
        assert operator.attrgetter(key)(Strategy.load(preset, overrides=overrides).config) == value


def test_a_configuration_is_frozen() -> None:
    config = Strategy.load("resident").config
    with pytest.raises((ValueError, AttributeError, TypeError)):
        config.clipping.max_norm = 7.0


def test_two_optimizers_of_one_strategy_share_nothing() -> None:
    strategy = Strategy.load("fp16")
    optimizers = []
    for _ in range(2):
        model = strategy.prepare_model(TinyModel())
        optimizers.append((model, strategy.create_optimizer(model, torch.optim.SGD, lr=0.1)))
    (model, first), (_, second) = optimizers
    model.head.weight.grad = torch.full_like(model.head.weight, math.inf)
    scale = float(second.loss_scale.scale)
    assert not first.step()
    assert float(first.loss_scale.scale) < scale
    assert float(second.loss_scale.scale) == scale


def test_one_device_is_the_whole_world() -> None:
    strategy = Strategy.load("resident")
    assert (strategy.rank, strategy.world_size, strategy.is_main) == (0, 1, True)
    assert isinstance(strategy.device, torch.device)
    model = TinyModel()
    assert strategy.unwrap_model(strategy.prepare_model(model)) is model
    strategy.close()
    assert not torch.distributed.is_initialized()


def test_a_model_may_be_meta_or_a_factory() -> None:
    strategy = Strategy.load("fp32")
    torch.manual_seed(3)
    expected = TinyModel()
    torch.manual_seed(3)
    made = strategy.prepare_model(TinyModel)
    for tested, value in zip(made.parameters(), expected.parameters(), strict=True):
        assert torch.equal(tested.cpu(), value)
    model = strategy.prepare_model(nn.Linear(4, 3, device="meta"))
    assert all(p.device == strategy.device and bool(torch.isfinite(p).all()) for p in model.parameters())
    assert float(model.weight.detach().abs().max()) > 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_of_a_meta_model_stay_tied() -> None:
    with torch.device("meta"):
        meta = Tied()
    meta.embed.weight.mark = "kept"  # type: ignore[attr-defined]
    model = Strategy.load("resident").prepare_model(meta)
    assert model.head.weight is model.embed.weight and len(list(model.parameters())) == 3
    assert model.embed.weight.mark == "kept"


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    text = refusal("residnt")
    assert "residnt" in text and "resident" in text
    assert all(name in refusal("nothing-like-it") for name in PRESETS)
    for source in (tmp_path / "none.yaml", str(tmp_path / "none.yaml")):
        assert "none.yaml" in refusal(source)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("clipping: {max_norm: 1.0", []),
        ("- a\n- list", []),
        ("just a word", []),
        ("a: 1\na: 2\n  b: 3", []),
        ("clipping: {}\nprecision: {}\nclipping: {norm_type: 1}\n", ["'clipping' is there twice", "line 3"]),
        ("[" * 1500, ["is not valid YAML: it is nested too deeply"]),
        ("# nothing yet\n", ["is empty; a mapping of keys is needed (sharding:, precision:"]),
    ],
    ids=["open", "list", "word", "indented", "twice", "deep", "empty"],
)
def test_a_file_that_is_no_mapping_is_named(content: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    text = refusal(path)
    assert all(part in text for part in ("broken.yaml", *parts)), text


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("clipping: {<<: &own {max_norm: 0.5, norm_type: 2}, norm_type: 1}\n")
    clipping = Strategy.load(path).config.clipping
    assert (clipping.max_norm, clipping.norm_type) == (0.5, 1)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"cliping": {"max_norm": 1.0}}, ["cliping", "'clipping'"]),
        ({"clipping": {"max_nrom": 1.0}}, ["max_nrom", "'max_norm'"]),
        ({"sharding": {"kind": "fsdp2", "reshard_after": True}}, ["reshard_after", "'reshard_after_forward'"]),
        ({"precision": {"loss_scale": {"kind": "dynamic", "init": 4.0}}}, ["init", "'init_scale'"]),
        ({"precision": {"parameters": "bf16"}}, ["precision.parameters", "bf16", "bfloat16", "float16", "float32"]),
        ({"precision": {"reduce": "float16"}}, ["precision.reduce", "float16", "float32", "parameters"]),
        ({"precision": {"loss_scale": "dinamic"}}, ["precision.loss_scale", "dinamic", "dynamic", "constant", "none"]),
        ({"precision": {"loss_scale": {"scale": 2.0}}}, ["precision.loss_scale", "kind", "dynamic", "constant"]),
        ({"precision": {"loss_scale": {"kind": "constant", "scale": 1e39}}}, ["precision.loss_scale.scale", "1e+39"]),
        ({"precision": {"master_weights": "perhaps"}}, ["precision.master_weights", "perhaps"]),
        ({"sharding": {"kind": "fsdp3"}}, ["sharding.kind", "fsdp3", "fsdp2", "single", "ddp", "deepspeed"]),
        ({"sharding": "tp"}, ["sharding", "tp", "mapping", "allowed kinds: single, ddp, fsdp2, deepspeed"]),
        ({"sharding": "fsdp2"}, ["'sharding' is 'fsdp2': a mapping is needed, write sharding: {kind: fsdp2}"]),
        ({"sharding": {"kind": "fsdp2", "mesh": 2}}, ["'sharding.mesh' is 2: a mapping", "keys: replicate, shard"]),
        ({"sharding": {"kind": "fsdp2", "wrap": 3}}, ["'sharding.wrap' is 3: a list is needed; also allowed: auto"]),
        ({"precision": "bfloat16"}, ["'precision' is 'bfloat16': a mapping", "allowed keys: parameters, master_w"]),
        ({"precision": {"loss_scale": {"kind": "constant"}}}, ["'precision.loss_scale.scale' is missing"]),
        ({"optimizer_state": {"update": "later"}}, ["optimizer_state.update", "later", "at_step"]),
        ({"optimizer_state": {"ring_mib": 0}}, ["optimizer_state.ring_mib", "0"]),
        ({"optimizer_state": None}, ["optimizer_state", "None"]),
        ({"clipping": {"max_norm": "small"}}, ["clipping.max_norm", "small"]),
        ({"clipping": {"max_norm": [1.0]}}, ["clipping.max_norm", "[1.0]"]),
        ({"description": 3}, ["description", "3"]),
        ({"precision": {"loss_scale": CROSSED}}, ["min_scale", "max_scale", "64", "2"]),
        ({"sharding": {"kind": "deepspeed", "stage": "3"}}, ["'sharding.stage' is '3' (text); allowed: 1, 2, 3"]),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_what_is_allowed(values: dict[str, Any], parts: list[str]) -> None:
    text = refusal(values)
    assert [part for part in parts if part not in text] == [], text


def test_every_mistake_is_told_at_once() -> None:
    text = refusal({"clipping": {"max_norm": -1}, "precision": {"parameters": "int8"}, "cliping": 1})
    assert all(part in text for part in ("clipping.max_norm", "precision.parameters", "cliping"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"cliping.max_norm": 0.5}, ["cliping", "clipping"]),
        ({"clipping.max_nrom": 0.5}, ["max_nrom", "max_norm"]),
        ({"clipping.max_norm": 0}, ["clipping.max_norm", "0"]),
        ({"clipping.max_norm.deep": 0}, ["clipping.max_norm"]),
        ("clipping.max_norm=1", ["overrides are 'clipping.max_norm=1'; a mapping is needed"]),
    ],
    ids=str,
)
def test_overrides_are_checked_too(overrides: Any, parts: list[str]) -> None:
    text = refusal("resident", overrides)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize("source", [None, 3, ["resident"]])
def test_a_source_of_the_wrong_type(source: Any) -> None:
    with pytest.raises((ConfigError, TypeError)) as error:
        Strategy.load(source)
    assert repr(source) in str(error.value) or type(source).__name__ in str(error.value)


# -- warnings ---------------------------------------------------------------------------------------------------------


def test_fp16_without_loss_scale_warns_what_to_set() -> None:
    with pytest.warns(UserWarning, match=r"loss_scale.*dynamic") as seen:
        strategy = Strategy.load({"precision": {"parameters": "float16"}})
    assert len(seen) == 1
    one_step(strategy)


@pytest.mark.parametrize("parameters", ["bfloat16", "float16"])
def test_16_bits_without_masters_warns_why(parameters: str) -> None:
    scale = {"kind": "constant", "scale": 8.0}
    values = {"precision": {"parameters": parameters, "master_weights": False, "loss_scale": scale}}
    with pytest.warns(UserWarning, match="master_weights") as seen:
        strategy = Strategy.load(values)
    assert len(seen) == 1
    _, optimizer, _ = one_step(strategy)
    assert all("master" not in state for state in optimizer.state.values())


def test_what_is_right_warns_nothing() -> None:
    good = [
        {"precision": {"parameters": "float32", "master_weights": False}},
        {"precision": {"parameters": "float16", "loss_scale": {"kind": "dynamic"}}},
        {"precision": {"parameters": "float16", "loss_scale": {"kind": "constant", "scale": 128}}},
        {"precision": {"loss_scale": "none"}, "clipping": {"max_norm": None}},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in good:
            Strategy.load(values)


# -- create_optimizer -------------------------------------------------------------------------------------------------


def refuse(error: Any, match: str, call: Any) -> None:
    """One line, and no warning before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=match) as caught:
            call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [nn.Linear, "AdamW", None, torch.optim.lr_scheduler.StepLR, "instance"])
def test_an_optimizer_class_that_is_none(bad: Any) -> None:
    model = RESIDENT.prepare_model(TinyModel())
    given = torch.optim.SGD(model.parameters(), lr=0.1) if bad == "instance" else bad
    named = "SGD" if bad == "instance" else f"{getattr(bad, '__name__', bad)}|{type(bad).__name__}"
    for match in ("Optimizer", named):
        refuse(TypeError, match, lambda: RESIDENT.create_optimizer(model, given, lr=0.1))


def test_parameters_and_settings_that_are_refused() -> None:
    model, frozen = (RESIDENT.prepare_model(TinyModel().requires_grad_(trained)) for trained in (True, False))
    twice = [{"params": [model.gain, model.head.weight, model.gain]}]
    in_two = [{"params": [model.gain]}, {"params": [model.head.weight, model.gain]}]
    for error, match, of, settings in (
        (ValueError, "gain", model, {"param_groups": twice}),
        (ValueError, "gain", model, {"param_groups": in_two}),
        (ValueError, "trainable", frozen, {}),
        (ValueError, "trainable", RESIDENT.prepare_model(nn.Identity()), {}),
        ((TypeError, ValueError), "momentun", model, {"momentun": 0.9}),
        (ValueError, "-1", model, {"lr": -1.0}),
    ):
        given: dict[str, Any] = {"lr": 0.1, **settings}  # type: ignore[dict-item]
        refuse(error, match, lambda of=of, given=given: RESIDENT.create_optimizer(of, torch.optim.SGD, **given))


def test_the_default_is_adamw_over_all_parameters() -> None:
    """Frozen ones too, as with torch's own: they are trained once they are thawed."""
    model = RESIDENT.prepare_model(TinyModel())
    optimizer = RESIDENT.create_optimizer(model, lr=1e-3)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    assert "AdamW" in repr(optimizer)


def test_a_role_or_a_model_that_is_none() -> None:
    with pytest.raises(ConfigError, match="trainr"):
        RESIDENT.prepare_model(TinyModel(), role="trainr")
    with pytest.raises(TypeError, match="str"):
        RESIDENT.prepare_model("model")


# -- processes, and the public face -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sub/my_train.py", "--lr", "3", "--name", "a b"], "sub/my_train.py --lr 3 --name 'a b'"),
        (["-m", "sub.my_train", "--lr", "3"], "-m sub.my_train --lr 3"),
    ],
)
def test_how_to_start_several_processes_is_said_with_this_program(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    program = "from lightstep import Strategy\nStrategy.load('fsdp2').prepare_model(None)\n"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "my_train.py").write_text(program)
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    environment["PYTHONPATH"] = str(Path(lightstep.__file__).resolve().parents[1])
    done = python(*arguments, cwd=tmp_path, env=environment)
    found = re.search(r"start it with: torchrun --nproc-per-node \d+ (.*)", done.stderr)
    assert found and found[1] == expected, done.stderr


# -- the files that ship, and the page that describes their keys


CHECKOUT = Path(__file__).resolve().parents[2]
# Keys that mean something to the streaming backend alone, have a default that depends on the rest, or are opt-in.
OPTIONAL = {
    "prefetch_layers",
    "ring_mib",
    "resident_gib",
    "spare_host_gib",
    "previous_weights",
    "moments",
    "moments_rounding",
    "rounding_seed",
}
# A section that is laid over a preset by who needs it.
LAID_OVER = {"roles", "weights"}


def _missing(config: BaseModel, values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys that the file leaves to a default."""
    for key in type(config).model_fields:
        if key in OPTIONAL and prefix in ("optimizer_state.", "precision."):
            continue
        if key in LAID_OVER and not prefix:
            continue
        inner = getattr(config, key)
        if key not in values:
            yield prefix + key
        elif isinstance(inner, BaseModel) and isinstance(values[key], dict):
            yield from _missing(inner, values[key], f"{prefix}{key}.")


@pytest.mark.parametrize("name", available_strategies())
def test_a_preset_is_complete_commented_and_loads_without_a_warning(name: str) -> None:
    text = (CHECKOUT / "strategies" / f"{name}.yaml").read_text(encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Strategy.load(name).config
    assert not list(_missing(config, yaml.safe_load(text)))
    assert text.startswith("# ")
    assert "# Choose it" in text or "yardstick" in text, "a preset says when to choose it"


def _schema_keys(model: type[BaseModel]) -> set[str]:
    keys = set()
    for key, field in model.model_fields.items():
        keys.add(key)
        for option in _models(field.annotation):
            keys |= _schema_keys(option)
    return keys


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def test_the_reference_page_describes_every_key() -> None:
    page = (CHECKOUT / "docs" / "strategy-files.md").read_text(encoding="utf-8")
    assert not [key for key in sorted(_schema_keys(StrategyConfig)) if f"`{key}`" not in page]
