"""Replicas that share the streamed work: the bits of the resident backend, and each of them a share of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from lightstep.checkpoint import load
from lightstep.distributed import Replicas, local_tensor
from lightstep.state.replicas import ReplicaShare, assign_owners
from lightstep.state.ring import Ring
from lightstep.state.schema import Managed
from lightstep.state.store import Store
from lightstep.state.units import RingError
from tests.covering import every_value
from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.training import DDP, HSDP, PRECISIONS, RESIDENT, STREAM, Training, collectives, same_tensors
from tests.reference.pair import same_tree, through_bytes
from tests.unit.test_classes_of_others import Projects

WIDE_RING = {"backend": "stream", "ring_mib": 1}
"""Under ``STREAM`` wide tensors go through the ring in parts."""

HYBRID = {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": 1}}
"""Replicas of one rank each."""


class Turned(TinyTransformer):
    """With a weight that is not row-major, which FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(0.1 * torch.randn(5, 7).t())

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits + logits @ self.turned[:5].t()


class Run(Training):
    """A model and its optimizer on this rank."""

    def __init__(
        self,
        sharding: dict[str, Any],
        state: dict[str, Any],
        precision: str = "bf16",
        scope: str = "global",
        **more: Any,
    ) -> None:
        values = {"sharding": sharding, "precision": PRECISIONS[precision], "optimizer_state": state}
        more.setdefault("make", TinyTransformer if sharding["kind"] == "fsdp2" else Turned)
        super().__init__({**values, "clipping": {"max_norm": 0.5, "scope": scope}}, **more)

    def owned(self) -> list[Managed]:
        return [item for item in self.optimizer.managed() if not item.is_remote]


def same_runs(where: str, tested: Run, expected: Run) -> None:
    """Weights and everything in the state dict, on this rank."""
    tested.optimizer.synchronize()
    same_tensors(tested.weights(), expected.weights(), where)
    found, wanted = tested.optimizer.state_dict(), expected.optimizer.state_dict()
    updated = [entries for entries in wanted["state"].values() if [*entries] != ["master"]]
    assert len(tested.optimizer.state) == len(expected.optimizer.state) == len(updated)
    same_tree(where, _local(found), _local(wanted))


