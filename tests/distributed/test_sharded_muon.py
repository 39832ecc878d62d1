"""Muon, and other classes that need whole tensors, on shards: what the rows of ``test_programs.py`` do not have."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Adafactor

import lightstep
from lightstep import Rule
from lightstep.bench.models import LlamaShape
from lightstep.bench.peers import TorchFsdp2
from lightstep.bench.step import StepTask, random_gradients
from lightstep.bench.strategies import StrategyContender
from lightstep.distributed import local_tensor, memory_order
from lightstep.distributed.matrices import assign_owners, orthogonalization_cost
from lightstep.optimizer import queue
from lightstep.optimizer.overlap import SpeculativeUpdates
from tests.distributed.failing_rank import train_as
from tests.distributed.programs import ADAFACTOR, MUON, Lamb, Program, WithExperts, whole_groups
from tests.distributed.ranks import Pool, device_of, on_ranks
from tests.distributed.training import (
    DEFERRED,
    FSDP2,
    OVERLAP,
    RESIDENT,
    STREAM,
    Training,
    load,
    same_tensors,
)
from tests.patience import PATIENCE


def content(run: Training) -> dict[str, Tensor]:
    """Weights and state, whole."""
    run.optimizer.synchronize()
    found = {}
    for name, parameter in run.inner.named_parameters():
        entries = {"weight": parameter, **run.optimizer.state.get(parameter, {})}
        found |= {f"{name}.{key}": whole(torch.as_tensor(value)) for key, value in entries.items()}
    return found


def whole(value: Tensor) -> Tensor:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value.cpu()


@on_ranks(2)
def test_layers_that_are_clipped_by_themselves() -> None:
    """Each layer's momentum has its own factor; later units' communication starts with the factors of their layers."""
    first, last = {}, {}
    for name, state in {"streamed": DEFERRED, "resident": RESIDENT, "whole": RESIDENT}.items():
        sharding = {"kind": "single"} if name == "whole" else FSDP2
        values = {"sharding": sharding, "optimizer_state": state, "clipping": {"max_norm": 0.05, "scope": "unit"}}
        run = Training(values, WithExperts, groups=partial(whole_groups, "Muon"))
        run.backend.WHOLE_UNIT = run.backend._ring_plan.BULK_UNIT = 150  # several units
        run.rank = 0  # the same batches everywhere
        run.train(1)
        first[name] = content(run)
        if name != "whole":
            run.train(2)
            last[name] = content(run)
        run.optimizer.close()
    for name, value in first["whole"].items():
        if name.endswith("momentum_buffer"):
            torch.testing.assert_close(first["resident"][name], value, rtol=1e-2, atol=1e-7)
    same_tensors(last["streamed"], last["resident"])


@on_ranks(4, "name", ["muon", "adafactor"])
def test_under_tensor_parallelism(rank: int, world_size: int, name: str) -> None:
    """FSDP2 over tensor parallelism, whose first matrix and bias are divided twice by rows, and the second by both
    dimensions."""
    device, is_muon = device_of(rank, world_size), name == "muon"
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7, bias=False), nn.Linear(7, 5)).to(device)
    wanted = [nn.Parameter(p.detach().bfloat16().float()) for p in model.parameters() if not is_muon or p.dim() == 2]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model.bfloat16(), mesh=mesh["dp"])
    state = {**OVERLAP, "ring_mib": 0.02}
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": None}, "optimizer_state": state})
    optimizer_class, settings = (torch.optim.Muon, MUON) if is_muon else (Adafactor, ADAFACTOR)
    rules = [Rule(torch.optim.Muon, dims=2, **MUON), Rule(torch.optim.AdamW, dims=1, lr=3e-3, weight_decay=0.1)]
    rules = rules if is_muon else [Rule(optimizer_class, **settings)]
    optimizer, plain = strategy.create_optimizer(model, rules=rules), optimizer_class(wanted, **settings)
    tested = [p for p in model.parameters() if not is_muon or p.dim() == 2]
    for step in range(2):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
        optimizer.accumulating = False  # the last backward of the step: units are tried in it
        optimizer.backward(model(inputs).float().square().mean())
        assert bool(optimizer.engine.queue.early._has_shared) == (is_muon and step > 0)
        for whole_one, parameter in zip(wanted, tested, strict=True):
            whole_one.grad = parameter.grad.full_tensor().float()
        assert optimizer.step()
        plain.step()
    optimizer.synchronize()
    for whole_one, parameter in zip(wanted, tested, strict=True):
        assert torch.equal(parameter.full_tensor(), whole_one.bfloat16())
        entries = dict(optimizer.state[parameter])
        assert torch.equal(whole(entries.pop("master")), whole_one.detach().cpu())
        theirs = plain.state[whole_one]
        assert is_muon or entries.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(whole(torch.as_tensor(entries[key])), torch.as_tensor(value).cpu()), key
    optimizer.close()


@on_ranks(2)
def test_the_benchs_loop_by_hand_does_the_same(rank: int, world_size: int) -> None:
    task = StepTask(device_of(rank, world_size), 0, LlamaShape.nearest(60_000, 2), optimizer="muon")
    ours = StrategyContender(task, lightstep.Strategy.load("fsdp2"))
    by_hand = TorchFsdp2(task)
    for step in range(2):
        for contender in (ours, by_hand):
            drawn = random_gradients(contender.gradient_weights(), contender.gradient_dtype, task.device, step)[0]
            contender.step(contender.placed(drawn))
    for mine, theirs in zip(ours.weights(), by_hand.weights(), strict=True):
        assert (mine.float() - theirs).abs().max() <= 2**-9, "beyond a rounding to bf16"
    ours.close()


def check_checkpoints(rank: int, folder: str, saves: bool) -> None:
    for name in ("Muon", "Adafactor", "ByColumns"):
        own = Path(folder, name)
        program = Program(FSDP2, {"optimizer_state": STREAM if saves else DEFERRED, "optimizer": name})
        if saves:
            program.micro()
            program.step()
            program.strategy.save_checkpoint(own / "a", program.model, program.optimizer)
            found = content(program)
            if rank == 0:
                torch.save(found, own / "content.pt")
        else:
            program.strategy.load_checkpoint(own / "a", program.model, program.optimizer)
            same_tensors(content(program), torch.load(own / "content.pt"))
            for parameter, state in program.optimizer.state.items() if name == "ByColumns" else ():
                by_columns = tuple(range(parameter.dim()))[::-1]
                assert parameter.shape[0] == 1 or memory_order(local_tensor(state["moment"])) == by_columns
            program.optimizer.backward(program.loss())
            assert program.optimizer.step()


def test_a_checkpoint_goes_to_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_checkpoints, 2, folder=str(tmp_path), saves=True)
    pool.run(check_checkpoints, 3, folder=str(tmp_path), saves=False)  # one has no expert


class CountingLamb(Lamb):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step()


class OddLamb(Lamb):
    """Keeps what looks like a shard: of six rows each of two ranks has three."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = torch.zeros(3, 6)


