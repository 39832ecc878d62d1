"""Recognising a checkpoint's format, and reading it."""

from __future__ import annotations

from pathlib import Path

from lightstep.checkpoint.errors import CheckpointError, NotFoundError
from lightstep.checkpoint.formats.from_dcp import METADATA, read_dcp
from lightstep.checkpoint.formats.from_engine import is_engine_checkpoint, read_engine_checkpoint
from lightstep.checkpoint.formats.from_lightrft import is_lightrft, rank_files, read_lightrft
from lightstep.checkpoint.formats.from_lightstep import read_lightstep
from lightstep.checkpoint.formats.from_torch import (
    TRAINER_STATE,
    add_trainer_files,
    is_trainer_checkpoint,
    read_torch_file,
    read_trainer_checkpoint,
)
from lightstep.checkpoint.formats.from_universal import PARAMETERS, read_universal
from lightstep.checkpoint.formats.from_zero import read_zero
from lightstep.checkpoint.formats.names import Naming
from lightstep.checkpoint.formats.safe_load import load_file
from lightstep.checkpoint.formats.state import TrainingState
from lightstep.checkpoint.formats.zero_files import MODEL_FILE, OPTIMIZER_FILE, open_zero
from lightstep.checkpoint.layout import MANIFEST, find_checkpoint, latest_checkpoint
from lightstep.checkpoint.urls import UrlPath

READABLE = (
    "lightstep checkpoints, DeepSpeed's ZeRO and universal checkpoints, files of torch.save with a model and an "
    "optimizer, transformers Trainer's checkpoint-N folders, folders of torch.distributed.checkpoint, and LightRFT's "
    "optim_states"
)


def read_checkpoint(path: Path, naming: Naming | None = None) -> TrainingState:
    """The run in a checkpoint of any known format. Every file is opened; tensors are read later.

    Raises:
        CheckpointError: there is no checkpoint in a known format, or files are missing, damaged, or of different runs.
    """
    state = _read(path, naming or Naming())
    state.check()
    return state


def _read(path: Path, naming: Naming) -> TrainingState:
    if path.is_file():
        content = load_file(path)
        return read_lightrft(path, naming) if is_lightrft(content) else read_torch_file(path, naming)
    if not path.is_dir() or (path / MANIFEST).is_file():
        whole = find_checkpoint(path)
        return read_engine_checkpoint(whole) if is_engine_checkpoint(whole) else read_lightstep(whole)
    if isinstance(path, UrlPath):
        raise NotFoundError(f"{path} holds no checkpoint of lightstep; copy one of another format to a local folder")
    folder = _tagged(path)
    if (folder / PARAMETERS).is_dir():
        return _with_trainer_files(read_universal(folder), folder.parent)
    if any(OPTIMIZER_FILE.fullmatch(entry.name) or MODEL_FILE.fullmatch(entry.name) for entry in folder.iterdir()):
        return _with_trainer_files(read_zero(open_zero(folder)), folder.parent)
    if rank_files(path):
        return read_lightrft(path, naming)
    if (path / METADATA).is_file():
        return read_dcp(path)
    if is_trainer_checkpoint(path):
        return read_trainer_checkpoint(path, naming)
    if (newest := latest_checkpoint(path)) is not None:
        raise NotFoundError(f"{path} is a folder of checkpoints; the newest is {newest}")
    raise NotFoundError(f"{path} holds no checkpoint in a known format. Known are {READABLE}")


def _with_trainer_files(state: TrainingState, folder: Path) -> TrainingState:
    """The run of DeepSpeed's files, with the Trainer's own if ``folder`` is a checkpoint of it."""
    if (folder / TRAINER_STATE).is_file():
        add_trainer_files(state, folder)
    return state


def _tagged(path: Path) -> Path:
    """The folder that DeepSpeed's ``latest`` or ``latest_universal`` names."""
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).is_file():
            folder = path / (path / pointer).read_text(encoding="utf-8").strip()
            if not folder.is_dir() or folder.parent != path:
                raise CheckpointError(
                    f"{path / pointer} names {folder.name!r}, which is not there; pass another folder"
                )
            return folder
    return path
