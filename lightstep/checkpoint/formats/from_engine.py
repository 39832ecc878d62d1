"""Reading checkpoints of ``sharding.kind: deepspeed``: DeepSpeed's files, and lightstep's manifest and small state."""

from __future__ import annotations

from pathlib import Path

from lightstep.checkpoint.formats.from_zero import read_zero
from lightstep.checkpoint.formats.state import Group, TrainingState
from lightstep.checkpoint.formats.zero_files import open_zero
from lightstep.checkpoint.layout import read_manifest
from lightstep.checkpoint.small_state import read_state

SECTION = "deepspeed"


def is_engine_checkpoint(folder: Path) -> bool:
    """Whether DeepSpeed wrote the tensors of this lightstep checkpoint."""
    return bool(read_manifest(folder).get(SECTION))


def read_engine_checkpoint(folder: Path) -> TrainingState:
    """The run in such a checkpoint: tensors and loss scale from DeepSpeed's files, all else from lightstep's.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    manifest = read_manifest(folder)
    small = read_state(folder, manifest)
    state = read_zero(open_zero(folder / manifest[SECTION]["tag"]))
    trained = set(state.optimized())
    state.groups = [
        Group([name for name in names if name in trained], dict(settings))
        for names, settings in zip(manifest["groups"], small["optimizer"]["groups"], strict=True)
    ]
    state.scheduler = small.get("scheduler")
    state.extra = {**(small.get("extra") or {}), SECTION: state.extra[SECTION]}
    state.random = list(small.get("random") or [])
    state.optimizer_class = manifest.get("optimizer")
    return state
