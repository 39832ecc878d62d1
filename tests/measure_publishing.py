"""Publishes a Llama to a server's stand-in in another process: time, stall of the loop, iterations meanwhile, and bytes
with and without deltas. Where there are more GPUs than trainers, the server has the next one, over nccl; else it is on
the CPU, over gloo. A delta is what one step has changed.

python -m tests.measure_publishing                      # 25 M parameters on the CPU, over gloo
python -m tests.measure_publishing --llama-3b           # 3.2 B parameters, the shape of Llama-3.2-3B
python -m tests.measure_publishing --vllm PYTHON        # to a real server, on the CPU; or --sglang
torchrun --nproc-per-node 3 -m tests.measure_publishing --llama-3b --strategy fsdp2     # from several trainers
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightstep import SglangServer, Strategy, VllmServer
from lightstep.rollout import transport
from lightstep.strategy.base import Strategy as BaseStrategy
from tests.rollout_servers import FakeVllm
from tests.servers.test_real_servers import RealServer

GIB = 2**30
PIECE = 2**24
ROWS = ((1e-6, False), (1e-6, True), (1e-5, True))
"""Learning rates, and whether deltas are sent."""
TRAINERS, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def make_model(args: argparse.Namespace) -> nn.Module:
    """On the meta device."""
    sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 64}
    settings = {"vocab_size": args.vocabulary, "pad_token_id": 0, **sizes, **heads}
    if args.llama_3b:
        settings |= {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "vocab_size": 128256}
        settings |= {"num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**settings))


@torch.no_grad()
def digest(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, int]]:
    """Two sums of each tensor's words, one of them with a weight for each position. Computed where the tensor is."""
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        words, plain, weighted = whole.bfloat16().contiguous().view(-1).view(torch.int16), [], []
        for start in range(0, len(words), PIECE):
            piece = words[start : start + PIECE].long()
            places = torch.arange(start, start + len(piece), device=piece.device) % 65521 + 1
            plain.append(piece.sum())
            weighted.append((piece * places).sum())
        found[name] = int(torch.stack(plain).sum()), int(torch.stack(weighted).sum())
    return found


def serve(args: argparse.Namespace, pipe: Connection) -> None:
    """A server, until it is told to end. Asked for anything else, it sends the digest of its weights."""
    torch.set_num_threads(1)
    transport.CHANNELS = args.channels
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = make_model(args).named_parameters()
    weights = {name: torch.zeros(p.shape, dtype=torch.bfloat16, device=device) for name, p in named}
    server = FakeVllm(weights, timeout_s=120.0, device=device)
    del weights
    pipe.send(server.url)
    while pipe.recv() != "end":
        pipe.send(digest(server.process.weights.items()))


def has_own_gpu() -> bool:
    """The server has."""
    return torch.cuda.device_count() > TRAINERS


@contextlib.contextmanager
def stand_in(args: argparse.Namespace) -> Iterator[tuple[str, Connection]]:
    """Its URL, and what asks it for digests."""
    processes = multiprocessing.get_context("spawn")
    pipe, other = processes.Pipe()
    server = processes.Process(target=serve, args=(args, other), daemon=True)
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": str(TRAINERS) if has_own_gpu() else ""}):
        server.start()
    yield pipe.recv(), pipe
    pipe.send("end")
    server.join()


@contextlib.contextmanager
def real_server(args: argparse.Namespace) -> Iterator[tuple[str, None]]:
    """Its URL. It begins with other weights."""
    kind = "vllm" if args.vllm else "sglang"
    with tempfile.TemporaryDirectory() as folder:
        model: Any = LlamaForCausalLM(make_model(args).config).bfloat16()
        model.save_pretrained(Path(folder, "model"))
        del model
        server = RealServer(kind, args.vllm or args.sglang, Path(folder), ["--skip-tokenizer-init"])
        server.start()
        try:
            yield server.url, None
        finally:
            server.kill()


@contextlib.contextmanager
def other_trainer(args: argparse.Namespace) -> Iterator[tuple[str, None]]:
    yield "http://known-to-the-first-one", None


