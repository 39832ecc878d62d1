"""Sharded weights that threads gather and send while training goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightstep import TransformersEngine, VllmServer, WeightTransferError
from lightstep.sharding.model_names import unwrap_model
from tests.distributed.publishing_runs import DDP, DEFERRED, FSDP2, HSDP, ON_HOST, OVERLAP, RESIDENT, Training, same
from tests.distributed.ranks import Pool
from tests.rollout_servers import FakeVllm
from tests.unit.test_publishing import Slow


def check_sets(rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any], folder: str) -> None:
    training, transport = Training(rank, sharding, state), Slow(seconds=0.003)
    strategy, expected = training.strategy, {}
    transport.go.set()
    for version in range(1, 10):
        training.step()
        expected[version] = training.weights()
        training.be_late()
        replace = version % 3 > 0
        assert strategy.publish_weights(training.model, transport, wait=False, replace=replace) == version
        training.be_late()
        if version == 5:
            strategy.save_checkpoint(Path(folder) / "saved", training.model, training.optimizer, asynchronous=True)
        training.step()  # its collectives run beside those of the threads
    report = strategy.wait_for_publication()
    assert report is not None and report.version == 9 and (report.nbytes > 0) == (rank == 0)
    if rank == 0:
        assert list(transport.received) == sorted(transport.received) and {3, 6, 9} <= transport.received.keys()
        wanted = sum(tensor.numel() for tensor in expected[1].values())
        for version, found in transport.received.items():
            assert sum(tensor.numel() for tensor in found.values()) < wanted  # tied weights once
            assert same(found, expected[version]), version
    else:
        assert not transport.received
    strategy.close()


@pytest.mark.parametrize(
    ("world_size", "sharding", "state"),
    [(3, FSDP2, RESIDENT), (2, FSDP2, OVERLAP), (4, HSDP, DEFERRED), (2, DDP, OVERLAP), (2, FSDP2, ON_HOST)],
    ids=["fsdp2", "fsdp2-overlap", "hsdp-deferred", "ddp-overlap", "fsdp2-offload"],
)
def test_every_set_is_one_steps(
    pool: Pool, world_size: int, sharding: dict[str, Any], state: dict[str, Any], tmp_path: Path
) -> None:
    pool.run(check_sets, world_size, sharding=sharding, state=state, folder=str(tmp_path))


def check_errors(rank: int, world_size: int) -> None:
    training, transport = Training(rank, FSDP2, RESIDENT), Slow(fails_at="send")
    strategy = training.strategy
    transport.go.set()
    strategy.publish_weights(training.model, transport, wait=False)
    training.step()
    time.sleep(0.3 * rank)
    with pytest.raises(WeightTransferError, match="the server is gone"):
        strategy.publish_weights(training.model, transport, wait=False, replace=True)
    transport._fails_at = None
    expected = training.weights()
    strategy.publish_weights(training.model, transport, wait=False)
    training.step()
    strategy.wait_for_publication()
    assert rank or same(transport.received[2], expected)
    strategy.close()


def test_every_trainer_gets_the_error_once(pool: Pool) -> None:
    pool.run(check_errors, 2)


def check_workers(rank: int, world_size: int) -> tuple[str, list[Any]]:
    training = Training(rank, FSDP2, DEFERRED, {"mode": "async", "ranks": [0]})
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


def check_deltas(rank: int, world_size: int, sharding: dict[str, Any], state: dict[str, Any]) -> None:
    training = Training(rank, sharding, state)
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
        wait = version % 3 == 0
        strategy.publish_weights(training.model, servers, wait=wait)
        training.be_late()
        training.step()
        report = strategy.wait_for_publication()
        assert report is not None
        if fake is not None:
            assert fake.process.version == str(version) and same(fake.process.weights, expected)
            assert (report.nbytes < report.whole_nbytes) == (version not in (1, 5)), version
            if version == 4:
                fake.restart(shapes)
    strategy.close()
    if fake is not None:
        servers.close()
        fake.kill()


@pytest.mark.parametrize(
    ("world_size", "sharding", "state"),
    [(3, FSDP2, RESIDENT), (4, HSDP, DEFERRED), (2, DDP, OVERLAP)],
    ids=["fsdp2", "hsdp-deferred", "ddp-overlap"],
)
def test_trainers_send_what_changed_in_their_shards(
    pool: Pool, world_size: int, sharding: dict[str, Any], state: dict[str, Any]
) -> None:
    pool.run(check_deltas, world_size, sharding=sharding, state=state)
