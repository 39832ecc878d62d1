"""Rates of the update's kernel beside that of a copy, on a GPU: ``python -m tests.measure_kernel``.

``--kinds`` selects some; ``--launches 1024x4x4 256x8x1x96`` compares launches with the usual one: the elements of a
tile, tiles of a program, warps, and the most registers of a thread. ``--in-cache`` updates so few elements that they
stay in the device's cache: what takes as long there is limited by arithmetic, and not by memory.

Each line says, too, how many instructions the kernel's loop has for each element, those of rare cases included.

One run of 134 M bf16 weights with split masters, by how the moments are kept. Bytes are those that an update reads and
writes, gradients in bf16 included.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightstep.precision import adam_kernel
from lightstep.precision.adam_batch import AdamBatch, AdamMemory, AdamTensors, adam_call

COUNT, IN_CACHE = 1 << 27, 1 << 21
KEPT = {
    "float32": (0, "none"),
    "bfloat16": (1, "none"),
    "bfloat16 stochastic": (1, "window"),
    "int8": (128, "none"),
    "int8 stochastic": (128, "window"),
}
"""``block`` and ``noise`` of :class:`lightstep.precision.adam_kernel.Kind`."""


def milliseconds(run: Callable[[], object], times: int = 12) -> float:
    """The median of several runs on the device."""
    found = []
    for _ in range(3 + times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[3:])


def copy_rate(device: torch.device) -> float:
    """GB/s, read and written."""
    source = torch.empty(8 * COUNT, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6


def repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    """A function that runs it so often, from a graph: small updates would wait for their launches."""
    run()  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def memory_of(kind: adam_kernel.Kind, count: int) -> tuple[AdamMemory, Tensor, float]:
    """Memory for updates of this kind, a gradient, and bytes for each parameter."""
    device, generator = kind.device, torch.Generator(kind.device).manual_seed(0)

    def numbers(scale: float) -> Tensor:
        return torch.randn(count, generator=generator, device=device).mul_(scale)

    gradient, weight = numbers(1e-3).bfloat16(), numbers(1.0).bfloat16()
    low = torch.randint(-9999, 9999, (count,), generator=generator, device=device, dtype=torch.int16)
    values = {"exp_avg": numbers(1e-3), "exp_avg_sq": numbers(1e-3).square_()}
    planes = {key: [value] for key, value in values.items()}
    for key, codec in kind.codecs().items():
        planes[key] = [torch.empty(count // per, dtype=dtype, device=device) for _, dtype, per in codec.planes]
        codec.at(planes[key]).encode(values[key])
    (first, *scales), (second, *beside) = planes["exp_avg"], planes["exp_avg_sq"]
    rest = {"scales": scales[0], "sq_scales": beside[0], "sq_signs": beside[1]} if scales else {}
    tensors = AdamTensors(first, second, None, weight, low, None, **rest)
    moments = sum(plane.nbytes for own in planes.values() for plane in own) / count
    return AdamMemory(tensors, 1, 0, kind.block, kind.window, kind.noisy), gradient, 2 + 2 * (2 + 2 + moments)


def instructions(kernels: Any, block: int) -> float:
    """Of the kernel that ran last, for each element in its longest loop."""
    launcher, tile = kernels.coding if block > 1 else kernels.plain
    found, labels, longest = 0, {}, 0
    for line in [*launcher._compiled.values()][-1].asm["sass"].splitlines()[1:]:
        if label := re.fullmatch(r"(LBB\d+):", line.strip()):
            labels[label[1]] = found
            continue
        found += 1
        if back := re.search(r"\bBRA\b.*\b(LBB\d+)", line):
            longest = max(longest, found - labels.get(back[1], found))
    versions = 1 if block > 1 else 2  # of the body: for whole tiles and for the last one
    return longest * 32 * launcher._options["num_warps"] / (tile * versions)


def launcher_of(name: str) -> Any:
    from lightstep.precision import adam_triton

    tile, tiles, warps, *registers = map(int, name.split("x"))
    return adam_triton.launcher(tile, tiles, warps, **({"maxnreg": registers[0]} if registers else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KEPT, default=list(KEPT))
    parser.add_argument("--launches", nargs="+", default=[])
    parser.add_argument("--in-cache", action="store_true")
    options = parser.parse_args()
    count, times = (IN_CACHE, COUNT // IN_CACHE) if options.in_cache else (COUNT, 1)
    device = torch.device("cuda", torch.cuda.current_device())
    kernels: Any = adam_kernel.fused_kernel_on(device)
    assert kernels is not None, "there is no kernel for this device"
    rate, usual = copy_rate(device), (kernels.plain, kernels.coding)
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy has {rate:.0f} GB/s\n")
    flags = (True, True, True, False, False, False, True)  # from fingerprinted to multiplied
    marks, step = torch.zeros(3, dtype=torch.int32, device=device), torch.tensor(7.0, device=device)
    for name in options.kinds:
        block, noise = KEPT[name]
        dtype, noisy = torch.bfloat16, noise != "none"
        kind = adam_kernel.Kind(device, dtype, dtype, True, False, *flags, block, noise, noisy)  # type: ignore[arg-type]
        memory, gradient, nbytes = memory_of(kind, count)
        for launch in ["", *options.launches]:
            kernels.plain, kernels.coding = (launcher_of(launch),) * 2 if launch else usual
            batch, call = AdamBatch([memory], marks), adam_call(kind.settings(1e-4, 0.9, 0.95, 1e-8), kind.scaling())
            run = functools.partial(kernels.update, batch, [gradient], [step], call)
            found = milliseconds(repeated(run, times) if options.in_cache else run)
            share = nbytes * COUNT / found / 1e6 / rate
            sys.stdout.write(
                f"{name:20} {launch:12} {found / COUNT * 1e9:6.2f} ms per 1e9, {nbytes:5.2f} bytes each, "
                f"{share:.0%} of a copy, {instructions(kernels, block):.0f} instructions\n"
            )


if __name__ == "__main__":
    main()
