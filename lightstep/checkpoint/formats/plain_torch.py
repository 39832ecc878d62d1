"""Files of ``torch.save({"model": ..., "optimizer": ...})``, read and written, and checkpoints of transformers'
Trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.formats.files import load_file, save_lazily
from lightstep.checkpoint.formats.names import Grouping, Naming, ParameterOrder, name_groups, read_model
from lightstep.checkpoint.formats.state import (
    MASTER,
    Group,
    LazyTensor,
    TrainingState,
    is_dynamic,
    max_step,
    scale_from_torch,
    scale_to_torch,
    step_tensor,
)
from lightstep.checkpoint.huggingface import WEIGHTS, WEIGHTS_INDEX, dtype_in_file, weight_map
from lightstep.checkpoint.storage import new_file
from lightstep.optimizer.foreign_moments import OTHER_SETTINGS, is_foreign, with_torchs_moments
from lightstep.optimizer.param_groups import clean_name
from lightstep.version import __version__

MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
SCHEDULER_KEYS = ("scheduler", "scheduler_state_dict", "lr_scheduler")
SCALER_KEYS = ("scaler", "scaler_state_dict", "grad_scaler")
TRAINER_STATE = "trainer_state.json"
MARK = "lightstep"
"""The section of a file that a conversion wrote."""


def read_torch_file(path: Path, naming: Naming) -> TrainingState:
    """The run in a file with the state dicts of model and optimizer under the usual keys.

    Raises:
        CheckpointError: the file is damaged or has no model, or the optimizer's parameters cannot be named.
    """
    content = load_file(path)
    key = next((k for k in MODEL_KEYS if isinstance(content, dict) and isinstance(content.get(k), Mapping)), None)
    if key is None:
        raise CheckpointError(f"{path} holds no dictionary with a model's state dict under {', '.join(MODEL_KEYS)}")
    weights, aliases, notes = module_tensors(content[key])
    state = TrainingState("torch", weights, aliases=aliases, notes=notes)
    rest = {name: value for name, value in content.items() if name != key}
    if optimizer := next((k for k in OPTIMIZER_KEYS if rest.get(k)), None):
        add_optimizer(state, rest.pop(optimizer), naming)
    if isinstance(section := rest.get(MARK), dict):
        state.format = "torch (converted)"
        state.optimizer_class, state.loss_scale = rest.get("optimizer_class"), rest.get("loss_scale")
        state.random, state.modules = list(rest.get("random") or []), dict(rest.get("modules") or {})
        state.extra, state.world_size = dict(rest.get("extra") or {}), rest.get("world_size")
        state.scheduler, state.scheduler_class = rest.get("scheduler"), section.get("scheduler_class")
        _cast_back(state, section.get("trained_in") or {})
    else:
        add_rest(state, rest)
    return state


def add_rest(state: TrainingState, rest: dict[str, Any]) -> None:
    """Add what the user saved beside model and optimizer: the scheduler, the scaler, and ``extra``, which is the rest.

    Entries of a dictionary ``extra`` are entries of the whole.
    """
    state.scheduler = _taken(rest, SCHEDULER_KEYS)
    if scaler := _taken(rest, SCALER_KEYS):
        state.loss_scale = scale_from_torch(scaler)
    extra = rest.get("extra")
    if isinstance(extra, Mapping) and not extra.keys() & rest.keys():
        rest = {**{key: value for key, value in rest.items() if key != "extra"}, **extra}
    state.extra = rest


def _taken(rest: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Remove the first of these that there is, unless it is empty."""
    found = next((key for key in keys if isinstance(rest.get(key), Mapping) and rest[key]), None)
    return None if found is None else rest.pop(found)


def _cast_back(state: TrainingState, trained_in: Mapping[str, str]) -> None:
    """Undo what :func:`~lightstep.checkpoint.formats.plain_torch.write_torch` does: its weights are the masters.

    Args:
        trained_in: name -> dtype in which the parameter is trained.
    """
    for name, dtype in trained_in.items():
        if name in state.weights:
            master = state.weights[name]
            state.weights[name] = master.to(getattr(torch, dtype))
            state.entries.setdefault(name, {})["master"] = master


