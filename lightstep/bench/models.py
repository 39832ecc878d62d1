"""The models that are measured: shapes of Llamas and of Qwen3's mixtures of experts, and transformers' models with a
chunked loss. The logits of 65 536 tokens over 128 256 words would be 34 GB in fp32.

Under torchrun each rank has other experts of every block of a mixture, on a mesh of their own, and the ranks exchange
tokens: what torchtitan calls expert parallel, over all ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from lightstep.chunked_loss import ChunkedLoss
from lightstep.distributed import world_size
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

    def make(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0, length: int = 64) -> Llama:
        """A new model on `device` for sequences up to `length`. Equal seeds give equal weights in every dtype."""
        torch.manual_seed(seed)
        config = self.config(max_position_embeddings=length)
        with device:
            model = Llama._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        return model.to(dtype)

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
        return self.model.layers

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """`tokens`, `targets`: [sequences, length] token ids; `targets` are the tokens shifted by one."""
        with ChunkedLoss(self, LOSS_CHUNK).in_place_of_logits(targets, LOSS_CHUNK):
            loss: Tensor = super().forward(input_ids=tokens, labels=targets, use_cache=False).loss  # type: ignore[misc]
        return loss


class Llama(WithChunkedLoss, LlamaForCausalLM):
    """`model(tokens, targets)` returns the mean cross entropy, 0-dim fp32."""

    def layer_indices(self) -> list[list[int]]:
        """Indices into `list(parameters())` for each block, then for all other parameters."""
        position = {parameter: i for i, parameter in enumerate(self.parameters())}
        blocks = [[position[parameter] for parameter in block.parameters()] for block in self.layers]
        taken = {i for block in blocks for i in block}
        return [*blocks, [i for i in position.values() if i not in taken]]


# -- mixtures of experts -----------------------------------------------------------------------------------------------

_SMALLEST_WITH_RELEASED_WIDTHS = 1_000_000_000
_MOE_WIDTHS = range(64, 2048, 64)


@dataclass(frozen=True)
class MoeShape:
    """Sizes of a Qwen3-MoE: ``chosen`` of ``experts`` see each token. ``expert`` is the width of one of them, ``head``
    the width of one attention head."""

    name: str
    hidden: int
    expert: int
    experts: int
    chosen: int
    heads: int
    key_value_heads: int
    head: int
    layers: int
    vocabulary: int

    @classmethod
    def nearest(cls, parameters: int, layers: int | None = None) -> MoeShape:
        """The shape whose size is nearest to ``parameters``: from 10⁹ on, blocks of Qwen3-30B-A3B.

        Raises:
            ValueError: too few parameters or layers.
        """
        if parameters < 200_000:
            raise ValueError(f"--params {parameters}: the smallest mixture of experts has about 200000 parameters")
        if layers is not None and layers < 1:
            raise ValueError(f"--layers {layers}: at least 1")
        if parameters < _SMALLEST_WITH_RELEASED_WIDTHS:
            shapes = (cls._scaled(hidden, parameters, layers or 2) for hidden in _MOE_WIDTHS)
            return min(shapes, key=lambda shape: abs(shape.parameters - parameters))
        if layers is None:
            outside = replace(_RELEASED_MOE, layers=0).parameters
            block = replace(_RELEASED_MOE, layers=1).parameters - outside
            layers = max(1, round((parameters - outside) / block))
        if layers == _RELEASED_MOE.layers:
            return _RELEASED_MOE
        return replace(_RELEASED_MOE, name=f"{layers} blocks of {_RELEASED_MOE.name}", layers=layers)

    @classmethod
    def _scaled(cls, hidden: int, parameters: int, layers: int) -> MoeShape:
        groups, vocabulary = max(1, hidden // 128), vocabulary_for(parameters, hidden)
        return cls("a scaled Qwen3-MoE", hidden, hidden * 3 // 8, 8, 2, 2 * groups, groups, 32, layers, vocabulary)

    @property
    def parameters(self) -> int:
        """The exact total, of all ranks."""
        attention = 2 * (self.heads + self.key_value_heads) * self.head * self.hidden + 2 * self.head
        experts = self.experts * (3 * self.expert * self.hidden + self.hidden)
        return self.layers * (attention + experts + 2 * self.hidden) + (2 * self.vocabulary + 1) * self.hidden

    def values(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**asdict(self), "parameters": self.parameters}

    def config(self, **settings: Any) -> Qwen3MoeConfig:
        """The transformers configuration with these sizes and further ``settings``."""
        return Qwen3MoeConfig(
            hidden_size=self.hidden,
            moe_intermediate_size=self.expert,
            num_experts_per_tok=self.chosen,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head,
            vocab_size=self.vocabulary,
            norm_topk_prob=True,
            **settings,
        )

    def make(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0, length: int = 64
    ) -> QwenMoe:
        """A new model on ``device`` for sequences up to ``length``, with this rank's experts alone.

        Raises:
            ValueError: the ranks cannot divide the experts evenly.
        """
        ranks = world_size()
        if self.experts % ranks:
            raise ValueError(f"{ranks} ranks cannot divide {self.experts} experts evenly: use 1, 2, 4 or 8 ranks")
        torch.manual_seed(seed)
        config = self.config(max_position_embeddings=length, num_experts=self.experts // ranks)
        everybody = self.config(num_experts=self.experts)
        with device:
            model = QwenMoe._from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
            )
            if ranks > 1:
                mesh = init_device_mesh(device.type, (1, ranks), mesh_dim_names=("same_experts", "exchange"))
                for block in model.layers:
                    block.mlp.gate = Qwen3MoeTopKRouter(everybody).to(torch.bfloat16)
                    nn.init.normal_(block.mlp.gate.weight, std=config.initializer_range)
                    block.mlp.experts = DividedExperts(block.mlp.experts.to(dtype), mesh.get_group("exchange"))
        made: QwenMoe = model.to(dtype)
        if ranks > 1:
            for experts in [module for module in made.modules() if isinstance(module, DividedExperts)]:
                own = fully_shard(experts.own, mesh=mesh["same_experts"])  # one rank: nothing is summed in fp32
                own.set_gradient_divide_factor(float(ranks))  # they get the tokens of all ranks
                for parameter in own.parameters():
                    parameter.differs_across_ranks = True
        return made


_RELEASED_MOE = MoeShape("Qwen3-30B-A3B", 2048, 768, 128, 8, 32, 4, 128, 48, 151_936)


class QwenMoe(WithChunkedLoss, Qwen3MoeForCausalLM):
    """``model(tokens, targets)`` returns the mean cross entropy, 0-dim fp32."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for its decorator in this file


class DividedExperts(nn.Module):
    """This rank's experts of one block. Tokens for the others go to their ranks, and come back.

    Args:
        own: transformers' experts, those of this rank alone.
    """

    def __init__(self, own: Qwen3MoeExperts, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.own, self._group = own, group

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``hidden``: [tokens, width]; ``chosen``, ``weights``: [tokens, experts of each]. The host waits once."""
        tokens, width = hidden.shape
        order = chosen.flatten().argsort(stable=True)
        number = self.own.num_experts  # a weight that is read here would have to rest on the host
        counts = chosen.flatten().bincount(minlength=self._group.size() * number).view(self._group.size(), number)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        experts = torch.arange(number, device=hidden.device).repeat(self._group.size())
        rows = all_to_all_single_autograd(hidden[order // chosen.shape[1]], received, sent, self._group)
        made = self.own(rows, experts.repeat_interleave(arriving.flatten())[:, None], rows.new_ones(len(rows), 1))
        returned = all_to_all_single_autograd(made.contiguous(), sent, received, self._group)
        back = returned[order.argsort()].view(tokens, -1, width)
        return (back * weights[..., None]).sum(1)