class DoubleLamb(Lamb):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["double"] = torch.zeros_like(parameter, dtype=torch.float64)


@on_ranks(
    2,
    ("optimizer_class", "update", "message"),
    [
        (torch.optim.Muon, "in_backward", "in_backward cannot do: set at_step"),
        (CountingLamb, "at_step", "CountingLamb counts in its groups .* only the rank"),
        (
            OddLamb,
            "at_step",
            r"keeps 'odd' of 0.weight, which is sharded, in shape \(3, 6\), "
            "which is also the shape of a rank's part",
        ),
        (DoubleLamb, "at_step", "keeps 'double' of 0.weight, which is sharded, in torch.float64"),
    ],
)
def test_what_does_not_go_on_shards(optimizer_class: Any, update: str, message: str) -> None:
    state = {"backend": "resident", "update": update}
    strategy = load(FSDP2, clipping={"max_norm": None}, optimizer_state=state)
    model = strategy.prepare_model(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    rules = [Rule(optimizer_class, dims=2), Rule(torch.optim.AdamW, dims=1)]
    optimizer = strategy.create_optimizer(model, rules=rules)
    with pytest.raises((ValueError, RuntimeError), match=message):  # noqa: PT012
        optimizer.backward(model(torch.ones(2, 6, dtype=torch.bfloat16, device=strategy.device)).sum())
        optimizer.step()


@on_ranks(2, "optimizer_class", [torch.optim.Muon, Lamb])
def test_experts_that_are_cut_are_refused(rank: int, world_size: int, optimizer_class: Any) -> None:
    device = device_of(rank, world_size)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(3, 6, 6, device=device, dtype=torch.bfloat16))
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), shard_placement_fn=lambda _: Shard(1))
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": None}})
    optimizer = strategy.create_optimizer(model, rules=Rule(optimizer_class))
    model.experts.grad = torch.ones_like(model.experts)
    with pytest.raises(
        ValueError, match=r"experts of shape \(3, 6, 6\) is sharded along another dimension than the firs"
    ):
        optimizer.step()


def test_the_work_is_shared_evenly() -> None:
    shapes = [torch.Size(shape) for shape in ((8, 8), (8, 8), (4, 4), (32, 8), (32, 8), (8, 32))]
    loads = [0, 0]
    owners = [assign_owners(shapes, loads) for _ in range(4)]  # of four units
    assert sum(loads) == 4 * sum(map(orthogonalization_cost, shapes)) and max(loads) <= 1.05 * min(loads)
    assert owners[0] != owners[1], "who had more in one unit has less in the next"
    assert assign_owners(shapes, [0]) == [0] * 6


# -- tried in backward by all ranks or none, whatever happens to one of them