def module_tensors(module: Mapping[str, Any]) -> tuple[dict[str, LazyTensor], dict[str, str], list[str]]:
    """A model's state dict as tensors (tied ones once), aliases, and notes about values that are not tensors."""
    prefix = "module." if module and all(name.startswith("module.") for name in module) else ""
    seen: dict[Any, str] = {}
    weights, aliases, notes = {}, {}, []
    for key, tensor in module.items():
        name = clean_name(key.removeprefix(prefix))
        if not isinstance(tensor, Tensor):
            notes.append(f"{name} of the model is not a tensor and was left out")
            continue
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        first = seen.setdefault(memory, name) if tensor.numel() else name
        if first == name:
            weights[name] = LazyTensor.of(tensor.detach())
        else:
            aliases[name] = first
    return weights, aliases, notes


def add_optimizer(
    state: TrainingState, packed: Mapping[str, Any], naming: Naming, rules: Sequence[Grouping] = ()
) -> None:
    """Add the state dict of a torch optimizer, whose parameters may be numbered or named.

    Raises:
        CheckpointError: it is not an optimizer's state dict, or its parameters cannot be named.
    """
    if "state" not in packed or "param_groups" not in packed:
        raise CheckpointError("its optimizer is not a state dict of torch.optim: it has no state and param_groups")
    groups, states = packed["param_groups"], packed["state"]
    shapes = {name: weight.shape for name, weight in state.weights.items()}
    if naming.model is None:
        shapes = {n: s for n, s in shapes.items() if state.weights[n].dtype.is_floating_point}
    names = name_groups(groups, states, naming, shapes, rules, state.ordered)
    foreign = any(isinstance(entries, Mapping) and is_foreign(entries) for entries in states.values())
    left_out = ("params", "param_names", *(OTHER_SETTINGS if foreign else ()))
    state.groups = [
        Group(
            [_weight_name(state, name) for name in own],
            {key: value for key, value in group.items() if key not in left_out},
        )
        for own, group in zip(names, groups, strict=True)
    ]
    for group, named in zip(groups, state.groups, strict=True):
        for index, name in zip(group["params"], named.names, strict=True):
            if entries := states.get(index):
                own = _with_torchs_moments(name, entries)
                state.entries[name] = {key: _entry(key, value) for key, value in own.items()}
    state.loss_scale = packed.get("loss_scale")  # of an optimizer of lightstep
    state.step = max_step(state.entries.values())


def _with_torchs_moments(name: str, entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's state; in fp32 if bitsandbytes or torchao kept it in 8 bits."""
    try:
        return with_torchs_moments(name, entries) if is_foreign(entries) else entries
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _weight_name(state: TrainingState, name: str) -> str:
    """The parameter's name among the weights: without wrappers' prefixes, and the first one of a tied tensor."""
    name = clean_name(name)
    for candidate in (name, name.removeprefix("module.")):
        if (found := state.aliases.get(candidate, candidate)) in state.weights:
            return found
    raise CheckpointError(f"the optimizer has {name}, of which there are no weights")


def _entry(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return LazyTensor.of(value.detach())
    return step_tensor(value) if key == "step" else value


# -- transformers ------------------------------------------------------------------------------------------------------


def is_trainer_checkpoint(folder: Path) -> bool:
    """Whether this is a ``checkpoint-N`` folder of transformers' Trainer with a torch optimizer."""
    return (folder / "optimizer.pt").is_file() and any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))


def read_trainer_checkpoint(folder: Path, naming: Naming) -> TrainingState:
    """The run in a ``checkpoint-N`` folder: safetensors, optimizer, scheduler, scaler and ``trainer_state.json``.

    Raises:
        CheckpointError: a file is missing or damaged, or the parameters cannot be named.
    """
    state = TrainingState("transformers Trainer", safetensors_weights(folder), ordered=False)
    if naming.model is None and naming.names is None and (folder / "config.json").is_file():
        naming = Naming(model=read_model(folder))
    if naming.model is not None:
        state.aliases = {alias: name for alias, name in naming.model.aliases.items() if alias not in state.weights}
        state.weights = _in_model_order(state.weights, naming.model)
    add_optimizer(state, load_file(folder / "optimizer.pt"), naming, [_trainer_groups(naming.model)])
    if (folder / "scaler.pt").is_file():
        state.loss_scale = scale_from_torch(load_file(folder / "scaler.pt"))
    add_trainer_files(state, folder)
    return state


