"""Finding the names of an optimizer's parameters: torch's state dicts number them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightstep.checkpoint.errors import CheckpointError, NotFoundError, list_names
from lightstep.extras import needs

Grouping = Callable[[list[str]], list[list[str]]]
"""A library's rule for parameter groups: names of a model's trainable parameters in order -> names in each group."""


@dataclass(frozen=True)
class ParameterOrder:
    """The names of a model's parameters in the model's order.

    Attributes:
        shapes: name -> shape.
        aliases: further names of tied parameters -> the name in ``shapes``.
        decayed: the names to which transformers' Trainer applies weight decay, if known.
    """

    shapes: dict[str, torch.Size]
    aliases: dict[str, str] = field(default_factory=dict)
    decayed: frozenset[str] | None = None


@dataclass(frozen=True)
class Naming:
    """What the user passed to name the parameters.

    Attributes:
        model: from ``--model``.
        names: from ``--names``: a list per group, or one list for all groups in order.
    """

    model: ParameterOrder | None = None
    names: list[list[str]] | None = None


def read_naming(model: str | os.PathLike[str] | None, names: str | os.PathLike[str] | None) -> Naming:
    """Read the files that were passed as ``--model`` and ``--names``.

    Raises:
        CheckpointError: as :func:`read_model` and :func:`read_names`.
    """
    return Naming(
        None if model is None else read_model(Path(model).expanduser()),
        None if names is None else read_names(Path(names).expanduser()),
    )


def read_names(path: Path) -> list[list[str]]:
    """A JSON file with a list of names in the optimizer's order, or a list of such lists, one for each group.

    Raises:
        CheckpointError: the file cannot be read, or has something else in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    groups = content if isinstance(content, list) and content and isinstance(content[0], list) else [content]
    if not all(isinstance(group, list) and all(isinstance(name, str) for name in group) for group in groups):
        raise CheckpointError(f"{path} must hold a list of names, or a list of lists of names, one for each group")
    return groups


def read_model(path: Path) -> ParameterOrder:
    """The parameters of a Hugging Face model, which is built on the meta device from its ``config.json``.

    Raises:
        CheckpointError: transformers cannot build the model.
    """
    if not path.exists():
        raise NotFoundError(f"{path} does not exist; the folder of a model's config.json is needed")
    folder = path.parent if path.is_file() else path
    with needs("train"):
        import transformers
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        classes = [getattr(transformers, name, None) for name in config.architectures or ()]
        model_class = classes[0] if classes and classes[0] is not None else transformers.AutoModelForCausalLM
        build = getattr(model_class, "_from_config", None) or model_class.from_config
        with torch.device("meta"):
            model = build(config)
        model.tie_weights()
        decayed = frozenset(transformers.Trainer.get_decay_parameter_names(None, model))
    except Exception as error:
        raise CheckpointError(f"{path} is not a model that transformers can make: {error}") from error
    return parameter_order(model, decayed)


def parameter_order(model: torch.nn.Module, decayed: frozenset[str] | None = None) -> ParameterOrder:
    """The names and shapes of a model's parameters in the model's order."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    first = {parameter: name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    aliases = {name: first[parameter] for name, parameter in named if name not in shapes}
    return ParameterOrder(shapes, aliases, decayed)


def name_groups(
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Mapping[str, Any]],
    naming: Naming,
    weights: Mapping[str, torch.Size],
    rules: Sequence[Grouping] = (),
    ordered: bool = True,
) -> list[list[str]]:
    """The names of each group's parameters.

    Args:
        groups: with ``params`` (indices or names), perhaps with ``param_names``.
        states: index -> state entries. Those with dimensions have the parameter's shape.
        naming: what the user passed.
        weights: name -> shape of the checkpoint's weights.
        rules: how the library that wrote the checkpoint forms groups.
        ordered: whether ``weights`` is in the model's order. If it is not, it says nothing about the numbers.

    Raises:
        CheckpointError: no order fits; the message says what to pass.
    """
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return [list(group["params"]) for group in groups]
    if naming.names is None and all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        return [list(group["param_names"]) for group in groups]
    shapes = {**weights, **(naming.model.shapes if naming.model else {})}
    wanted = [[_shape(states.get(index, {})) for index in group["params"]] for group in groups]
    counts = [len(group) for group in wanted]
    for proposal in _proposals(naming, counts, list(weights) if ordered else None, rules):
        if len(proposal) == len(counts):
            found = [_unique_choice(names, needed, shapes) for names, needed in zip(proposal, wanted, strict=True)]
            if all(names is not None for names in found):
                return [names for names in found if names is not None]
    given = "--names" if naming.names else "--model" if naming.model else None
    raise CheckpointError(
        f"its optimizer numbers {sum(counts)} parameters in groups of {list_names(map(str, counts))} "
        "and does not name them"
        + (f", and {given} does not fit them" if given else "")
        + ". Pass --names FILE, a JSON list of names in the optimizer's order, or --model DIR with the config.json"
    )


def _shape(entries: Mapping[str, Any]) -> torch.Size | None:
    """The parameter's shape, if its state has a tensor with dimensions."""
    return next((torch.Size(value.shape) for value in entries.values() if len(getattr(value, "shape", ()))), None)


def _proposals(
    naming: Naming, counts: list[int], weights: list[str] | None, rules: Sequence[Grouping]
) -> list[list[list[str]]]:
    """Possible names of each group's parameters, which may include names that the optimizer does not have.

    Args:
        weights: the names of the checkpoint's weights in the model's order; ``None``: that order is unknown.
    """
    if naming.names is not None:
        flat = [name for group in naming.names for name in group]
        return [naming.names, _split_by_counts(flat, counts)]
    order = list(naming.model.shapes) if naming.model else weights
    if order is None:
        return []
    return [[order], *(rule(order) for rule in rules)] if len(counts) == 1 else [rule(order) for rule in rules]


def _split_by_counts(names: list[str], counts: list[int]) -> list[list[str]]:
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return (
        [names[end - count : end] for end, count in zip(ends, counts, strict=True)] if ends[-1:] == [len(names)] else []
    )


def _unique_choice(
    names: list[str], wanted: list[torch.Size | None], shapes: Mapping[str, torch.Size]
) -> list[str] | None:
    """The names that fit the ``wanted`` shapes (``None``: any) in order, if there is exactly one way to choose them.

    Then the earliest names that fit are the latest, too.
    """
    if any(name not in shapes for name in names):
        return None
    earliest = _earliest(names, wanted, shapes)
    latest = _earliest(names[::-1], wanted[::-1], shapes)[::-1]
    return earliest if earliest == latest and len(earliest) == len(wanted) else None


def _earliest(names: list[str], wanted: list[torch.Size | None], shapes: Mapping[str, torch.Size]) -> list[str]:
    chosen: list[str] = []
    for name in names:
        if len(chosen) < len(wanted) and wanted[len(chosen)] in (None, shapes[name]):
            chosen.append(name)
    return chosen
