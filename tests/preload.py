"""What ranks, examples and other programs need, imported once by the process that all of them are forked from.

Without the collector, which takes a fifth of the time of these imports and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

MODULES = (
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "lightstep.strategy.base",
    "lightstep.sharding",
    "lightstep.checkpoint",
    "tests.rollout_faults",
    "tests.snippets",
    "tests.distributed.models",
)

gc.disable()
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()
gc.enable()