class Measurement:
    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.client = SglangServer if args.sglang else VllmServer
        self.strategy: BaseStrategy = Strategy.load(args.strategy)
        torch.manual_seed(0)
        self.model = self.strategy.prepare_model(make_model(args))
        self.optimizer: Any = self.strategy.create_optimizer(self.model, lr=1e-6, weight_decay=0.0)
        self.device = self.strategy.device
        self.vocabulary, self.iterations = self.model.config.vocab_size, args.iterations
        self.url, self.checks = url, not (args.vllm or args.sglang)

    def step(self, tokens: int) -> None:
        batch = torch.randint(0, self.vocabulary, (1, tokens), device=self.device)
        self.optimizer.backward(self.model(input_ids=batch, labels=batch).loss)
        self.optimizer.step()
        if self.device.type == "cpu":
            self.optimizer.wait_for_update()

    def steps(self, tokens: int) -> list[float]:
        """Iterations that wait for nothing on the host: when each of them ended, in seconds from the beginning."""
        moments = [self.moment()]
        for _ in range(self.iterations):
            self.step(tokens)
            moments.append(self.moment())
        if self.device.type == "cpu":
            return [moment - moments[0] for moment in moments]
        moments[-1].synchronize()
        return [moments[0].elapsed_time(moment) / 1e3 for moment in moments]

    def moment(self) -> Any:
        """Now, on the stream that computes."""
        if self.device.type == "cpu":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        self.optimizer.wait_for_update()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def row(self, tokens: int, lr: float, deltas: bool, steps: int, pipe: Connection | None) -> None:
        """Publications that the loop does not wait for, with iterations meanwhile. Prints medians."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        backend = None if has_own_gpu() else "gloo"
        servers = self.client(self.url, timeout_s=120, backend=backend, deltas=deltas)
        for _ in range(2):  # connects the two, and page-locks memory
            self.strategy.publish_weights(self.model, servers, wait=False)
            self.strategy.wait_for_publication()
        self.steps(tokens)
        alone = statistics.median(end - start for start, end in itertools.pairwise(self.steps(tokens)))
        calls, copies, reports, meanwhile = [], [], [], []
        for number in range(steps):
            if deltas:  # to a set of one step before
                self.strategy.publish_weights(self.model, servers)
            self.step(tokens)
            expected = digest(self.model.named_parameters()) if number == 0 and self.checks else None
            self.synchronize()
            begin = time.monotonic()
            self.strategy.publish_weights(self.model, servers, wait=False)
            calls.append(time.monotonic() - begin)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the copy on the device
            copied = time.monotonic() - begin
            ends = self.steps(tokens)
            report = self.strategy.wait_for_publication()
            assert report is not None
            reports.append(report)
            copies.append(copied)
            pairs = itertools.pairwise(ends)
            meanwhile += [(end - start) / alone for start, end in pairs if start < report.seconds - copied]
            if pipe is not None and expected is not None:
                pipe.send("digest")
                assert pipe.recv() == expected, "what arrived is not what was published"
        servers.close()
        if RANK:
            return
        size, seconds = statistics.median(r.nbytes for r in reports), statistics.median(r.seconds for r in reports)
        call, copy = statistics.median(calls) * 1e3, statistics.median(copies) * 1e3
        say(
            f"{'deltas' if deltas else 'whole':7} lr {lr:g}: {size / 2**20:.1f} MiB "
            f"({size / reports[0].whole_nbytes:.1%}) in {seconds:.2f} s ({size / seconds / 1e9:.2f} GB/s); the loop "
            f"waited {call:.1f} ms, its stream {copy:.1f} ms; an iteration of {tokens} tokens takes {alone * 1e3:.0f} "
            f"ms, and {statistics.mean(meanwhile):.3f} of that meanwhile ({len(meanwhile)} iterations: median "
            f"{statistics.median(meanwhile):.3f}, longest {max(meanwhile):.3f}){'' if pipe is None else '; bits equal'}"
        )


def say(text: str) -> None:
    if RANK == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def link(device: torch.device) -> str:
    """Bytes per second between a GPU and page-locked memory, which bounds a publication over the host."""
    if device.type == "cpu":
        return "gloo"
    there, here = (
        torch.empty(GIB, dtype=torch.uint8, device=device),
        torch.empty(GIB, dtype=torch.uint8, pin_memory=True),
    )
    rates = []
    for target, source in ((here, there), (there, here)):
        target.copy_(source)
        begin = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize()
        rates.append(GIB / (time.monotonic() - begin) / 1e9)
    return f"{rates[0]:.0f} GB/s to the host and {rates[1]:.0f} GB/s back"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="resident")
    parser.add_argument("--llama-3b", action="store_true", help="instead of the next three")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16], help="of each iteration; rows for each number")
    parser.add_argument("--iterations", type=int, default=8, help="while a set is on its way")
    parser.add_argument("--steps", type=int, default=5, help="publications of each kind")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only so many")
    parser.add_argument("--vllm", help="the interpreter of a real server")
    parser.add_argument("--sglang", help="the same, for whole sets")
    parser.add_argument("--channels", type=int, default=transport.CHANNELS, help="of NCCL, at most")
    args = parser.parse_args()
    torch.set_num_threads(2)
    transport.CHANNELS = args.channels
    if torch.cuda.is_available():
        torch.cuda.set_device(RANK)
    server = other_trainer if RANK else real_server if args.vllm or args.sglang else stand_in
    with server(args) as (url, pipe):
        measurement = Measurement(args, url)
        count = sum(p.numel() for p in measurement.model.parameters()) / 1e6
        for _ in range(3):
            measurement.step(args.tokens[0])
        say(f"{count:.0f} M parameters, {args.strategy}, {TRAINERS} trainers; {link(measurement.device)}")
        for tokens in args.tokens:
            for lr, deltas in ROWS[: 1 if args.sglang else args.rows]:
                measurement.row(tokens, lr, deltas, args.steps, pipe)
        measurement.strategy.close()


if __name__ == "__main__":
    main()
