"""Random programs against the textbook loop on a GPU, with sleep kernels in every lane.

``LIGHTSTEP_FUZZ_SECONDS=600 pytest tests/gpu/test_fuzz_gpu.py`` goes on with other seeds for that long in all.
"""

from __future__ import annotations

import pytest

from tests.patience import PATIENCE
from tests.unit.test_fuzz import CASES, SECONDS, check_random_programs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("kind", "by_unit"), CASES)
@pytest.mark.timeout(3 * PATIENCE + 2 * SECONDS)
def test_random_programs(kind: str, by_unit: bool) -> None:
    check_random_programs(kind, by_unit, one_pass=False)  # the kernel itself, and no stand-in
