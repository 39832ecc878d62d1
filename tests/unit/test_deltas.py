"""Deltas: only what changed is sent, and what servers have afterwards is what a whole set would have given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep import VllmServer, WeightTransferError
from lightstep.rollout import servers
from lightstep.rollout.transport import Bucket, BucketDelta, HeldWeights, WeightInfo, changed_words, shard_in_bucket
from lightstep.state.host_copy_pool import HostCopyPool
from tests.covering import every_value
from tests.rollout_servers import PLUGIN, FakeVllm, Process, ServedModel
from tests.unit.test_rollout_servers import Breaking, Training


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30), nn.Linear(30, 8))


class Run(Training):
    """A model whose weights change little, and servers that take deltas."""

    def __init__(self, servers: int = 1, **settings: Any) -> None:
        settings = {"model": make_model(), "deltas": True, **settings}
        super().__init__("vllm", servers, **settings)
        self.sent = 0

    def step(self) -> None:
        """Changes a few weights of the first and the last layer."""
        with torch.no_grad():
            for parameter in (next(iter(self.model.parameters())), list(self.model.parameters())[-1]):
                chosen = torch.randperm(parameter.numel())[: max(1, parameter.numel() // 50)]
                parameter.view(-1)[chosen] += torch.randn(len(chosen)).to(parameter.dtype)

    def publish(self, wait: bool = True, **options: Any) -> int:
        version = self.strategy.publish_weights(self.model, to=self.servers, wait=wait, **options)
        report = self.strategy.wait_for_publication()
        assert report is not None and report.version == version
        self.is_delta = report.nbytes < report.whole_nbytes
        self.report = report
        return version


def test_only_what_changed_is_sent() -> None:
    run = Run(servers=3)
    for version in range(1, 5):
        run.step()
        assert run.publish(wait=version % 2 == 0) == version and run.serves(str(version))
        assert run.is_delta == (version > 1)
    assert run.report.nbytes < 0.1 * run.report.whole_nbytes
    run.publish()  # nothing has changed
    assert run.serves("5") and run.report.nbytes == 0
    assert all(fake.process.engine.model.reloads == ["begin", "end"] * 5 for fake in run.fakes)
    run.close()


def test_above_a_third_a_bucket_is_sent_whole() -> None:
    run = Run()
    run.publish()
    first = next(iter(run.model.parameters()))
    for share, whole in ((0.30, False), (0.37, True)):
        with torch.no_grad():
            first.view(-1)[: int(share * first.numel())] += 1
        run.publish()
        assert run.serves(str(run.strategy.rollout._version)) and run.is_delta
        assert (run.report.nbytes >= first.nbytes) == whole
    run.close()


def test_without_room_on_the_device_the_host_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = Run(), []

    def compare(own: Tensor, base: Tensor, device: torch.device, most: int) -> tuple[Tensor, Tensor] | None:
        asked.append(device)
        if len(asked) % 2:
            raise torch.OutOfMemoryError("no room")
        return changed_words(own, base, device, most)

    monkeypatch.setattr("lightstep.rollout.staged_weights.changed_words", compare)
    for version in range(1, 4):
        run.step()
        assert run.publish() == version and run.serves(str(version))
    assert run.is_delta and len(asked) > 4
    run.close()


def test_bits_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the weights alone, whatever the memory held before."""
    allocate = HostCopyPool.allocate_bytes
    monkeypatch.setattr(HostCopyPool, "allocate_bytes", lambda *given: allocate(*given).random_())
    run = Run()
    with torch.no_grad():
        run.model[0].weight.zero_()
    run.publish()
    for value in (float("nan"), float("inf"), 0.0, -0.0):
        with torch.no_grad():
            run.model[0].weight.view(-1)[7] = value
        run.publish()
        found = run.fakes[0].process.weights["0.weight"].view(torch.int16)
        assert run.report.nbytes == 6 and torch.equal(found, run.model[0].weight.view(torch.int16)), value
    run.close()


# -- a whole set, whenever it is not known what a server has -----------------------------------------------------------


def restarted(run: Run) -> None:
    run.fakes[0].restart(run.initial)


def restarted_as_the_same_version(run: Run) -> None:
    """Another trainer's version has the same number."""
    run.fakes[0].restart(run.initial)
    run.fakes[0].process.version = str(run.strategy.rollout._version)


def lost_its_copy(run: Run) -> None:
    run.fakes[0].process.engine._held.forget()


def another_server(run: Run) -> None:
    new = FakeVllm(run.initial, 10.0)
    run.servers.add(new.url)
    run.fakes.append(new)


def another_trainer(run: Run) -> None:
    """Has published a set with the same number."""
    other = Training("vllm", deltas=True, model=make_model())
    mine = VllmServer(run.fakes[0].url, timeout_s=10, deltas=True)
    other.strategy.publish_weights(other.model, to=mine, version=run.strategy.rollout._version)
    mine.close()
    other.close()


def a_set_without_deltas(run: Run) -> None:
    mine = VllmServer(run.fakes[0].url, timeout_s=10)
    run.step()
    run.strategy.publish_weights(run.model, to=mine)
    mine.close()


