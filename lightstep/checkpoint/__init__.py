"""Checkpoints: written whole or not at all, read on any number of ranks; other libraries' formats in ``formats``."""

from lightstep.checkpoint.checkpoint import (
    CheckpointError,
    export_model,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    to_torch_state_dict,
)

__all__ = [
    "CheckpointError",
    "export_model",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "to_torch_state_dict",
]
