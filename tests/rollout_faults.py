"""Trainers and servers that are killed or freeze in the middle of a set: never is half a set served, and nothing hangs.

Few sets are published again and again: a server's checksums show which one it has. The faults need a server with the
methods of :class:`StandIn`; ``tests/servers`` has real ones.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightstep import SglangServer, Strategy, VllmServer, WeightTransferError
from tests.ports import free_port
from tests.rollout_servers import FakeServer, FakeSglang, FakeVllm, Process, Refusal

CLIENTS: dict[str, Any] = {"vllm": VllmServer, "sglang": SglangServer}
SETS = 4
LIMIT = 10.0
"""Seconds for one call or broadcast."""
SHORT_LIMIT = 1.0
"""While servers are frozen, which takes this time twice. A busy machine may exceed it without a fault."""
TRIES = 5
"""Publications with the short limit, of which one has to arrive."""

processes = multiprocessing.get_context("forkserver")


class StandIn:
    """A :class:`FakeServer` in a process of its own."""

    def __init__(self, kind: str) -> None:
        self.kind, self._port = kind, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: Any = None

    def start(self) -> None:
        self._process = processes.Process(target=_serve, args=(self.kind, self._port), daemon=True)
        self._process.start()
        while True:
            with contextlib.suppress(OSError):
                self._ask("/weights")
                return
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def freeze(self, stopped: bool) -> None:
        """Stop its process, or let it go on."""
        os.kill(self._process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.loads(answer.read())

    def checksums(self) -> dict[str, str]:
        """Of all weights."""
        return dict(self._ask("/weights"))

    def answer(self) -> Any:
        """To a request; ``None`` if there is none, because it is paused."""
        try:
            return self._ask("/answer")
        except urllib.error.HTTPError:
            return None


class _Generating(FakeServer):
    """Tells which weights it would generate with."""

    def answer(self, process: Process, path: str, payload: dict[str, Any]) -> Any:
        if path == "/weights" or (path == "/answer" and not process.paused):
            return {name: checksum(tensor) for name, tensor in process.weights.items()}
        if path == "/answer":
            raise Refusal(503, "paused")
        return super().answer(process, path, payload)


class GeneratingVllm(_Generating, FakeVllm):
    pass


class GeneratingSglang(_Generating, FakeSglang):
    pass


def checksum(tensor: Tensor) -> str:
    return str(zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy()))


def _serve(kind: str, port: int) -> None:
    torch.set_num_threads(1)
    weights = {name: tensor.bfloat16() for name, tensor in made_model().state_dict().items()}
    {"vllm": GeneratingVllm, "sglang": GeneratingSglang}[kind](weights, timeout_s=LIMIT, port=port)
    threading.Event().wait()


def made_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 32))


class Trainer:
    """Publishes sets that it knows by number.

    Args:
        model: the server's, with the weights that this starts with.
    """

    def __init__(self, kind: str, url: str, model: nn.Module, limit: float, deltas: bool = False) -> None:
        torch.set_num_threads(1)
        overrides = {"roles.rollout": {"bucket_mib": 0.005, "parameters": "bfloat16"}}
        self.strategy = Strategy.load("resident", overrides=overrides)
        self.model = self.strategy.prepare_model(model)
        self.servers = CLIENTS[kind](url, timeout_s=limit, **({"deltas": True} if deltas else {}))
        generator = torch.Generator().manual_seed(1)
        self._sets: list[dict[str, Tensor]] = []
        for _ in range(SETS):  # a part of the weights differs: deltas are smaller
            self._sets.append({})
            for name, tensor in self.model.state_dict().items():
                changed = torch.rand(tensor.shape, generator=generator) < 0.1
                new = torch.randn(tensor.shape, generator=generator) * 0.2
                self._sets[-1][name] = torch.where(changed, new.to(tensor.dtype), tensor)

    def publish(self, number: int, wait: bool = True) -> None:
        self.model.load_state_dict(self._sets[number])
        self.strategy.publish_weights(self.model, self.servers, wait=wait)
        self.strategy.wait_for_publication()


def _train(kind: str, url: str, make_model: Any, limit: float, deltas: bool, pipe: Any) -> None:
    """A trainer's process, which publishes until it is killed."""
    trainer, number = Trainer(kind, url, make_model(), limit, deltas), 0
    while True:
        pipe.send(number)
        trainer.publish(number % SETS, wait=number % 2 == 0)
        number += 1


