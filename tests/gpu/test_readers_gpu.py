"""Readers in other threads, in signal handlers and in forks, on a GPU: autograd's threads run the backward there."""

from __future__ import annotations

import pytest

from tests.unit.test_readers import (
    history,
    test_a_handler_in_the_middle_of_an_update_is_told,
    test_a_thread_saves_checkpoints,
    test_a_thread_trains_another_optimizer,
    test_handlers_at_any_moment_leave_the_run_as_it_is,
    test_other_readers_change_nothing,
    test_what_another_thread_reads_is_of_one_step,
    test_workers_of_a_data_loader_read_the_dtype,
)

__all__ = [
    "history",
    "test_a_handler_in_the_middle_of_an_update_is_told",
    "test_a_thread_saves_checkpoints",
    "test_a_thread_trains_another_optimizer",
    "test_handlers_at_any_moment_leave_the_run_as_it_is",
    "test_other_readers_change_nothing",
    "test_what_another_thread_reads_is_of_one_step",
    "test_workers_of_a_data_loader_read_the_dtype",
]

pytestmark = pytest.mark.gpu
