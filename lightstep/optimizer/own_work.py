"""The autograd mode in which an optimizer works, whatever its caller's is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["own_work"]


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Without gradients; and what is made in here may be written to afterwards.

    Tensors made under ``torch.inference_mode()`` may not, outside of it. Evaluation and generation run under it, and
    what they call takes memory that later steps use.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
