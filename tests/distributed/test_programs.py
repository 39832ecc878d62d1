"""Random programs over two ranks against the textbook loops: micro-batches, reductions and edits in any order.

Every rank runs the same program on data of its own. Under DDP the ranks may leave out different layers.

``LIGHTSTEP_FUZZ_SECONDS=600 pytest tests/distributed/test_programs.py`` goes on with other seeds for that long in all.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.distributed import local_tensor
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.test_exactness import DistributedPair
from tests.distributed.training import DEFERRED, LAYOUTS, OVERLAP, PRECISIONS, RESIDENT, STREAM
from tests.unit.test_fuzz import delay_lanes

STATES: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "stream": STREAM,
    "next_forward": DEFERRED,
    "overlap": OVERLAP,
}
SECONDS = float(os.environ.get("LIGHTSTEP_FUZZ_SECONDS", "0"))


class Skipping(TinyTransformer):
    """Leaves some of its blocks out."""

    skipped: frozenset[int] = frozenset()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for index, block in enumerate(self.blocks):
            hidden = hidden if index in self.skipped else block(hidden)
        return self.head(hidden)


class Program(DistributedPair):
    """One random program; :attr:`calls` is what it has done so far."""

    def __init__(self, seed: int, sharding: dict[str, Any], case: dict[str, Any]) -> None:
        self.frozen: set[str] = set()
        super().__init__(case, sharding, Skipping)
        self.chance, self.own_chance = random.Random(seed), random.Random(f"{seed} {self.rank}")
        self.alike = sharding["kind"] != "ddp"  # the ranks run the same layers
        # DDP itself adds fp32 gradients to what is in p.grad, and reduces the sum once more.
        self.in_place = not self.alike and case["precision"]["parameters"] == "float32"
        self.calls: list[Any] = []
        self.batches = 0
        self.reduced = True  # nothing is left on its rank
        self.drops = False  # what was left on its rank has been dropped, and no backward has been reduced since

    def run(self, length: int) -> None:
        steps = [self.micro_batch] * 6 + [self.step] * 4
        others = [
            self.zero_grad,
            self.freeze,
            self.lr,
            self.clip,
            self.read,
            self.edit,
            self.edit_gradients,
            self.penalty,
            self.reload,
            self.memory,
            self.move,
        ]
        for _ in range(length):
            call = self.chance.choice(steps if self.chance.random() < 0.7 else others)
            self.calls.append(call.__name__)
            call()
        self.calls.append("end")
        self.step()

    def micro_batch(self, last: bool | None = None) -> None:
        last = self.chance.random() < 0.6 if last is None else last
        chance = self.chance if self.alike else self.own_chance
        skipped = frozenset(index for index in range(3) if chance.random() < 0.25)
        if self.alike and not (last and self.reduced):
            skipped = frozenset()  # torch's FSDP2 adds up nothing for layers that it has not gathered
        if self.drops:
            skipped = frozenset()  # torch's DDP takes them for used, and finds no gradient
        self.inner.skipped = self.replica.skipped = skipped
        by_hand = self.reference.loss_scale.scale == 1 and self.chance.random() < 0.3
        self.overflow = self.chance.random() < 0.05 and self.rank == 1
        self.batches += 1
        plain = last and (self.reduced or not by_hand) and self.chance.random() < 0.3
        self.calls[-1] = ("micro_batch", sorted(skipped), last, by_hand, plain, self.overflow)
        batch = (self.batches, 0, self.rank, self.device)
        with contextlib.nullcontext() if plain else self.strategy.accumulate(self.model, last=last):
            loss = loss_of(self.model, *batch)
            loss.backward() if by_hand else self.optimizer.backward(loss)
        self.reference.backward(loss_of(self.replica, *batch))
        if last:
            self.reference.reduce()
            if self.in_place:
                self.reference.sums, self.reference.reduced = self.reference.reduced, {}
        self.reduced, self.drops, self.overflow = last, self.drops and not last, False

    def step(self) -> None:
        if not self.reduced or not self.pending:
            self.calls.append("for the step")
            self.micro_batch(last=True)
        if self.chance.random() < 0.2:
            self.optimizer.grad_norm()
        with self._delays():
            result = self.optimizer.step()
        assert self.reference.step(result.grad_norm) is bool(result)
        if self.chance.random() < 0.3:
            self.check()

    @contextlib.contextmanager
    def _delays(self) -> Any:
        yield
        delay_lanes(self.optimizer, self.own_chance.randrange(1 << 30))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.drops = self.drops or not (self.alike or self.reduced)
        self.reference.sums, self.reference.reduced, self.reduced = {}, {}, True

    def freeze(self) -> None:
        if self.pending:
            return
        name = self.chance.choice(["blocks.0.up", "blocks.1.norm", "embed"])
        thaw = name in self.frozen
        self.frozen ^= {name}
        for model in (self.inner, self.replica):
            model.get_submodule(name).requires_grad_(thaw)

    def lr(self) -> None:
        group, value = self.chance.randrange(2), self.chance.choice([1e-3, 3e-3])
        for optimizer in (self.optimizer, self.reference.optimizer):
            optimizer.param_groups[group]["lr"] = value

    def clip(self) -> None:
        self.optimizer.max_norm = self.reference.max_norm = self.chance.choice([None, 0.3, 1e4])

    def read(self) -> None:
        """By one rank alone, or by all."""
        if self.chance.random() < 0.5 or self.own_chance.random() < 0.5:
            for _, parameter, expected in self.named():
                assert torch.equal(local_tensor(parameter.detach()), self.reference.part(expected))

    def edit(self) -> None:
        if self.pending:
            return
        self.optimizer.synchronize()
        name, change = self.chance.choice(["head.weight", "blocks.2.up.weight"]), self.chance.choice([0.5, -0.25])
        with torch.no_grad():
            self.inner.get_parameter(name).add_(change)
            expected = self.replica.get_parameter(name)
            expected.add_(change)
            self.reference.masters[expected].copy_(self.reference.part(expected))

    def edit_gradients(self) -> None:
        """In ``p.grad``, in place or by another tensor; one of them is dropped."""
        if not self.reduced:
            return
        sums = self.reference.sums if self.in_place else self.reference.reduced
        factor, in_place, dropped = (
            self.chance.choice([0.3, 2.0]),
            self.chance.random() < 0.5,
            self.chance.random() < 0.3,
        )
        for name, parameter, replica in self.named():
            assert (parameter.grad is None) == (replica not in sums), name
            if parameter.grad is None:
                continue
            if dropped and name == "blocks.1.up.weight":
                parameter.grad = None
                del sums[replica]
                continue
            found = local_tensor(parameter.grad)  # in 16 bits if the penalty alone has made it
            assert torch.allclose(found.to(sums[replica].dtype), sums[replica], 0, 0, equal_nan=True), name
            if in_place:
                parameter.grad.mul_(factor)
            else:
                parameter.grad = parameter.grad * factor
            sums[replica] = (sums[replica].to(found.dtype) * factor).to(sums[replica].dtype)

    def penalty(self) -> None:
        """A backward of the shards themselves, which FSDP2 has no part in."""
        if not self.alike or not self.reduced:
            return
        named = [found for found in self.named() if found[0] in ("head.weight", "blocks.1.down.weight")]
        loss = torch.stack([parameter.to_local().sum() for _, parameter, _ in named]).sum()  # type: ignore[attr-defined]
        by_hand = self.reference.loss_scale.scale == 1 and self.chance.random() < 0.5
        loss.backward() if by_hand else self.optimizer.backward(loss)
        for _, _, replica in named:
            gradient = torch.full_like(self.reference.part(replica), self.reference.loss_scale.scale).float()
            earlier = self.reference.reduced.get(replica)
            self.reference.reduced[replica] = gradient if earlier is None else earlier + gradient

    def reload(self) -> None:
        """Nothing changes."""
        if not self.pending:
            state = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer.load_state_dict(state)

    def memory(self) -> None:
        if not self.pending:
            self.optimizer.release_device_memory()

    def move(self) -> None:
        """Into another model under another backend or update time, through a checkpoint."""
        if self.pending:
            return
        state, asynchronous = self.chance.choice(list(STATES)), self.chance.random() < 0.5
        self.calls[-1] = ("move", state, asynchronous)
        places = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(places)
        folder = Path(places[0]) / "checkpoint"
        saved = self.strategy.save_checkpoint(folder, self.model, self.optimizer, asynchronous=asynchronous)
        if asynchronous:
            self.train_on_and_forget()
            saved.result()
        self.values["optimizer_state"] = STATES[state]
        self.begin(self.values)
        self.strategy.load_checkpoint(folder, self.model, self.optimizer)
        self.optimizer.max_norm = self.reference.max_norm
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(places[0])

    def train_on_and_forget(self) -> None:
        """A step that the checkpoint must not see."""
        self.optimizer.backward(loss_of(self.model, 0, 0, self.rank, self.device))
        self.optimizer.step()

    @property
    def pending(self) -> bool:
        """Whether there are gradients."""
        return bool(self.reference.sums or self.reference.reduced)

    def prepare(self, model: nn.Module) -> nn.Module:
        prepared = super().prepare(model)
        for name in self.frozen:
            self.strategy.unwrap_model(prepared).get_submodule(name).requires_grad_(False)
        return prepared


CASES = [
    ("ddp", "stream", "bf16"),
    ("ddp", "next_forward", "fp16"),
    ("ddp", "overlap", "fp32"),
    ("fsdp2", "stream", "fp16"),
    ("fsdp2", "next_forward", "fp32"),
    ("fsdp2", "overlap", "bf16"),
    ("hsdp", "overlap", "fp16"),
]


@pytest.mark.parametrize(("layout", "state", "precision"), CASES)
@on_ranks(LAYOUTS)
def test_random_programs(sharding: dict[str, Any], state: str, precision: str) -> None:
    """A program gets to resident state, and to other update times, by a move."""
    deadline = time.monotonic() + SECONDS / len(CASES)
    case = {"optimizer_state": STATES[state], "precision": PRECISIONS[precision]}
    for seed in itertools.count():
        program = Program(seed, sharding, copy.deepcopy(case))
        try:
            program.run(length=14)
            program.check()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {program.calls}") from error
        program.strategy.close()
        over = [time.monotonic() > deadline]
        dist.broadcast_object_list(over)
        if over[0]:
            break
