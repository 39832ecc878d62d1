"""torch.equal to the textbook loop on a GPU, under sleeps: every class, home, update time and place of the weights."""

from __future__ import annotations

import pytest

from tests.unit.test_exactness import (  # noqa: F401  (they run here as they are)
    test_a_gradient_that_backward_could_not_know_of_is_refused,
    test_a_scale_that_overflows_by_itself_comes_down,
    test_a_weight_may_be_transposed_in_its_memory,
    test_any_element_wise_optimizer,
    test_equal_to_the_textbook_loop,
    test_every_loss_scale,
    test_gradients_may_have_gaps,
    test_gradients_of_up_to_one_element_may_have_any_stride,
    test_gradients_written_by_hand,
    test_nan_skips_as_inf_does,
    test_odd_memory_layouts,
    test_other_norms,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_units", "never_pauses")]
