"""Updates that finish during the next forward, on a GPU: resident's bits with sleep kernels in every lane, no waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.optimizer import queue
from tests.distributed.models import CLASSES, VOCABULARY
from tests.unit import test_next_forward as on_cpu
from tests.unit.test_next_forward import BETWEEN, OVERLAP, Skipping, assert_same
from tests.unit.test_stream import random_sleeps

pytestmark = pytest.mark.gpu

GATES = "lightstep.sharding.prepared_model.Gates.guard"


class Training(on_cpu.Training):
    """The same training; lanes are slowed down by sleep kernels."""

    def loss(self, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + micro)
        tokens = torch.randint(VOCABULARY, (4, 6), generator=generator).cuda()
        targets = torch.randint(CLASSES, (24,), generator=generator).cuda()
        return nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1), targets)

    def delays(self, seed: int, longest: float = 1e-3) -> None:
        for number, lanes in enumerate(self.lanes()):
            random_sleeps(lanes, seed + number, int(longest * 1e9))

    def assert_bits(self, losses: list[Any], snapshot: dict[str, Tensor], seed: int, before: int = 1) -> None:
        """Those of a run, although lanes are slow after so many steps. Ends the optimizer."""
        found = self.train(before)
        self.delays(seed)
        assert found + self.train(len(losses) - before) == losses, seed
        assert_same(self.snapshot(), snapshot)
        self.optimizer.close()


@pytest.mark.parametrize("parameters", ["bfloat16", "float16", "float32"])
def test_sleep_kernels_in_every_lane(parameters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Training({"backend": "resident"}, parameters)
    losses, wanted = expected.train(6), expected.snapshot()
    for seed in range(67):
        monkeypatch.setattr(queue, "SUBMIT_IN_STEP", (0, 1, 3, 48)[seed % 4])
        monkeypatch.setattr(queue, "SUBMIT_AHEAD", seed % 3)
        Training(OVERLAP, parameters).assert_bits(losses, wanted, seed)


def test_the_sleeps_find_a_missing_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Training({"backend": "resident"}).train(5)
    monkeypatch.setattr(GATES, lambda *_: None)
    for seed in range(5):
        tested = Training(OVERLAP)
        found = tested.train(1)
        tested.delays(seed, longest=2e-2)  # longer than a busy host needs to launch a forward
        try:
            wrong = found + tested.train(4) != expected
        except RuntimeError as error:  # autograd saw the update in time
            assert "modified by an inplace operation" in str(error)
            wrong = True
        tested.optimizer.close()
        if wrong:
            return
    pytest.fail("the forwards without gates read the right weights")


def look(training: Training) -> list[float]:
    with torch.inference_mode():
        return [training.loss(7).item(), float(training.model(torch.tensor([[1, 2]]).cuda()).float().sum())]


def fail_in_forward(training: Training) -> None:
    with pytest.raises(RuntimeError):
        training.model.blocks[0](torch.zeros(1, 3).cuda())


HERE = {"look": look, "fail_in_forward": fail_in_forward}


@pytest.mark.parametrize("between", BETWEEN, ids=lambda function: function.__name__)
def test_whatever_happens_between_steps(between: Callable[[Any], Any]) -> None:
    between = HERE.get(between.__name__, between)
    expected = Training({"backend": "resident"}, "bfloat16", Skipping)
    wanted = on_cpu.run(expected, None, 5, between)
    for seed in range(4):
        tested = Training(OVERLAP, "bfloat16", Skipping)
        assert on_cpu.run(tested, seed, 5, between) == wanted, seed
        assert_same(tested.snapshot(), expected.snapshot())
        tested.optimizer.close()


def llama(state: dict[str, Any], max_norm: float = 0.5) -> tuple[Any, nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8
    )
    strategy = lightstep.Strategy.load({"optimizer_state": state, "clipping": {"max_norm": max_norm}})
    model = strategy.prepare_model(LlamaForCausalLM(config))
    return strategy, model, strategy.create_optimizer(model, lr=1e-3)


def train(model: nn.Module, optimizer: Any, steps: range, watch: bool = False) -> list[Tensor]:
    """Losses, on the device: nothing here waits."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(4096, (2, 256), generator=generator).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        if watch:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.backward(loss)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("update", ["next_forward", "overlap"])
def test_a_llama_learns_the_same_and_a_steady_step_neither_waits_nor_keeps_memory(update: str) -> None:
    _, model, resident = llama({"backend": "resident"}, max_norm=1e6)
    expected = torch.stack(train(model, resident, range(12))).tolist()
    _, model, optimizer = llama({"backend": "stream", "update": update, "ring_mib": 64}, max_norm=1e6)
    losses = train(model, optimizer, range(6))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses += train(model, optimizer, range(6, 12), watch=True)
    optimizer.synchronize()
    assert torch.stack(losses).tolist() == expected
    assert torch.cuda.memory_allocated() - before <= 64 * 1024  # the losses, and overlap's copies of step counts
    optimizer.close()
