"""Weights that are published while the GPU trains: one step's, bit for bit, and training waits for no link."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep import Strategy, VllmNcclServer, VllmServer
from lightstep.rollout import staged_weights
from lightstep.state.lanes import CopyLane
from tests.reference.tiny_llama import VOCABULARY, make_llama
from tests.rollout_servers import FakeVllm
from tests.unit.test_publishing import STATES, Slow
from tests.vllm_receiver import VllmReceiver, imported_engine, nccl_library, vllm_folder

pytestmark = pytest.mark.gpu

SECOND = 1_500_000_000
"""Cycles of a GPU: a second or less."""


class Run:
    def __init__(self, state: dict[str, Any]) -> None:
        settings: dict[str, Any] = {"optimizer_state": state, "roles.rollout.bucket_mib": 0.05}
        if state.get("update") == "in_backward":
            settings["clipping"] = {"max_norm": None}
        self.strategy = Strategy.load("resident", overrides=settings)
        self.model: Any = self.strategy.prepare_model(make_llama(hidden_size=128, intermediate_size=256))
        self.optimizer: Any = self.strategy.create_optimizer(self.model, lr=1e-2)
        self.transport = Slow()
        self.transport.go.set()

    def step(self) -> None:
        tokens = torch.randint(0, VOCABULARY, (4, 16), device="cuda")
        self.optimizer.backward(self.model(input_ids=tokens, labels=tokens).loss)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def publish(self, **settings: Any) -> int:
        return self.strategy.publish_weights(self.model, self.transport, wait=False, **settings)

    def check(self, expected: dict[int, dict[str, Tensor]]) -> None:
        self.strategy.wait_for_publication()
        for version, weights in expected.items():
            found = self.transport.received[version]
            for name, tensor in found.items():
                assert torch.equal(tensor, weights[name].cpu()), (version, name)
            assert found.keys() == weights.keys()


@pytest.fixture(name="slow_link")
def _slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to and from the host begin late."""
    copy = CopyLane.copy

    def late(self: CopyLane, target: Tensor, source: Tensor, label: str = "") -> None:
        with self.stream:
            torch.cuda._sleep(SECOND // 200)
        copy(self, target, source, label)

    monkeypatch.setattr(CopyLane, "copy", late)


@pytest.mark.parametrize("has_room", [True, False], ids=["copied on the device", "no room on the device"])
@pytest.mark.parametrize("state", STATES)
def test_what_arrives_is_one_steps(
    state: str, has_room: bool, slow_link: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further steps, edits and sets that replace others are queued at once."""
    run = Run(STATES[state])
    run.step()
    if not has_room:
        monkeypatch.setattr(staged_weights, "_device_memory", lambda *_: None)
    for replace in (False, True):
        expected = {}
        for number in range(4):
            run.step()
            weights = run.weights()
            expected[run.publish(replace=replace)] = weights
            for _ in range(number):
                run.step()
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.mul_(1.1)
        run.strategy.wait_for_publication()
        run.check({version: weights for version, weights in expected.items() if version in run.transport.received})
        assert max(expected) in run.transport.received
    run.strategy.close()


def test_sets_after_one_that_had_no_room(slow_link: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a set that is replaced is written again while its copies are under way."""
    run = Run(STATES["resident"])
    run.transport.go.clear()
    run.publish()
    expected = {}
    for room in (True, False, True, False):
        with monkeypatch.context() as patch:
            if not room:
                patch.setattr(staged_weights, "_device_memory", lambda *_: None)
            run.step()
            weights = run.weights()
            expected = {run.publish(replace=True): weights}
    run.transport.go.set()
    run.check(expected)
    run.strategy.close()


def test_neither_the_program_nor_its_stream_waits_for_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(STATES["resident"])
    run.publish()
    run.strategy.wait_for_publication()
    for _ in range(3):
        run.step()
    torch.cuda.synchronize()
    copy = CopyLane.copy

    def very_late(self: CopyLane, *arguments: Any) -> None:
        with self.stream:
            torch.cuda._sleep(SECOND)
        copy(self, *arguments)

    monkeypatch.setattr(CopyLane, "copy", very_late)
    begin = time.monotonic()
    run.publish()
    run.step()
    torch.cuda.current_stream().synchronize()
    waited = time.monotonic() - begin
    run.strategy.wait_for_publication()
    assert waited < 0.25 < time.monotonic() - begin
    run.strategy.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("deltas", [False, True])
def test_a_server_on_another_gpu_gets_them_over_nccl(deltas: bool) -> None:
    run = Run(STATES["stream"])
    run.optimizer.param_groups[0]["lr"] = 1e-5
    weights = {name: torch.zeros_like(tensor, device="cuda:1") for name, tensor in run.weights().items()}
    server = FakeVllm(weights, timeout_s=60.0, device=torch.device("cuda", 1))
    servers = VllmServer(server.url, timeout_s=60.0, deltas=deltas)
    for number in range(4):
        run.step()
        expected = run.weights()
        run.strategy.publish_weights(run.model, servers, wait=number == 0)
        run.step()
        report = run.strategy.wait_for_publication()
        assert report is not None and (report.nbytes < report.whole_nbytes or not deltas or number == 0)
        torch.cuda.synchronize(1)
        for name, tensor in expected.items():
            assert torch.equal(server.process.weights[name].cpu(), tensor.cpu()), name
    run.strategy.close()
    servers.close()
    server.kill()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(nccl_library() is None, reason="needs a library of NCCL in torch's version")
@pytest.mark.skipif(vllm_folder() is None, reason="needs vLLM's Python files: python -m tests.vllm_receiver packs them")
def test_vllms_own_engine_gets_them_over_nccl() -> None:
    """Its receiver is vLLM's, and what it loads into a stand-in."""
    run = Run(STATES["stream"])
    weights = {name: torch.zeros_like(tensor, device="cuda:1") for name, tensor in run.weights().items()}
    with imported_engine() as engine:
        server = VllmReceiver(engine, weights, timeout_s=60.0, device=torch.device("cuda", 1))
        servers = VllmNcclServer(server.url, timeout_s=60.0)
        for number in range(4):
            run.step()
            expected = run.weights()
            run.strategy.publish_weights(run.model, servers, wait=number == 0)
            run.step()
            assert run.strategy.wait_for_publication() is not None
            for name, tensor in expected.items():
                assert torch.equal(server.process.weights[name].cpu(), tensor.cpu()), name
            assert server.process.version == str(number + 1) and not server.process.paused
        run.strategy.close()
        servers.close()
        server.kill()
