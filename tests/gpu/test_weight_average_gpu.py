"""Averages of weights on a GPU."""

from __future__ import annotations

import pytest

from tests.unit.test_weight_average import test_the_average_is_a_plain_loops

pytestmark = pytest.mark.gpu

__all__ = ["test_the_average_is_a_plain_loops"]
