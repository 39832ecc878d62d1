"""What a checkpoint holds beside tensors of model and optimizer: one ``torch.save`` file of plain values.

It has ``extra``, scheduler, group hyper-parameters, loss scale, random states and state entries that are numbers. It
is checked when it is saved to load with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from lightstep.checkpoint.errors import DamagedError, error_text
from lightstep.checkpoint.layout import STATE, Manifest, read_checked
from lightstep.checkpoint.storage import write_file


def check_loadable(what: str, value: Any) -> None:
    """Refuse what ``weights_only=True`` would not load again, naming the innermost key at fault.

    Raises:
        TypeError: for example ``extra['sampler'] is a Sampler ...``.
    """
    if _survives(value):
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for key, part in inner:
        check_loadable(f"{what}[{key!r}]", part)
    kind = type(value)
    raise TypeError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, which a weights-only load refuses; "
        "save plain numbers, strings, lists, dicts and tensors"
    )


def write_state(folder: Path, state: dict[str, Any]) -> tuple[int, int]:
    """Size and checksum of the file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return write_file(folder / STATE, buffer.getvalue())


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Raises :class:`CheckpointError` when the file is damaged or holds anything that needs unpickling."""
    content = read_checked(folder, manifest, STATE)
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's text recommends to run what is in it
        raise DamagedError(
            f"{folder / STATE} cannot be read: it is damaged, or holds more than plain values and tensors"
        ) from error
    except Exception as error:
        raise DamagedError(f"{folder / STATE} cannot be read: {error_text(error)}") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{folder / STATE} cannot be read: it holds a {type(state).__name__}")
    return state


def _survives(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


# -- random states -----------------------------------------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Python's, numpy's, torch's and the current accelerator's generator, as plain values."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    try:
        import numpy

        name, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state())
        states["numpy"] = [str(name), keys.tolist(), int(position), int(has_gauss), float(gauss)]
    except ImportError:
        pass
    if (device := _accelerator()) is not None:
        states["accelerator"] = {"type": device, "state": torch.get_device_module(device).get_rng_state()}
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue from :func:`random_states`; generators that this machine does not have are left out."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        try:
            import numpy
        except ImportError:
            pass
        else:
            numpy.random.set_state(tuple(states["numpy"]))
    saved = states.get("accelerator")
    if saved is not None and saved["type"] == _accelerator():
        torch.get_device_module(saved["type"]).set_rng_state(saved["state"])


def _accelerator() -> str | None:
    """The accelerator's type if this process uses it: asking must not start it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    assert device is not None
    started = getattr(torch.get_device_module(device.type), "is_initialized", lambda: True)
    return device.type if started() else None
