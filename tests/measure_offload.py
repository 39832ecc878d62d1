"""Full fine-tuning of Llama-3.1-8B with everything on the host, and a limit on the device's memory.

    python -m tests.measure_offload --gpu-memory 24
    export CUBLAS_WORKSPACE_CONFIG=:4096:8            # for runs that are compared
    python -m tests.measure_offload --save FOLDER     # three steps, a checkpoint, two steps
    python -m tests.measure_offload --load FOLDER     # in a new process: the same two steps

The first prints what the link does, time and peak memory of forward and backward alone (without a limit, weights on the
device), and of a step for each of `--steps`. It needs a GPU with room for weights and gradients (40 GB), for that.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightstep
from lightstep.bench.llama import Llama, LlamaShape
from lightstep.plan.measure import measure_link
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


def set_up(
    shape: LlamaShape, gpu_memory: float, update: str, moments: str, checkpointing: bool | str, device_mib: int
) -> tuple[lightstep.Strategy, Any, Any]:
    """A strategy, a prepared model, and its optimizer."""
    keys = {
        "optimizer_state.update": update,
        "optimizer_state.moments": moments,
        "precision.reduce": "parameters",
        "weights.device_mib": device_mib,
        "sharding.activation_checkpointing": checkpointing,
    }
    torch.cuda.set_per_process_memory_fraction(gpu_memory * 1e9 / torch.cuda.mem_get_info()[1])
    begin = time.perf_counter()
    strategy = lightstep.Strategy.load("offload", overrides=keys)
    model = strategy.prepare_model(Llama.make(shape, torch.device("cuda"), length=SEQUENCE))
    torch.cuda.empty_cache()
    optimizer = strategy.create_optimizer(model, lr=1e-6)
    say(f"set-up: {time.perf_counter() - begin:.0f} s; {host_peak()}")
    return strategy, model, optimizer


def host_peak() -> str:
    return (
        f"host memory of the process at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.0f} GB"
    )


def saved(made: tuple[lightstep.Strategy, Any, Any], shape: LlamaShape, folder: Path, loads: bool) -> None:
    """Steps before and after a checkpoint, or after it alone. Losses and norms of those after it are printed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic
    strategy, model, optimizer = made
    torch.manual_seed(1)
    batches = [batch(shape, SEQUENCE) for _ in range(5)]

    def train(*numbers: int) -> list[tuple[float, float]]:
        found = []
        for number in numbers:
            loss = model(*batches[number])
            optimizer.backward(loss)
            found.append((loss.item(), optimizer.step().grad_norm.item()))
        return found

    if not loads:
        train(0, 1, 2)
    begin = time.perf_counter()
    (strategy.load_checkpoint if loads else strategy.save_checkpoint)(folder, model, optimizer)
    seconds, nbytes = (
        time.perf_counter() - begin,
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    )
    say(f"{'loaded' if loads else 'saved'} {nbytes / 1e9:.1f} GB in {seconds:.0f} s; {host_peak()}")
    say(f"losses and norms of the next two steps: {train(3, 4)}; {host_peak()}")
    strategy.close()


def offloaded(made: tuple[lightstep.Strategy, Any, Any], shape: LlamaShape, steps: list[tuple[int, int]]) -> None:
    strategy, model, optimizer = made

    def step(tokens: int, micro_batches: int) -> Callable[[], None]:
        def iterate() -> None:
            for number in range(micro_batches):
                with strategy.accumulate(model, last=number == micro_batches - 1):
                    optimizer.backward(model(*batch(shape, tokens)) / micro_batches)
            optimizer.step()

        return iterate

    timed("first step", step(SEQUENCE, 1), 1)
    for micro_batches, tokens in steps:
        step(tokens, micro_batches)()
        timed(f"{micro_batches} x {tokens} tokens", step(tokens, micro_batches))
    report = optimizer.memory_report()
    say(f"host: {report['host_bytes'] / report['parameters']:.2f} bytes per parameter")


def micro_batches_and_tokens(text: str) -> tuple[int, int]:
    micro_batches, tokens = text.split("x")
    return int(micro_batches), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-memory", type=float, default=24.0, help="GB that this process may allocate")
    parser.add_argument("--update", default="next_forward", help="optimizer_state.update")
    parser.add_argument("--moments", default="float32", help="optimizer_state.moments")
    parser.add_argument("--params", type=float, default=8e9)
    parser.add_argument(
        "--steps",
        type=micro_batches_and_tokens,
        nargs="+",
        metavar="MICRO_BATCHESxTOKENS",
        default=[(1, SEQUENCE), (1, 4 * SEQUENCE), (4, 4 * SEQUENCE), (2, 8 * SEQUENCE)],
    )
    parser.add_argument("--inputs", choices=["device", "host"], default="device", help="those of recomputed blocks")
    parser.add_argument("--device-mib", type=int, default=3600, help="weights.device_mib")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    parser.add_argument("--load", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    shape = LlamaShape.nearest(int(given.params), released=True)
    checkpointing = "host" if given.inputs == "host" else True
    made = partial(set_up, shape, given.gpu_memory, given.update, given.moments, checkpointing, given.device_mib)
    if given.save or given.load:
        saved(made(), shape, given.save or given.load, bool(given.load))
        return
    link = measure_link(torch.device("cuda"))
    say(f"link: {link}")
    alone(shape)
    torch.cuda.empty_cache()
    offloaded(made(), shape, given.steps)


if __name__ == "__main__":
    main()
