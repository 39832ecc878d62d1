"""Measures this machine's rates for `lightstep plan`, in under a minute, and caches them."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from lightstep.bench.link import measure_link
from lightstep.bench.llama import Llama, LlamaShape
from lightstep.bench.probes import free_memory, lap_times
from lightstep.bench.ranks import Ranks, local_device
from lightstep.bench.report import device_name
from lightstep.plan.activations import run_on_meta
from lightstep.plan.models import from_values
from lightstep.plan.profiles import Link, Profile
from lightstep.plan.profiles import from_values as profile_from_values
from lightstep.sharding.preparation import checkpoint_activations

_GPU = LlamaShape("two blocks", 3072, 8192, 1024, 2, 32_000, 128), 16_384, 4096, 10**8
_CPU = LlamaShape("two blocks", 128, 384, 64, 2, 512, 32), 512, 256, 10**6
_REPEATS = 3


def cached_profile(device: torch.device | None = None) -> Profile | None:
    """The cached profile of this device, if there is one."""
    try:
        values = json.loads(_file(device or local_device(None)).read_text(encoding="utf-8"))
        return profile_from_values(values)
    except (OSError, ValueError, TypeError):
        return None


def measure_profile(device: torch.device | None = None) -> Profile:
    """Measure a training pass of two transformer blocks, AdamW, and the link. Results for a GPU are cached."""
    device = device or local_device(None)
    shape, tokens, sequence, elements = _GPU if device.type == "cuda" else _CPU
    when = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else 0.0
    tflops = _tflops(shape, tokens, sequence, device)
    free_memory(device)
    profile = Profile(
        device_name(device),
        tflops,
        _update_ms(elements, device),
        memory,
        _link(device, when),
        f"measured here, {when}",
        _dtype(device),
    )
    if device.type == "cuda":  # later plans are about GPUs
        file = _file(device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
    return profile


def _file(device: torch.device) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lightstep" / f"rates-{device_name(device).lower().replace(' ', '-')}.json"


def _tflops(shape: LlamaShape, tokens: int, sequence: int, device: torch.device) -> float:
    """TFLOP/s of forward and backward, with activation checkpointing."""
    dtype = getattr(torch, _dtype(device))
    model = Llama.make(shape, device, dtype, length=sequence)
    checkpoint_activations(model)
    model.train()
    words = torch.zeros(tokens // sequence, sequence, dtype=torch.long, device=device)

    def once() -> None:
        model(words, words).backward()
        model.zero_grad()

    fastest = _fastest(once, device)
    seen = run_on_meta(from_values(shape.config().to_dict(), dtype), tokens, sequence, True, 1024)
    blocks = seen.blocks * (seen.forward_flops + seen.backward_flops)
    return (blocks + seen.other_forward_flops + seen.other_backward_flops) / fastest / 1e9


def _dtype(device: torch.device) -> str:
    """CPUs without bf16 instructions multiply bf16 ten times slower than fp32."""
    return "bfloat16" if device.type == "cuda" else "float32"


def _update_ms(elements: int, device: torch.device) -> float:
    weight = nn.Parameter(torch.zeros(elements, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return _fastest(lambda: optimizer.step(), device) / elements * 1e9


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """The shortest time in ms, after one untimed run."""
    work()
    return min(lap_times([work] * _REPEATS, device))


def _link(device: torch.device, when: str) -> Link:
    seen = measure_link(device, Ranks(device))
    if seen is None:
        return Link(1e9, 1e9, None, "a CPU has none")
    return Link(min(seen.to_device, seen.to_host), seen.duplex, None, f"measured here, {when}, one GPU alone")
