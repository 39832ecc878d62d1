"""The loss of a language model, with the logits of some tokens at a time.

The logits of 16 384 tokens over 128 256 words are 8.4 GB in fp32, and a loss holds several such tensors. Here head and
cross entropy are computed chunk by chunk, and again in backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightstep.config import ConfigError

__all__ = ["ChunkedLoss", "whole_loss"]

_IGNORED = -100
_TOLERANCE = 1e-4


def whole_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The model's own loss: the mean over the predicted tokens, nats; 0-dim fp32."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss.float()


class ChunkedLoss:
    """The same loss, with the logits of ``chunk`` tokens at a time.

    The model's own forward runs. Its head returns the losses of the tokens in place of their logits, and its loss
    function the mean of these. What else a model adds to its loss is added, too.

    Args:
        model: a causal language model of transformers, unwrapped.

    Raises:
        ConfigError: the model has no head.
    """

    def __init__(self, model: Any, chunk: int) -> None:
        self._model, self._chunk, self._name = model, chunk, type(model).__name__
        self._head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if not isinstance(self._head, nn.Module):
            raise ConfigError(f"loss_chunk: {self._name} has no head (get_output_embeddings()); leave loss_chunk out")

    def __call__(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The loss of ``tokens``, ``[rows, length]``; ``model`` is that of this object, with its wrappers."""
        with self.in_place_of_logits(_next(tokens), self._chunk):
            return whole_loss(model, tokens)

    @torch.no_grad()
    def check(self, model: nn.Module, length: int) -> None:
        """Compare with the model's own loss on a few tokens. All ranks call it.

        Raises:
            ConfigError: they differ: the model does something with its logits, for example limit them.
        """
        model.eval()
        device = next(self._model.parameters()).device
        tokens = torch.arange(min(length, 8), device=device)[None]
        own = whole_loss(model, tokens).item()
        with self.in_place_of_logits(_next(tokens), tokens.numel()):
            found = whole_loss(model, tokens).item()
        if not math.isclose(own, found, rel_tol=_TOLERANCE):
            raise ConfigError(
                f"loss_chunk is {self._chunk}, and the loss of {self._name} is not that of its head's logits alone "
                f"({own:.5g}, and {found:.5g} in chunks): it changes them first; leave loss_chunk out"
            )

    @contextlib.contextmanager
    def in_place_of_logits(self, targets: Tensor, chunk: int) -> Iterator[None]:
        """Within this context the model's ``loss`` is that of ``targets``, ``[rows, length]``, ``chunk`` at a time."""
        head, model, targets = self._head, self._model, targets.flatten()
        logits_of = head.forward

        def part(states: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(logits_of(states).float(), targets, reduction="none", ignore_index=_IGNORED)

        def losses(states: Tensor) -> Tensor:
            chunks = zip(states.flatten(0, 1).split(chunk), targets.to(states.device).split(chunk), strict=True)
            found = [checkpoint(part, *each, use_reentrant=False, preserve_rng_state=False) for each in chunks]
            return torch.cat(found).view(*states.shape[:2], 1)

        def mean(logits: Tensor, *_: Any, **__: Any) -> Tensor:
            return logits.sum() / (targets != _IGNORED).sum().to(logits.device)

        before = vars(model).get("_loss_function")
        head.forward, model.loss_function = losses, mean
        try:
            yield
        finally:
            del head.forward
            if before is None:
                del model._loss_function
            else:
                model.loss_function = before


def _next(tokens: Tensor) -> Tensor:
    """Behind each token the one to predict."""
    return torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), _IGNORED)], dim=1)
