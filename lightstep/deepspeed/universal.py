"""DeepSpeed's universal checkpoints: for any stage and number of ranks, from DeepSpeed's or lightstep's converter.

::

    DIRECTORY/
        latest_universal       the name of the folder below
        global_step100/zero/   one folder per parameter: master and moments; and the groups
        global_step100/*.pt    weights and everything small
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

from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.formats.safe_load import refused_name
from lightstep.checkpoint.formats.zero_files import RESERVED as DEEPSPEEDS_OWN
from lightstep.checkpoint.load import apply_scheduler
from lightstep.checkpoint.partly_loaded import loading
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.small_state import set_random_states
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer

logger = logging.getLogger(__name__)

UNIVERSAL = "latest_universal"

_TRUSTED = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Classes in DeepSpeed's files beside what torch itself allows."""


def refuse_untrusted(file: Path) -> None:
    """Raise when unpickling the file would run anything but torch's and DeepSpeed's own records.

    Raises:
        CheckpointError: naming what it asks for.
    """
    wanted = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - _TRUSTED
    if wanted:
        raise CheckpointError(f"{file} asks for {', '.join(sorted(wanted))}, which no file of DeepSpeed's needs")


@contextmanager
def trusted_loads() -> Iterator[None]:
    """``torch.load(..., weights_only=False)``, as DeepSpeed calls it, makes nothing but what is trusted in this block.

    torch's own switch does it, an environment variable that is read at each load: the call's argument has no say then.
    """
    switches = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in switches}
    os.environ.update(switches)
    try:
        with torch.serialization.safe_globals([_imported(name) for name in _TRUSTED]):
            yield
    except pickle.UnpicklingError as error:  # torch's text recommends to run what is in it
        raise CheckpointError(f"a file is damaged, or holds what must not be run ({refused_name(error)})") from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def load_universal(
    folder: Path, optimizer: DeepSpeedOptimizer, scheduler: Any, weights_only: bool = False
) -> dict[str, Any]:
    """Masters, moments, groups and what else the converter knew, at this engine's stage and number of ranks.

    Raises:
        CheckpointError: it cannot be used. All ranks raise.
    """
    ranks = Ranks()
    with checkpoint_errors(f"{folder} was not loaded"):
        if weights_only:
            raise CheckpointError("a universal checkpoint is loaded with its optimizer state; pass the optimizer too")
        tag = ranks.together(lambda: _checked(folder, optimizer))
        with loading(optimizer.engine.module, [optimizer], folder):
            client = ranks.together(lambda: _load_engine(folder, tag, optimizer))
            ours = client.get("lightstep") or {}
            ranks.together(lambda: _apply(client, ours, optimizer, scheduler, ranks.rank))
    logger.info("loaded %s", folder)
    return {key: value for key, value in client.items() if key not in DEEPSPEEDS_OWN}


def _checked(folder: Path, optimizer: DeepSpeedOptimizer) -> str:
    """The tag; every file has been looked at, and every trained parameter has its files."""
    optimizer.prepare_for_checkpoint()
    tag = (folder / UNIVERSAL).read_text().strip()
    names = [optimizer.engine.param_names[p] for group in optimizer.param_groups for p in group["params"]]
    trained = [p.requires_grad for group in optimizer.param_groups for p in group["params"]]
    missing = [
        name
        for name, wanted in zip(names, trained, strict=True)
        if wanted and not (folder / tag / "zero" / name / "fp32.pt").is_file()
    ]
    if missing:
        raise CheckpointError(f"it belongs to another model: {', '.join(missing[:5])} of {len(missing)} are not in it")
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
    """Stage 3 puts one tensor into the state of every group, and each group's update would count it up."""
    for entries in optimizer.state.values():
        if isinstance(entries.get("step"), torch.Tensor):
            entries["step"] = entries["step"].clone()


def _apply(
    client: Mapping[str, Any], ours: Mapping[str, Any], optimizer: DeepSpeedOptimizer, scheduler: Any, rank: int
) -> None:
    optimizer.take_hyperparameters(ours.get("param_groups"))
    optimizer.loaded()
    states = ours.get("random") or []
    if rank < len(states):
        set_random_states(states[rank])
    if scheduler is not None:
        apply_scheduler(client.get("lr_scheduler"), scheduler)
