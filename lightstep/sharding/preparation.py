"""Preparation that all strategies share: device memory, initial weights, dtypes, blocks, activation checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from lightstep.distributed import is_sharded, like, local_tensor
from lightstep.sharding.dtypes import DtypePlan, cast, models_of_transformers, planned_dtypes
from lightstep.state.host_activations import HostActivations


def materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on ``device``; one made on the meta device gets memory there and its initial weights.

    Raises:
        ValueError: only part of the model is on the meta device, or it has no way to initialise itself.
    """
    on_meta = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if not on_meta:
        with _keeping_attributes(model):
            return model.to(device)
    if len(on_meta) < sum(1 for _ in model.parameters()):
        raise ValueError(f"{len(on_meta)} parameters are on the meta device and others are not (first: {on_meta[0]})")
    to_device(model, device)
    initialise_weights(model)
    return model


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move plain tensors to the device; those on the meta device get uninitialised memory, tied ones the same."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if is_sharded(tensor):
                continue
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
                continue
            if tensor not in made:
                made[tensor] = _empty_like(tensor, device)
            setattr(module, name, made[tensor])


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def hold_places(model: nn.Module, dtype: torch.dtype) -> None:
    """Give a model of transformers on the meta device parameters that have no memory yet, cast to ``dtype``.

    For weights that get memory elsewhere and are then all loaded. Buffers are initialised. Other models stay as they
    are.
    """
    if model not in models_of_transformers(model) or not all(parameter.is_meta for parameter in model.parameters()):
        return
    cast_tensors(model, planned_dtypes(model, dtype))
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = _place_of(parameter)
            setattr(module, name, made[parameter])
    to_device(model, torch.device("cpu"))
    initialise_weights(model, loaded_next=True)


def hold_shards(model: nn.Module) -> None:
    """Give a sharded model on the meta device parameters whose shards, on the host, have no memory yet."""
    for parameter in list(model.parameters()):
        torch.utils.swap_tensors(parameter, _place_of(parameter))


def _place_of(parameter: nn.Parameter) -> nn.Parameter:
    local = local_tensor(parameter)
    nothing = torch.zeros((), dtype=local.dtype, device="cpu").expand(local.shape)
    place = nn.Parameter(like(parameter, nothing), parameter.requires_grad)
    vars(place).update(vars(parameter))
    return place


def cast_tensors(model: nn.Module, plan: DtypePlan) -> None:
    """Cast as :func:`~lightstep.sharding.dtypes.planned_dtypes` says; attributes of parameters are kept."""
    with _keeping_attributes(model):
        cast(model, plan)


def unrounded_values(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Trainable fp32 parameters with their present values (local shards), which later casts do not change."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not parameter.is_meta]
    return [(p, local_tensor(p).detach()) for p in trained if p.dtype == torch.float32]


@contextlib.contextmanager
def _keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Restore attributes of parameters (``differs_across_ranks``), which torch loses when it swaps DTensors."""
    before = [(parameter, dict(vars(parameter))) for parameter in model.parameters()]
    yield
    for parameter, attributes in before:
        vars(parameter).update(attributes)


def initialise_weights(model: nn.Module, loaded_next: bool = False) -> None:
    """Initialise a model whose memory is uninitialised, by its own methods.

    That is ``init_weights`` (transformers), or ``reset_parameters`` of every module that owns parameters or buffers.

    Args:
        loaded_next: all parameters will be loaded: models of transformers initialise their buffers only.
    """
    init_weights = getattr(model, "init_weights", None)
    if callable(init_weights):
        with _left_as_they_are(model.parameters()) if loaded_next else contextlib.nullcontext():
            init_weights()
        return
    for name, module in model.named_modules():
        owns = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not owns:
            continue
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"the model is on the meta device and {name or 'its root'} ({type(module).__name__}) has no "
                "reset_parameters(): add one, or build the model on a real device"
            )
        module.reset_parameters()


_INITIALISED = "_is_hf_initialized"
"""The attribute of tensors that ``init_weights`` of transformers leaves as they are."""


@contextlib.contextmanager
def _left_as_they_are(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """In the body ``init_weights`` of transformers does not write to these parameters."""
    before = {parameter: getattr(parameter, _INITIALISED, False) for parameter in parameters}
    try:
        for parameter in before:
            setattr(parameter, _INITIALISED, True)
        yield
    finally:
        for parameter, initialised in before.items():
            setattr(parameter, _INITIALISED, initialised)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: ``_no_split_modules`` if it names them, else its largest list of equal modules."""
    named = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in named]
    if blocks:
        return blocks
    lists = [list(m) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and _same_type(list(m))]
    return max(lists, key=_size, default=[])


def experts_of(block: nn.Module) -> list[nn.Module]:
    """The modules below the block that hold its experts, if these are more than half of its parameters.

    They are its largest list of equal modules, of which one forward may call some only; or the one module that has all
    experts stacked in parameters of three dimensions.
    """
    lists = [list(part.children()) for part in block.modules() if isinstance(part, nn.ModuleList | nn.ModuleDict)]
    stacks = [[part] for part in block.modules() if part is not block and _is_stack(part)]
    largest = max([*filter(_same_type, lists), *stacks], key=_size, default=[])
    return largest if 2 * _size(largest) > _size([block]) else []


def _is_stack(module: nn.Module) -> bool:
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def scripted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost scripted and traced modules with trained parameters, by name. Reads of their weights cannot wait:
    they are not Python's."""
    found: dict[str, nn.Module] = {}
    scripted = (named for named in model.named_modules() if isinstance(named[1], torch.jit.ScriptModule))
    for name, module in scripted:
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and any(parameter.requires_grad for parameter in module.parameters()):
            found[name] = module
    return found


def checkpoint_activations(model: nn.Module, inputs: HostActivations | None = None) -> None:
    """Recompute each block in backward: by ``gradient_checkpointing_enable`` if the model has it, else by wrapping.

    Args:
        inputs: keeps what the blocks save on the host.

    Raises:
        ValueError: the model has neither that method nor repeated blocks, or ``inputs`` cannot keep what it saves.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if inputs is not None:
            _keep_on_host(model, inputs)
        return
    blocks = set(transformer_blocks(model))
    if not blocks:
        raise ValueError(
            f"activation_checkpointing: {type(model).__name__} has no repeated blocks to recompute; turn it off"
        )
    wrapper = checkpoint_wrapper
    if inputs is not None:
        recomputed = partial(inputs.checkpoint, partial(checkpoint, use_reentrant=False))
        wrapper = partial(checkpoint_wrapper, checkpoint_fn=recomputed)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=blocks.__contains__)


_CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"
"""The attribute by which modules of transformers call ``torch.utils.checkpoint``."""


def _keep_on_host(model: nn.Module, inputs: HostActivations) -> None:
    recomputing = [module for module in model.modules() if _CHECKPOINT_FUNCTION in vars(module)]
    if not recomputing:
        raise ValueError(
            f"activation_checkpointing: host: gradient_checkpointing_enable() of {type(model).__name__} sets no "
            f"{_CHECKPOINT_FUNCTION}, as models of transformers do, so what it saves stays on the device; set true"
        )
    for module in recomputing:
        setattr(module, _CHECKPOINT_FUNCTION, partial(inputs.checkpoint, getattr(module, _CHECKPOINT_FUNCTION)))


def _same_type(modules: Sequence[nn.Module]) -> bool:
    return len(modules) > 1 and len({type(module) for module in modules}) == 1 and _size(modules) > 0


def _size(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
