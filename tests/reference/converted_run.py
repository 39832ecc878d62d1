"""A small run with everything that makes conversion hard: tied, frozen, unused and odd-sized parameters, two groups."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightstep import Strategy

BEFORE, AFTER = range(3), range(3, 6)
"""Steps before and after the checkpoint."""

ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "foreach": False}
SCALE: dict[str, Any] = {"kind": "dynamic", "init_scale": 256.0, "growth_interval": 4, "hysteresis": 2}


class Net(nn.Module):
    """Sizes that no number of ranks divides; ``unused`` never gets a gradient."""

    _keep_in_fp32_modules_strict = ("seen",)  # other libraries keep buffers as they are

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 7)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor([3.0, 1.0, 2.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.frozen(self.first(self.embedding(tokens)))))
        return self.head(self.second(hidden)).float().pow(2).mean()


def make_net(frozen: bool = True) -> Net:
    torch.manual_seed(0)
    net = Net()
    net.frozen.requires_grad_(not frozen)
    return net


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; vectors do not and learn faster."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]


def tokens(step: int) -> Tensor:
    return (torch.arange(5) + step) % 11


def make_strategy(dtype: str, growth_interval: int) -> Strategy:
    scale = {**SCALE, "growth_interval": growth_interval} if dtype == "float16" else "none"
    return Strategy.load(
        {
            "sharding": {"kind": "single"},
            "precision": {"parameters": dtype, "loss_scale": scale},
            "clipping": {"max_norm": None},
        }
    )


class Run:
    """The run under lightstep, on one CPU."""

    def __init__(
        self,
        dtype: str,
        growth_interval: int = SCALE["growth_interval"],
        frozen: bool = True,
        weights: torch.dtype = torch.float32,
    ) -> None:
        self.strategy = make_strategy(dtype, growth_interval)
        self.model = self.strategy.prepare_model(make_net(frozen).to(weights))
        self.optimizer = self.strategy.create_optimizer(self.model, param_groups=make_groups(self.model), **ADAMW)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def train(self, steps: Iterable[int]) -> Run:
        for step in steps:
            self.optimizer.backward(self.model(tokens(step)))
            if self.optimizer.step():
                self.scheduler.step()
        return self

    def save(self, path: Path) -> Path:
        extra = {"epoch": 3, "order": torch.arange(4)}
        self.strategy.save_checkpoint(path, self.model, self.optimizer, self.scheduler, extra)
        return path

    def load(self, path: Path) -> dict[str, Any]:
        return self.strategy.load_checkpoint(path, self.model, self.optimizer, self.scheduler)

    def content(self) -> dict[str, Any]:
        """Everything that must be the same, by name."""
        self.optimizer.synchronize()
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        state = {names[p]: dict(entries) for p, entries in self.optimizer.state.items() if entries}
        groups = [{**g, "params": [names[p] for p in g["params"]]} for g in self.optimizer.param_groups]
        content = {
            "model": dict(self.model.state_dict()),
            "state": state,
            "groups": groups,
            "loss_scale": self.optimizer.loss_scale.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        return copy.deepcopy(content)


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Where two nested structures differ; tensors must be equal in dtype, shape and every bit."""
    if isinstance(first, dict) and isinstance(second, dict):
        missing = [f"{path}.{key} on one side" for key in first.keys() ^ second.keys()]
        return missing + [
            d for key in first.keys() & second.keys() for d in differences(first[key], second[key], f"{path}.{key}")
        ]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        return [
            d for i, (a, b) in enumerate(zip(first, second, strict=True)) for d in differences(a, b, f"{path}[{i}]")
        ]
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.dtype == second.dtype and torch.equal(first.detach(), second.detach())
        return (
            []
            if same
            else [f"{path}: {first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)} differ"]
        )
    return [] if first == second else [f"{path}: {first!r} and {second!r}"]
