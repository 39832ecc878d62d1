"""Sharded weights that threads gather and send while training goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightstep import TransformersEngine, VllmServer, WeightTransferError
from lightstep.rollout.staged_weights import MappedMemory, Publisher, StagedWeights
from lightstep.rollout.transport import Bucket
from lightstep.sharding.model_names import unwrap_model
from lightstep.state.shared_memory import SharedMemory
from tests.distributed.publishing_runs import ON_HOST, Publishing, same
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.training import DDP, DEFERRED, FSDP2, HSDP, OVERLAP, RESIDENT
from tests.rollout_servers import FakeVllm
from tests.unit.test_publishing import Slow

NOTHING, EVERYTHING = "nothing", "everything"
"""What the first trainer can map of the others' memory; or only that of one rank."""


@contextmanager
def mapping(mapped: str | int, rank: int) -> Iterator[Counter[bool]]:
    """Trainers whose memory the first one can map. Counts shards that it read there, and those that were sent."""
    create, count = SharedMemory.create, Counter[bool]()
    shares = mapped in (EVERYTHING, rank)
    receive, near = dist.irecv, StagedWeights._near

    def received(*arguments: Any, **settings: Any) -> Any:
        count[False] += 1
        return receive(*arguments, **settings)

    def read(staged: StagedWeights, part: Tensor, device: torch.device) -> Tensor:
        views = [view for listed in staged._mapped.values() for view in listed]
        count[True] += any(part is view for view in views)
        return near(staged, part, device)

    with (
        mock.patch.object(SharedMemory, "create", create if shares else lambda nbytes: None),
        mock.patch.object(dist, "irecv", received),
        mock.patch.object(StagedWeights, "_near", read),
    ):
        yield count


class FromDevice(Slow):
    """Its buckets may be on a device."""

    def send(self, bucket: Bucket) -> None:
        super().send(Bucket(bucket.infos, bucket.buffer.cpu()))


@on_ranks(
    None,
    ("ranks", "sharding", "mapped", "state", "on_device"),
    [
        (4, HSDP, EVERYTHING, DEFERRED, False),
        (2, DDP, EVERYTHING, OVERLAP, False),
        (2, FSDP2, EVERYTHING, ON_HOST, False),
        (2, FSDP2, NOTHING, RESIDENT, True),
        (3, FSDP2, 2, RESIDENT, True),  # one trainer's is mapped
    ],
)
def test_every_set_is_one_steps(
    rank: int, sharding: dict[str, Any], mapped: str | int, state: dict[str, Any], on_device: bool, tmp_path: Path
) -> None:
    """Shards in memory that the first trainer cannot map are sent to it.

    Shards on the device under overlap: what changed of them is sent below.
    """
    with mapping(mapped, rank) as count:
        check_sets(rank, sharding, state, tmp_path, on_device)
    if rank == 0 and sharding != DDP:
        assert (count[True] > 0) == (mapped != NOTHING) and (count[False] > 0) == (mapped != EVERYTHING)


def check_sets(rank: int, sharding: dict[str, Any], state: dict[str, Any], folder: Path, on_device: bool) -> None:
    training, transport = Publishing(sharding, state), FromDevice(seconds=0.003)
    transport.takes_device = on_device
    strategy, expected = training.strategy, {}
    transport.go.set()
    for version in range(1, 5):
        training.step()
        expected[version] = training.weights()
        training.be_late()
        replace = version != 3
        assert strategy.publish_weights(training.model, transport, wait=False, replace=replace) == version
        training.be_late()
        if version == 2:
            strategy.save_checkpoint(folder / f"saved{state}", training.model, training.optimizer, asynchronous=True)
        training.step()  # its collectives run beside those of the threads
    report = strategy.wait_for_publication()
    assert report is not None and report.version == 4 and (report.nbytes > 0) == (rank == 0)
    if rank == 0:
        assert list(transport.received) == sorted(transport.received)
        assert {2, 4} <= transport.received.keys()  # the others may have been replaced before they were begun
        wanted = sum(tensor.numel() for tensor in expected[1].values())
        for version, found in transport.received.items():
            assert sum(tensor.numel() for tensor in found.values()) < wanted  # tied weights once
            assert same(found, expected[version]), version
    else:
        assert not transport.received
    strategy.close()


@on_ranks(2)
def test_no_trainer_sends_what_another_one_has_replaced(rank: int) -> None:
    """The first trainer sends the set while another one has copied it, and has not replaced the old one yet."""
    training, transport = Publishing(FSDP2, RESIDENT), Slow()
    strategy, copied, sent = training.strategy, [], []
    stage, publication = Publisher._staged, Publisher._publication

    def late(self: Publisher, *arguments: Any) -> StagedWeights:
        copied.append(stage(self, *arguments))
        time.sleep(0.5 * rank)
        return copied[-1]

    def noted(self: Publisher, item: Any, keeps: bool) -> Any:
        sent.append(item.staged)
        return publication(self, item, keeps)

    strategy.publish_weights(training.model, transport, wait=False)
    while rank == 0 and transport._version != 1:
        time.sleep(0.001)
    strategy.publish_weights(training.model, transport, wait=False, replace=True)
    training.step()
    with mock.patch.object(Publisher, "_staged", late), mock.patch.object(Publisher, "_publication", noted):
        transport.go.set()
        strategy.publish_weights(training.model, transport, wait=False, replace=True)
        strategy.wait_for_publication()
    assert sent[-1] is copied[-1]
    strategy.close()


