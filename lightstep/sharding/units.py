"""The modules that FSDP2 gathers and frees as units: each transformer block; the rest belongs to the root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from lightstep.config import ConfigError
from lightstep.config_errors import suggest
from lightstep.optimizer.param_groups import clean_name
from lightstep.sharding.preparation import transformer_blocks


def sharding_units(model: nn.Module, wrap: str | Sequence[str]) -> list[nn.Module]:
    """The modules to shard on their own, inner ones first; the root is not among them.

    Args:
        wrap: ``"auto"`` (the model's ``_no_split_modules``, else its largest list of equal modules) or names of
            classes or modules, each of which must be there.

    Raises:
        ConfigError: a name matches nothing, or a named module shares a weight with one outside it.
    """
    if isinstance(wrap, str):
        blocks = set(transformer_blocks(model))
        chosen = {block for block in blocks if not _shared_outside(model, block)}
    else:
        chosen = {module for name in wrap for module in _named(model, name)}
        _refuse_shared(model, chosen)
    inner_first = [module for module in reversed(list(model.modules())) if module in chosen and module is not model]
    wrappers = _checkpointed(model)
    return [wrappers.get(module, module) for module in inner_first]


Key = tuple[nn.Module, str]
"""A module and the name of a parameter of its own."""


def fp32_parts(unit: nn.Module, units: Collection[nn.Module], grouped: set[Key], kept: set[Key]) -> list[nn.Module]:
    """The largest modules in a unit whose parameters are all kept in fp32; they are gathered on their own.

    Args:
        unit: the module to search, without the units inside it.
        units: all units.
        grouped: the parameters that need one dtype in a group of FSDP2.
        kept: those of them that stay fp32.

    Raises:
        ConfigError: a module has parameters of its own in fp32 beside others that are not.
    """
    below = grouped.intersection(_keys(unit, units))
    if not below & kept:
        return []
    if below <= kept and not isinstance(unit, nn.ModuleList | nn.ModuleDict):
        return [unit]
    mixed = sorted(name for module, name in below & kept if module is unit)
    if mixed:
        raise ConfigError(
            f"{type(unit).__name__} keeps its own {', '.join(mixed)} in float32 (_keep_in_fp32_modules), and its other "
            "parameters are cast. FSDP2 gathers one dtype per module; train this model with sharding.kind ddp, or set "
            "type(model)._keep_in_fp32_modules_strict = None before you build it, and they are cast, too"
        )
    return [part for child in unit.children() if child not in units for part in fp32_parts(child, units, grouped, kept)]


def _keys(module: nn.Module, units: Collection[nn.Module]) -> Iterator[Key]:
    """The parameters of the module and of those below it, without other units."""
    yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
    for child in module.children():
        if child not in units:
            yield from _keys(child, units)


def _named(model: nn.Module, name: str) -> list[nn.Module]:
    modules = {clean_name(path): module for path, module in model.named_modules() if path}
    found = [module for path, module in modules.items() if name in (path, type(module).__name__)]
    if not found:
        classes = sorted({type(module).__name__ for module in modules.values()})
        raise ConfigError(
            f"sharding.wrap: {name!r} is neither a class nor a module of {type(model).__name__}"
            f"{suggest(name, [*classes, *modules])}; its classes: {', '.join(classes)}"
        )
    return found


def _refuse_shared(model: nn.Module, chosen: set[nn.Module]) -> None:
    for path, module in model.named_modules():
        if module in chosen and (other := _shared_outside(model, module)):
            raise ConfigError(
                f"sharding.wrap: {path} shares a weight with {other}, which is outside it; tied weights have to be in "
                "one unit: remove it from wrap, so that both belong to the root"
            )


def _shared_outside(model: nn.Module, block: nn.Module) -> str | None:
    """The name of a parameter outside ``block`` that is one of its own, or ``None``."""
    own = Counter(id(p) for _, p in block.named_parameters(remove_duplicate=False))
    total = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    if all(total[key] == count for key, count in own.items()):
        return None
    inside = {id(module) for module in block.modules()}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in own and id(module) not in inside:
                return f"{path}.{name}" if path else name
    return "itself in another place"


def _checkpointed(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Block -> the activation checkpointing wrapper around it, which has to be sharded in its stead."""
    wrappers = [(module, getattr(module, "_checkpoint_wrapped_module", None)) for module in model.modules()]
    return {inner: wrapper for wrapper, inner in wrappers if isinstance(inner, nn.Module)}
