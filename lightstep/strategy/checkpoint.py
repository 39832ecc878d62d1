"""The old name of :mod:`lightstep.checkpoint`, for one version."""

from lightstep.checkpoint import (
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
