"""Which optimizer class and hyper-parameters each parameter of a model gets."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightstep.error_text import value_text
from lightstep.optimizer.classes import constructor_arguments, kept_by_class
from lightstep.optimizer.param_groups import clean_name

__all__ = [
    "KINDS",
    "Rule",
    "described_parameters",
    "groups_by_rules",
    "match_rules",
    "own_class",
    "refuse_unmatched",
    "warn_of_muon_on_vocabularies",
]

KINDS = ("hidden_matrices", "embeddings", "head", "norms", "biases", "rest")
"""The values of ``Rule(kinds=...)``; every parameter has one kind, and ``rest`` is what no other rule matches."""


class Rule:
    """An optimizer class with its hyper-parameters, and the parameters that it updates.

    A rule matches a parameter that fits all of ``names``, ``kinds`` and ``dims`` that are given; with none given, every
    parameter. Each trainable parameter must match exactly one rule.

    ::

        rules = [
            Rule(torch.optim.Muon, kinds="hidden_matrices", lr=2e-2),
            Rule(torch.optim.AdamW, kinds=["norms", "biases"], lr=3e-4, weight_decay=0.0),
            Rule(torch.optim.AdamW, kinds="rest", lr=3e-4, weight_decay=0.1),
        ]

    Args:
        optimizer_class: a ``torch.optim.Optimizer`` subclass.
        names: one or several regular expressions, one of which is found in the parameter's name.
        kinds: one or several of :data:`KINDS`. ``hidden_matrices`` are what a layer multiplies by, of two dimensions or
            three (experts), except ``embeddings`` and the ``head``, which maps to the vocabulary; ``norms`` are all
            parameters of normalization layers, ``biases`` all others whose name ends in ``bias``. Kernels of
            convolutions and all others have none of these kinds. ``rest`` is what no other rule matches.
        dims: one or several numbers of dimensions.
        hyperparameters: keyword arguments of the class.

    Raises:
        TypeError: not an optimizer class, or a keyword that it does not have.
        ValueError: an unknown kind, or a pattern that is no regular expression.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        names: str | Sequence[str] | None = None,
        kinds: str | Sequence[str] | None = None,
        dims: int | Sequence[int] | None = None,
        **hyperparameters: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise TypeError(
                f"a rule's optimizer class is {optimizer_class!r}; a subclass of torch.optim.Optimizer is needed, for "
                "example torch.optim.Muon (the class, not an instance)"
            )
        self.optimizer_class, self.hyperparameters = optimizer_class, hyperparameters
        self.names, self.kinds = _several("names", names, str), _several("kinds", kinds, str)
        self.dims = _several("dims", dims, int)
        self._patterns = None if self.names is None else [_compiled(pattern) for pattern in self.names]
        unknown = [kind for kind in self.kinds or () if kind not in KINDS]
        if unknown:
            raise ValueError(f"{self}: {unknown[0]!r} is not a kind of parameter; allowed: {', '.join(KINDS)}")
        self._check_hyperparameters()

    def __repr__(self) -> str:
        given = {"names": self.names, "kinds": self.kinds, "dims": self.dims}
        shown = [f"{key}={_shown(value)}" for key, value in given.items() if value is not None]
        return f"Rule({', '.join([self.optimizer_class.__name__, *shown])})"

    def matches(self, name: str, parameter: Tensor, kind: str) -> bool:
        """Whether it matches this parameter, whatever the other rules match."""
        return self._matches(name, parameter) and (self.kinds is None or (kind in self.kinds and kind != "rest"))

    def matches_rest(self, name: str, parameter: Tensor) -> bool:
        """Whether it matches this parameter if no other rule does."""
        return self._matches(name, parameter) and "rest" in (self.kinds or ())

    def _matches(self, name: str, parameter: Tensor) -> bool:
        found = self._patterns is None or any(pattern.search(name) for pattern in self._patterns)
        return found and (self.dims is None or parameter.dim() in self.dims)

    def refuse_unused_names(self, matched: Collection[str]) -> None:
        """Raise ``ValueError`` if one of several ``names`` is in no name that the rule has matched."""
        for pattern in self._patterns or ():
            if not any(map(pattern.search, matched)):
                raise ValueError(
                    f"{self}: {pattern.pattern!r} matches none of the {len(matched)} parameters of the rule; leave it "
                    "out, or correct it (`lightstep params` lists names and kinds)"
                )

    def group(self) -> dict[str, Any]:
        """A parameter group without parameters."""
        return {"params": [], "optimizer_class": self.optimizer_class, **self.hyperparameters}

    def _check_hyperparameters(self) -> None:
        parameters = inspect.signature(self.optimizer_class).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        known = list(parameters)[1:]
        for key in self.hyperparameters:
            if key not in known and not takes_any:
                raise TypeError(f"{self}: {self.optimizer_class.__name__} has no {key!r}; it has {', '.join(known)}")
        try:
            self.optimizer_class([torch.zeros(2, 2, device="cpu")], **self.hyperparameters)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self}: {error}") from error


