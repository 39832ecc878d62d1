"""Sizes of Llamas, and what single steps are about: parameters of those shapes, and fresh random gradients.

Optimizer steps need no forward, so there is none: real shapes, and values drawn from a normal distribution (zeros would
run faster than real data does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightstep.bench.contender import Inputs

if TYPE_CHECKING:
    from transformers import LlamaConfig

_VOCABULARIES = (128_256, 32_000)  # Llama 3 and Llama 2; smaller models get a smaller one
_WIDTHS = (*range(32, 256, 8), *range(256, 1024, 64), *range(1024, 16_384 + 1, 128))
_HEADS = (128, 64, 32, 16, 8, 4, 2)
_NEAR = 0.1  # of the parameters asked for
_WEIGHT_STD = 0.02
_GRADIENT_STD = 0.01


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama; `key_value` is the width of keys and values, `head` of one head."""

    name: str
    hidden: int
    feed_forward: int
    key_value: int
    layers: int
    vocabulary: int
    head: int
    tied_embeddings: bool = False

    @classmethod
    def near(cls, parameters: int, layers: int | None = None, released: bool = False) -> LlamaShape:
        """The shape whose size is nearest to `parameters`; without `layers`, as deep as Llamas of that width are.

        Args:
            released: a released Llama where there is one within a tenth of `parameters`, unless `layers` are given.

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
        shapes = (cls.of_width(hidden, parameters, layers) for hidden in _WIDTHS)
        return min(shapes, key=lambda shape: abs(shape.parameters - parameters))

    @classmethod
    def of_width(cls, hidden: int, parameters: int, layers: int | None = None) -> LlamaShape:
        multiple = 256 if hidden >= 1024 else 32
        key_value = max(8, hidden // 4)
        return cls(
            name="a scaled Llama",
            hidden=hidden,
            feed_forward=-(-hidden * 7 // (2 * multiple)) * multiple,
            key_value=key_value,
            layers=layers or max(2, hidden // 128),
            vocabulary=_vocabulary(parameters, hidden),
            head=next(size for size in _HEADS if key_value % size == 0),
        )

    def block(self) -> dict[str, tuple[int, ...]]:
        """Parameter names and shapes of one transformer block."""
        return {
            "input_norm": (self.hidden,),
            "q_proj": (self.hidden, self.hidden),
            "k_proj": (self.key_value, self.hidden),
            "v_proj": (self.key_value, self.hidden),
            "o_proj": (self.hidden, self.hidden),
            "post_norm": (self.hidden,),
            "gate_proj": (self.feed_forward, self.hidden),
            "up_proj": (self.feed_forward, self.hidden),
            "down_proj": (self.hidden, self.feed_forward),
        }

    def ends(self) -> dict[str, tuple[int, ...]]:
        """Parameter names and shapes before and after the blocks."""
        table = (self.vocabulary, self.hidden)
        return {"embed_tokens": table, "norm": (self.hidden,), "lm_head": table}

    @property
    def parameters(self) -> int:
        """The exact total; tied embeddings count once."""
        tied = self.vocabulary * self.hidden if self.tied_embeddings else 0
        return self.layers * _elements(self.block()) + _elements(self.ends()) - tied

    @property
    def heads(self) -> int:
        return self.hidden // self.head

    @property
    def key_value_heads(self) -> int:
        return self.key_value // self.head

    def values(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            **asdict(self),
            "heads": self.heads,
            "key_value_heads": self.key_value_heads,
            "parameters": self.parameters,
        }

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
    LlamaShape("Llama-3.2-1B", 2048, 8192, 512, 16, 128_256, 64, True),
    LlamaShape("Llama-3.2-3B", 3072, 8192, 1024, 28, 128_256, 128, True),
    LlamaShape("Llama-3.1-8B", 4096, 14_336, 1024, 32, 128_256, 128),
)


def _elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _vocabulary(parameters: int, hidden: int) -> int:
    """A real vocabulary where embedding and head stay below a quarter of the parameters, else a small one that does."""
    limit = parameters // (8 * hidden)
    return next((size for size in _VOCABULARIES if size <= limit), max(64, limit // 64 * 64))


class LlamaBlock(nn.Module):
    """The parameters of one transformer block."""

    def __init__(self, shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        _register(self, shape.block(), device, dtype)


class LlamaStack(nn.Module):
    """Embedding, blocks, norm and head with random weights, equal for equal seeds."""

    def __init__(
        self, shape: LlamaShape, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> None:
        super().__init__()
        _register(self, shape.ends(), device, dtype)
        self.layers = nn.ModuleList(LlamaBlock(shape, device, dtype) for _ in range(shape.layers))
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                # Drawn in bf16 whatever the dtype, so that every contender starts from the same weights.
                draw = torch.empty(parameter.shape, device=device, dtype=torch.bfloat16)
                parameter.copy_(draw.normal_(0.0, _WEIGHT_STD, generator=generator))

    def layer_indices(self) -> list[list[int]]:
        """Positions in `list(parameters())` of each block's parameters, last those of the rest."""
        position = {id(parameter): i for i, parameter in enumerate(self.parameters())}
        blocks = [[position[id(parameter)] for parameter in block.parameters()] for block in self.layers]
        taken = {i for block in blocks for i in block}
        return [*blocks, [i for i in position.values() if i not in taken]]


def _register(module: nn.Module, shapes: dict[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))


class GradientSets(Inputs):
    """Random gradients: two sets, so that steps can follow each other without a gap.

    The values are drawn in bf16 whatever the dtype, so that every contender sees the same gradients for the same
    `seed`.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype, device: torch.device, count: int = 2) -> None:
        super().__init__([[torch.empty(w.shape, dtype=dtype, device=device) for w in weights] for _ in range(count)])
        self._device = device

    def refresh(self, seed: int) -> None:
        """New values for every set."""
        generator = torch.Generator(self._device).manual_seed(seed)
        for gradient in (gradient for gradients in self.sets for gradient in gradients):
            draw = torch.empty(gradient.shape, dtype=torch.bfloat16, device=self._device)
            gradient.copy_(draw.normal_(0.0, _GRADIENT_STD, generator=generator))
