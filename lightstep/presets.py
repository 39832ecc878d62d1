"""The strategy files that come with lightstep: in a wheel, an editable install and a plain checkout."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from lightstep.config import ConfigError, read_yaml, what_it_holds
from lightstep.config_errors import suggest


def available_strategies() -> list[str]:
    """The names that ``Strategy.load`` accepts, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def read_source(source: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name for messages, and the values, of a preset's name, a path or a mapping.

    Raises:
        ConfigError: no such name or file, unreadable YAML, or a file that holds no mapping.
        TypeError: ``source`` is none of the three.
    """
    if isinstance(source, Mapping):
        return "strategy", dict(source)
    if not isinstance(source, (str, Path)):
        raise TypeError(f"a strategy is a name, a path or a mapping; {type(source).__name__} was given")
    if str(source) in available_strategies():
        return str(source), _parse(preset_text(str(source)), str(source), _KEYS)
    path = Path(source).expanduser()
    if not path.is_file():
        names = available_strategies()
        raise ConfigError(
            f"{str(source)!r} is neither a strategy nor a file{suggest(str(source), names)}; allowed: "
            f"{', '.join(names)}, or the path of a YAML file"
        )
    return str(path), read_mapping(path, _KEYS)


_KEYS = "sharding:, precision:, …"


def read_mapping(path: Path, keys: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        keys: some of those that it may have, for errors.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8; a YAML file is needed") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return _parse(text, str(path), keys)


def preset_text(name: str) -> str:
    """The text of a preset's file, with its comments.

    Raises:
        ConfigError: there is no preset with this name.
    """
    names = available_strategies()
    if name not in names:
        raise ConfigError(f"{name!r} is not a ready strategy{suggest(name, names)}; allowed: {', '.join(names)}")
    return (_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def _parse(text: str, source: str, keys: str) -> dict[str, Any]:
    try:
        values = read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        what = "is empty" if values is None else f"holds {what_it_holds(values)}"
        raise ConfigError(f"{source} {what}; a mapping of keys is needed ({keys})")
    return {str(key): value for key, value in values.items()}


def _folder() -> Traversable:
    """``lightstep/strategies`` in an installed package, else ``strategies`` in the checkout."""
    installed = resources.files("lightstep") / "strategies"
    if installed.is_dir():
        return installed
    return Path(__file__).resolve().parents[1] / "strategies"
