"""A slow link between trainers and a server, or one that loses what is sent: half of a set is never served.

``timeout_s`` is the limit of each bucket, and not of the set.
"""

from __future__ import annotations

import http.client
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightstep import Strategy, WeightTransferError
from tests.hosts.hosts import RANKS, Hosts, lacks_discipline
from tests.hosts.receiver import LAYERS, wide_model
from tests.hosts.test_publishing import URL, asked, receiver, unanswered, wait_for
from tests.patience import PATIENCE
from tests.rollout_faults import CLIENTS, checksum

SLOW = "tbf rate 1mbit burst 4kb limit 32kb"
"""A bucket takes more than a second."""
TOO_SLOW = "tbf rate 100kbit burst 4kb limit 32kb"
"""More than ten seconds."""
LIMIT = 5.0
"""Seconds for one call or bucket."""
SHORT_LIMIT = 2.0
LATE = 5.0
"""Seconds in which what is left of a call arrives, when the network takes it: TCP sends it again and again."""


class Trainers:
    """Two that hold the same weights."""

    def __init__(self, kind: str) -> None:
        rollout = {"parameters": "bfloat16", "bucket_mib": 0.1}
        self._strategy = Strategy.load({"sharding": {"kind": "ddp"}, "roles": {"rollout": rollout}})
        self._model = self._strategy.prepare_model(wide_model)
        self._kind = kind
        self.connect()

    def connect(self, timeout_s: float = PATIENCE) -> None:
        self.servers = CLIENTS[self._kind](URL, backend="gloo", timeout_s=timeout_s)

    def publish(self, wait: bool = True) -> dict[str, str]:
        """New weights. Returns their checksums."""
        with torch.no_grad():
            for weight in self._model.parameters():
                weight.normal_()
        expected = {name: checksum(w.detach().bfloat16()) for name, w in self._model.named_parameters()}
        self._strategy.publish_weights(self._model, self.servers, wait=wait)
        self._strategy.wait_for_publication()
        return {name.removeprefix("module."): value for name, value in expected.items()}

    def close(self) -> None:
        self._strategy.close()
        self.servers.close()


def check_slow(rank: int, world_size: int, kind: str) -> tuple[float, dict[str, str]]:
    trainers = Trainers(kind)
    trainers.connect(LIMIT)
    begin = time.monotonic()
    expected = trainers.publish()
    seconds = time.monotonic() - begin
    trainers.close()
    return seconds, expected


def check_too_slow(rank: int, world_size: int, kind: str) -> tuple[str, float, list[dict[str, str]]]:
    """The link is too slow, or down, from the third bucket of the second set on, until that has failed."""
    answers = Path(os.environ["ANSWERS"])
    trainers = Trainers(kind)
    wait_for(answers / "serving")
    sets = [trainers.publish()]
    (answers / "hold").touch()
    trainers.connect(LIMIT)
    with pytest.raises(WeightTransferError) as raised:
        trainers.publish(wait=False)
    seconds = time.time() - (answers / "cut").stat().st_mtime
    (answers / f"failed{rank}").touch()
    wait_for(answers / "restored")
    sets.append(trainers.publish(wait=False))
    trainers.close()
    return str(raised.value), seconds, sets


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_set_over_a_slow_link_arrives_whole_however_long_it_takes(hosts: Hosts, tmp_path: Path, kind: str) -> None:
    if reason := lacks_discipline(SLOW):
        pytest.skip(f"the link cannot be made slow: {reason}")
    with hosts.slow_link(*SLOW.split()), receiver(hosts, tmp_path, kind, "wide"):
        (seconds, expected), _ = hosts.run(check_slow, on=[0], kind=kind)
        assert hosts.held_back() > 0
        found = asked(hosts, "/answer")
    assert found == expected and len(found) == LAYERS
    assert seconds > LIMIT


@pytest.mark.parametrize(("kind", "link"), [("vllm", "slow"), ("sglang", "slow"), ("sglang", "down")])
def test_a_link_that_is_too_slow_ends_the_set_within_the_limit(hosts: Hosts, kind: str, link: str) -> None:
    """The server answers nothing until the next set, which comes as soon as the link is as before."""
    if link == "slow" and (reason := lacks_discipline(TOO_SLOW)):
        pytest.skip(f"the link cannot be made slow: {reason}")
    with hosts.started(check_too_slow, on=[0], kind=kind) as run, receiver(hosts, run.answers, kind, "wide"):
        run.wait("receiving")
        with hosts.slow_link(*TOO_SLOW.split()) if link == "slow" else hosts.link_down():
            (run.answers / "cut").touch()
            for rank in range(RANKS):
                run.wait(f"failed{rank}")
            assert asked(hosts, "/answer") is None
            half = asked(hosts, "/weights")
        (run.answers / "restored").touch()
        (sentence, seconds, (first, last)), (other, _, _) = run.results()
        found = asked(hosts, "/answer")
    assert found == last
    assert sentence == unanswered("/update_weights" if kind == "vllm" else "/update_weights_from_distributed")
    assert sum(half[name] == first[name] for name in half) not in (0, len(half))
    assert other == f"trainer 0: {sentence}"
    assert seconds < 4 * LIMIT


def check_lost_call(rank: int, world_size: int, kind: str) -> list[dict[str, str]]:
    """What the last call of the second set sends is lost, until the third set is on its way."""
    answers, request = Path(os.environ["ANSWERS"]), http.client.HTTPConnection.request

    def lost(connection: http.client.HTTPConnection, method: str, url: str, *arguments: Any, **keywords: Any) -> None:
        if url in ("/resume", "/continue_generation"):
            connection.connect()
            (answers / "port.new").write_text(str(connection.sock.getsockname()[1]))
            (answers / "port.new").rename(answers / "port")
            wait_for(answers / "lost")
        request(connection, method, url, *arguments, **keywords)

    trainers = Trainers(kind)
    wait_for(answers / "serving")
    sets = [trainers.publish()]
    trainers.connect(SHORT_LIMIT)
    with pytest.raises(WeightTransferError), mock.patch.object(http.client.HTTPConnection, "request", lost):
        trainers.publish()
    trainers.connect()
    (answers / "hold").touch()
    dist.barrier()
    sets.append(trainers.publish())
    trainers.close()
    return sets


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_lost_call_does_not_arrive_in_the_middle_of_the_next_set(hosts: Hosts, kind: str) -> None:
    """It would make the server go on with half of that."""
    with hosts.started(check_lost_call, on=[0], kind=kind) as run, receiver(hosts, run.answers, kind, "wide"):
        with hosts.lost_packets(int(run.wait("port"))):
            (run.answers / "lost").touch()
            run.wait("receiving")
        end = time.monotonic() + LATE
        while time.monotonic() < end:
            assert asked(hosts, "/answer") is None
        (run.answers / "cut").touch()
        (first, last), _ = run.results()
        assert asked(hosts, "/answer") == last != first