def groups_by_rules(rules: Sequence[Rule] | Rule, model: nn.Module) -> list[dict[str, Any]]:
    """A parameter group for each rule, in their order; its parameters are in the order of the model.

    A frozen parameter may match no rule, and is then in no group.

    Raises:
        TypeError: not rules.
        ValueError: a rule matches no parameter, two match the same one, or a trainable parameter matches none.
    """
    listed = [rules] if isinstance(rules, Rule) else list(rules)
    matched = match_rules(listed, described_parameters(model))
    refuse_unmatched(listed, matched)
    return [{**rule.group(), "params": list(own.values())} for rule, own in zip(listed, matched, strict=True)]


def match_rules(
    rules: Sequence[Rule], described: Iterable[tuple[str, nn.Parameter, str]], *, first: bool = False
) -> list[dict[str, nn.Parameter]]:
    """The parameters of each rule by their names.

    Args:
        described: name, parameter and kind of each.
        first: a parameter that several rules match belongs to the first of them.

    Raises:
        TypeError: not rules.
        ValueError: there are no rules, two match the same parameter, or a trainable parameter matches none.
    """
    if not rules:
        raise ValueError("rules are empty: give at least one, such as lightstep.Rule(torch.optim.AdamW, lr=1e-5)")
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rules hold {value_text(rule, 80)}; lightstep.Rule(optimizer_class, kinds=..., lr=...) is needed"
            )
    _check_class_settings(rules)
    matched: list[dict[str, nn.Parameter]] = [{} for _ in rules]
    for name, parameter, kind in described:
        found = [number for number, rule in enumerate(rules) if rule.matches(name, parameter, kind)]
        found = found or [number for number, rule in enumerate(rules) if rule.matches_rest(name, parameter)]
        if len(found) > 1 and not first:
            raise ValueError(
                f"{name} of shape {tuple(parameter.shape)} matches {rules[found[0]]} and {rules[found[1]]}; each "
                "parameter belongs to one rule (kinds='rest' is what no other rule matches)"
            )
        if found:
            matched[found[0]][name] = parameter
        elif parameter.requires_grad:
            raise ValueError(
                f"{name} of shape {tuple(parameter.shape)} ({kind}) is trained, and matches no rule; "
                f"rules: {', '.join(map(str, rules))}. Add one with kinds='rest'"
            )
    return matched


def refuse_unmatched(rules: Sequence[Rule], matched: Sequence[Collection[str]]) -> None:
    """Raise ``ValueError`` if a rule, or a pattern of one, has matched none of the names."""
    for rule, names in zip(rules, matched, strict=True):
        if not names:
            raise ValueError(
                f"{rule} matches no parameter of the model; `lightstep params` lists their names and kinds"
            )
        rule.refuse_unused_names(names)


def _check_class_settings(rules: Sequence[Rule]) -> None:
    seen: dict[type, tuple[Rule, dict[str, Any]]] = {}
    for rule in rules:
        kept = kept_by_class(rule.optimizer_class, rule.hyperparameters)
        other, theirs = seen.setdefault(rule.optimizer_class, (rule, kept))
        if kept != theirs:
            raise ValueError(
                f"{other} and {rule} differ in settings that {rule.optimizer_class.__name__} has for all its groups "
                f"({theirs} and {kept}): give both the same"
            )


def warn_of_muon_on_vocabularies(
    groups: Sequence[Mapping[str, Any]], optimizer_class: type[torch.optim.Optimizer], model: nn.Module
) -> None:
    """Warn of embeddings and heads under Muon (or a subclass), which orthogonalizes a matrix as a linear map."""
    muons = {
        parameter: chosen.__name__
        for group in groups
        for parameter in group["params"]
        if _is_muon(chosen := group.get("optimizer_class", optimizer_class))
    }
    if not muons:
        return
    found = {
        f"{name} ({kind})": muons[parameter]
        for name, parameter, kind in described_parameters(model)
        if kind in ("embeddings", "head") and parameter in muons
    }
    if found:
        warnings.warn(
            f"{' and '.join(dict.fromkeys(found.values()))} will update {', '.join(found)}: it is meant for hidden "
            "matrices, and treats these tables of tokens as linear maps. Give them to AdamW (kinds='hidden_matrices' "
            "leaves them out)",
            stacklevel=3,
        )


def _is_muon(optimizer_class: Any) -> bool:
    return isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Muon)