def _local(tree: Any) -> Any:
    """Shards on the host as plain tensors."""
    if isinstance(tree, dict):
        return {key: _local(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_local(value) for value in tree]
    return local_tensor(tree).cpu() if isinstance(tree, Tensor) else tree


# -- the same bits: also rows of ``test_programs.py``


def strides_of_state(state: dict[str, Any]) -> dict[str, list[Any]]:
    run = Run(DDP, state, "fp32", optimizer_class=Projects, groups=lambda model: [{"params": [*model.parameters()]}])
    run.train(2)
    states: dict[Any, dict[str, Any]] = run.optimizer.state_dict()["state"]
    return {key: [own[key].stride() for own in states.values()] for key in ("basis", "moment")}


@on_ranks(2)
def test_all_replicas_see_the_strides_of_entries() -> None:
    assert strides_of_state(STREAM) == strides_of_state(RESIDENT)


@on_ranks(3)
def test_weights_that_are_not_row_major(rank: int) -> None:
    runs = [Run(DDP, state) for state in (STREAM, RESIDENT)]
    for run in runs:
        run.train(3)
    assert 0 < len(runs[0].owned()) < len(runs[0].optimizer.managed())
    same_runs(f"rank {rank}", *runs)


@on_ranks(2)
def test_a_weight_is_sent_when_all_its_parts_are_updated(rank: int) -> None:
    """Each replica gets what a weight is when its sending begins."""
    tested, expected = (Run(DDP, state, make=lambda: TinyTransformer(width=40)) for state in (STREAM, RESIDENT))
    start = Replicas.broadcast

    def send_at_once(replicas: Replicas, tensor: Tensor, owner: int) -> dist.Work | None:
        work = start(replicas, tensor, owner)
        replicas.wait([work])
        return work

    with mock.patch.object(Replicas, "broadcast", send_at_once):
        tested.train(2)
        tested.optimizer.synchronize()
    expected.train(2)
    assert any(len({unit for unit in tested.backend.units() if item in unit.owners}) > 1 for item in tested.owned())
    same_runs(f"rank {rank}", tested, expected)


@on_ranks(2)
def test_weights_that_one_replica_alone_edits() -> None:
    """Edits on all replicas are rows of ``test_programs.py``."""
    tested = Run(DDP, STREAM)
    tested.train(2)
    with torch.no_grad():
        for item in tested.optimizer.managed():
            if item.is_remote:
                item.param.add_(1.0)
    tested.train(1)
    for item in tested.optimizer.managed():
        values = tested.backend._share.replicas.gather_objects(local_tensor(item.param).detach().cpu())
        assert all(torch.equal(values[0], value) for value in values), "replicas differ"


class TurnedAtTimes(TinyTransformer):
    """Its weights that are not row-major have no gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.ParameterList(0.1 * torch.randn(5, 7).t() for _ in range(4))
        self.forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        self.forwards += 1
        used = self.turned if self.forwards // 2 % 2 == 0 else ()
        return sum((logits @ weight[:5].t() for weight in used), start=logits)


@on_ranks(2, ("update", "scope"), [("at_step", "global"), ("overlap", "global"), ("in_backward", "unit")])
def test_what_another_replica_has_sent_is_no_write_of_the_user(update: str, scope: str) -> None:
    """Weights that arrive in copies are written to, also in steps in which they have no gradient."""
    runs = [Run(DDP, {**home, "update": update}, scope=scope, make=TurnedAtTimes) for home in (STREAM, RESIDENT)]
    for _ in range(5):
        for run in runs:
            run.train(1)
            run.optimizer.synchronize()
            managed = run.optimizer.engine.managed
            assert [item.name for item in managed.find_written(list(managed))] == []
    same_runs(update, *runs)


@on_ranks(2, "update", ["at_step", "next_forward", "overlap", "in_backward"])
def test_a_graph_from_before_the_step_is_refused_by_all_replicas(update: str) -> None:
    """As after torch's own step. Else a rank whose graph needs weights of others alone would have wrong gradients, or
    wait for the ranks that refuse it."""
    run = Run(DDP, {**STREAM, "update": update}, scope="unit" if update == "in_backward" else "global")
    run.train(3)
    run.optimizer.synchronize()
    older = {}
    for name, parameter in run.inner.named_parameters():
        given = torch.ones_like(parameter, requires_grad=True)
        older[name] = (given * parameter).sum(), given
    run.train(1)
    unchanged = {name for name, parameter in run.inner.named_parameters() if parameter not in run.optimizer.state}
    for name, (output, given) in older.items():
        with nullcontext() if name in unchanged else pytest.raises(RuntimeError, match="inplace operation"):
            torch.autograd.grad(output, given)
    assert len(unchanged) == 4  # two that are frozen, and two without gradients
    run.train(1)


def _without_blocks(model: Any) -> list[dict[str, Any]]:
    inside = {id(parameter) for parameter in model.blocks.parameters()}
    return [{"params": [parameter for parameter in model.parameters() if id(parameter) not in inside]}]


@on_ranks(4)
def test_parameters_that_join() -> None:
    """Parameters that join; those that were there stay with their owners."""
    tested, expected = (Run(HSDP, state, groups=_without_blocks) for state in (STREAM, RESIDENT))
    owned: list[Managed] = []
    for run in (tested, expected):
        run.train(2)
        if run is tested:
            owned = run.owned()
        run.optimizer.add_param_group({"params": list(run.inner.blocks.parameters()), "lr": 5e-3})
        run.inner.frozen.requires_grad_(True)
        run.train(2)
    assert set(owned) < set(tested.owned())
    same_runs("joined", tested, expected)


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 11))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight.t()[tokens]


class HeadOnly(OneWeight):
    """Two trained tensors on a frozen base."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.requires_grad_(False)
        self.head = nn.Linear(5, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(super().forward(tokens))


@every_value(
    update=["at_step", "next_forward", "in_backward", "overlap"],
    layout=["two", "head", "shards"],
)
@on_ranks({"two": (2, (DDP, OneWeight)), "head": (3, (DDP, HeadOnly)), "shards": (4, (HSDP, OneWeight))})
def test_a_replica_without_parameters(rank: int, sharding: tuple[Any, Any], update: str, tmp_path: Path) -> None:
    """More replicas than trained parameters; lanes are slow. Then a checkpoint, and a state dict."""
    streamed, scope = {**WIDE_RING, "update": update}, "unit" if update == "in_backward" else "global"
    layout, make = sharding

    def trained(model: Any) -> list[dict[str, Any]]:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]

    def new(state: dict[str, Any], seed: int = 0) -> Run:
        return Run(layout, state, make=make, groups=trained, scope=scope, seed=seed)

    runs = [new(streamed), new(RESIDENT)]
    for step in range(4):
        for run in runs:
            run.step(overflow=step == 2)
        assert torch.equal(runs[0].norms[-1].nan_to_num(), runs[1].norms[-1].nan_to_num())
        if step == 1:
            runs[0].delay(rank)
        if step > 1:
            same_tensors(runs[0].weights(), runs[1].weights(), f"rank {rank}, step {step}")
    owned = runs[0].backend._share.replicas.gather_objects(len(runs[0].owned()))
    assert sum(owned) == len(runs[0].optimizer.managed()) and owned[-1] == 0
    same_runs(f"rank {rank}", *runs)
    runs[0].strategy.save_checkpoint(tmp_path / "saved", runs[0].model, runs[0].optimizer)
    loaded, read, read_tensors = new(streamed, seed=1), set[str](), load.read_tensors

    def noting(data: Path, index: Any, targets: Any, *more: Any) -> None:
        read.update(target.key for target in targets if not target.key.startswith("model."))
        read_tensors(data, index, targets, *more)

    with mock.patch.object(load, "read_tensors", noting):
        loaded.strategy.load_checkpoint(tmp_path / "saved", loaded.model, loaded.optimizer)
    shares = runs[0].backend._share.replicas.gather_objects(read)
    assert sum(map(len, shares)) == len(set().union(*shares)) > 0, "no entry is read twice"
    loaded.steps = runs[0].steps
    runs[0].optimizer.load_state_dict(through_bytes(runs[0].optimizer.state_dict()))
    for run in (loaded, *runs):
        run.train(1)
        run.optimizer.release_device_memory()
        run.train(1)
    same_runs(f"rank {rank}, its state dict loaded", *runs)
    same_runs(f"rank {rank}, its checkpoint loaded", loaded, runs[1])
    for run in (loaded, *runs):
        run.optimizer.close()


# -- the share


@on_ranks(None, ("ranks", "sharding", "replicas"), [(2, DDP, 2), (4, HSDP, 2)])
def test_each_replica_has_its_share(sharding: dict[str, Any], replicas: int) -> None:
    """Host bytes, and bytes fetched per step; the sum over the replicas is what one process would have."""
    run = Run(sharding, WIDE_RING, make=lambda: TinyTransformer(width=64))
    run.train(2)
    fetched: list[int] = []
    stage = Ring._fetch

    def counting(ring: Ring, record: Any) -> None:
        fetched.append(record.nbytes)
        stage(ring, record)

    with mock.patch.object(Ring, "_fetch", counting):
        run.train(1)
    kept, report = _record_bytes(run.backend._records), run.optimizer.memory_report()
    updated = [record for record in run.backend._records if any(part.owner.updated for part in record.parts)]
    assert sum(fetched) == _record_bytes(updated) > 0
    assert report["parameters"] == sum(local_tensor(p).numel() for p in run.inner.parameters() if p.requires_grad)
    assert report["host_bytes_per_parameter"] == report["host_bytes"] / report["parameters"]

    undivided = Store(**run.backend._settings)
    items = [dataclasses.replace(item, is_remote=False) for item in run.optimizer.managed()]
    undivided.register(items)
    for item in items:
        state = run.optimizer.parameter_state(item.param) if item.updated else {}
        undivided.load(item, {key: local_tensor(value) for key, value in state.items()})
    whole, whole_on_host = _record_bytes(undivided._records), undivided.memory()["host_bytes"]
    undivided.close()
    assert sum(run.backend._share.replicas.gather_objects(kept)) == whole
    assert abs(report["host_bytes"] / whole_on_host - 1 / replicas) < 0.1


def _record_bytes(records: Iterable[Any]) -> int:
    return sum(record.nbytes for record in records)


@on_ranks(None, ("ranks", "sharding"), [(2, DDP), (4, HSDP)])
def test_what_is_sent(rank: int, sharding: dict[str, Any]) -> None:
    """One broadcast per weight that has elements, also where nothing was updated."""
    run = Run(sharding, WIDE_RING)
    run.train(2)
    weights = [p for p in run.inner.parameters() if p.requires_grad and local_tensor(p).numel()]
    reductions = 3 if sharding["kind"] == "fsdp2" else 1  # the norm twice: a layer has no gradient on any rank
    run.optimizer.backward(run.loss())
    with collectives() as counted:
        assert run.optimizer.step()
    assert counted == {"allreduce_": reductions, "broadcast_": len(weights)}, counted
    if sharding["kind"] == "ddp":
        run.optimizer.backward(0 * run.loss())
        run.optimizer.zero_grad()
        with collectives() as counted:
            run.optimizer.step()
        assert counted == {"allreduce_": reductions, "broadcast_": len(weights)}, counted


def items_of(sizes: list[int]) -> list[Managed]:
    return [Managed(torch.zeros(size), torch.zeros(size), {}, f"p{i}") for i, size in enumerate(sizes)]


def test_share_out() -> None:
    def cost(item: Managed) -> int:
        return item.local.numel()

    items = items_of([4, 4, 9, 1, 0, 6, 6])
    shared = assign_owners(items, cost, {}, 3)
    assert list(shared) == items
    assert list(shared.values()) == [1, 2, 0, 0, 0, 1, 2]
    assert _loads(shared, cost, 3) == [10, 10, 10]
    more = items_of([30, 5])
    grown = assign_owners([*items[1:], *more], cost, shared, 3)
    assert all(grown[item] == shared[item] for item in items[1:])
    assert [grown[item] for item in more] == [1, 0], "the owner of the first had the least to do without it"
    assert _loads(assign_owners(items_of([7]), cost, {}, 2), cost, 2) == [7, 0]


def _loads(shared: dict[Managed, int], cost: Callable[[Managed], int], replicas: int) -> list[int]:
    return [sum(cost(item) for item, owner in shared.items() if owner == replica) for replica in range(replicas)]


def test_weights_wait_for_all_that_is_sent_before() -> None:
    """Also when own ones are done in another order than they are sent in, as after a trial in backward."""
    items = items_of([4] * 6)
    for number, item in enumerate(items):
        item.is_remote = number % 2 == 1
    sending = ReplicaShare(SimpleNamespace(size=2, rank=0))  # type: ignore[arg-type]
    sending._owners = {item: int(item.is_remote) for item in items}
    sending._plan(items, lambda item: item.local.numel())
    numbers = sending.arrival_jobs({items[0]: 2, items[2]: 0, items[4]: 3}, 9)
    assert numbers == dict(zip(items, (2, 2, 2, 3, 3, 9), strict=True))


# -- state seen from outside


@on_ranks(2, "sharding", [DDP, HYBRID])
def test_replicas_know_what_backward_has_updated(sharding: dict[str, Any]) -> None:
    """Layers without a gradient, and those that were skipped, get no state. A replica that took them for updated would
    wait for state that the one that keeps it does not send."""
    runs = [Run(sharding, {**state, "update": "in_backward"}, scope="unit") for state in (STREAM, RESIDENT)]
    for overflow in (True, False, False):
        for run in runs:
            run.step(overflow=overflow)
        found, wanted = ([item.name for item in run.optimizer.managed() if item.updated] for run in runs)
        assert found == wanted and bool(wanted) is not overflow
    same_runs("in backward", *runs)


class AllTrained(TinyTransformer):
    """torch wants state for every parameter that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.dead.requires_grad_(False)


@on_ranks(2)
def test_state_dict_of_torch_distributed_checkpoint() -> None:
    tested, expected = (Run(DDP, state, make=AllTrained) for state in (STREAM, RESIDENT))
    for run in (tested, expected):
        run.train(2)
    saved = get_optimizer_state_dict(tested.model, tested.optimizer)
    same_tree("saved", _local(saved), _local(get_optimizer_state_dict(expected.model, expected.optimizer)))
    loaded = Run(DDP, STREAM, make=AllTrained, seed=5)
    loaded.model.load_state_dict(tested.model.state_dict())
    set_optimizer_state_dict(loaded.model, loaded.optimizer, saved)
    same_runs("loaded", loaded, expected)
    loaded.steps = expected.steps
    for run in (loaded, expected):
        run.train(2)
    same_runs("continued", loaded, expected)


# -- what goes wrong


class Breaking(torch.optim.AdamW):
    """Raises ``error`` in the next update."""

    error: BaseException | None = None

    def step(self, closure: Any = None) -> Any:
        if Breaking.error is not None:
            error, Breaking.error = Breaking.error, None
            raise error
        return super().step(closure)


@on_ranks(2)
def test_an_update_that_fails_on_one_replica(rank: int) -> None:
    """An update that fails on one replica: the others finish the step; all load what was saved, and go on."""
    tested, expected = Run(DDP, STREAM, optimizer_class=Breaking), Run(DDP, RESIDENT)
    for run in (tested, expected):
        run.train(2)
    weights = {name: value.clone() for name, value in tested.model.state_dict().items()}
    saved = tested.optimizer.state_dict()
    Breaking.error = ValueError("out of luck") if rank == 1 else None
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"the update of .* failed \(ValueError: out of luck\)"):
            tested.step()
        with pytest.raises(RuntimeError, match="Load a checkpoint before the next step"):
            tested.optimizer.step()
    else:
        tested.step()
        assert tested.result
    tested.model.load_state_dict(weights)
    tested.optimizer.load_state_dict(saved)
    tested.steps = 2
    for run in (tested, expected):
        run.train(2)
    same_runs("after a failure", tested, expected)


def check_lost_replica(rank: int, folder: str) -> None:
    """A replica that is gone before it has sent its weights: the others are told, and refuse to go on."""
    run = Run(DDP, STREAM, optimizer_class=Breaking)
    run.train(2)
    if rank == 1:
        Breaking.error = KeyboardInterrupt()
        run.backend.abandon = lambda: os._exit(1)  # a killed process sends nothing more
        run.step()
    with pytest.raises(RuntimeError, match=r"the end of the update failed"):
        run.step()
    with pytest.raises(RuntimeError, match="Load a checkpoint before the next step"):
        run.optimizer.step()
    Path(folder, "told").touch()


def test_a_replica_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--- rank 1 of 2 ---\nthe process ended") as failure:
        Pool(patience=60).run(check_lost_replica, 2, cpu=True, folder=str(tmp_path))  # nccl's watchdog ends all
    assert (tmp_path / "told").exists(), failure.value


class WholeTensors(torch.optim.AdamW):
    whole_tensors = True


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(64, 64, bias=False), nn.Linear(64, 1, bias=False)


@on_ranks(2)
def test_a_share_that_does_not_fit(rank: int) -> None:
    """The ring of one replica is too small for its share: all of them raise at the first step."""
    run = Run(
        {"kind": "ddp"},
        {"backend": "stream", "ring_mib": 0.1},
        make=Uneven,
        groups=lambda model: [{"params": list(model.parameters())}],
        optimizer_class=WholeTensors,
    )
    expected = RingError if rank == 0 else RuntimeError
    with pytest.raises(expected, match=r"optimizer_state\.ring_mib is 0\.1"):
        run.optimizer.step()


@on_ranks(4)
def test_who_shares(rank: int, world_size: int) -> None:
    """Which ranks share, and where nobody does."""
    assert Run({"kind": "fsdp2"}, STREAM).backend._share is None
    assert Run(DDP, RESIDENT).backend._share is None
    replicas = Run(HSDP, STREAM).backend._share.replicas
    assert replicas.gather_objects(rank) == ([0, 2] if rank % 2 == 0 else [1, 3])
    plain = Run(DDP, STREAM)
    assert plain.backend._share.replicas.size == world_size
    assert Replicas.of_shards(plain.inner.parameters()) is None
    assert Replicas.of_shards([]) is None


def _lacks_one(groups: list[dict[str, Any]], rank: int) -> None:
    del groups[0]["params"][rank]


def _swapped_groups(groups: list[dict[str, Any]], rank: int) -> None:
    first = groups[0]["params"].pop(rank)
    groups[1]["params"].append(first)


def _other_rate(groups: list[dict[str, Any]], rank: int) -> None:
    groups[1]["lr"] = 1e-3 * (1 + rank)


@on_ranks(
    2,
    ("change", "found"),
    [
        (_lacks_one, "{'parameter': 'blocks.0.norm.weight'}, and the other {'parameter': 'embed.weight'}"),
        (
            _swapped_groups,
            "{'lr': 0.001, 'weight_decay': 0.0}, and the other {'lr': 0.003, 'weight_decay': 0.1}, for emb",
        ),
        (_other_rate, "{'lr': 0.001}, and the other {'lr': 0.002}, for gain"),
    ],
)
def test_other_parameters_or_settings_on_other_replicas_are_refused(rank: int, change: Any, found: str) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = model.split()
        change(listed, rank)
        return listed

    run = Run(DDP, WIDE_RING, make=TinyTransformer, groups=groups)
    before = run.weights()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"the optimizers of replicas 0 and 1 differ: one has {found}"):
            run.step()
        run.optimizer.zero_grad()
    same_tensors(run.weights(), before)
