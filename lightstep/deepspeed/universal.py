"""Loading DeepSpeed's universal checkpoints, from DeepSpeed's or lightstep's converter, at any stage and world size.

::

    DIRECTORY/
        latest_universal       the name of the folder below
        global_step100/zero/   a folder per parameter with master and moments, and the parameter groups
        global_step100/*.pt    weights, scheduler, counters, extra
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors, list_names
from lightstep.checkpoint.formats.files import GETATTR, enum_member, refused_name
from lightstep.checkpoint.formats.zero import RESERVED
from lightstep.checkpoint.load import apply_scheduler
from lightstep.checkpoint.model_state import loading
from lightstep.checkpoint.saved import set_random_states
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer
from lightstep.distributed import Ranks

logger = logging.getLogger(__name__)

UNIVERSAL = "latest_universal"

_TRUSTED = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Classes in DeepSpeed's files that torch's weights-only unpickler does not allow by itself."""


def refuse_untrusted(file: Path) -> None:
    """Check that unpickling the file needs only torch's classes and a few of DeepSpeed's.

    Raises:
        CheckpointError: it needs others; the message names them.
    """
    wanted = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - _TRUSTED - {GETATTR}
    if wanted:
        raise CheckpointError(f"{file} asks for {', '.join(sorted(wanted))}, which no file of DeepSpeed's needs")


@contextmanager
def trusted_loads() -> Iterator[None]:
    """In the block ``torch.load(..., weights_only=False)``, as DeepSpeed calls it, uses the weights-only unpickler.

    An environment variable of torch does that. torch reads it in each load, and it overrides the argument.
    """
    switches = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in switches}
    os.environ.update(switches)
    try:
        classes = [_import_class(name) for name in _TRUSTED]
        with torch.serialization.safe_globals([*classes, (enum_member, GETATTR)]):
            yield
    except pickle.UnpicklingError as error:  # torch's own message recommends weights_only=False
        raise CheckpointError(f"a file is damaged, or holds what must not be run ({refused_name(error)})") from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def load_universal(
    folder: Path, optimizer: DeepSpeedOptimizer, scheduler: Any, weights_only: bool = False
) -> dict[str, Any]:
    """Load masters, moments, groups, scheduler and random states into the engine; returns ``extra``.

    Raises:
        CheckpointError: the checkpoint cannot be used. All ranks raise.
    """
    ranks = Ranks()
    with checkpoint_errors(f"{folder} was not loaded"):
        if weights_only:
            raise CheckpointError("a universal checkpoint is loaded with its optimizer state; pass the optimizer too")
        tag = ranks.together(lambda: _check(folder, optimizer))
        with loading(optimizer.engine.module, [optimizer], folder):
            client = ranks.together(lambda: _load_engine(folder, tag, optimizer))
            section = client.get("lightstep") or {}
            ranks.together(lambda: _apply(client, section, optimizer, scheduler, ranks.rank))
    logger.info("loaded %s", folder)
    return {key: value for key, value in client.items() if key not in RESERVED}


def _check(folder: Path, optimizer: DeepSpeedOptimizer) -> str:
    """Check that all files may be loaded and that every trained parameter is there; returns the tag."""
    optimizer.prepare_for_checkpoint()
    tag = (folder / UNIVERSAL).read_text().strip()
    names = [optimizer.engine.param_names[p] for group in optimizer.param_groups for p in group["params"]]
    trained = [p.requires_grad for group in optimizer.param_groups for p in group["params"]]
    missing = [
        name
        for name, is_trained in zip(names, trained, strict=True)
        if is_trained and not (folder / tag / "zero" / name / "fp32.pt").is_file()
    ]
    if missing:
        raise CheckpointError(f"it belongs to another model; not in the checkpoint: {list_names(missing)}")
    for file in sorted((folder / tag).rglob("*.pt")):
        refuse_untrusted(file)
    return tag


def _load_engine(folder: Path, tag: str, optimizer: DeepSpeedOptimizer) -> dict[str, Any]:
    engine = optimizer.engine
    engine._config.load_universal_checkpoint = True
    try:
        with trusted_loads():
            _, client = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    finally:
        engine._config.load_universal_checkpoint = False
    _separate_step_counts(engine.optimizer.optimizer)
    return dict(client)


def _separate_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Give each group its own step count: at stage 3 DeepSpeed loads one tensor, which every update would increment."""
    for entries in optimizer.state.values():
        if isinstance(entries.get("step"), torch.Tensor):
            entries["step"] = entries["step"].clone()


def _apply(
    client: Mapping[str, Any], section: Mapping[str, Any], optimizer: DeepSpeedOptimizer, scheduler: Any, rank: int
) -> None:
    optimizer.load_hyperparameters(section.get("param_groups"))
    optimizer.after_load()
    states = section.get("random") or []
    if rank < len(states):
        set_random_states(states[rank])
    if scheduler is not None:
        apply_scheduler(client.get("lr_scheduler"), scheduler)
