"""`lightstep bench --roles`: memory of a worker that only generates, with the rollout role and without it.

Without the role, the worker prepares the model as a trainer does and keeps an inference copy as well, as reported in
https://github.com/verl-project/verl/issues/4229. Each variant runs in a fresh process, which receives weights and
generates a few tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import LlamaForCausalLM

from lightstep.bench.llama import LlamaShape
from lightstep.bench.ranks import local_device
from lightstep.bench.report import Column, Panel, Values, View, conditions, progress, publish, size

_PARAMETERS = {"cpu": 1e8, "cuda": 3e9}
_PROMPT, _NEW_TOKENS = 16, 4

WITHOUT, WITH = "sharded model and inference copy", "role rollout, mode async"

REPORTED: dict[str, Any] = {
    "source": "https://github.com/verl-project/verl/pull/4257, for issue 4229",
    "model": "Qwen2.5-3B",
    "gb": {WITHOUT: 22, WITH: 14},
}
"""Memory of one rollout worker, including its inference engine."""


@dataclass(frozen=True)
class WorkerTask:
    """The model and the device (`cpu` or `cuda`) of a worker."""

    shape: LlamaShape
    device_name: str
    seed: int

    def model(self) -> nn.Module:
        """A Llama on the meta device; preparing it allocates its memory."""
        with torch.device("meta"):
            return LlamaForCausalLM(self.shape.config(pad_token_id=0))


def measure(
    params: float | None, layers: int | None, output: Path, device_name: str | None = None, seed: int = 0
) -> Values:
    """Measure both variants, write roles.json and roles.png to `output`, and return the JSON values.

    Raises:
        ValueError: this is one of several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--roles starts the ranks that it needs itself; run it without torchrun")
    device = local_device(device_name)
    task = WorkerTask(
        LlamaShape.nearest(int(params or _PARAMETERS[device.type]), layers, released=True), device.type, seed
    )
    output.mkdir(parents=True, exist_ok=True)
    rows = []
    with progress(True) as say:
        for name in (WITHOUT, WITH):
            say(name)
            rows.append(row(name, _in_fresh_processes(task, name)))
    model = {**task.shape.values(), "weights": "bfloat16"}
    values = {**conditions(device), "model": model, "rows": rows, "reported": REPORTED}
    publish(values, VIEW, output / "roles.json")
    return values


# -- the processes ----------------------------------------------------------------------------------------------------


def _in_fresh_processes(task: WorkerTask, name: str) -> dict[str, int]:
    """The worker's figures. With the role, a trainer runs as a second process."""
    ranks = 2 if name == WITH else 1
    config = LaunchConfig(1, 1, ranks, run_id="roles", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    figures: dict[int, dict[str, int]] = elastic_launch(config, run_rank)(task, name)
    return figures[ranks - 1]


def run_rank(task: WorkerTask, name: str) -> dict[str, int] | None:
    """Run one of the processes, in torchrun's environment. The last rank is the worker."""
    from lightstep import Strategy

    if task.device_name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rollout = {"mode": "async"} if name == WITH else {}
    strategy = Strategy.load("fsdp2", overrides={"roles.rollout": rollout})
    torch.manual_seed(task.seed)
    with strategy:
        strategy.start()
        if name == WITHOUT or strategy.role == "rollout":
            return _worker(task, strategy)
        strategy.publish_weights(strategy.prepare_model(task.model))
        return None


def _worker(task: WorkerTask, strategy: Any) -> dict[str, int]:
    from lightstep import TransformersEngine

    _generate(WorkerTask(LlamaShape.nearest(20_000, 1), task.device_name, 0).model().to_empty(device=strategy.device))
    memory = Memory(strategy.device)
    trained = strategy.prepare_model(task.model) if strategy.role == "trainer" else None
    engine = TransformersEngine(strategy.prepare_model(task.model, role="rollout"))
    if trained is None:
        strategy.receive_weights(engine)
    else:
        strategy.publish_weights(trained, to=engine)
    _generate(engine.model)
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    return {"inference_weight_bytes": weights, "held_bytes": memory.held(), "peak_bytes": memory.peak()}


@torch.no_grad()
def _generate(model: Any) -> None:
    """Generate a few tokens. The first call in a process also loads libraries that later calls share."""
    prompt = torch.ones(1, _PROMPT, dtype=torch.long, device=next(model.parameters()).device)
    model.generate(input_ids=prompt, attention_mask=prompt, max_new_tokens=_NEW_TOKENS, do_sample=False)


class Memory:
    """Memory that this process allocated since construction: on its GPU, or on the host if it has none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = self._now()

    def held(self) -> int:
        """Bytes allocated now."""
        return self._now() - self._before

    def peak(self) -> int:
        """Peak bytes."""
        most = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _status("VmHWM")
        return most - self._before

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


# -- how it is shown --------------------------------------------------------------------------------------------------


def row(name: str, figures: dict[str, int]) -> Values:
    """The JSON values of one worker, with the reported figure."""
    kind = "lightstep" if name == WITH else "peer"
    return {"name": name, "kind": kind, "reported_gb": REPORTED["gb"][name], **figures}


def _title(values: Values, case: Any) -> str:
    what = f"{size(values['model']['parameters'])} parameters in bfloat16, {values['hardware']['device']}"
    return f"One rollout worker: {what}"


VIEW = View(
    key="peak_bytes",
    columns=(
        Column("inference\nweights, GB", "inference_weight_bytes", ".2f", 1, unit=1e9),
        Column("held\nGB", "held_bytes", ".2f", 2, unit=1e9),
        Column("peak\nGB", "peak_bytes", ".2f", 3, unit=1e9),
        Column(f"reported for verl\n({REPORTED['model']}), GB", "reported_gb", ".0f"),
    ),
    panels=(
        Panel("peak GB, measured here", "peak_bytes", unit=1e9),
        Panel(f"GB, {REPORTED['model']}, reported for verl", "reported_gb"),
    ),
    title=_title,
    footnotes=lambda values: [f"Reported: {values['reported']['source']}"],
)
