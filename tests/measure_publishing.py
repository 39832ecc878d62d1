"""Publishes a Llama to a server's stand-in in another process: time, stall of the loop, and bytes with and without
deltas.

python -m tests.measure_publishing                      # 25 M parameters, on the CPU, over gloo
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightstep import Strategy, VllmServer
from lightstep.strategy.base import Strategy as BaseStrategy
from tests.rollout_servers import FakeVllm


def make_model(hidden: int, layers: int, vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, pad_token_id=0, **sizes, **heads))


def serve(weights: dict[str, Tensor], pipe: Connection) -> None:
    """A server, until it is told to end."""
    torch.set_num_threads(1)
    server = FakeVllm(weights, timeout_s=120.0)
    pipe.send(server.url)
    pipe.recv()


class Measurement:
    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.strategy: BaseStrategy = Strategy.load(args.strategy)
        self.model = self.strategy.prepare_model(lambda: make_model(args.hidden, args.layers, args.vocabulary))
        self.optimizer: Any = self.strategy.create_optimizer(self.model, lr=1e-6, weight_decay=0.0)
        self.shape, self.vocabulary = (1, args.tokens), args.vocabulary
        self.url = url

    def step(self) -> float:
        begin, tokens = time.monotonic(), torch.randint(0, self.vocabulary, self.shape)
        self.optimizer.backward(self.model(input_ids=tokens, labels=tokens).loss)
        self.optimizer.step()
        return time.monotonic() - begin

    def row(self, lr: float, deltas: bool, steps: int) -> None:
        """Steps at a learning rate, each with a publication that the loop does not wait for. Prints medians."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        servers = VllmServer(self.url, timeout_s=120, deltas=deltas)
        self.strategy.publish_weights(self.model, servers)
        stalls, seconds, nbytes, whole = [], [], [], 0
        for _ in range(steps):
            self.step()
            begin = time.monotonic()
            self.strategy.publish_weights(self.model, servers, wait=False)
            stalls.append(time.monotonic() - begin)
            report = self.strategy.wait_for_publication()
            assert report is not None
            seconds.append(report.seconds)
            nbytes.append(report.nbytes)
            whole = report.whole_nbytes
        servers.close()
        size = statistics.median(nbytes)
        say(
            f"{'deltas' if deltas else 'whole':7} lr {lr:g}: {size / 2**20:.1f} MiB ({size / whole:.1%}), "
            f"sent in {statistics.median(seconds):.2f} s; the loop waited {statistics.median(stalls) * 1e3:.0f} ms"
        )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="resident")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=16, help="of each step")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(2)
    processes = multiprocessing.get_context("spawn")
    pipe, other = processes.Pipe()
    model = make_model(args.hidden, args.layers, args.vocabulary).bfloat16()
    weights = {name: torch.zeros_like(p.detach()) for name, p in model.named_parameters()}
    server = processes.Process(target=serve, args=(weights, other), daemon=True)
    server.start()
    measurement = Measurement(args, pipe.recv())
    count = sum(p.numel() for p in measurement.model.parameters()) / 1e6
    say(f"{count:.0f} M parameters; a step takes {min(measurement.step() for _ in range(10)):.2f} s")
    for lr, deltas in ((1e-6, False), (1e-6, True), (1e-5, True)):
        measurement.row(lr, deltas, args.steps)
    measurement.strategy.close()
    pipe.send("end")
    server.join()


if __name__ == "__main__":
    main()
