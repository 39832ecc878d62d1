"""Whether strategies that shard train the same weights, bit for bit, over 50 steps of a Llama, and after a resume.

torchrun --nproc-per-node 4 -m tests.measure_exactness FOLDER            # also leaves a checkpoint of the middle
torchrun --nproc-per-node 2 -m tests.measure_exactness FOLDER --resume   # goes on from it, on fewer ranks

About half of the steps are clipped, so that overlapped updates are done again, and two have gradients that are not
finite, and are dropped; under ``in_backward`` nothing is clipped or dropped. Strategies are compared with ``fsdp2``:
losses, norms, and every bit of weights, masters and moments at the end. With weights on the host every micro-batch is
reduced, and sums have other bits than where micro-batches are added first; so that is compared with an ``fsdp2`` that
reduces each, too.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lightstep
from lightstep.distributed import local_tensor
from tests.distributed.ranks import device_of

STEPS, MIDDLE, DROPPED = 50, 25, (7, 33)
HALF, PART = "half of the state", "a sixteenth of the state"
Settings = dict[str, Any]


def at(update: str, backend: str = "stream") -> Settings:
    ring = {"optimizer_state.ring_mib": PART} if backend == "stream" else {}
    return {"optimizer_state.backend": backend, "optimizer_state.update": update, **ring}


OFFLOAD: Settings = {"weights.placement": "host", "weights.device_mib": 0.001}
REDUCED = ", every micro-batch reduced"
GROUPS: dict[str, tuple[Settings, dict[str, Settings]]] = {
    "fp32 moments": (
        {},
        {
            "resident, once more": {},
            "resident, overlap": at("overlap", "resident"),
            "bulk": at("at_step", "bulk"),
            "bulk, overlap": at("overlap", "bulk"),
            "stream": at("at_step"),
            "stream, next_forward": at("next_forward"),
            "stream, overlap": at("overlap"),
            "stream, overlap, some on the device": {**at("overlap"), "optimizer_state.resident_gib": HALF},
        },
    ),
    "fp32 moments" + REDUCED: (
        {},
        {
            "weights on the host": {**at("at_step"), **OFFLOAD},
            "weights on the host, next_forward": {**at("next_forward"), **OFFLOAD},
            "weights on the host, overlap": {**at("overlap"), **OFFLOAD},
            "weights on the host, gradients stay": {**at("next_forward"), **OFFLOAD, "weights.gradients_gib": 100},
        },
    ),
    "moments in 8 bits": ({"optimizer_state.moments": "int8"}, {"stream, overlap": at("overlap")}),
    "moments in 8 bits" + REDUCED: (
        {"optimizer_state.moments": "int8"},
        {"weights on the host, overlap": {**at("overlap"), **OFFLOAD}},
    ),
    "not clipped": ({"clipping.max_norm": None}, {"stream, in_backward": at("in_backward")}),
    "not clipped" + REDUCED: (
        {"clipping.max_norm": None},
        {"weights on the host, in_backward": {**at("in_backward"), **OFFLOAD}},
    ),
    "hsdp": (
        {"sharding.mesh": {"replicate": 2, "shard": "auto"}},
        {"stream": at("at_step"), "stream, overlap": at("overlap"), "stream, next_forward": at("next_forward")},
    ),
}


def run(
    settings: Settings, args: argparse.Namespace, path: Path, accumulates: bool = True
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Losses and norms of all steps, this rank's shards at the end, and the norms once more."""
    keys = {"clipping.max_norm": args.max_norm, **settings}
    clips, norms = keys["clipping.max_norm"] is not None, []
    device = device_of(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers}
    config = LlamaConfig(vocab_size=args.vocabulary, num_attention_heads=8, pad_token_id=0, **sizes)
    config._attn_implementation = "eager"
    llama = LlamaForCausalLM(config)
    state_mib = 10 * llama.num_parameters() / dist.get_world_size() / 2**20
    if keys.get("optimizer_state.resident_gib") == HALF:
        keys["optimizer_state.resident_gib"] = state_mib / 2 / 2**10
    if keys.get("optimizer_state.ring_mib") == PART:
        keys["optimizer_state.ring_mib"] = state_mib / 16
    strategy = lightstep.Strategy.load("fsdp2", overrides=keys)
    model: Any = strategy.prepare_model(llama)
    optimizer: Any = strategy.create_optimizer(model, lr=1e-3)
    first = 0
    if args.resume:
        strategy.load_checkpoint(path, model, optimizer)
        first = MIDDLE
    figures = []
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        for micro in range(2):
            words = torch.randint(1, args.vocabulary, (2, args.tokens), generator=generator).to(device)
            with strategy.accumulate(model, last=micro == 1 or not accumulates):
                loss = model(input_ids=words, labels=words).loss / 2
                optimizer.backward(loss * float("inf") if clips and step in DROPPED and micro else loss)
        result = optimizer.step()
        figures.append(loss.detach())
        if clips:
            assert bool(result) is (step not in DROPPED), step
            norms += [float(result.grad_norm)] if bool(result) else []
        if step == MIDDLE - 1 and not args.resume:
            strategy.save_checkpoint(path, model, optimizer)
    optimizer.wait_for_update()
    state = optimizer.state_dict()["state"]
    shards = [local_tensor(parameter).detach().clone() for parameter in model.parameters()]
    shards += [local_tensor(value).clone() for each in state.values() for value in each.values()]
    strategy.close()
    return [*map(Tensor.cpu, figures), torch.tensor(norms)], [shard.cpu() for shard in shards], norms


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    """On all ranks."""
    here = len(found) == len(expected) and all(map(torch.equal, found, expected))
    flag = torch.tensor([int(here)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for checkpoints; all ranks see it")
    parser.add_argument("--resume", action="store_true", help="from checkpoints there, on any number of ranks")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="GROUP")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    has_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if has_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    args.max_norm = math.inf
    *_, norms = run({}, args, args.folder / "norms")
    args.max_norm = statistics.median(norms)
    begin, different = time.monotonic(), 0
    for group in args.groups:
        if group == "hsdp" and dist.get_world_size() < 4:
            continue
        common, strategies = GROUPS[group]
        figures, shards, norms = run(common, args, args.folder / group, not group.endswith(REDUCED))
        for name, settings in strategies.items():
            found, parts, _ = run({**common, **settings}, args, args.folder / group / name)
            same = equal(found, figures) and equal(parts, shards)
            different += not same
            say(f"  {name}: {'equal' if same else 'DIFFERENT'}")
        clipped, seconds = sum(norm > args.max_norm for norm in norms), time.monotonic() - begin
        say(f"{group}: {len(shards)} tensors, {clipped} of {len(figures) - 1} steps clipped; {seconds:.0f} s")
    say(f"{dist.get_world_size()} ranks, {'a GPU each' if has_gpus else 'gloo'}: {different} different")
    dist.destroy_process_group()
    sys.exit(1 if different else 0)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