def own_class(groups: Sequence[Mapping[str, Any]]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of the first group, and the arguments to construct an optimizer over all groups with it."""
    optimizer_class: type[torch.optim.Optimizer] = groups[0]["optimizer_class"]
    return optimizer_class, constructor_arguments(optimizer_class, groups[0])


def described_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Name, parameter and kind (:data:`KINDS`) of each, in the model's order."""
    modules = dict(model.named_modules())
    owners: dict[Tensor, list[_Owner]] = {}
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append(_Owner.of(path, name, modules))
    vocabulary = _inside(_called(model, "get_input_embeddings"))
    heads = _heads(model, modules)
    for name, parameter in model.named_parameters():
        clean = clean_name(name)
        yield clean, parameter, _kind(clean, parameter, owners[parameter], vocabulary, heads)


class _Owner(NamedTuple):
    """The layer that a parameter belongs to, and the parameter's name in it (``weight``, ``lora_A.default``)."""

    layer: nn.Module
    name: str

    @classmethod
    def of(cls, path: str, name: str, modules: Mapping[str, nn.Module]) -> _Owner:
        while path and isinstance(modules[path], _CONTAINERS):  # parametrizations are in such containers, too
            path, _, last = path.rpartition(".")
            name = f"{last}.{name}"
        return cls(modules[path], name)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _kind(
    name: str,
    parameter: Tensor,
    owners: Sequence[_Owner],
    vocabulary: Collection[nn.Module],
    heads: Collection[nn.Module],
) -> str:
    layers = [owner.layer for owner in owners]
    if any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in layers):  # a tied head is one of them
        return "embeddings"
    if any(_is_norm(layer, parameter) for layer in layers):
        return "norms"
    if name.endswith("bias"):
        return "biases"
    if parameter.dim() < 2 or any(isinstance(layer, nn.modules.conv._ConvNd) for layer in layers):
        return "rest"
    if any(layer in vocabulary or _is_embedding(*owner) for layer, owner in zip(layers, owners, strict=True)):
        return "embeddings"
    if any(layer in heads for layer in layers):
        return "head"
    return "hidden_matrices" if any(_is_matrix(*owner, parameter) for owner in owners) else "rest"


def _is_norm(layer: nn.Module, parameter: Tensor) -> bool:
    """torch's layers, and those of libraries whose class names say so (``LlamaRMSNorm``)."""
    return isinstance(layer, nn.LayerNorm) or (parameter.dim() < 2 and "norm" in type(layer).__name__.lower())


def _is_embedding(layer: nn.Module, name: str) -> bool:
    """Tables outside of torch's layers, which only names tell: ``cls_token``, ``pos_embed``, ``lora_embedding_A``."""
    if isinstance(layer, nn.Linear):
        return False
    return "embedding" in type(layer).__name__.lower() or re.search(r"emb|token|(^|_)pos", name) is not None


def _is_matrix(layer: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether the layer multiplies by this parameter: by one matrix, or by each of a stack (experts)."""
    named = isinstance(layer, nn.Linear) or re.search(r"weight|proj", name) is not None
    if parameter.dim() == 2:
        return named  # others are no factors of a product: Mamba's A_log
    return parameter.dim() == 3 and (named or 1 not in parameter.shape)  # broadcast: RWKV's time_mix_key


def _heads(model: nn.Module, modules: Mapping[str, nn.Module]) -> Collection[nn.Module]:
    """What maps to the vocabulary, with all that is inside (adapters, copies that are trained instead).

    As transformers say; else the linear layers outside of all blocks that are as large as the largest embedding; else
    the last linear layer there.
    """
    head = _inside(_called(model, "get_output_embeddings"))
    if head:
        return head
    outside = [
        module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and not any(part.isdigit() for part in name.split("."))
    ]
    size = max((module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)), default=None)
    return frozenset([module for module in outside if module.out_features == size] or outside[-1:])


def _called(model: nn.Module, method: str) -> Any:
    """What this method of transformers' models returns; ``None`` if the model has none, or does not say."""
    try:
        return getattr(model, method, lambda: None)()
    except NotImplementedError:
        return None


def _inside(module: Any) -> Collection[nn.Module]:
    return frozenset(module.modules()) if isinstance(module, nn.Module) else frozenset()


_CALLED = {str: "a string", int: "a number"}


def _several(key: str, given: Any, kind: type) -> list[Any] | None:
    if given is None:
        return None
    listed = [given] if isinstance(given, kind) else given
    if not isinstance(listed, list | tuple | set | frozenset) or not all(isinstance(value, kind) for value in listed):
        raise TypeError(f"a rule's {key} is {value_text(given)}; {_CALLED[kind]} or a list of them is needed")
    return list(listed)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} in a rule's names is not a valid regular expression: {error}") from error


def _shown(values: Sequence[Any]) -> str:
    return repr(values[0]) if len(values) == 1 else repr(list(values))
