"""Turns Pydantic's errors into messages in the terms of the file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

__all__ = ["describe_errors", "suggest"]

_MAPPING = ("model_type", "model_attributes_type", "dict_type")
_NEEDED = {
    "missing": "a value is needed",
    "dict_type": "a mapping is needed",
    "list_type": "a list is needed",
    "string_type": "text is needed",
    "path_type": "a path is needed",
    "too_short": "at least {min_length} is needed",
    "finite_number": "a finite number is needed",
    "greater_than": "more than {gt:.10g} is needed",
    "greater_than_equal": "at least {ge:.10g} is needed",
    "less_than": "less than {lt:.10g} is needed",
    "less_than_equal": "at most {le:.10g} is needed",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false is needed"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number is needed"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number is needed"),
}
"""Messages that replace Pydantic's, which name Python types."""


def describe_errors(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """One sentence per wrong key: its value, what is allowed, and the nearest name."""
    findings: dict[str, list[Any]] = {}
    for item in error.errors():
        findings.setdefault(_walk(model, _location(item))[1], []).append(item)
    return f"{source}: " + "; ".join(_describe(key, items, model) for key, items in findings.items())


def _location(item: Any) -> list[str]:
    return [str(part) for part in item["loc"]]


def _describe(key: str, items: list[Any], model: type[BaseModel]) -> str:
    """Describe the errors of one key; a union has one error for each member."""
    item, location = items[0], _location(items[0])
    if not location:
        return str(item["msg"]).removeprefix("Value error, ")
    owner, _ = _walk(model, location)
    given = item["input"]
    if item["type"] == "extra_forbidden":
        allowed = sorted(owner.model_fields)
        near = suggest(key.rsplit(".", 1)[-1], allowed)
        return f"unknown key '{key}' (value {given!r}){near}; allowed: {', '.join(allowed)}"
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = given.get("kind") if isinstance(given, Mapping) else given
        names = _kinds(owner, location)
        return f"'{key}.kind' is {tag!r}{suggest(str(tag), names)}; allowed: {', '.join(names)}"
    text = f"'{key}' is missing" if item["type"] == "missing" else f"'{key}' is {given!r}"
    names = [name for item in items if item["type"] == "literal_error" for name in _literals(item)]
    needs = [_need(item, owner, location) for item in items if item["type"] != "literal_error"]
    if needs:
        text += f": {', or '.join(dict.fromkeys(needs))}"
    if names:
        near = " (text)" if given in names else suggest(str(given), names)
        text += f"{near}; {'also ' if needs else ''}allowed: {', '.join(names)}"
    return text


def _literals(item: Any) -> list[str]:
    return [name.strip(" '") for name in item["ctx"]["expected"].replace(" or ", ", ").split(", ")]


def _need(item: Any, owner: type[BaseModel], location: list[str]) -> str:
    """What kind of value is needed."""
    if item["type"] in _MAPPING and (kinds := _kinds(owner, location)):
        kind = item["input"] if item["input"] in kinds else kinds[0]
        return f"a mapping is needed, write {location[-1]}: {{kind: {kind}}}; allowed kinds: {', '.join(kinds)}"
    if item["type"] in _MAPPING and (models := _models(owner, location[-1])):
        keys = list(models[0].model_fields)
        return f"a mapping is needed, write {location[-1]}: {{{keys[0]}: ...}}; allowed keys: {', '.join(keys)}"
    if item["type"] in _NEEDED:
        return _NEEDED[item["type"]].format(**item.get("ctx", {}))
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{message[0].lower()}{message[1:]}"


def _models(owner: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """The models that are allowed as the value of a key."""
    field = owner.model_fields.get(key)
    options = [field.annotation, *get_args(field.annotation)] if field is not None else []
    return [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _kinds(owner: type[BaseModel], location: list[str]) -> list[str]:
    return list(_by_kind(_models(owner, location[-1])))


def _by_kind(models: list[type[BaseModel]]) -> dict[str, type[BaseModel]]:
    with_kind = [model for model in models if "kind" in model.model_fields]
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in with_kind}


def _walk(model: type[BaseModel], location: list[str]) -> tuple[type[BaseModel], str]:
    """The model that owns the last key of ``location`` and the dotted key as it stands in the file.

    Pydantic puts the tag of a union into the location (``sharding.fsdp2.mesh``), and for a plain value the member of
    its union (``mesh.shard.constrained-int``): those parts are not keys.
    """
    keys: list[str] = []
    owner = model
    options: dict[str, type[BaseModel]] = {}
    for index, part in enumerate(location):
        if part in options:
            owner, options = options[part], {}
            continue
        keys.append(part)
        models = _models(owner, part)
        options = _by_kind(models)
        if part in owner.model_fields and not models:
            break
        if len(models) == 1 and index + 1 < len(location) and location[index + 1] not in options:
            owner = models[0]
    return owner, ".".join(keys)


def one_sentence(error: Exception) -> str:
    """The first two lines of a library's error, at most 300 characters; its class if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:2]) if lines else type(error).__name__
    return reason if len(reason) < 300 else reason[:300] + " ..."


def suggest(name: str, allowed: list[str]) -> str:
    """``, did you mean 'x'?`` for the nearest of ``allowed``, or nothing."""
    near = difflib.get_close_matches(name, allowed, n=2, cutoff=0.5)
    return f", did you mean {' or '.join(repr(match) for match in near)}?" if near else ""
