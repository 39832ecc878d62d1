"""DeepSpeed's configuration from a strategy's, and what is refused: when the strategy is loaded, without DeepSpeed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightstep import Strategy, available_strategies
from lightstep.config import ConfigError
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer
from lightstep.optimizer.base import BaseOptimizer

DYNAMIC = {"kind": "dynamic", "init_scale": 1024, "growth_interval": 500, "hysteresis": 3, "min_scale": 4}


def _load(sharding: Any = (), **sections: Any) -> Any:
    return Strategy.load({"sharding": {"kind": "deepspeed", **dict(sharding)}, **sections})


def _half(**scale: Any) -> dict[str, Any]:
    return {"precision": {"parameters": "float16", "loss_scale": DYNAMIC | scale}}


def test_every_key_arrives_where_deepspeed_reads_it() -> None:
    plain = _load().deepspeed_config
    assert plain["bf16"] == {"enabled": True} and plain["fp16"] == {"enabled": False}
    assert plain["gradient_clipping"] == 1.0 and plain["zero_optimization"] == {"stage": 2}
    assert plain["communication_data_type"] == "fp32" and plain["data_types"] == {"grad_accum_dtype": "fp32"}

    sections = _half()["precision"] | {"reduce": "parameters"}
    half = _load({"stage": 3, "offload": "cpu"}, precision=sections, clipping={"max_norm": None}).deepspeed_config
    scale = {"initial_scale_power": 10, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 4}
    assert half["fp16"] == {"enabled": True, "loss_scale": 0, **scale}
    assert half["gradient_clipping"] == 0.0 and half["communication_data_type"] == "fp16"
    cpu = {"device": "cpu"}
    assert half["zero_optimization"] == {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    constant = _load(precision={"parameters": "float16", "loss_scale": {"kind": "constant", "scale": 512}})
    assert constant.deepspeed_config["fp16"] == {"enabled": True, "loss_scale": 512.0}
    assert not _load(precision={"parameters": "float32"}).deepspeed_config["bf16"]["enabled"]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"optimizer_state": {"backend": "stream"}}, ["optimizer_state.backend stream", "sharding.offload: cpu"]),
        ({"optimizer_state": {"ring_mib": 64}}, ["optimizer_state.ring_mib 64"]),
        ({"clipping": {"norm_type": 1}}, ["clipping.norm_type is 1", "set it to 2.0"]),
        ({"clipping": {"scope": "unit"}}, ["clipping.scope is unit", "set it to global"]),
        ({"precision": {"parameters": "float32", "loss_scale": DYNAMIC}}, ["loss_scale is dynamic", "float32"]),
        (_half(init_scale=1000), ["1000", "power of 2"]),
        (_half(growth_factor=4, max_scale=4096), ["growth_factor is 4", "max_scale is 4096"]),
        (_half(min_scale=0.5), ["min_scale is 0.5"]),
        ({"sharding": {"kind": "deepspeed", "zenflow": True}}, ["sharding", "zenflow"]),
        ({"sharding": {"kind": "deepspeed", "stage": 4}}, ["sharding.stage", "4", "1, 2, 3"]),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_in_one_sentence(sections: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.load({"sharding": {"kind": "deepspeed"}, **sections})
    assert not [word for word in words if word not in str(caught.value)] and "\n" not in str(caught.value)


def test_masters_cannot_be_left_out() -> None:
    with pytest.warns(UserWarning, match="master_weights"), pytest.raises(ConfigError, match="master_weights is false"):
        _load(precision={"master_weights": False})


# -- DeepSpeed's own configuration


def test_what_the_strategy_does_not_say_is_passed_on(tmp_path: Path) -> None:
    own = {
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 1000},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "steps_per_print": 10,
    }
    (tmp_path / "ds.json").write_text(json.dumps(own))
    for given in (own, str(tmp_path / "ds.json")):
        merged = _load({"config": given}).deepspeed_config
        assert merged["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
        assert merged["gradient_clipping"] == 1.0 and merged["steps_per_print"] == 10
        assert merged["train_micro_batch_size_per_gpu"] == 4


def test_sections_that_are_off_and_batch_sizes_are_no_contradiction() -> None:
    own = {"amp": {"enabled": False}, "torch_autocast": {"enabled": False}, "scheduler": None, "train_batch_size": 32}
    merged = _load({"config": own}).deepspeed_config
    assert not {"amp", "torch_autocast", "scheduler"} & merged.keys()
    assert merged["train_batch_size"] == 32 and "train_micro_batch_size_per_gpu" not in merged
    with pytest.raises(ConfigError, match="amp is"):
        _load({"config": {"amp": {"enabled": True}}})


def test_what_contradicts_the_strategy_is_named_with_both_values() -> None:
    own = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": True},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR"},
    }
    with pytest.raises(ConfigError) as caught:
        _load({"config": own})
    for words in (
        "zero_optimization.stage is 3, and the strategy needs 2 (sharding.stage)",
        "zero_optimization.offload_optimizer.device is 'cpu', and the strategy needs 'none' (sharding.offload)",
        "fp16.enabled is True, and the strategy needs False (precision.parameters)",
        "gradient_clipping is 0.5, and the strategy needs 1.0 (clipping.max_norm)",
        "gradient_accumulation_steps is 4, and the strategy needs 1 (strategy.accumulate takes its place)",
        "create_optimizer",
        "schedulers are the caller's",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("zenflow", {"zenflow": {}}),
        ("zenflow", {"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}),
        ("offload_optimizer.super_offload", {"offload_optimizer": {"device": "cpu", "super_offload": True}}),
        ("round_robin_gradients", {"round_robin_gradients": True}),
    ],
)
def test_what_replaces_the_optimizer_or_mixes_up_its_state_is_refused(key: str, section: dict[str, Any]) -> None:
    reason = "takes the masters and moments of one parameter" if "robin" in key else "supports only ZeRO's own"
    with pytest.raises(ConfigError, match=rf"zero_optimization.{key} is .*{reason}"):
        _load({"offload": "cpu", "config": {"zero_optimization": section}})
    off = {"zenflow": None, "offload_optimizer": {"device": "cpu", "super_offload": False}}
    assert _load({"offload": "cpu", "config": {"zero_optimization": off}})


@pytest.mark.parametrize(
    ("content", "words"), [("{", "cannot be read as JSON"), ("[1]", "holds a list"), (None, "cannot")]
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "ds.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        _load({"config": str(tmp_path / "ds.json")})


# -- without DeepSpeed


def test_without_deepspeed_this_strategy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for name in [name for name in available_strategies() if name.startswith("deepspeed")]:
        strategy = Strategy.load(name)
        with pytest.raises(ConfigError, match=r"pip install 'lightstep-optim\[deepspeed\]'"):
            strategy.prepare_model(nn.Linear(2, 2))
    other = Strategy.load("resident")
    model = other.prepare_model(nn.Linear(2, 2))
    assert isinstance(other.create_optimizer(model, torch.optim.AdamW, lr=1e-3), BaseOptimizer)
    assert issubclass(DeepSpeedOptimizer, BaseOptimizer)


def test_a_dtype_that_deepspeed_does_not_support_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    accelerator = deepspeed.get_accelerator()
    monkeypatch.setattr(accelerator, "supported_dtypes", lambda: [torch.float32, torch.bfloat16])
    half = _load(**_half())
    allowed = f"this machine's {accelerator.device_name()}; allowed here: float32, bfloat16"
    with pytest.raises(ConfigError, match=f"precision.parameters is float16, which DeepSpeed .*{allowed}"):
        half.prepare_model(nn.Linear(2, 2))
