"""Ports for the rendezvous of processes that tests start."""

from __future__ import annotations

import itertools
import os
import random
import socket
from contextlib import suppress

_FIRST = 16_000
"""Below the range from which the system takes ports for connections: those may be gone before they are used."""

_EACH = 500
"""Ports for each worker of pytest-xdist."""

_numbers = itertools.count(random.SystemRandom().randrange(_EACH))


def free_port() -> int:
    """A port, with a free one behind it, that no other worker of the same run is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 30
    for number in itertools.islice(_numbers, _EACH):
        port = _FIRST + worker * _EACH + 2 * number % _EACH
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("", port))
            second.bind(("", port + 1))
            return port
    raise OSError(f"no port from {_FIRST + worker * _EACH} to {_FIRST + (worker + 1) * _EACH - 1} is free")
