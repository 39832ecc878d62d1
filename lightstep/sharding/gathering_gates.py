"""FSDP2's all-gathers wait for deferred updates: each unit's all-gather for those of its own shards.

FSDP2 copies a unit's shards into the all-gather's input on a stream of its own, often before the unit is called: that
stream waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from lightstep.sharding.fsdp_groups import own_parts, parameter_groups
from lightstep.sharding.parameter_reads import AwaitedParameters, awaited, updates_of

__all__ = ["GatheringGates"]


class GatheringGates:
    """Makes the all-gathers of one FSDP2 model wait, each for the updates of its own shards.

    Args:
        modules: :func:`sharded_modules` of the model; the first one is the root.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._root = weakref.ref(modules[0])
        own = awaited(part for module in modules for part in own_parts(module))
        for group in (group for module in modules for group in parameter_groups(module)):
            group.hooks.before_read = _waiting(group.shards_later(), own)

    def belongs_to(self, root: nn.Module) -> bool:
        """Whether these are the gates of the model with this outermost FSDP module."""
        return self._root() is root


def _waiting(shards_later: Callable[[], list[nn.Parameter]], own: Sequence[AwaitedParameters]) -> Callable[[], None]:
    """A function that makes the current stream wait for the updates of the shards."""

    def wait() -> None:
        shards = shards_later()
        for updates in updates_of(own):
            updates.wait_on_stream(shards)

    return wait
