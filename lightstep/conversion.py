"""The old name of :mod:`lightstep.checkpoint.formats`, for one version."""

from lightstep.checkpoint.formats import convert_checkpoint, describe_checkpoint

__all__ = ["convert_checkpoint", "describe_checkpoint"]
