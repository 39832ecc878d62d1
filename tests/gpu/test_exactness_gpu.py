"""torch.equal to the textbook loop on a GPU, under sleeps: every class, home, update time and place of the weights."""

from __future__ import annotations

import zlib

import pytest

from tests.covering import every_pair, every_value
from tests.reference.pair import DTYPES, TWO_GROUPS
from tests.unit.test_exactness import (  # noqa: F401  (one thing at a time: they run here as they are)
    HOMES,
    OTHERS,
    PLACES,
    REDUCE,
    TIMES,
    Slow,
    pair_for,
    test_a_first_update_that_overflows_makes_no_state,
    test_a_loss_scale_may_be_exchanged,
    test_a_scale_that_overflows_by_itself_comes_down,
    test_every_loss_scale,
    test_gradients_of_up_to_one_element_may_have_any_stride,
    test_gradients_written_by_hand,
    test_nan_skips_as_inf_does,
    test_odd_memory_layouts,
    test_other_norms,
    test_the_same_optimizer_on_the_default_group,
    train,
)
from tests.unit.test_stream import random_sleeps

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_units", "never_pauses")]


class Sleeping(Slow):
    def delay(self, seed: int) -> None:
        for lanes in self.lanes():
            random_sleeps(lanes, seed, 1_000_000)


@every_pair(
    name=TWO_GROUPS, home=HOMES, time=TIMES, parameters=DTYPES, micro_batches=[1, 2], reduce=REDUCE, place=PLACES
)
def test_equal_to_the_textbook_loop(
    name: str, home: str, time: str, parameters: str, micro_batches: int, reduce: str, place: str
) -> None:
    pair = pair_for(name, home, time, parameters, micro_batches, Sleeping, reduce=reduce, weights=PLACES[place][0])
    train(pair, zlib.crc32(f"{name} {home} {time}".encode()), place)


@every_value(
    name=OTHERS,
    home=["resident", "stream"],
    time=TIMES,
    parameters=["bfloat16", "float32"],
    place=["device, then host", "host", "host, then device"],
)
def test_any_element_wise_optimizer(name: str, home: str, time: str, parameters: str, place: str) -> None:
    train(pair_for(name, home, time, parameters, 1, Sleeping, weights=PLACES[place][0]), seed=1, place=place)
