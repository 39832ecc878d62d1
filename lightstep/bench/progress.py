"""What is being measured, on stderr: a status line on a terminal, else one line after the other."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Progress:
    """A context; ranks other than the first say nothing (`visible=False`)."""

    def __init__(self, visible: bool) -> None:
        self._console = Console(stderr=True, quiet=not visible)
        self._status = self._console.status("starting")

    def __enter__(self) -> Progress:
        self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(None, None, None)

    def show(self, sentence: str) -> None:
        self._status.update(f"measuring {sentence}")
        if not self._console.is_terminal:
            self._console.print(f"measuring {sentence}", highlight=False)
