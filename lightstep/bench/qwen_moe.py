"""Shapes of Qwen3's mixtures of experts, and transformers' model, whose experts the ranks divide among themselves.

Under torchrun each rank has other experts of every block, on a mesh of their own, and the ranks exchange tokens: what
torchtitan calls expert parallel, over all ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from lightstep.bench.llama import WithChunkedLoss, vocabulary_for
from lightstep.distributed import world_size

_SMALLEST_WITH_RELEASED_WIDTHS = 1_000_000_000
_WIDTHS = range(64, 2048, 64)


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
            shapes = (cls._scaled(hidden, parameters, layers or 2) for hidden in _WIDTHS)
            return min(shapes, key=lambda shape: abs(shape.parameters - parameters))
        if layers is None:
            outside = replace(_RELEASED, layers=0).parameters
            block = replace(_RELEASED, layers=1).parameters - outside
            layers = max(1, round((parameters - outside) / block))
        if layers == _RELEASED.layers:
            return _RELEASED
        return replace(_RELEASED, name=f"{layers} blocks of {_RELEASED.name}", layers=layers)

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

    def make(self, device: torch.device, dtype: torch.dtype, seed: int, length: int) -> QwenMoe:
        """See :meth:`QwenMoe.make`."""
        return QwenMoe.make(self, device, dtype, seed, length)


_RELEASED = MoeShape("Qwen3-30B-A3B", 2048, 768, 128, 8, 32, 4, 128, 48, 151_936)


class QwenMoe(WithChunkedLoss, Qwen3MoeForCausalLM):
    """``model(tokens, targets)`` returns the mean cross entropy, 0-dim fp32."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for its decorator in this file

    @classmethod
    def make(cls, shape: MoeShape, device: torch.device, dtype: torch.dtype, seed: int, length: int) -> QwenMoe:
        """A new model on ``device`` for sequences up to ``length``, with this rank's experts alone.

        Raises:
            ValueError: the ranks cannot divide the experts evenly.
        """
        ranks = world_size()
        if shape.experts % ranks:
            raise ValueError(f"{ranks} ranks cannot divide {shape.experts} experts evenly: use 1, 2, 4 or 8 ranks")
        torch.manual_seed(seed)
        config = shape.config(max_position_embeddings=length, num_experts=shape.experts // ranks)
        everybody = shape.config(num_experts=shape.experts)
        with device:
            model = cls._from_config(
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
        rows: Tensor = _Exchange.apply(hidden[order // chosen.shape[1]], sent, received, self._group)
        made = self.own(rows, experts.repeat_interleave(arriving.flatten())[:, None], rows.new_ones(len(rows), 1))
        returned: Tensor = _Exchange.apply(made, received, sent, self._group)
        back = returned[order.argsort()].view(tokens, -1, width)
        return (back * weights[..., None]).sum(1)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradients go back the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = received, sent, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _exchange(gradient, *ctx.way), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
