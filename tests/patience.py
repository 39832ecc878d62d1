"""How long tests wait. Limits are there for hangs: what takes a second may take minutes on a busy machine."""

from __future__ import annotations

PATIENCE = 600.0
"""Seconds after which a thread, a process or a collective counts as hanging. A test as a whole has three times as long
(``timeout`` in ``setup.cfg``)."""
