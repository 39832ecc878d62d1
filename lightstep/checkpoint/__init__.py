"""Checkpoints: written completely or not at all, loaded on any number of ranks.

``formats`` converts from and to other libraries' formats.
"""

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.huggingface import export_model, to_torch_state_dict
from lightstep.checkpoint.layout import latest_checkpoint
from lightstep.checkpoint.load import load_checkpoint
from lightstep.checkpoint.save import save_checkpoint
from lightstep.checkpoint.saved import verify_checkpoints

__all__ = [
    "CheckpointError",
    "export_model",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "to_torch_state_dict",
    "verify_checkpoints",
]
