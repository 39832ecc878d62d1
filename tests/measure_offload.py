"""Full fine-tuning of Llama-3.1-8B with everything on the host, and a limit on the device's memory.

    python -m tests.measure_offload --gpu-memory 24

Prints time and peak memory of forward and backward alone (without a limit, weights on the device), of a step with one
micro-batch, and of one with several. It needs a GPU with room for weights and gradients (40 GB), for the first line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import lightstep
from lightstep.bench.llama import Llama, LlamaShape
from lightstep.sharding.preparation import checkpoint_activations

SEQUENCE = 4096


def batch(shape: LlamaShape, tokens: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(shape.vocabulary, (tokens // SEQUENCE, SEQUENCE + 1), device="cuda")
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def timed(what: str, work: Callable[[], object], times: int = 3) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    took, peak = (time.perf_counter() - begin) / times * 1e3, torch.cuda.max_memory_allocated() / 1e9
    say(f"{what}: {took:.0f} ms, peak {peak:.1f} GB")


def alone(shape: LlamaShape) -> None:
    model = Llama.make(shape, torch.device("cuda"), length=SEQUENCE)
    checkpoint_activations(model)
    words = batch(shape, 4 * SEQUENCE)

    def iterate() -> None:
        model(*words).backward()

    iterate()
    timed(f"forward and backward alone, {4 * SEQUENCE} tokens", iterate)


def offloaded(shape: LlamaShape, gpu_memory: float, update: str) -> None:
    keys = {
        "optimizer_state.update": update,
        "precision.reduce": "parameters",
        "weights.device_mib": 3600,
        "sharding.activation_checkpointing": True,
    }
    strategy = lightstep.Strategy.load("offload", overrides=keys)
    model = strategy.prepare_model(Llama.make(shape, torch.device("cuda"), length=SEQUENCE))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(gpu_memory * 1e9 / torch.cuda.mem_get_info()[1])
    optimizer = strategy.create_optimizer(model, lr=1e-6)

    def step(tokens: int, micro_batches: int) -> Callable[[], None]:
        def iterate() -> None:
            for number in range(micro_batches):
                with strategy.accumulate(model, last=number == micro_batches - 1):
                    optimizer.backward(model(*batch(shape, tokens)) / micro_batches)
            optimizer.step()

        return iterate

    timed("first step", step(SEQUENCE, 1), 1)
    for tokens, micro_batches in ((SEQUENCE, 1), (4 * SEQUENCE, 1), (4 * SEQUENCE, 4)):
        step(tokens, micro_batches)()
        timed(f"{micro_batches} x {tokens} tokens", step(tokens, micro_batches))
    report = optimizer.memory_report()
    say(f"host: {report['host_bytes'] / report['parameters']:.2f} bytes per parameter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-memory", type=float, default=24.0, help="GB that this process may allocate")
    parser.add_argument("--update", default="next_forward", help="optimizer_state.update")
    given = parser.parse_args()
    shape = LlamaShape.nearest(8_000_000_000, released=True)
    alone(shape)
    torch.cuda.empty_cache()
    offloaded(shape, given.gpu_memory, given.update)


if __name__ == "__main__":
    main()
