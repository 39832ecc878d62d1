"""Whole training iterations: forward, backward and step of a real Llama, one contender at a time in memory.

Iterations follow each other without a gap, and the host never waits in between: what a step leaves behind delays the
next forward, and shows. Each is timed from the end of the one before, in the stream that computes; the first of a block
is left out, and the median of the others counts.
"""

from __future__ import annotations

import logging
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightstep.bench.clock import Clock
from lightstep.bench.contender import ADAMW, MAX_NORM, Skipped
from lightstep.bench.llama import LlamaSizes
from lightstep.bench.measure import Effort, free_memory
from lightstep.bench.probes import HostSyncs
from lightstep.bench.ranks import Ranks
from lightstep.bench.timeline import Spans, record
from lightstep.distributed import world_size
from lightstep.strategy import Strategy
from lightstep.strategy.model_setup import checkpoint_activations, initialise_weights

__all__ = ["WITHOUT", "Batch", "IterationRow", "Iterations", "chosen", "measure_iterations", "rows_of", "timelines"]

logger = logging.getLogger(__name__)

WITHOUT = "no optimizer"
"""The row whose iterations are forward and backward alone."""

_COMMON = {"clipping.max_norm": MAX_NORM, "sharding.activation_checkpointing": True}


@dataclass(frozen=True)
class Batch:
    """One iteration's tokens on one rank, in sequences of ``length``."""

    tokens: int
    length: int

    def draw(self, vocabulary: int, device: torch.device, seed: int) -> Tensor:
        """Random tokens [sequences, length + 1]."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (max(1, self.tokens // self.length), min(self.length, self.tokens) + 1)
        return torch.randint(vocabulary, shape, generator=generator, device=device)


@dataclass
class Seen:
    """Of one contender and batch, on this rank; None is: not measurable on this device."""

    iteration_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    host_syncs: int | None = None
    first_sync: str | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.iteration_ms)


@dataclass
class IterationRow:
    """One contender; `note` says why there are no figures."""

    name: str
    kind: str
    about: str = ""
    seen: dict[int, Seen] = field(default_factory=dict)
    note: str | None = None
    skipped: bool = False


@dataclass
class Iterations:
    """One run, and everything measured so far."""

    sizes: LlamaSizes
    batches: Sequence[Batch]
    device: torch.device
    seed: int
    effort: Effort
    rounds: int
    ranks: Ranks
    rows: list[IterationRow]
    parameters: int = 0


class Contender(ABC):
    """Runs iterations."""

    about: str

    @abstractmethod
    def iterate(self, tokens: Tensor) -> None:
        """Forward, backward and step on one batch; the host does not wait for the device of its own accord."""

    @abstractmethod
    def parameters(self) -> int:
        """Of the whole model."""

    def finish(self) -> None:
        """Wait until the last step has landed."""
        return

    def close(self) -> None:
        """Let go of what garbage collection does not."""
        return


Build = Callable[[Iterations], Contender]


class OfStrategy(Contender):
    """A lightstep strategy through its public interface.

    Args:
        source: name or path, with overrides behind it: ``stream-overlap:optimizer_state.resident_gib=8``.
        with_step: ``False`` drops the gradients instead.
    """

    def __init__(self, run: Iterations, source: str, with_step: bool = True) -> None:
        self._strategy = load(source)
        if self._strategy.device.type != run.device.type:
            raise Skipped(f"strategies run on this process's {self._strategy.device.type}; --device cannot change that")
        torch.manual_seed(run.seed)
        length = max(batch.length for batch in run.batches)
        self._model = self._strategy.prepare_model(lambda: _on_meta(run.sizes, length))
        self._optimizer: Any = None
        if with_step:
            self._optimizer = self._strategy.create_optimizer(self._model, torch.optim.AdamW, **ADAMW)
        self.about = self._strategy.config.description or source

    def iterate(self, tokens: Tensor) -> None:
        loss = self._model(tokens)
        if self._optimizer is None:
            loss.backward()
            self._model.zero_grad()
        else:
            self._optimizer.backward(loss)
            self._optimizer.step()

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def finish(self) -> None:
        if self._optimizer is not None:
            self._optimizer.synchronize()

    def close(self) -> None:
        if self._optimizer is not None:
            self._optimizer.close()
        self._strategy.close()


class Fsdp2OffloadIterations(Contender):
    """FSDP2 with `CPUOffloadPolicy`: fp32 shards on the host, fused AdamW there, bf16 compute."""

    name = "fsdp2-offload"
    about = "fully_shard(CPUOffloadPolicy), fp32 shards, bf16 compute, clip_grad_norm_, fused CPU AdamW"

    def __init__(self, run: Iterations) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        run.ranks.ensure_group()
        self._model = _on_meta(run.sizes, max(batch.length for batch in run.batches))
        checkpoint_activations(self._model)
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(run.device.type, (world_size(),)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=run.device.type == "cuda"),
        }
        for block in self._model.model.model.layers:
            fully_shard(block, **settings)
        fully_shard(self._model, **settings)
        self._model.to_empty(device="cpu")
        initialise_weights(self._model)
        for name, buffer in list(self._model.named_buffers()):
            owner, _, key = name.rpartition(".")
            self._model.get_submodule(owner).register_buffer(key, buffer.to(run.device), persistent=False)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True, **ADAMW)

    def iterate(self, tokens: Tensor) -> None:
        self._model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())


def _on_meta(sizes: LlamaSizes, length: int) -> Any:
    with torch.device("meta"):
        return sizes.model(length)


_PEERS: Mapping[str, Build] = {Fsdp2OffloadIterations.name: Fsdp2OffloadIterations}


def load(source: str) -> Strategy:
    """The strategy of ``name:key=value:…`` with the bench's clipping and activation checkpointing."""
    name, *settings = source.split(":")
    overrides: dict[str, Any] = dict(_COMMON)
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"--strategies {source}: {setting!r} is no override; write {name}:key=value")
        overrides[key] = _value(value)
    return Strategy.load(name, overrides=overrides)


