"""Updates between two rollouts: verl's FSDP2 engine and lightstep's, time and device memory, on one GPU or several.

PYTHONPATH=.venv/verl torchrun --nproc-per-node 2 -m tests.measure_verl
PYTHONPATH=.venv/verl torchrun --nproc-per-node 2 -m tests.measure_verl --layers 16 --vocabulary 128256  # Llama-3.2-1B

Making the model, and engines that load it, take most of the time: the first column has the seconds since torch and
transformers were imported. The model's files are in memory, if there is room.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.verl_engines import import_verl, make_batch, make_engine, save_model, train

GIB = 2**30
BEGIN = time.monotonic()


def say(text: str) -> None:
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"{time.monotonic() - BEGIN:5.1f} {text}\n")
        sys.stdout.flush()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def memory(peak: bool = False) -> float:
    """GiB that are allocated on the device."""
    if not torch.cuda.is_available():
        return 0.0
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / GIB


def weights(engine: Any) -> Iterator[torch.Tensor]:
    """All weights, one at a time, as a rollout engine in the same process gets them."""
    for _, tensor in engine.get_per_tensor_param()[0]:
        yield tensor


def measure(name: str, engine: Any, args: argparse.Namespace) -> None:
    """Rounds of one update with several mini-batches, and of sending the weights. Prints medians after the first."""
    say(f"{name}: loaded")
    updates, sends, losses, peaks, held = [], [], [], [], []
    for number in range(args.rounds):
        batches = [
            make_batch(1000 * number + 10 * k + dist.get_rank(), [args.tokens] * 2, args.vocabulary, 1)
            for k in range(args.mini_batches)
        ]
        synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        losses.append(train(engine, *batches)[-1][0])
        synchronize()
        updates.append(time.monotonic() - begin)
        peaks.append(memory(peak=True))
        held.append(memory())
        begin = time.monotonic()
        for tensor in weights(engine):
            del tensor
        synchronize()
        sends.append(time.monotonic() - begin)
    say(
        f"{name:28} update {statistics.median(updates[1:]):7.2f} s, weights {statistics.median(sends[1:]):6.2f} s, "
        f"device: peak {max(peaks[1:]):5.1f} GiB, between updates {held[-1]:5.1f} GiB; losses "
        + " ".join(f"{loss:.5f}" for loss in losses)
    )


def parameters(args: argparse.Namespace) -> int:
    attention = args.hidden * args.hidden * 2 * (1 + args.kv_heads / args.heads)
    layer = attention + 3 * args.hidden * args.intermediate
    return int(args.layers * layer + 2 * args.vocabulary * args.hidden)


def in_memory(args: argparse.Namespace) -> bool:
    """Whether the files, in fp32, fit there twice."""
    return Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 8 * parameters(args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=1024, help="of each of two sequences of a mini-batch")
    parser.add_argument("--mini-batches", type=int, default=2, help="steps of an update")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--strategies", default="fsdp2,fsdp2-stream")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    say("torch and transformers are imported")
    import_verl()
    say("verl, too")
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    shared = [tempfile.mkdtemp(dir="/dev/shm" if in_memory(args) else None) if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    if rank == 0:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        heads = {"num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads}
        sizes = {"hidden_size": args.hidden, "intermediate_size": args.intermediate, "num_hidden_layers": args.layers}
        save_model(folder, device, **sizes, **heads, vocab_size=args.vocabulary, initializer_range=0.02)
    dist.barrier()
    say(f"a model of {parameters(args) / 1e9:.2f} B parameters is in {folder}")
    common = {
        "lr": 1e-6,
        "override_optimizer_config": {"fused": True},
        "optimizer_offload": True,
        "model": {"override_config": {"attn_implementation": "sdpa"}},
    }
    engine = make_engine("fsdp2", folder, param_offload=True, **common)
    measure("verl fsdp2, offload", engine, args)
    for strategy in args.strategies.split(","):
        del engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        engine = make_engine("lightstep", folder, lightstep=strategy, **common)
        measure(f"lightstep {strategy}", engine, args)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
