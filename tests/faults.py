"""Faults while checkpoints are saved, and in them afterwards: what is left, counted.

``python -m tests.faults --help`` measures; ``tests/unit/test_checkpoint_faults.py`` does less of the same.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    storage,
    verify_checkpoints,
)
from lightstep.checkpoint.background import finish_pending
from lightstep.checkpoint.layout import holds_checkpoint, seal
from tests.checkpoint_runs import Run, values_of
from tests.patience import PATIENCE

STEPS = 6
"""Of the run that is killed; a checkpoint after each."""

Counts = Counter[str]


# -- kill -9 -----------------------------------------------------------------------------------------------------------


def kills(
    folder: Path,
    count: int,
    ranks: int,
    *,
    asynchronous: bool = False,
    alone: bool = False,
    by_trainer: bool = False,
    placement: str = "device",
) -> Counts:
    """Kill a run of ``ranks`` processes ``count`` times at random moments; each time what is left has to go on.

    Args:
        alone: one of the ranks is killed, and the others have to end by themselves.
        by_trainer: the run is one of the Trainer.
        placement: of the weights, but for the Trainer's.
    """
    chance, counts = random.Random(0), Counts()
    train: Callable[[Path, bool], dict[str, Tensor]]
    train, prefix = (_train_by_trainer, "checkpoint") if by_trainer else (partial(_train, placement), "step")
    expected, took = train(folder / "expected", asynchronous), 0.5
    for number in range(count):
        place = folder / f"{ranks}-{number}"
        place.mkdir(parents=True)
        processes = [_fork(_train_on_rank, train, place, rank, ranks, asynchronous) for rank in range(ranks)]
        began = time.monotonic()
        first = chance.choice(processes)
        while not any(place.iterdir()) and first.is_alive():
            time.sleep(0.001)
        time.sleep(chance.random() * took)
        counts["killed while saving" if any(place.glob(".*.saving-*")) else "killed besides"] += first.is_alive()
        counts["had finished"] += not first.is_alive()
        if not first.is_alive():
            took = min(took, time.monotonic() - began)
        if alone:
            first.kill()
            for process in processes:
                process.join(PATIENCE)
                counts["waited for a dead rank"] += process.is_alive()
        for process in [first, *processes]:
            process.kill()
        for process in processes:
            process.join()
        last = place / f"{prefix}-{STEPS}"
        was_over = holds_checkpoint(last)
        whole = list(place.glob("checkpoint-*")) if by_trainer else [*filter(None, [latest_checkpoint(place)])]
        counts["no checkpoint yet"] += not whole
        counts["left a damaged checkpoint"] += any(each.damage for path in whole for each in verify_checkpoints(path))
        counts["resumed to other bits"] += not _same(train(place, asynchronous), expected)
        if not was_over:  # else nothing more was saved, and nothing tidied
            counts["left rubbish"] += list(place.iterdir()) != [last]
    return counts


def _train(placement: str, folder: Path, asynchronous: bool) -> dict[str, Tensor]:
    """From the newest checkpoint, if there is one, to the last step, saving after each; what the run ends with."""
    torch.manual_seed(0)  # whatever this process has drawn before
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    run, newest = Run("stream", 0, model, weights={"placement": placement}), latest_checkpoint(folder)
    if newest is not None:
        run.steps = run.load(newest)["step"]
    while run.steps < STEPS:
        run.train()
        extra = {"step": run.steps}
        run.save(folder / f"step-{run.steps}", extra=extra, keep_last=1, asynchronous=asynchronous)
    finish_pending()
    return run.content()


def _train_by_trainer(folder: Path, asynchronous: bool) -> dict[str, Tensor]:
    """The same with the Trainer; the weights at the end."""
    from lightstep.integrations.transformers import LightstepTrainer
    from tests.reference.tiny_llama import Rows, make_llama, training_arguments

    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "logging_strategy": "no"}
    arguments, late = training_arguments(folder, max_steps=STEPS, **options), {"asynchronous_saves": asynchronous}
    trainer = LightstepTrainer(make_llama(), arguments, strategy="stream", train_dataset=Rows(), **late)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def _train_on_rank(train: Callable[[Path, bool], object], folder: Path, rank: int, ranks: int, late: bool) -> None:
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (who loses a rank says so, and ends)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=rank, world_size=ranks)
    train(folder, late)
    if ranks > 1:
        dist.destroy_process_group()


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def _fork(work: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


# -- a full disk -------------------------------------------------------------------------------------------------------


def full_disks(folder: Path, count: int, asynchronous: bool = False) -> Counts:
    """Save over a checkpoint on disks that are full after the n-th byte, for ``count`` values of n up to all bytes."""
    place, counts = folder / "step-1", Counts()
    old, new = model_of(1.0), model_of(2.0)
    save_checkpoint(place, old[0], old[1])
    total = sum(file.stat().st_size for file in place.iterdir())
    for number in range(count):
        with disk_of(total * number // count), suppress(CheckpointError):
            pending = save_checkpoint(place, new[0], new[1], asynchronous=asynchronous)
            if pending is not None:
                pending.result(PATIENCE)
            counts["saved all the same"] += 1
        found = model_of(0.0)
        load_checkpoint(place, found[0], found[1])
        counts["lost the checkpoint before"] += values_of(found[0]) != {1.0}
        counts["left rubbish"] += [entry.name for entry in folder.iterdir()] != ["step-1"]
        counts["tried"] += 1
    return counts


@contextmanager
def disk_of(nbytes: int) -> Iterator[None]:
    """No more than these bytes can be written in the block."""
    left = [nbytes]

    class Limited(storage._SyncedFile):
        def write(self, data: Any) -> int:
            left[0] -= memoryview(data).nbytes
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    with mock.patch.object(storage, "_SyncedFile", Limited):
        yield


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged(folder: Path, changed: Callable[[bytes], Iterable[bytes]]) -> Counts:
    """Change each file of a checkpoint in several ways, one at a time; who finds each."""
    model, optimizer = model_of(1.0)
    save_checkpoint(folder / "step", model, optimizer, extra={"epoch": 1})
    counts = Counts()
    for file in sorted((folder / "step").iterdir()):
        content = file.read_bytes()
        for text in changed(content):
            file.write_bytes(text)
            _look(folder / "step", file, counts)
        file.write_bytes(content)
    return counts


def flipped_bits(content: bytes, count: int) -> Iterator[bytes]:
    """With one of ``count`` random bits flipped."""
    for bit in random.Random(0).sample(range(8 * len(content)), min(count, 8 * len(content))):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def cut_and_zeroed(content: bytes) -> Iterator[bytes]:
    """Without the last byte, and with one of the sectors of 512 bytes zeroed."""
    yield content[:-1]
    for start in range(0, len(content), 512):
        changed = content[:start] + bytes(len(content[start : start + 512])) + content[start + 512 :]
        if changed != content:
            yield changed


def _look(place: Path, file: Path, counts: Counts) -> None:
    counts["tried"] += 1
    counts["not found by verify"] += not any(each.damage for each in verify_checkpoints(place))
    if file.name == ".metadata":  # for torch's tools; a load does not read it
        return
    model, optimizer = model_of(7.0)
    try:
        load_checkpoint(place, model, optimizer)
        counts["not found by load"] += 1
    except CheckpointError:
        counts["changed something"] += values_of(model) != {7.0}


def forge(folder: Path, **changes: Any) -> None:
    """Make the manifest agree with files that were tampered with, as somebody would who knows how."""
    manifest = json.loads((folder / "lightstep.json").read_text()) | changes
    del manifest["crc32"]
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = len(content)
        if name in manifest["checksums"]:
            manifest["checksums"][name] = zlib.crc32(content)
    (folder / "lightstep.json").write_bytes(seal(manifest))


# -- two savers --------------------------------------------------------------------------------------------------------


def two_savers(folder: Path, seconds: float) -> Counts:
    """Two processes that save to one path as often as they can, and twice at least."""
    place, counts = folder / "step-1", Counts()
    context = multiprocessing.get_context("fork")
    outcomes = context.Queue()
    processes = [_fork(_save_often, place, float(value), seconds, outcomes) for value in (1, 2)]
    for _ in processes:
        counts.update(outcomes.get())
    for process in processes:
        process.join()
    found = model_of(0.0)
    load_checkpoint(place, found[0], found[1])
    counts["left a mixture"] += len(values_of(found[0])) != 1
    counts["left rubbish"] += [entry.name for entry in folder.iterdir()] != ["step-1"]
    return counts


def _save_often(place: Path, value: float, seconds: float, outcomes: Any) -> None:
    torch.set_num_threads(1)
    (model, optimizer), counts, until = model_of(value), Counts(), time.monotonic() + seconds
    while time.monotonic() < until or counts["saved"] < 2:
        try:
            save_checkpoint(place, model, optimizer)
            counts["saved"] += 1
        except CheckpointError as error:
            counts["refused" if "is saving to" in str(error) else f"failed: {error}"] += 1
    outcomes.put(dict(counts))


def model_of(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer in which every number is the same."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kills for each number of ranks")
    parser.add_argument("--bits", type=int, default=300, help="bits that are flipped in each file")
    parser.add_argument("--disks", type=int, default=100, help="sizes of disks that are too small")
    parser.add_argument("--seconds", type=float, default=20, help="for how long two savers meet")
    parser.add_argument("--only", default="", help="faults with this in their name")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tried: dict[str, Callable[[Path], Counts]] = {
            "one flipped bit": lambda place: damaged(place, partial(flipped_bits, count=asked.bits)),
            "one byte less, sectors of zeros": lambda place: damaged(place, cut_and_zeroed),
            "two savers": lambda place: two_savers(place, asked.seconds),
        }
        for late in (False, True):
            tried["full disk" + late * ", asynchronous"] = partial(full_disks, count=asked.disks, asynchronous=late)
            for what, count, options in (
                ("kill -9, 1 rank", asked.kills, {"ranks": 1}),
                ("kill -9, 2 ranks", asked.kills, {"ranks": 2}),
                ("kill -9, weights on the host", asked.kills, {"ranks": 1, "placement": "host"}),
                ("kill -9 of the Trainer", asked.kills, {"ranks": 1, "by_trainer": True}),
                ("kill -9 of one of 2 ranks", asked.kills // 4, {"ranks": 2, "alone": True}),
            ):
                tried[what + late * ", asynchronous"] = partial(kills, count=count, asynchronous=late, **options)
        for number, (fault, measure) in enumerate(tried.items()):
            if asked.only not in fault:
                continue
            place = folder / str(number)
            place.mkdir()
            sys.stdout.write(f"{fault}: {json.dumps(dict(measure(place)))}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
