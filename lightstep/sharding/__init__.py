"""Preparing a model: placement, sharding units, hooks that wait for updates, reduced gradients."""
