"""Sizes of the Llama that is trained: a released one where it is near, else one scaled like the stack of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightstep.bench.model import LlamaShape

if TYPE_CHECKING:
    from transformers import LlamaConfig

_NEAR = 0.1  # of the parameters asked for
_HEAD_SIZES = (128, 64, 32, 16, 8, 4, 2)


@dataclass(frozen=True)
class TrainedShape:
    """Sizes of a `transformers.LlamaForCausalLM`."""

    name: str
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied_embeddings: bool

    @classmethod
    def near(cls, parameters: int, layers: int | None = None) -> TrainedShape:
        """A released Llama within a tenth of `parameters`; otherwise, and with `layers`, one of about that size.

        Raises:
            ValueError: too few parameters or layers.
        """
        nearest = min(_RELEASED, key=lambda shape: abs(shape.parameters - parameters))
        if layers is None and abs(nearest.parameters - parameters) <= _NEAR * parameters:
            return nearest
        scaled = LlamaShape.near(parameters, layers)
        head = next(size for size in _HEAD_SIZES if scaled.key_value % size == 0)
        return cls(
            name="a scaled Llama",
            hidden=scaled.hidden,
            feed_forward=scaled.feed_forward,
            layers=scaled.layers,
            heads=scaled.hidden // head,
            key_value_heads=scaled.key_value // head,
            vocabulary=scaled.vocabulary,
            tied_embeddings=False,
        )

    @property
    def parameters(self) -> int:
        """The exact number of the model's parameters; tied embeddings count once."""
        key_value = self.hidden // self.heads * self.key_value_heads
        block = 2 * self.hidden * (self.hidden + key_value) + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        tables = (1 if self.tied_embeddings else 2) * self.vocabulary * self.hidden
        return self.layers * block + tables + self.hidden

    def config(self, **settings: Any) -> LlamaConfig:
        """transformers' configuration of these sizes, with ``settings`` beside them."""
        from transformers import LlamaConfig

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
    TrainedShape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 128_256, True),
    TrainedShape("Llama-3.2-3B", 3072, 8192, 28, 24, 8, 128_256, True),
    TrainedShape("Llama-3.1-8B", 4096, 14_336, 32, 32, 8, 128_256, False),
)
