"""Lightning Fabric launches, moves data and logs; lightstep shards, scales, clips and keeps the optimizer state.

    python examples/fabric.py --strategy stream
    torchrun --nproc-per-node 2 examples/fabric.py --strategy fsdp2-stream --devices 2

Needs ``pip install lightning-fabric``. Trains a small byte-level Llama on Python's own argparse.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightstep import Strategy

LENGTH = 64


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="stream", help="a name or file of a lightstep strategy")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args()


def fabric_for(strategy: Strategy, devices: int) -> Fabric:
    """On one device Fabric's plain strategy; on several the one that leaves sharding to a function."""
    if strategy.config.sharding.kind == "single":
        if devices > 1:
            raise SystemExit(
                f"strategy {strategy.name} is for one device; --devices {devices} needs ddp or fsdp2-stream"
            )
        return Fabric(devices=1, strategy=SingleDeviceStrategy(strategy.device))
    sharded = ModelParallelStrategy(
        lambda model, mesh: strategy.prepare_model(model), data_parallel_size=devices, tensor_parallel_size=1
    )
    return Fabric(devices=devices, strategy=sharded)


def small_model() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))


def sequences() -> TensorDataset:
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    return TensorDataset(text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH))


def main() -> None:
    given = options()
    strategy = Strategy.load(given.strategy)
    fabric = fabric_for(strategy, given.devices)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    model = small_model()
    if strategy.config.sharding.kind == "single":
        model = strategy.prepare_model(model)
    model = fabric.setup_module(model)  # on several devices this calls prepare_model
    optimizer = fabric.setup_optimizers(strategy.create_optimizer(model, torch.optim.AdamW, lr=3e-3))
    loader = fabric.setup_dataloaders(DataLoader(sequences(), batch_size=16, shuffle=True, drop_last=True))

    step = 0
    while step < given.steps:
        for (tokens,) in loader:
            micro_batches = tokens.chunk(2)
            for number, part in enumerate(micro_batches):
                with strategy.accumulate(model, last=number == len(micro_batches) - 1):
                    optimizer.backward(model(input_ids=part, labels=part).loss / len(micro_batches))
            result = optimizer.step()
            step += 1
            if step % 20 == 0 or step == given.steps:
                with torch.no_grad():
                    loss = fabric.all_reduce(model(input_ids=tokens, labels=tokens).loss.float())
                fabric.print(f"step {step}: loss {float(loss):.3f}, gradient norm {float(result.grad_norm):.3f}")
            if step == given.steps:
                break
    strategy.save_checkpoint("runs/fabric", model, optimizer, extra={"step": step})


if __name__ == "__main__":
    main()