def interrupted(run: Run, path: str, number: int) -> None:
    run.step()
    run.fakes[0].before = Breaking(path, number, "refuses", run.fakes[0])
    with pytest.raises(WeightTransferError, match="the engine is unwell"):
        run.publish()
    run.fakes[0].before = lambda path: None


def broken_off(run: Run) -> None:
    interrupted(run, "/update_weights", 3)


def not_finished(run: Run) -> None:
    """All of it has arrived, but the trainer does not know."""
    interrupted(run, "/reset_prefix_cache", 1)


@every_value(
    wait=[True, False],
    event=[
        restarted,
        restarted_as_the_same_version,
        lost_its_copy,
        another_server,
        another_trainer,
        a_set_without_deltas,
        broken_off,
        not_finished,
    ],
)
def test_a_whole_set_is_sent_after(event: Callable[[Run], None], wait: bool) -> None:
    run = Run()
    for _ in range(2):
        run.step()
        run.publish(wait)
    assert run.is_delta
    event(run)
    run.step()
    version = run.publish(wait)
    assert run.serves(str(version)) and not run.is_delta
    run.step()
    version = run.publish(wait)
    assert run.serves(str(version)) and run.is_delta
    run.close()


def test_what_takes_less_time_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are tried twice, and later the slower one now and then."""
    monkeypatch.setattr("lightstep.rollout.servers._AGAIN", 4)
    run = Run(deltas="auto")
    seconds, note = {True: 5.0, False: 1.0}, servers._Faster.note
    monkeypatch.setattr(servers._Faster, "note", lambda own, is_deltas, _: note(own, is_deltas, seconds[is_deltas]))
    sent = []
    for version in range(1, 17):
        run.step()
        assert run.publish() == version and run.serves(str(version))
        sent.append(run.is_delta)
        if version == 9:
            seconds[True] = 0.5
    assert sent == [False, True, True, False, *[False] * 3, True, *[False] * 4, *[True] * 4]
    run.close()


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_a_receiver_applies_deltas_to_nothing_else_than_their_base() -> None:
    infos = [WeightInfo(("a",), (5,), torch.bfloat16)]
    bucket = Bucket(infos, torch.arange(16, dtype=torch.uint8))
    delta = BucketDelta.of_words(infos, torch.tensor([1]), torch.tensor([9], dtype=torch.int16))
    held = HeldWeights()
    held.begin("one", "")
    held.keep(bucket, is_last=True)
    with pytest.raises(RuntimeError, match="no complete set is here"):
        held.begin("two", "one")  # "one" has not ended
    held.end()
    with pytest.raises(RuntimeError, match="deltas to set none, and one is here"):
        held.begin("two", "none")
    held.begin("two", "one")
    assert held.apply(infos, delta.buffer, is_last=False).buffer.view(torch.int16)[1] == 9
    held.end()  # half of it
    with pytest.raises(RuntimeError, match="no complete set is here"):
        held.begin("three", "two")
    held.begin("three", "")
    with pytest.raises(RuntimeError, match="a bucket that is not here"):
        held.apply(infos, delta.buffer, is_last=True)


@every_value(dtype=[torch.bfloat16, torch.float32, torch.int64], dim=[0, 1, 2])
def test_positions_of_a_shard_in_its_bucket(dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightstep.rollout.transport._PIECE", 37)

    infos = [WeightInfo(("a",), (3,), torch.bfloat16), WeightInfo(("b",), (4, 6, 8), dtype)]
    before = Bucket(infos, torch.zeros(Bucket.nbytes_of(infos), dtype=torch.uint8))
    after = Bucket(infos, torch.zeros(Bucket.nbytes_of(infos), dtype=torch.uint8))
    region = [slice(None)] * 3
    region[dim] = slice(1, 3)
    place = [slice(0, size) if i != dim else slice(1, 3) for i, size in enumerate((4, 6, 8))]
    whole = dict(after)[infos[1]]
    shard = whole[tuple(region)]
    shard.copy_(torch.randint(0, 2, shape := shard.shape))
    shard = shard.contiguous().view(-1)

    def changes(buffer: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        found = changed_words(buffer, base, torch.device("cpu"), most=10**9)
        assert found is not None
        count = len(found[0])
        assert changed_words(buffer, base, torch.device("cpu"), most=count - 1) is None
        return found

    found, words = changes(shard, torch.zeros_like(shard))
    start = dict(after.starts())[infos[1]]
    positions = shard_in_bucket(found, start, infos[1], place, shape)
    expected, expected_words = changes(after.buffer, before.buffer)
    order = positions.argsort()
    assert torch.equal(positions[order], expected) and torch.equal(words[order], expected_words)


def test_the_plugin_refuses_fused_experts_on_a_cpu() -> None:
    """vLLM packs them when it loads them first, and not again."""
    model = ServedModel(Process({"experts.w13_weight": torch.zeros(4, 8, 2)}))
    with pytest.raises(NotImplementedError, match=r"fused experts on a CPU \(experts.w13_weight\)"):
        PLUGIN.ProcessGroupEngine(model, torch.device("cpu"))
    PLUGIN.ProcessGroupEngine(model, torch.device("cuda"))
