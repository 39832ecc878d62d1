"""The three backends of a strategy file, as stores."""

from __future__ import annotations

from typing import Any

from lightstep.precision.split import Splitter
from lightstep.state.store import Store


def resident() -> Store:
    return Store(Splitter, home="device")


def bulk() -> Store:
    return Store(Splitter, slots="all")


def stream(**settings: Any) -> Store:
    return Store(Splitter, **settings)