def _value(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def chosen(strategies: str, peers: str, ranks: int) -> dict[str, Build]:
    """What `--strategies` and `--peers` name, in the table's order; the row without optimizer comes first.

    Raises:
        ValueError, ConfigError: a name that is none.
    """
    defaults = "fsdp2,fsdp2-stream,fsdp2-stream-overlap" if ranks > 1 else "resident,stream,stream-overlap"
    sources = [source.strip() for source in (defaults if strategies == "default" else strategies).split(",")]
    names = [name for name in (peers.split(",") if peers not in ("none", "all") else ()) if name]
    if peers == "all" and ranks > 1:
        names = list(_PEERS)
    for name in names:
        if name not in _PEERS:
            raise ValueError(f"--peers {name}: whole iterations are measured of {', '.join(_PEERS)}, all or none")
    for source in sources:
        load(source)
    plain = sources[0]
    builds: dict[str, Build] = {WITHOUT: lambda run: OfStrategy(run, plain, with_step=False)}
    builds |= {source: _of_strategy(source) for source in sources}
    return builds | {name: _PEERS[name] for name in names}


def rows_of(builds: Mapping[str, Build]) -> list[IterationRow]:
    """Empty rows for these contenders."""
    kinds = {WITHOUT: "none", **dict.fromkeys(_PEERS, "peer")}
    return [IterationRow(name, kinds.get(name, "lightstep")) for name in builds]


def _of_strategy(source: str) -> Build:
    return lambda run: OfStrategy(run, source)


def measure_iterations(run: Iterations, builds: Mapping[str, Build], progress: Callable[[str], None]) -> None:
    """Fill the rows, in rounds of alternating direction. `progress` is told before each contender."""
    for number in range(run.rounds):
        for row in run.rows if number % 2 == 0 else reversed(run.rows):
            if row.note is None:
                progress(f"round {number + 1} of {run.rounds}: {row.name}")
                _visit(run, row, builds[row.name], last=number == run.rounds - 1)
    progress("done")


def _visit(run: Iterations, row: IterationRow, build: Build, last: bool) -> None:
    contenders: list[Contender] = []
    try:
        row.note = run.ranks.agree(_attempt(row, lambda: contenders.append(build(run))))
        for batch in run.batches:
            if row.note is None:
                row.note = run.ranks.agree(_attempt(row, partial(_measure, run, row, contenders[0], batch, last)))
    finally:
        _let_go(contenders, run.device)


def _let_go(contenders: list[Contender], device: torch.device) -> None:
    while contenders:
        contenders.pop().close()
    free_memory(device)


def _attempt(row: IterationRow, phase: Callable[[], None]) -> str | None:
    """Do it; a failure becomes the row's note, and the run goes on."""
    try:
        phase()
    except Skipped as reason:
        row.skipped = True
        return str(reason)
    except Exception as error:
        logger.info("%s failed", row.name, exc_info=True)
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}"
    return None


def _measure(run: Iterations, row: IterationRow, contender: Contender, batch: Batch, last: bool) -> None:
    row.about, run.parameters = contender.about, contender.parameters()
    seen, device = row.seen.setdefault(batch.tokens, Seen()), run.device
    tokens = batch.draw(run.sizes.vocabulary, device, run.seed)
    for _ in range(run.effort.warmup):
        contender.iterate(tokens)
    settle(contender, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    run.ranks.barrier()
    clock = Clock(device)
    clock.lap()
    for _ in range(run.effort.steps + 1):
        contender.iterate(tokens)
        clock.lap()
    seen.iteration_ms += clock.read()[1:]
    if device.type == "cuda":
        seen.peak_bytes = max(seen.peak_bytes or 0, torch.cuda.max_memory_allocated(device))
        if last:
            with HostSyncs() as syncs:
                contender.iterate(tokens)
            seen.host_syncs, seen.first_sync = syncs.count, syncs.first
    settle(contender, device)


def timelines(
    run: Iterations, builds: Mapping[str, Build], folder: Path, say: Callable[[str], None]
) -> dict[str, Spans]:
    """What two steady iterations of the first batch look like; a Chrome trace of each is written (rank 0's)."""
    found: dict[str, Spans] = {}
    for name, build in builds.items():
        say(f"recording {name}")
        contenders = [build(run)]
        try:
            tokens = run.batches[0].draw(run.sizes.vocabulary, run.device, run.seed)
            for _ in range(run.effort.warmup + 1):
                contenders[0].iterate(tokens)
            trace = folder / f"{_file_name(name)}-timeline.json" if run.ranks.is_main else None
            found[name] = record(partial(contenders[0].iterate, tokens), 2, trace)
            settle(contenders[0], run.device)
        finally:
            _let_go(contenders, run.device)
    return found


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)


def settle(contender: Contender, device: torch.device) -> None:
    """Everything that was queued is done."""
    contender.finish()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
