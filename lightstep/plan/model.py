"""The model on the meta device: its shape and sizes, and what its forward and backward take, without weights.

To find memory and FLOPs, the model runs with few blocks, which represent all of them, because the blocks are alike.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightstep.chunked_loss import ChunkedLoss, whole_loss
from lightstep.config import ConfigError
from lightstep.config_errors import one_sentence, suggest
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.preparation import checkpoint_activations, transformer_blocks
from lightstep.sharding.units import sharding_units

_KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
_SIZES = {
    "Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128_256, True),
    "Llama-3.1-8B": ("llama", 4096, 14_336, 32, 32, 8, 128_256, False),
    "Llama-3.1-70B": ("llama", 8192, 28_672, 80, 64, 8, 128_256, False),
    "Qwen2.5-7B": ("qwen2", 3584, 18_944, 28, 28, 4, 152_064, False),
    "Mixtral-8x7B": ("mixtral", 4096, 14_336, 32, 32, 8, 32_000, False),
}
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_KEYS, sizes, strict=True)) for name, sizes in _SIZES.items()}
SHAPES["Mixtral-8x7B"] |= {"num_local_experts": 8, "num_experts_per_tok": 2}
"""Sizes alone; nothing is downloaded."""


def load_shape(source: str) -> nn.Module:
    """The model of that shape on the meta device, without weights.

    Args:
        source: a name of :data:`SHAPES`, a Hugging Face folder, a ``config.json``, or ``module:factory``, a function
            that returns a causal language model of transformers.

    Raises:
        ConfigError: none of these, or what cannot be read; with what is allowed.
    """
    from transformers import AutoConfig

    if source in SHAPES:
        return from_values(SHAPES[source], torch.bfloat16)
    path = Path(source).expanduser()
    if path.exists():
        return _made(partial(AutoConfig.from_pretrained, path, trust_remote_code=False), source)
    module, colon, attribute = source.partition(":")
    if colon and module and attribute:
        return _from_factory(source)
    raise ConfigError(
        f"{source!r} is not a known model{suggest(source, list(SHAPES))}; a Hugging Face folder, a config.json, "
        f"module:factory or one of these is needed: {', '.join(SHAPES)}"
    )


def from_values(values: dict[str, Any], dtype: torch.dtype, device: str = "meta") -> nn.Module:
    """A causal language model of transformers from its configuration's values."""
    from transformers import AutoConfig

    return _made(partial(AutoConfig.for_model, **values), f"model_type {values['model_type']!r}", dtype, device)


def _made(
    configuration: Callable[[], Any], source: str, dtype: torch.dtype = torch.bfloat16, device: str = "meta"
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(configuration(), dtype=dtype)
    except Exception as error:  # transformers has many classes of errors
        raise ConfigError(f"{source}: {one_sentence(error)}") from error


def _from_factory(name: str) -> nn.Module:
    """What ``module:factory`` returns. The current folder is searched, too, which a console script does not do."""
    sys.path.insert(0, os.getcwd())
    try:
        factory = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(factory):
        raise ConfigError(f"{name} is not a function; one that returns the model is needed")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} returned an object of type {type(model).__name__}; a torch.nn.Module is needed")
    return model


