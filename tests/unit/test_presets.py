"""The strategy files that ship with lightstep, and the page that describes their keys."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from lightstep import Strategy, available_strategies
from lightstep.config import StrategyConfig

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


def test_a_preset_that_leaves_a_key_out_is_noticed() -> None:
    config = StrategyConfig()
    values = {**config.model_dump(exclude={"clipping"}), "precision": {"parameters": "bfloat16"}}
    assert list(_missing(config, values)) == [
        "precision.master_weights",
        "precision.reduce",
        "precision.loss_scale",
        "clipping",
    ]


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
