"""Optimizer classes by their names in files."""

from __future__ import annotations

import importlib
import inspect

import torch

from lightstep.config import ConfigError
from lightstep.config_errors import suggest


def optimizer_class(name: str, key: str = "optimizer.name") -> type[torch.optim.Optimizer]:
    """The class of that name in ``torch.optim``, or at that import path.

    Args:
        key: what the error calls the setting.

    Raises:
        ConfigError: there is none.
    """
    module, _, attribute = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "torch.optim"), attribute, None)
    except ImportError as error:
        raise ConfigError(f"{key} is {name!r}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        known = [n for n, value in vars(torch.optim).items() if inspect.isclass(value) and n != "Optimizer"]
        raise ConfigError(
            f"{key} is {name!r}{suggest(str(name), known)}; a class of torch.optim or the import path of an Optimizer "
            "class is needed"
        )
    return found