def units_outside_blocks(model: nn.Module, wrap: str | Sequence[str]) -> tuple[int, int]:
    """Elements before and behind the blocks that FSDP2 gathers as units of their own (``sharding.wrap``)."""
    if isinstance(wrap, str):
        return 0, 0
    blocks = set(transformer_blocks(model))
    found, behind = [0, 0], False
    units = set(sharding_units(model, wrap)) - blocks
    for module in model.modules():
        behind = behind or module in blocks
        if module in units:
            found[behind] += sum(parameter.numel() for parameter in module.parameters())
    return found[0], found[1]


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements in a model: of each block, and outside the blocks in model order."""

    blocks: tuple[int, ...]
    before: int
    """The embedding, which the first block waits for."""
    behind: int
    """The last norm and the head; a tied head counts as embedding."""
    tensors: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.blocks) + self.root

    @property
    def root(self) -> int:
        return self.before + self.behind


def model_sizes(model: nn.Module) -> Sizes:
    """The sizes of a model; a shared parameter counts once."""
    blocks = list(transformer_blocks(model))
    inside = {parameter for block in blocks for parameter in block.parameters()}
    before = behind = 0
    seen_block = False
    for parameter in model.parameters():
        if parameter in inside:
            seen_block = True
        elif seen_block:
            behind += parameter.numel()
        else:
            before += parameter.numel()
    counts = tuple(sum(p.numel() for p in block.parameters()) for block in blocks)
    return Sizes(counts, before, behind, tuple(p.numel() for p in model.parameters()))


def fp32_share(model: nn.Module, dtype: torch.dtype) -> float:
    """The share of the parameters that the model keeps in fp32 under a strategy of another ``dtype``."""
    if dtype == torch.float32:
        return 0.0
    planned, parameters = planned_by_tensor(model, dtype), list(model.parameters())
    kept = sum(p.numel() for p in parameters if planned.get(p, p.dtype) == torch.float32)
    return kept / max(sum(p.numel() for p in parameters), 1)


# -- forward and backward ---------------------------------------------------------------------------------------------

LOSS_CHUNK = 1024
"""Tokens per chunk of a fused loss."""
HEAD, BLOCK, TAIL, FORWARD = "head", "block", "tail", "forward"
_ON_DEVICE = 2
"""Number of blocks whose inputs are on the device if they rest on the host."""
_BLOCKS = 3
"""Number of blocks that run: the first, the last, and one between."""


@dataclass(frozen=True)
class Moment:
    """Peak memory between two completed gradients.

    Attributes:
        where: ``forward``; in backward ``head`` (loss, head, last norm), ``block`` or ``tail`` (the embedding).
        blocks_below: blocks whose activations are still kept for backward.
        blocks_done: blocks whose gradients are complete.
        live: bytes of activations and of incomplete gradients.
        arrived_root, arrived_block: elements of complete gradients, outside the blocks and in this block.
    """

    where: str
    blocks_below: int
    blocks_done: int
    live: int
    arrived_root: int
    arrived_block: int


@dataclass(frozen=True)
class Activations:
    """Memory and FLOPs of one micro-batch on one device.

    Attributes:
        kept_per_block: bytes that each block's forward saves for backward.
        on_host: bytes that all blocks have on the host between forward and backward.
        forward_flops, backward_flops: of one block; backward includes recomputation.
        other_forward_flops, other_backward_flops: outside the blocks.
    """

    blocks: int
    kept_per_block: int
    moments: tuple[Moment, ...]
    forward_flops: float
    backward_flops: float
    other_forward_flops: float
    other_backward_flops: float
    on_host: int = 0

    @property
    def peak(self) -> int:
        return max((moment.live for moment in self.moments), default=0)

    def with_inputs_on_host(self) -> Activations:
        """The same if blocks keep what they save on the host, but for two of them."""

        def away(moment: Moment) -> int:
            return max(moment.blocks_below - _ON_DEVICE, 0) * self.kept_per_block

        moments = tuple(replace(moment, live=moment.live - away(moment)) for moment in self.moments)
        return replace(self, moments=moments, on_host=self.blocks * self.kept_per_block)


def run_on_meta(
    model: nn.Module,
    tokens: int,
    sequence: int,
    checkpointed: bool,
    loss_chunk: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Activations:
    """Run forward and backward of ``tokens`` tokens in sequences of ``sequence``.

    Args:
        model: a causal language model of transformers. It is not changed, and its weights are not read.
        loss_chunk: tokens per chunk of the loss; ``None``: all logits at once, as in transformers' own loss.
        dtype: of forward and backward.

    Raises:
        ValueError: the model cannot be run on the meta device, some of it is frozen, or its blocks are not alike.
    """
    blocks = len(transformer_blocks(model))
    if not hasattr(type(model), "_from_config") or not blocks:
        raise ValueError(
            f"{type(model).__name__} is not a causal language model of transformers; only those can be planned"
        )
    _refuse_others(model)
    sequence = min(sequence, tokens)
    if tokens < 1 or tokens % sequence:
        raise ValueError(f"tokens is {tokens}, and sequence {sequence}: a multiple of the sequence is needed")
    small = _with_blocks(model, min(blocks, _BLOCKS), dtype)
    if checkpointed:
        checkpoint_activations(small)
    batch = torch.zeros(tokens // sequence, sequence, dtype=torch.long, device="meta")
    loss_of = whole_loss if loss_chunk is None else ChunkedLoss(small, loss_chunk)
    tracker = _Tracker(small)
    try:
        with tracker:
            loss = loss_of(small, batch)
            tracker.backward()
            loss.backward()
    except (RuntimeError, NotImplementedError, TypeError, KeyError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{type(model).__name__} cannot be run on the meta device: {first}") from error
    return tracker.result(blocks)


def _refuse_others(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model that is frozen in part, or of which three blocks do not stand for all."""
    name = type(model).__name__
    frozen = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    if frozen:
        total = sum(parameter.numel() for parameter in model.parameters())
        raise ValueError(
            f"{sum(frozen):,} of the {total:,} parameters of {name} are frozen, and plans are for training all of them"
        )
    sizes = {sum(parameter.numel() for parameter in block.parameters()) for block in transformer_blocks(model)}
    if len(sizes) > 1:
        raise ValueError(
            f"the blocks of {name} have {min(sizes):,} to {max(sizes):,} parameters, and plans are for models whose "
            "blocks are alike"
        )


