"""Shapes of Llamas, and transformers' Llama with a chunked loss.

The logits of 65 536 tokens over 128 256 words would be 34 GB in fp32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightstep.chunked_loss import ChunkedLoss
from lightstep.plan.model import LOSS_CHUNK

_VOCABULARIES = (128_256, 32_000)  # Llama 3 and Llama 2; smaller models get a smaller one
_WIDTHS = (*range(32, 256, 8), *range(256, 1024, 64), *range(1024, 16_384 + 1, 128))
_HEADS = (128, 64, 32, 16, 8, 4, 2)
_NEAR = 0.1  # relative to the requested number of parameters


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama. `key_value` is the width of keys and values, `head` the width of one head."""

    name: str
    hidden: int
    feed_forward: int
    key_value: int
    layers: int
    vocabulary: int
    head: int
    tied_embeddings: bool = False

    @classmethod
    def nearest(cls, parameters: int, layers: int | None = None, released: bool = False) -> LlamaShape:
        """The shape whose size is nearest to `parameters`. Default depth: the usual one for a Llama of that width.

        Args:
            released: prefer a released Llama within 10 % of `parameters`, unless `layers` is given.

        Raises:
            ValueError: too few parameters or layers.
        """
        if parameters < 20_000:
            raise ValueError(f"--params {parameters}: the smallest stack has about 20000 parameters")
        if layers is not None and layers < 1:
            raise ValueError(f"--layers {layers}: at least 1")
        if released and layers is None:
            nearest = min(_RELEASED, key=lambda shape: abs(shape.parameters - parameters))
            if abs(nearest.parameters - parameters) <= _NEAR * parameters:
                return nearest
        shapes = (cls.from_width(hidden, parameters, layers) for hidden in _WIDTHS)
        return min(shapes, key=lambda shape: abs(shape.parameters - parameters))

    @classmethod
    def from_width(cls, hidden: int, parameters: int, layers: int | None = None) -> LlamaShape:
        multiple = 256 if hidden >= 1024 else 32
        key_value = max(8, hidden // 4)
        return cls(
            name="a scaled Llama",
            hidden=hidden,
            feed_forward=-(-hidden * 7 // (2 * multiple)) * multiple,
            key_value=key_value,
            layers=layers or max(2, hidden // 128),
            vocabulary=vocabulary_for(parameters, hidden),
            head=next(size for size in _HEADS if key_value % size == 0),
        )

    @property
    def parameters(self) -> int:
        """The exact total; tied embeddings count once."""
        attention = 2 * self.hidden + 2 * self.key_value  # queries and output, keys and values
        block = (attention + 3 * self.feed_forward + 2) * self.hidden  # 2: the norms
        tables = self.vocabulary * (1 if self.tied_embeddings else 2)
        return self.layers * block + (tables + 1) * self.hidden

    @property
    def heads(self) -> int:
        return self.hidden // self.head

    @property
    def key_value_heads(self) -> int:
        return self.key_value // self.head

    def values(self) -> dict[str, Any]:
        """For the JSON file."""
        heads = {"heads": self.heads, "key_value_heads": self.key_value_heads}
        return {**asdict(self), **heads, "parameters": self.parameters}

    def make(self, device: torch.device, dtype: torch.dtype, seed: int, length: int) -> Llama:
        """See :meth:`Llama.make`."""
        return Llama.make(self, device, dtype, seed, length)

    def config(self, **settings: Any) -> LlamaConfig:
        """The transformers configuration with these sizes and further ``settings``."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied_embeddings,
            **settings,
        )


_RELEASED = (
    LlamaShape("Llama-3.2-1B", 2048, 8192, 512, 16, 128_256, 64, True),
    LlamaShape("Llama-3.2-3B", 3072, 8192, 1024, 28, 128_256, 128, True),
    LlamaShape("Llama-3.1-8B", 4096, 14_336, 1024, 32, 128_256, 128),
)


def vocabulary_for(parameters: int, hidden: int) -> int:
    """A released vocabulary if embedding and head stay below a quarter of the parameters, else a smaller one."""
    limit = parameters // (8 * hidden)
    return next((size for size in _VOCABULARIES if size <= limit), max(64, limit // 64 * 64))


class WithChunkedLoss:
    """Before a causal language model of transformers among a class's bases: its blocks, and the loss as its output."""

    model: Any

    @property
    def layers(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.model.layers
        return blocks

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """`tokens`, `targets`: [sequences, length] token ids; `targets` are the tokens shifted by one."""
        with ChunkedLoss(self, LOSS_CHUNK).in_place_of_logits(targets, LOSS_CHUNK):
            loss: Tensor = super().forward(input_ids=tokens, labels=targets, use_cache=False).loss  # type: ignore[misc]
        return loss


class Llama(WithChunkedLoss, LlamaForCausalLM):
    """`model(tokens, targets)` returns the mean cross entropy, 0-dim fp32."""

    @classmethod
    def make(
        cls,
        shape: LlamaShape,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        length: int = 64,
    ) -> Llama:
        """A new model on `device` for sequences up to `length`. Equal seeds give equal weights in every dtype."""
        torch.manual_seed(seed)
        config = shape.config(max_position_embeddings=length)
        with device:
            model = cls._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        made: Llama = model.to(dtype)
        return made

    def layer_indices(self) -> list[list[int]]:
        """Indices into `list(parameters())` for each block, then for all other parameters."""
        position = {parameter: i for i, parameter in enumerate(self.parameters())}
        blocks = [[position[parameter] for parameter in block.parameters()] for block in self.layers]
        taken = {i for block in blocks for i in block}
        return [*blocks, [i for i in position.values() if i not in taken]]