@dataclass
class Outcome:
    """Of several faults.

    Attributes:
        paused: after so many faults the server waited for a complete set.
        longest: seconds of the longest publication, failed ones included.
    """

    faults: int = 0
    paused: int = 0
    longest: float = 0.0
    errors: list[str] = field(default_factory=list)

    def add_time(self, begin: float) -> None:
        self.longest = max(self.longest, time.monotonic() - begin)

    def __str__(self) -> str:
        return f"{self.faults} faults, {self.paused} servers left paused, the longest publication {self.longest:.1f} s"


class Faults:
    """Faults at random moments.

    Args:
        server: it is running, with the weights of ``make_model``, and has the methods of :class:`StandIn`.
        make_model: importable.
        limit: seconds for one call or broadcast.
        short_limit: the same, while servers are frozen.
    """

    def __init__(
        self, server: Any, make_model: Any, limit: float = LIMIT, short_limit: float = SHORT_LIMIT, deltas: bool = False
    ) -> None:
        self._server, self._make_model, self._deltas = server, make_model, deltas
        self._limit, self._short_limit = limit, short_limit
        self._chance = random.Random(0)
        self._trainer = self._new_trainer()
        initial = server.checksums(), server.answer()
        self._known = [initial, *map(self._published, range(SETS))]
        begin = time.monotonic()
        self._published(0)
        self._seconds = time.monotonic() - begin
        assert len({json.dumps(sums) for sums, _ in self._known}) == SETS + 1

    def _new_trainer(self, limit: float | None = None) -> Trainer:
        return Trainer(self._server.kind, self._server.url, self._make_model(), limit or self._limit, self._deltas)

    def _published(self, number: int) -> tuple[dict[str, str], Any]:
        self._trainer.publish(number)
        return self._server.checksums(), self._server.answer()

    def _check_served(self, outcome: Outcome) -> None:
        """The server answers with a whole set, or waits for one."""
        answer = self._server.answer()
        outcome.faults += 1
        outcome.paused += answer is None
        if answer is not None:
            assert (self._server.checksums(), answer) in self._known

    def _check_recovers(self, outcome: Outcome, tries: int = 1) -> None:
        """The next set arrives, in so many tries."""
        number = self._chance.randrange(SETS)
        for left in reversed(range(tries)):
            begin = time.monotonic()
            try:
                assert self._published(number) == self._known[1 + number]
                break
            except WeightTransferError:
                if not left:
                    raise
        outcome.add_time(begin)
        assert outcome.longest < 3 * self._limit, outcome.errors[-1:]

    def _moment(self) -> float:
        return self._chance.random() * 2.5 * self._seconds

    def of_trainers(self, count: int) -> Outcome:
        """A trainer's process is killed, and another one publishes."""
        outcome = Outcome()
        for _ in range(count):
            self._trainer.servers.close()
            pipe, other = processes.Pipe()
            arguments = (self._server.kind, self._server.url, self._make_model, self._limit, self._deltas, other)
            trainer = processes.Process(target=_train, args=arguments, daemon=True)
            trainer.start()
            assert pipe.poll(120)
            time.sleep(self._moment())
            trainer.kill()
            trainer.join()
            self._check_served(outcome)
            self._trainer = self._new_trainer()
            self._check_recovers(outcome)
        return outcome

    def of_servers(self, count: int) -> Outcome:
        """A server is killed and started again."""
        outcome = Outcome()
        for number in range(count):
            self._publish_beside(number, threading.Timer(self._moment(), self._server.kill), outcome)
            self._server.kill()
            self._server.start()
            assert (self._server.checksums(), self._server.answer()) == self._known[0]
            outcome.faults += 1
            self._check_recovers(outcome)
        return outcome

    def of_networks(self, count: int) -> Outcome:
        """A server freezes for longer than the limit, as if no packet came through, and goes on."""
        outcome = Outcome()
        self._trainer.servers.close()
        self._trainer = self._new_trainer(self._short_limit)
        for number in range(count):
            self._publish_beside(number, threading.Timer(self._moment(), self._server.freeze, [True]), outcome)
            self._server.freeze(False)
            time.sleep(0.2)  # what it had begun fails now
            self._check_served(outcome)
            self._check_recovers(outcome, TRIES)
        return outcome

    def _publish_beside(self, number: int, fault: threading.Timer, outcome: Outcome) -> None:
        """Publish until that fails."""
        fault.start()
        failed = False
        while not failed:
            begin = time.monotonic()
            try:
                self._trainer.publish(number % SETS, wait=number % 2 == 0)
            except WeightTransferError as error:
                outcome.errors.append(str(error))
                failed = True
            outcome.add_time(begin)
        fault.join()

    def close(self) -> None:
        self._trainer.servers.close()