@on_ranks(2)
def test_every_trainer_gets_the_error_once(rank: int) -> None:
    training, transport = Publishing(FSDP2, RESIDENT), Slow(fails_at="send")
    strategy = training.strategy
    transport.go.set()
    strategy.publish_weights(training.model, transport, wait=False)
    training.step()
    while rank == 1 and not strategy.rollout._publisher._sets[0].pending.done():  # type: ignore[union-attr]
        time.sleep(0.001)
    with pytest.raises(WeightTransferError, match="the server is gone"):
        strategy.publish_weights(training.model, transport, wait=False, replace=True)
    expected = training.weights()
    strategy.publish_weights(training.model, transport, wait=False)
    training.step()
    strategy.wait_for_publication()
    assert rank or same(transport.received[2], expected)
    strategy.close()


@pytest.mark.parametrize("method", ["_copy", "prepare", "bucket"])
@on_ranks(3)
def test_all_trainers_hear_of_ones_failure(rank: int, method: str) -> None:
    training, transport = Publishing(FSDP2, RESIDENT), Slow()
    strategy = training.strategy
    transport.go.set()
    broken = mock.patch.object(StagedWeights, method, side_effect=MemoryError("no more"))

    def publish() -> None:
        strategy.publish_weights(training.model, transport, wait=False)
        strategy.wait_for_publication()

    with broken if rank == 1 else nullcontext(), pytest.raises((WeightTransferError, MemoryError), match="no more"):
        publish()
    expected = training.weights()
    strategy.publish_weights(training.model, transport, wait=False)
    training.step()
    report = strategy.wait_for_publication()
    assert report is not None and (rank or same(transport.received[report.version], expected))
    strategy.close()


@on_ranks(3)
def test_what_cannot_be_mapped_after_all_is_sent(rank: int) -> None:
    training, transport = Publishing(FSDP2, RESIDENT), Slow()
    transport.go.set()
    with mock.patch.object(MappedMemory, "view", side_effect=RuntimeError("page-locking broke")):
        expected = training.weights()
        training.strategy.publish_weights(training.model, transport, wait=False)
        training.strategy.wait_for_publication()
    assert rank or same(transport.received[1], expected)
    training.strategy.close()


def check_workers(rank: int) -> tuple[str, list[Any]]:
    training = Publishing(FSDP2, DEFERRED, {"mode": "async", "ranks": [0]})
    strategy, versions = training.strategy, []
    if strategy.role == "rollout":
        engine = TransformersEngine(training.model)
        while engine.version != 6:
            training.be_late()
            strategy.receive_weights(engine)
            versions.append((engine.version, {n: t.clone() for n, t in training.model.state_dict().items()}))
    else:
        for version in range(1, 7):
            training.step()
            versions.append((version, training.weights()))
            training.be_late()
            strategy.publish_weights(training.model, wait=False, replace=True)
        strategy.wait_for_publication()
    role = strategy.role
    dist.barrier()
    strategy.close()
    return role, versions


def test_rollout_workers_get_whole_sets(pool: Pool) -> None:
    outcomes = pool.run(check_workers, 3)
    published = dict(next(versions for role, versions in outcomes if role == "trainer"))
    received = next(versions for role, versions in outcomes if role == "rollout")
    assert received[-1][0] == 6
    for version, weights in received:
        assert same(weights, published[version]), version


def too_many(source: StagedWeights, number: int) -> None:
    """So many words of this trainer's part have changed that the bucket has to be sent whole."""


@on_ranks(
    None,
    ("ranks", "sharding", "state"),
    [(2, FSDP2, OVERLAP), (4, HSDP, DEFERRED), (2, DDP, RESIDENT)],
)
def test_trainers_send_what_changed_in_their_shards(rank: int, sharding: dict[str, Any], state: dict[str, Any]) -> None:
    training = Publishing(sharding, state)
    strategy = training.strategy
    names = [name for name, _ in unwrap_model(training.model).named_parameters()]
    shapes = {name: torch.zeros_like(tensor) for name, tensor in training.weights().items() if name in names}
    fake = FakeVllm(shapes) if rank == 0 else None
    url = [fake.url if fake else ""]
    dist.broadcast_object_list(url)
    servers = VllmServer(url[0], backend="gloo", timeout_s=60, deltas=True)  # the stand-in has no GPU
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-5
    for version in range(1, 7):
        training.step()
        expected = training.weights()
        wait = version == 3
        with mock.patch.object(StagedWeights, "_compare", too_many) if (rank, version) == (1, 6) else nullcontext():
            strategy.publish_weights(training.model, servers, wait=wait)
            training.be_late()
            training.step()
            report = strategy.wait_for_publication()
        assert report is not None
        if fake is not None:
            assert fake.process.version == str(version) and same(fake.process.weights, expected)
            assert (report.nbytes < report.whole_nbytes) == (version not in (1, 4, 6)), version
            if version == 3:
                fake.restart(shapes)
    keeps_bits = training.optimizer.engine.updater.changed is not None
    assert keeps_bits == (state != RESIDENT and sharding == FSDP2)  # 16 bits, and no other replica writes them
    strategy.close()
    if fake is not None:
        servers.close()
        fake.kill()
