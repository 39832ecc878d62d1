"""Trainers on two hosts publish their weights to a receiver on one of them, also while the link to it goes down."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightstep import TransformersEngine, VllmServer, WeightTransferError
from tests.distributed.publishing_runs import Publishing as Trainers
from tests.distributed.publishing_runs import same
from tests.distributed.training import DEFERRED, FSDP2, HSDP, OVERLAP
from tests.hosts.hosts import ADDRESSES, RANKS, Hosts
from tests.patience import PATIENCE
from tests.rollout_faults import checksum

PORT = 8000
URL = f"http://{ADDRESSES[1]}:{PORT}"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "fsdp2-overlap": (FSDP2, OVERLAP, False),
    "hsdp-deferred": (HSDP, DEFERRED, False),
    "fsdp2-deltas": (FSDP2, DEFERRED, True),
}
"""Sharding, optimizer state, and whether only what changed is sent."""
VERSIONS = 3
LIMIT = 5.0
"""Seconds for one call or broadcast while the link is down."""


def _ask(path: str) -> Any:
    with urllib.request.urlopen(URL + path, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


class Publishing:
    """A model in training, and the receiver on the second host."""

    def __init__(self, rank: int, case: str) -> None:
        sharding, state, self._deltas = CASES[case]
        self.training = Trainers(sharding, state)
        self.strategy = self.training.strategy
        for group in self.training.optimizer.param_groups:
            group["lr"] = 1e-5 if self._deltas else 1e-2
        self.connect()

    def connect(self, timeout_s: float = PATIENCE) -> None:
        """Anew, with another time limit."""
        self.servers = VllmServer(URL, backend="gloo", timeout_s=timeout_s, deltas=self._deltas)

    def publish(self, wait: bool) -> dict[str, str]:
        """Publish a step's weights while training goes on, and return their checksums."""
        self.training.step()
        expected = {name: checksum(tensor) for name, tensor in self.training.weights().items()}
        self.strategy.publish_weights(self.training.model, self.servers, wait=wait)
        self.training.step()
        self.strategy.wait_for_publication()
        return expected

    def close(self) -> None:
        self.strategy.close()
        self.servers.close()


def check_sets(rank: int, world_size: int) -> None:
    """All that the receiver has, after each set, is the whole weights of a step."""
    for case in CASES:
        publishing = Publishing(rank, case)
        for version in range(VERSIONS):
            expected = publishing.publish(wait=version % 2 == 0)
            if rank == 0:
                found = _ask("/answer")
                assert found == {name: expected[name] for name in found}, (case, version)
        publishing.close()


def check_worker(rank: int, world_size: int) -> None:
    """The last rank, on the second host, gets the weights of the other three."""
    training = Trainers(FSDP2, OVERLAP, {"mode": "async", "ranks": [world_size - 1]})
    strategy, versions = training.strategy, {}
    if strategy.role == "rollout":
        engine = TransformersEngine(training.model)
        while engine.version != VERSIONS:
            strategy.receive_weights(engine)
            versions[engine.version] = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    else:
        for version in range(1, VERSIONS + 1):
            training.step()
            versions[version] = training.weights()
            strategy.publish_weights(training.model, wait=False, replace=True)
        strategy.wait_for_publication()
    everywhere: list[Any] = [None] * world_size
    dist.all_gather_object(everywhere, versions)
    *_, published, received = everywhere
    assert all(same(weights, published[version]) for version, weights in received.items())
    strategy.close()


def check_both(rank: int, world_size: int) -> None:
    check_sets(rank, world_size)
    check_worker(rank, world_size)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def check_cut(rank: int, world_size: int) -> tuple[str, float, list[dict[str, str]]]:
    """The link goes down in the middle of the second set. Returns what is said, after how long, and all sets."""
    answers = Path(os.environ["ANSWERS"])
    publishing = Publishing(rank, "fsdp2-overlap")
    wait_for(answers / "serving")
    sets = [publishing.publish(wait=True)]
    (answers / "hold").touch()
    publishing.connect(LIMIT)
    dist.barrier()
    with pytest.raises(WeightTransferError) as raised:
        publishing.publish(wait=False)
    seconds = time.time() - (answers / "cut").stat().st_mtime
    publishing.training.step()  # training goes on
    (answers / f"failed{rank}").touch()
    wait_for(answers / "restored")
    publishing.connect()
    sets.append(publishing.publish(wait=False))
    publishing.close()
    return str(raised.value), seconds, sets


@contextlib.contextmanager
def receiver(hosts: Hosts, folder: Path, kind: str = "vllm", model: str = "tiny") -> Iterator[None]:
    """On the second host. There is a file ``serving`` as soon as it answers."""
    command = ["tests.hosts.receiver", kind, model, ADDRESSES[1], str(PORT), str(folder)]
    process = hosts.start(1, folder / "receiver.log", command)
    try:
        end = time.monotonic() + PATIENCE
        while asked(hosts, "/weights") is None:
            assert process.poll() is None and time.monotonic() < end, (folder / "receiver.log").read_text()
            time.sleep(0.1)
        (folder / "serving").touch()
        yield
    finally:
        process.kill()
        process.wait()


def asked(hosts: Hosts, path: str) -> Any:
    """What the receiver answers on its own host; ``None`` if it is not there, or refuses because it is paused."""
    program = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    try:
        return json.loads(hosts.on(1, sys.executable, "-c", program, URL + path))
    except OSError as error:
        assert "HTTP Error 503: Service Unavailable" in str(error) or "Connection refused" in str(error)
        return None


def unanswered(path: str) -> str:
    """What is said of a call that took too long in the middle of a set."""
    consequence = f"Training can go on; {URL} will stay paused until a complete set arrives"
    return f"{URL}{path} did not answer: timed out. {consequence}"


def test_what_is_received_has_the_bits_of_trainers_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    with receiver(hosts, tmp_path):
        hosts.run(check_both)


def test_the_link_goes_down_in_the_middle_of_a_set(hosts: Hosts, tmp_path: Path) -> None:
    """The trainers are on the first host. The receiver has half a set then, and answers nothing until a whole one."""
    with hosts.started(check_cut, on=[0]) as run, receiver(hosts, run.answers):
        run.wait("receiving")
        hosts.set_link("down")
        try:
            (run.answers / "cut").touch()
            for rank in range(RANKS):
                run.wait(f"failed{rank}")
            assert asked(hosts, "/answer") is None
            half = asked(hosts, "/weights")
        finally:
            hosts.set_link("up")
        (run.answers / "restored").touch()
        (sentence, seconds, (first, last)), (other, _, _) = run.results()
        found = asked(hosts, "/answer")
    assert found == {name: last[name] for name in found}
    assert sum(half[name] == first[name] for name in half) not in (0, len(half))
    assert sentence == unanswered("/update_weights")
    assert other == f"trainer 0: {sentence}"
    assert seconds < 4 * LIMIT
