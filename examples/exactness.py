"""A plain PyTorch loop and lightstep's, side by side: weights, masters and moments are torch.equal after every step.

Run ``python examples/exactness.py``; it takes the GPU when there is one. ``--backend`` is where lightstep keeps state.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

from lightstep import Strategy

MAX_NORM, MICRO_BATCHES = 0.5, 2
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}  # fused is what lightstep takes when you say nothing


def main() -> None:
    """Train both, compare, and say what was compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="stream", choices=["resident", "bulk", "stream"])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    model.to(device, torch.bfloat16)

    # A plain loop: fp32 masters, gradients added in fp32, torch's own clipping and optimizer.
    plain = copy.deepcopy(model)
    masters = [p.detach().float() for p in plain.parameters()]
    plain_optimizer = torch.optim.AdamW(masters, **ADAMW)

    def plain_step(step: int) -> Tensor:
        for micro in range(MICRO_BATCHES):
            (loss_of(plain, step, micro) / MICRO_BATCHES).backward()
            for p, master in zip(plain.parameters(), masters, strict=True):
                master.grad = p.grad.float() if micro == 0 else master.grad + p.grad.float()
                p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        plain_optimizer.step()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters, strict=True):
                p.copy_(master)
        return norm

    # lightstep's.
    strategy = Strategy.load({"clipping": {"max_norm": MAX_NORM}, "optimizer_state": {"backend": arguments.backend}})
    model = strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, **ADAMW)

    def step_of_lightstep(step: int) -> Tensor:
        for micro in range(MICRO_BATCHES):
            with strategy.accumulate(model, last=micro == MICRO_BATCHES - 1):
                optimizer.backward(loss_of(model, step, micro) / MICRO_BATCHES)
        return optimizer.step().grad_norm

    clipped = 0
    for step in range(arguments.steps):
        norm = plain_step(step)
        clipped += int(norm > MAX_NORM)
        check("norm", step_of_lightstep(step), norm)
        for p, q, master in zip(model.parameters(), plain.parameters(), masters, strict=True):
            check("weight", p, q)
            check("master", optimizer.state[p]["master"], master)
            for moment in ("exp_avg", "exp_avg_sq"):
                check(moment, optimizer.state[p][moment], plain_optimizer.state[master][moment])
    print(f"{arguments.backend} on {device}: {arguments.steps} steps, {clipped} of them clipped, every bit equal")


def loss_of(model: nn.Module, step: int, micro: int) -> Tensor:
    """The same batch for the same step, always."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(MICRO_BATCHES * step + micro)
    inputs = torch.randn(16, 32, generator=generator).to(device, torch.bfloat16)
    targets = torch.randint(8, (16,), generator=generator).to(device)
    return nn.functional.cross_entropy(model(inputs).float(), targets)


def check(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Equal in every bit, wherever each of them is."""
    if not torch.equal(ours.detach().cpu(), theirs.detach().cpu()):
        raise SystemExit(f"{what} differs")


if __name__ == "__main__":
    main()