def add_trainer_files(state: TrainingState, folder: Path) -> None:
    """Add what the Trainer keeps beside any optimizer's files, DeepSpeed's too: the scheduler and its own state."""
    if (folder / "scheduler.pt").is_file():
        state.scheduler = load_file(folder / "scheduler.pt")
    if (folder / TRAINER_STATE).is_file():
        state.extra["trainer_state"] = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    if any(folder.glob("rng_state*.pth")):
        state.notes.append("the Trainer's random states (rng_state) are pickles, and were left out")


def safetensors_weights(folder: Path) -> dict[str, LazyTensor]:
    """All tensors in ``model.safetensors``, or in the files that the index names, sorted by name.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    files = sorted(set(weight_map(folder).values())) or [WEIGHTS]
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder} is incomplete; missing, and named in {WEIGHTS_INDEX}: {list_names(missing)}")
    return {name: tensor for file in files for name, tensor in _safetensors(folder / file)}


def _safetensors(path: Path) -> list[tuple[str, LazyTensor]]:
    def lazy(name: str) -> LazyTensor:
        def read() -> Tensor:
            with safe_open(path, framework="pt") as reopened:
                return reopened.get_tensor(name)

        return LazyTensor(dtype_in_file(opened, name), torch.Size(opened.get_slice(name).get_shape()), read)

    try:
        with safe_open(path, framework="pt") as opened:
            return [(name, lazy(name)) for name in opened.keys()]  # noqa: SIM118  (not a mapping)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: it is truncated or damaged ({error})") from error


def _in_model_order(weights: dict[str, LazyTensor], model: ParameterOrder) -> dict[str, LazyTensor]:
    first = [name for name in model.shapes if name in weights]
    return {name: weights[name] for name in dict.fromkeys([*first, *weights])}


def _trainer_groups(model: ParameterOrder | None) -> Grouping:
    """Trainer's two groups: parameters with weight decay, then those without (biases and norms)."""
    decayed = model.decayed if model is not None and model.decayed is not None else frozenset()
    return lambda order: [[n for n in order if n in decayed], [n for n in order if n not in decayed]]


def write_torch(state: TrainingState, path: Path) -> None:
    """Write the run as a file of ``torch.save``. Host memory grows by what reading one tensor takes.

    Raises:
        CheckpointError: something that no conversion wrote is at ``path``, ...
    """
    content = _content(state)
    with new_file(path, is_conversion, "a file that a conversion wrote") as temporary:
        save_lazily(content, temporary)


def is_conversion(path: Path) -> bool:
    """Whether :func:`write_torch` wrote the file."""
    try:
        content = load_file(path) if path.is_file() else None
    except CheckpointError:
        return False
    return isinstance(content, dict) and isinstance(content.get(MARK), dict)


def _content(state: TrainingState) -> dict[str, Any]:
    """The file's content. The model's weights are the masters, for a loop with fp32 weights."""
    weights = {name: state.master(name) for name in state.weights}
    mark = {"version": __version__, "converted_from": state.format, "trained_in": _dtypes(state)}
    content: dict[str, Any] = {
        MARK: {**mark, "scheduler_class": state.scheduler_class},
        "model": {**weights, **{alias: weights[name] for alias, name in state.aliases.items() if name in weights}},
    }
    if state.groups is not None:
        content["optimizer"] = _optimizer(state)
        content["optimizer_class"] = state.optimizer_class
    content["scheduler"] = state.scheduler
    content["scaler"] = scale_to_torch(state.loss_scale) if state.loss_scale and is_dynamic(state.loss_scale) else None
    content["loss_scale"] = state.loss_scale
    content |= {"extra": state.extra, "random": state.random, "modules": state.modules, "step": state.step}
    content["world_size"] = state.world_size
    return content


def _dtypes(state: TrainingState) -> dict[str, str]:
    """The dtypes in which parameters are trained, if the file has their masters."""
    return {
        name: str(weight.dtype).removeprefix("torch.")
        for name, weight in state.weights.items()
        if state.master(name).dtype != weight.dtype
    }


def _optimizer(state: TrainingState) -> dict[str, Any]:
    """The optimizer's state dict in torch's layout, with names in addition to the indices."""
    assert state.groups is not None
    index = {name: number for number, name in enumerate(state.optimized())}
    entries = {
        index[name]: {key: value for key, value in state.entries[name].items() if key != MASTER}
        for name in index
        if name in state.entries
    }
    groups = [
        {**group.settings, "params": [index[name] for name in group.names], "param_names": list(group.names)}
        for group in state.groups
    ]
    return {"state": {number: own for number, own in entries.items() if own}, "param_groups": groups}