def _with_blocks(model: Any, count: int, dtype: torch.dtype) -> nn.Module:
    """A new model with ``count`` blocks and otherwise the same configuration, on the meta device."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:count])
    _register_attention()
    with torch.device("meta"):
        small = type(model)._from_config(config, dtype=dtype, attn_implementation=_ATTENTION)
    with contextlib.suppress(ValueError, AttributeError):  # no experts
        small.set_experts_implementation("grouped_mm")
    return small.train()


# -- attention, like fused kernels that never store the scores --------------------------------------------------------

_ATTENTION = "lightstep_plan"


class _FusedAttention(torch.autograd.Function):
    """Saves the inputs, the output and the softmax sums; computes shapes only."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        _count_attention(query, key, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _out, _sums = ctx.saved_tensors
        _count_attention(query, key, 5)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _count_attention(query: Tensor, key: Tensor, products: int) -> None:
    """Count ``products`` matrix products over (queries, keys), half of which is masked."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, _Tracker):
        rows, heads, length, width = query.shape
        mode.flops += products * 2 * rows * heads * length * key.shape[2] * width / 2


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    out = _FusedAttention.apply(query, key, value)
    return out.transpose(1, 2).contiguous(), None


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)


# -- tracking ---------------------------------------------------------------------------------------------------------


def _grouped_flops(first: Tensor, second: Tensor) -> float:
    """FLOPs of a grouped product: each row of ``first`` meets one expert."""
    rows, inner = first.shape[-2:]
    return 2.0 * rows * inner * second.shape[-1]


@dataclass
class _Segment:
    where: str
    block: int | None
    live: int = 0
    arrived_root: int = 0
    arrived_block: int = 0
    flops: float = 0.0


class _Tracker(TorchDispatchMode):
    """Tracks live storages and counts FLOPs. Drops each gradient as soon as it is complete."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._live = self._most = 0  # bytes, and their maximum since the last gradient
        self._known: dict[int, Any] = {}
        self._held = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._known.update((storage._cdata, storage) for storage in self._held)
        self._blocks = list(transformer_blocks(model))
        self._block_of: dict[Tensor, int] = {p: i for i, block in enumerate(self._blocks) for p in block.parameters()}
        self._shared = {tuple(p.shape) for p in model.parameters() if p not in self._block_of}
        self._segments: list[_Segment] = []
        self.flops, self._forward_flops = 0.0, [0.0] * len(self._blocks)
        self._kept = [0] * len(self._blocks)
        self._in_backward = False
        self._root = self._own = 0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._record_gradient)
        for index, block in enumerate(self._blocks):
            block.register_forward_pre_hook(lambda *_, i=index: self._enter(i))
            block.register_forward_hook(lambda *_, i=index: self._leave(i))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # "is nothing masked?"
            return True if args[0].dtype == torch.bool else 1
        if self._in_backward and func is torch.ops.aten.add.Tensor and self._adds_to_gradient(args):
            return args[0]  # autograd accumulates in place here
        out = func(*args, **(kwargs or {}))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += flops(*args, **(kwargs or {}), out_val=out)
        elif "grouped_mm" in func.name():
            self.flops += _grouped_flops(args[0], args[1])
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return out

    def _adds_to_gradient(self, args: Any) -> bool:
        return isinstance(args[1], Tensor) and args[0].shape == args[1].shape and tuple(args[0].shape) in self._shared

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = None
        self._live += nbytes
        self._most = max(self._most, self._live)
        weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self._live -= nbytes

    def _enter(self, index: int) -> None:
        if not self._in_backward:
            self._forward_flops[index] -= self.flops

    def _leave(self, index: int) -> None:
        if not self._in_backward:
            self._forward_flops[index] += self.flops
            self._kept[index] = self._live

    def backward(self) -> None:
        """Mark the end of forward."""
        self._segments.append(_Segment(FORWARD, None, self._most, flops=self.flops))
        self.flops, self._most, self._in_backward = 0.0, self._live, True

    def _record_gradient(self, parameter: Tensor) -> None:
        block = self._block_of.get(parameter)
        seen_block = any(segment.block is not None for segment in self._segments)
        where = BLOCK if block is not None else TAIL if seen_block else HEAD
        if not self._segments or self._segments[-1].block != block:
            self._own = 0
        segment = _Segment(where, block, self._most, self._root, self._own, self.flops)
        self._segments.append(segment)
        if block is None:
            self._root += parameter.numel()
        else:
            self._own += parameter.numel()
        parameter.grad = None
        self.flops, self._most = 0.0, self._live

    def result(self, blocks: int) -> Activations:
        last = len(self._blocks) - 1
        kept = self._kept[1] - self._kept[0] if last else self._kept[0]
        middle = min(1, last)
        forward = self._segments[0].flops
        inside = sum(self._forward_flops)
        backward = [sum(s.flops for s in self._segments if s.block == i) for i in range(len(self._blocks))]
        outside = sum(s.flops for s in self._segments[1:] if s.block is None)
        return Activations(
            blocks,
            kept,
            tuple(self._moments(blocks, kept)),
            self._forward_flops[middle],
            backward[middle],
            forward - inside,
            outside,
        )

    def _moments(self, blocks: int, kept: int) -> Iterator[Moment]:
        """Moments of the first block, the last block and the rest; the blocks between never need more than these."""
        count = len(self._blocks)
        for segment in self._segments:
            if segment.block is not None and segment.block not in (0, count - 1):
                continue
            at_end = segment.where == TAIL or (segment.block == 0 and count > 1)
            below_here = 0 if at_end else count if segment.block is None else segment.block
            below = 0 if at_end else below_here + blocks - count
            done = blocks if segment.where == TAIL else blocks - 1 if at_end else 0
            live = segment.live + (below - below_here) * kept
            yield Moment(segment.where, below, done, live, segment.arrived_root, segment.arrived_block)