Act = Callable[[int, SpeculativeUpdates], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def nothing(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    yield


@contextlib.contextmanager
def other_order(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    """One rank sees its gradients last to first, when backward is over.

    On the CPU: NCCL wants the operations of all communicators in one order on all ranks. FSDP2's own reductions, which
    follow the order of gradients, would hang there as well.
    """
    on_gradient, speculate_shared, held = overlap._on_gradient, overlap._speculate_shared, []

    def speculated(speculation: Any, flush: bool = False) -> None:
        while flush and held:
            on_gradient(*held.pop())
        speculate_shared(speculation, flush)

    if rank == 1 and overlap._backend.lanes.device.type == "cpu":
        collecting = mock.patch.object(overlap, "_on_gradient", lambda *one: held.append(one))
        with collecting, mock.patch.object(overlap, "_speculate_shared", speculated):
            yield
        assert not held
    else:
        yield


@contextlib.contextmanager
def read_in_backward(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    """One rank reads what was tried, while all of them go on with more."""
    submit, reads = overlap._submit_speculative, []

    def submitted(speculation: Any, units: Any) -> None:
        submit(speculation, units)
        if speculation.shared_queue and speculation.submitted:
            overlap._queue.wait_for_update(list(speculation.used))
            reads.append(units)

    if rank == 1:
        with mock.patch.object(overlap, "_submit_speculative", submitted):
            yield
        assert reads
    else:
        yield


@contextlib.contextmanager
def no_room(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    able: Any = overlap._backend.reserve_speculation
    with mock.patch.object(overlap._backend, "reserve_speculation", (lambda units: ()) if rank == 1 else able):
        yield


@contextlib.contextmanager
def some_room(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    """Others on every rank: weights are cut, and what is tried of one may be its end."""
    able: Any = overlap._backend.reserve_speculation
    with mock.patch.object(overlap._backend, "reserve_speculation", lambda units: able(units)[rank % 3 :: 2]):
        yield


def read_before_step(rank: int, optimizer: Any) -> None:
    if rank == 1:
        optimizer.synchronize()


STEPS: list[tuple[Act, Any, float, str]] = [
    (nothing, None, 1e6, ""),  # state is made
    (nothing, None, 0.05, "redo"),
    (other_order, None, 1e6, "commit"),
    (read_in_backward, None, 1e6, "redo"),
    (nothing, read_before_step, 1e6, "redo"),
    (no_room, None, 1e6, ""),
    (some_room, None, 1e6, "any"),
    (nothing, None, float("nan"), "drop"),
    (nothing, None, 1e6, "commit"),
]
"""What is done in backward, what before ``step()``, the largest norm (NaN: an overflow), and what becomes of units that
ranks try together, on rank 0."""


@on_ranks(None, ("ranks", "moments", "copies"), [(2, "bfloat16", 1), (4, "float32", 2)])
def test_the_same_on_all_ranks(rank: int, world_size: int, moments: str, copies: int) -> None:
    """With copies of the shards, what is said of rank 1 is so of one copy, or of one rank of it."""
    sharding = {**FSDP2, "mesh": {"replicate": copies, "shard": world_size // copies}}
    state = {**OVERLAP, "ring_mib": 0.02, "moments": moments}
    program = Program(sharding, {"optimizer_state": state, "optimizer": "Muon"})
    optimizer = program.optimizer
    overlap: SpeculativeUpdates = optimizer.engine.queue.early
    became: list[str] = []
    apply_verdict, roll_back, skip = overlap._apply_verdict, overlap._roll_back, overlap.skip

    def note(speculation: Any, what: str) -> None:
        if speculation is not None and speculation.plan.shared & set(speculation.submitted):
            became.append(what)

    def applied(speculation: Any, update: Any) -> None:
        note(speculation, overlap._verdict.read())
        apply_verdict(speculation, update)

    def rolled_back(reason: str) -> Any:
        note(overlap.speculation, "rolled back")
        return roll_back(reason)

    def skipped() -> None:
        note(overlap.speculation, "drop")
        skip()

    patches: dict[str, Any] = {
        "skip": skipped,
        "_apply_verdict": applied,
        "_roll_back": rolled_back,
        "_update_pause": lambda: setattr(overlap, "_pause", 0),
    }
    one_by_one = mock.patch.multiple(queue, SUBMIT_IN_STEP=1, SUBMIT_AHEAD=0)
    with one_by_one, mock.patch.multiple(overlap, **patches), mock.patch.object(overlap._link_share, "adapt"):
        for step, (in_backward, before_step, max_norm, expected) in enumerate(STEPS):
            overflow = max_norm != max_norm
            program.clip("1" if overflow else str(max_norm))
            with in_backward(rank, overlap):
                program.micro(*["inf"] * overflow)
            if before_step is not None:
                before_step(rank, optimizer)
            program.step()
            if rank == 0:
                optimizer.synchronize()  # alone: what it waits for does not wait for what the others do next
            dist.barrier()
            assert rank > 0 or expected == "any" or became == [expected] * bool(expected), (step, became)
            became.clear()
    program.check()
    optimizer.close()


def test_a_rank_that_fails_ends(tmp_path: Path) -> None:
    """With its own error, and the others with it: neither waits for the other until the process group gives up."""
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    ranks = [context.Process(target=train_as, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
    assert all(rank.exitcode for rank in ranks)
    failed, waiting = ((tmp_path / name).read_text() for name in ("rank1", "rank0"))
    assert "no more room); other ranks wait for this one until its process ends" in failed
    assert "imed out" not in waiting
