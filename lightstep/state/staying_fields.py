"""Chooses which gradients stay on the device from their arrival to their update, where weights rest on the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from lightstep.state.host_fields import Field
from lightstep.state.spare_memory import GIB, AutoBudget, device_memory

__all__ = ["StayingFields"]

logger = logging.getLogger(__name__)


class StayingFields:
    """Fields of gradients that stay: whole ones, in the order in which they first arrive, as many as a budget allows.

    They keep their device memory between steps, so the peak of a step is known after the first one that has them all.
    They keep their memory on the host, too, so each can leave at any time.

    Args:
        gib: ``weights.gradients_gib``.
    """

    def __init__(self, device: torch.device, gib: float | str) -> None:
        self._auto = AutoBudget(device_memory(device)) if gib == "auto" else None
        self._allowed = 0 if gib == "auto" else int(float(gib) * GIB)
        self._device = device
        self._fields: dict[Field, None] = {}

    def __contains__(self, field: Field) -> bool:
        return field in self._fields

    def __iter__(self) -> Iterator[Field]:
        return iter(list(self._fields))

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self._fields)

    def has_room(self, field: Field) -> bool:
        """Whether the budget allows one more."""
        return self.nbytes + field.nbytes <= self._allowed

    def add(self, field: Field) -> None:
        self._fields[field] = None

    def discard(self, field: Field) -> None:
        self._fields.pop(field, None)
        if self._auto is not None:
            self._auto.changed()

    def limit(self) -> None:
        """The device has no room for more than what stays now."""
        if self.nbytes < self._allowed:
            logger.warning(
                "weights.gradients_gib: %s has no room for more than %.2f GiB; that much stays on it",
                self._device,
                self.nbytes / GIB,
            )
        self._allowed = self.nbytes
        if self._auto is not None:
            self._auto.limit_to(self._allowed)

    def surplus(self) -> list[Field]:
        """What the budget of the next step does not allow any more. Called once in a step, when it has been begun."""
        if self._auto is not None:
            self._allowed = self._auto.before_step(self.nbytes)
        leaving, over = [], self.nbytes - self._allowed
        for field in reversed(self._fields):
            if over > 0 and not field.holds:
                leaving.append(field)
                over -= field.nbytes
        return leaving

    def remeasure(self) -> None:
        """Something else may use the device now."""
        if self._auto is not None:
            self._auto.remeasure()
