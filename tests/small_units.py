"""Tiny models have several units, as large ones have."""

from __future__ import annotations

import pytest


def make_units_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lightstep.state.units.SMALL_UNIT", 1 << 10)
    patch.setattr("lightstep.state.units.RingPlan.BULK_UNIT", 1 << 12)
    patch.setattr("lightstep.state.store.Store.WHOLE_UNIT", 1 << 7)
