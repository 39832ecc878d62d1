"""Reading and writing other libraries' checkpoints: DeepSpeed, plain torch, transformers, LightRFT."""

from __future__ import annotations

from lightstep.checkpoint.formats.convert import convert_checkpoint, describe_checkpoint, read_checkpoint

__all__ = ["convert_checkpoint", "describe_checkpoint", "read_checkpoint"]
