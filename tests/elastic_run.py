"""A run of several ranks that resumes by itself, for tests that kill it: ``torchrun -m tests.elastic_run OPTIONS``.

Its sequences of a step are the same for any number of ranks, as those of ``lightstep train``. The first rank writes a
line for each step that has ended, with a checksum of the whole state. Every rank writes what it is doing at
any time, so that it can be killed in the middle of that.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import lightstep
from lightstep.checkpoint import latest_checkpoint
from lightstep.distributed import Ranks, is_sharded, local_tensor
from lightstep.optimizer.state_edits import plain
from tests.distributed.models import CLASSES, VOCABULARY, TinyTransformer
from tests.training_files import MODEL, training_values

PHASES = ("forward", "backward", "step", "save")
_ROWS = 8
"""Sequences of a step, over all ranks."""


def training_file(folder: Path, output: Path, steps: int, strategy: str = "fsdp2") -> Path:
    """A file for ``lightstep train``, which saves after every fourth step, in ``folder``."""
    model, batch = {"config": MODEL | {"attention_dropout": 0.0}}, {"sequences": 4, "length": 32}
    often = {"checkpoint": {"every": 4, "keep": 100}, "log_every": 10}
    values = training_values(
        folder, output=str(output), model=model, strategy=strategy, steps=steps, batch=batch, **often
    )
    (folder / "train.yaml").write_text(yaml.safe_dump(values))
    return folder / "train.yaml"


@dataclass(frozen=True)
class Options:
    """Of a run, as JSON has them."""

    folder: str
    """With the checkpoints."""
    notes: str
    """A folder with the lines and the phases."""
    steps: int = 30
    save_every: int = 3
    asynchronous: bool = False
    strategy: dict[str, Any] = field(
        default_factory=lambda: {
            "sharding": {"kind": "fsdp2"},
            "optimizer_state": {"backend": "stream", "ring_mib": 1},
        }
    )

    @property
    def text(self) -> str:
        """The argument of the program."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Step:
    """A line about a step that has ended."""

    time: float
    """Seconds since the epoch, as in ``started``."""
    started: float
    """When the process had begun."""
    number: int
    """Steps that have ended."""
    loss: float
    """Mean over the ranks, before the step."""
    checksum: int
    """Of weights and optimizer state."""
    ranks: int
    resumed: int
    """The step that this process has resumed from."""
    resumed_checksum: int
    """Of what it had loaded; of the initial values if it had begun anew."""


def steps_of(notes: Path) -> list[Step]:
    """The lines so far."""
    file = notes / "steps"
    whole = file.read_text().split("\n")[:-1] if file.exists() else []  # a killed rank may have written half a line
    return [Step(**json.loads(line)) for line in whole if line]


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    process: int
    host: str
    phase: str
    step: int


def place_of(notes: Path, rank: int) -> Place | None:
    """Where a rank is now; ``None`` if it has not said so."""
    try:
        fields = json.loads((notes / f"rank{rank}").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return Place(**fields)


class _Notes:
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._place = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT, 0o644)

    def enter(self, phase: str, step: int) -> None:
        place = Place(os.getpid(), os.uname().nodename, phase, step)
        os.pwrite(self._place, json.dumps(asdict(place)).ljust(120).encode(), 0)

    def end(self, step: Step) -> None:
        if self._rank == 0:
            line = os.open(self._folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(line, f"\n{json.dumps(asdict(step))}\n".encode())
            os.close(line)


def _loss(model: nn.Module, step: int, rank: int, ranks: int) -> Tensor:
    """Of this rank's rows of the step's sequences, fp32."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (_ROWS, 6), generator=generator)[rank::ranks]
    logits: Tensor = model(tokens).float()
    return nn.functional.cross_entropy(logits.reshape(-1, CLASSES), (tokens % CLASSES).reshape(-1).to(logits.device))


def _checksum(strategy: lightstep.Strategy, model: nn.Module, optimizer: Any) -> int:
    """The same for any number of ranks: shards one after the other are the whole. Called by all ranks."""
    optimizer.synchronize()
    local: dict[str, tuple[bool, bytes]] = {}
    for name, parameter in strategy.unwrap_model(model).named_parameters():
        for key, value in {"": parameter, **optimizer.state.get(parameter, {})}.items():
            tensor = local_tensor(torch.as_tensor(plain(value))).detach().contiguous()
            local[f"{name}.{key}"] = is_sharded(parameter) and tensor.dim() > 0, _bytes(tensor)
    found = 0
    ranks = Ranks().gather(local)
    for name in sorted(set().union(*ranks)):  # a rank with an empty shard may have no state
        parts = [rank[name] for rank in ranks if name in rank]
        for _, content in parts if parts[0][0] else parts[:1]:
            found = zlib.crc32(content, found)
    return found


def _bytes(tensor: Tensor) -> bytes:
    content: bytes = tensor.cpu().view(-1).view(torch.uint8).numpy().tobytes()
    return content


def run(options: Options) -> None:
    started = time.time()
    torch.set_num_threads(1)
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": 0.5}, **options.strategy})
    torch.manual_seed(0)
    model = strategy.prepare_model(TinyTransformer())
    groups = strategy.unwrap_model(model).split()  # type: ignore[operator]
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, param_groups=groups)
    folder, done = Path(options.folder), 0
    newest = latest_checkpoint(folder)
    if newest is not None:
        done = strategy.load_checkpoint(newest, model, optimizer)["step"]
    resumed, loaded = done, _checksum(strategy, model, optimizer)
    notes, pending = _Notes(Path(options.notes), strategy.rank), None
    while done < options.steps:
        notes.enter("forward", done)
        loss = _loss(model, done, strategy.rank, strategy.world_size)
        notes.enter("backward", done)
        optimizer.backward(loss)
        notes.enter("step", done)
        optimizer.step()
        checksum = _checksum(strategy, model, optimizer)
        mean = fmean(Ranks().gather(float(loss.detach())))
        done += 1
        notes.end(Step(time.time(), started, done, mean, checksum, strategy.world_size, resumed, loaded))
        if done % options.save_every == 0 or done == options.steps:
            notes.enter("save", done)
            path, kept = folder / f"step-{done}", {"keep_last": 2, "asynchronous": options.asynchronous}
            pending = strategy.save_checkpoint(path, model, optimizer, extra={"step": done}, **kept)
    if pending is not None:
        pending.result()
    notes.enter("end", done)
    strategy.close()


if __name__ == "__main__":
    run(Options(**json.loads(sys.argv[1])))
