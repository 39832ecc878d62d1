"""Trainers and rollout workers in one process group: who holds what, and how weights get from one to the other."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import lightstep
from lightstep import ConfigError, Strategy, TrainingEnded, TransformersEngine, WeightTransferError
from lightstep.checkpoint.huggingface import full_weights
from lightstep.distributed import local_tensor
from lightstep.strategy import fsdp2
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.training import COPIES, DDP, DEFERRED, FSDP2, OVERLAP, RESIDENT, same_tensors, slow_lanes

SINGLE: dict[str, Any] = {"kind": "single"}

SMALL = 0.001
"""MiB: layers of the tiny model travel in several buckets."""


# Torch keeps what it found out about a mesh for all that are equal to it, those of later process groups included. The
# ranks of this pool are all ranks of other tests: where something is sharded, rank 0 generates and the others train.
FIRST: dict[str, Any] = {"ranks": [0]}


def load(sharding: dict[str, Any], rollout: dict[str, Any] | None = None, **sections: Any) -> Strategy:
    asynchronous = {"mode": "async", "timeout_s": 20, **(rollout or {})}
    return Strategy.load({"sharding": sharding, **sections, "roles": {"rollout": asynchronous}})


class Model(TinyTransformer):
    """With a buffer that is cast, one that is not, and tied weights."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.norm = nn.BatchNorm1d(7)
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", torch.rand(5))

    def forward(self, tokens: Tensor) -> Tensor:
        self.norm.num_batches_tracked += 1
        return super().forward(tokens)


def train(strategy: Strategy, model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.backward(loss_of(model, step, 0, strategy.rank, strategy.device))
        optimizer.step()


def prepared(strategy: Strategy, make: type[nn.Module] = Model) -> nn.Module:
    torch.manual_seed(strategy.rank + 10 * (strategy.role == "rollout"))  # nobody starts from anybody's weights
    return strategy.prepare_model(make, role=strategy.role)


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}


# -- the weights that arrive ------------------------------------------------------------------------------------------


def check_weights(
    sharding: dict[str, Any], trained: str, sent: str, ranks: Any, state: dict[str, Any]
) -> tuple[str, list[Any]]:
    """Three versions, each with the weights it arrived with (trainers: with those that it was published from)."""
    rollout = {"ranks": ranks, "parameters": sent, "bucket_mib": SMALL}
    strategy = load(sharding, rollout, precision={"parameters": trained}, optimizer_state=state)
    model = prepared(strategy)
    versions: list[Any] = []
    if strategy.role == "rollout":
        engine = TransformersEngine(model)
        for _ in range(3):
            strategy.receive_weights(engine)
            versions.append((engine.version, copied(model.state_dict())))
        return strategy.role, versions
    optimizer: Any = strategy.create_optimizer(model, lr=1e-2)
    for step in range(3):
        train(strategy, model, optimizer, 1, first=step)
        slow_lanes(optimizer, step, 3e-4)
        version = strategy.publish_weights(model)
        versions.append((version, copied(full_weights(model))))
    return strategy.role, versions


KEYS = ("sharding", "trained", "sent", "ranks", "state")
SENT: dict[str, tuple[int, tuple[Any, ...]]] = {
    "fsdp2": (3, (FSDP2, "bfloat16", "bfloat16", [0], RESIDENT)),
    "fsdp2-deferred": (3, (FSDP2, "float32", "bfloat16", [0], DEFERRED)),
    "hsdp": (3, (COPIES, "bfloat16", "float32", [0], DEFERRED)),
    "ddp": (3, (DDP, "float32", "float16", 1, RESIDENT)),
    "single-to-two": (3, (SINGLE, "bfloat16", "float32", 2, DEFERRED)),
    "fsdp2-alone": (2, (FSDP2, "float32", "float32", [0], RESIDENT)),
}


@pytest.mark.parametrize("what", SENT)
def test_weights_arrive_as_they_are_cast(pool: Pool, what: str) -> None:
    world_size, values = SENT[what]
    outcomes = pool.run(check_weights, world_size, **dict(zip(KEYS, values, strict=True)))
    _, _, sent, ranks, _ = values
    published = next(versions for role, versions in outcomes if role == "trainer")
    workers = [versions for role, versions in outcomes if role == "rollout"]
    assert len(workers) == (len(ranks) if isinstance(ranks, list) else ranks)
    for versions in workers:
        assert [number for number, _ in versions] == [number for number, _ in published] == [1, 2, 3]
        for (_, received), (_, weights) in zip(versions, published, strict=True):
            assert received.keys() == weights.keys()
            for name, tensor in received.items():
                kept = name in ("rotary.inv_freq", "norm.num_batches_tracked")
                dtype = weights[name].dtype if kept else getattr(torch, sent)
                assert tensor.dtype == dtype and torch.equal(tensor, weights[name].to(dtype)), name


# -- trainers that shard their model themselves ------------------------------------------------------------------------


class ShardedByHand:
    """A model of which a mesh holds shards: this role's part of a larger one, or a mesh of its own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.mesh, self.model = mesh, TinyTransformer()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def loss(self, step: int) -> Tensor:
        return loss_of(self.model, step, 0, self.mesh.get_local_rank(), torch.device("cpu"))


@on_ranks(4, ("sliced", "state"), [(False, RESIDENT), (True, OVERLAP)], cpu=True)
def test_two_ranks_of_four_train_what_they_have_sharded(
    rank: int, sliced: bool, state: dict[str, Any], tmp_path: Path
) -> None:
    """With the bits of torch's own loop, while the others do something else."""
    whole = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("role", "shard"))
    mesh = whole["shard"] if sliced else DeviceMesh("cpu", [2, 3])
    if rank < 2:
        return
    settings = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": 0.05}, "optimizer_state": state}
    strategy = load(SINGLE, {"ranks": [0, 1]}, **settings)
    trained, plain = ShardedByHand(mesh), ShardedByHand(mesh)
    optimizer = strategy.create_optimizer(trained.model, lr=1e-2)
    expected = torch.optim.AdamW(plain.model.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        if step == 2:
            strategy.save_checkpoint(tmp_path / f"saved-{sliced}", trained.model, optimizer)
        optimizer.backward(trained.loss(step))
        result = optimizer.step()
        plain.loss(step).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05)
        expected.step()
        expected.zero_grad()
        assert torch.equal(result.grad_norm, norm.full_tensor()) and float(result.grad_norm) > 0.05
    optimizer.synchronize()
    for own, other in zip(trained.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(local_tensor(own), local_tensor(other))
    strategy.load_checkpoint(tmp_path / f"saved-{sliced}", trained.model, optimizer)
    whole_model = strategy.create_optimizer(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="leaves 2 of them to train, which would train apart"):
        whole_model.step()


@pytest.mark.parametrize("sliced", [False, True])
@on_ranks(4, cpu=True)
def test_ranks_that_are_waited_for_are_named(rank: int, sliced: bool) -> None:
    """Nothing says that the others, which leave, do not train."""
    whole = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("role", "shard"))
    mesh = whole["shard"] if sliced else DeviceMesh("cpu", [2, 3])
    if rank < 2:
        dist.destroy_process_group()
        return
    trained = ShardedByHand(mesh)
    optimizer = Strategy.load("fp32").create_optimizer(trained.model)
    optimizer.backward(trained.loss(0))
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    assert "ranks [0, 1] have to step, too" in "".join(getattr(error.value, "__notes__", []))


# -- memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The size of the largest plain tensor that any operation returned, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if type(tensor) is Tensor:
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.itemsize)
        return result


class Deep(nn.Module):
    """Twelve equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))


def check_buffers() -> tuple[str, int, int]:
    """The largest buffer of one publication, and the bytes of a layer in fp32."""
    strategy = load(FSDP2, FIRST, precision={"parameters": "float32"})
    with torch.device("meta"):
        made = Deep()
    model = strategy.prepare_model(made, role=strategy.role)
    engine = TransformersEngine(model)
    layer = sum(parameter.numel() * 4 for parameter in Deep().layers[0].parameters())
    with Largest() as largest:
        if strategy.role == "rollout":
            strategy.receive_weights(engine)
        else:
            strategy.publish_weights(model)
    return strategy.role, largest.nbytes, layer


def test_no_more_than_a_layer_is_gathered_or_received_at_once(pool: Pool) -> None:
    for role, largest, layer in pool.run(check_buffers, 3):
        assert 0 < largest <= layer, role


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an async rollout worker came to the FSDP path")


@on_ranks(2)
def test_an_async_rollout_worker_holds_inference_weights_and_nothing_else(rank: int, tmp_path: Path) -> None:
    """Inference weights, once, and an answer to every question about what it has not."""
    strategy = load(FSDP2, FIRST, precision={"parameters": "float32"})
    assert (strategy.role, strategy.is_main) == [("rollout", False), ("trainer", True)][rank]
    if strategy.role == "trainer":
        model = prepared(strategy)
        assert strategy.fsdp_version(model) == 2
        with pytest.raises(ConfigError, match="rank 1, whose role is 'trainer'"):
            strategy.prepare_model(Model, role="rollout")
        with pytest.raises(ConfigError, match="this one trains"):
            strategy.receive_weights(TransformersEngine(Deep()))
        strategy.save_checkpoint(tmp_path / "saved", model)
        strategy.publish_weights(model, version=7)
        return
    fsdp2.fully_shard, whole = _never, fsdp2.fully_shard
    try:
        model = prepared(strategy)
    finally:
        fsdp2.fully_shard = whole
    assert type(model) is Model and strategy.fsdp_version(model) == 0 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    engine = TransformersEngine(model)
    assert strategy.receive_weights(engine, wait=True) == 7 == engine.version
    assert strategy.receive_weights(engine, wait=False) is None
    with strategy.release_device_memory():
        pass
    strategy.load_checkpoint(tmp_path / "saved", model)
    strategy.export_model(tmp_path / "exported", model)
    assert (tmp_path / "exported" / "model.safetensors").exists()
    plain = nn.Linear(2, 2)
    for what, call in {
        "create_optimizer": lambda: strategy.create_optimizer(model),
        "create_optimizer on": lambda: strategy.create_optimizer(plain),
        "accumulate": strategy.accumulate(model).__enter__,
        "save_checkpoint": lambda: strategy.save_checkpoint(tmp_path / "none", model),
        "load_checkpoint with an optimizer": lambda: strategy.load_checkpoint(
            tmp_path / "saved", model, torch.optim.SGD(plain.parameters())
        ),
        "publish_weights": lambda: strategy.publish_weights(model),
        "mesh()": lambda: strategy.mesh(),
        "whose role is 'rollout'": lambda: strategy.prepare_model(Model),
    }.items():
        with pytest.raises(ConfigError, match=what.replace("(", r"\(").replace(")", r"\)")):
            call()
    assert not (tmp_path / "none").exists()


class Unfinished(TransformersEngine):
    """Whose first set of weights breaks off in the second bucket."""

    buckets = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.buckets += 1
        if self.buckets == 2:
            raise OSError("no room")
        super().load_weights(weights)


@on_ranks(2)
def test_sharded_trainers_fill_the_engines_beside_them(rank: int) -> None:
    """Every trainer has an engine; what fails in one of them is told to all."""
    strategy = Strategy.load({"sharding": FSDP2, "roles": {"rollout": {"parameters": "float32", "bucket_mib": SMALL}}})
    torch.manual_seed(rank)
    model = strategy.prepare_model(Model)
    engine = [TransformersEngine, Unfinished][rank](strategy.prepare_model(Model, role="rollout"))
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    train(strategy, model, optimizer, 1)
    with pytest.raises(WeightTransferError, match=["trainer 1: OSError: no room", "OSError: no room"][rank]):
        strategy.publish_weights(model, to=engine)
    assert not engine.complete and engine.version is None
    with strategy.release_device_memory():
        assert strategy.publish_weights(model, to=engine) == 1 == engine.version
    weights = copied(full_weights(model))
    assert all(
        torch.equal(tensor, weights[name].to(tensor.dtype))
        for name, tensor in copied(engine.model.state_dict()).items()
    )
    train(strategy, model, optimizer, 1, first=1)


# -- the ranks that train, among themselves ---------------------------------------------------------------------------


def check_training(sharding: dict[str, Any], roles: bool, folder: str) -> Any:
    """The weights of two trainers after three steps, a checkpoint and its loading."""
    strategy = load(sharding, FIRST) if roles else Strategy.load({"sharding": sharding})
    if strategy.role == "rollout":
        strategy.start()
        return None
    torch.manual_seed(0)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    train(strategy, model, optimizer, 2)
    strategy.save_checkpoint(Path(folder, str(roles)), model, optimizer)
    train(strategy, model, optimizer, 3, first=5)
    strategy.load_checkpoint(Path(folder, str(roles)), model, optimizer)
    train(strategy, model, optimizer, 1, first=2)
    loss_of(model, 9, 0, strategy.rank, strategy.device).backward()
    norm = float(lightstep.global_grad_norm(model.parameters()))
    reference = strategy.prepare_model(TinyTransformer, role="reference")
    assert strategy.fsdp_version(reference) == strategy.fsdp_version(model)
    loss = loss_of(reference, 3, 0, 0, strategy.device)
    assert loss.grad_fn is None and not reference.training
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in reference.parameters())
    for refused in (lambda: strategy.create_optimizer(reference), strategy.accumulate(reference).__enter__):
        with pytest.raises(ConfigError, match="reference model: it has no gradients and no optimizer"):
            refused()
    return norm, full_weights(model), full_weights(reference)


@pytest.mark.parametrize("sharding", [FSDP2, DDP], ids=["fsdp2", "ddp"])
def test_two_of_three_ranks_train_as_two_of_two(pool: Pool, tmp_path: Path, sharding: dict[str, Any]) -> None:
    _, *among = pool.run(check_training, 3, cpu=True, sharding=sharding, roles=True, folder=str(tmp_path))
    alone = pool.run(check_training, 2, cpu=True, sharding=sharding, roles=False, folder=str(tmp_path))
    for (norm, weights, reference), (norm_alone, weights_alone, _) in zip(among, alone, strict=True):
        assert norm == norm_alone
        same_tensors(weights, weights_alone)
        same_tensors(reference, among[0][2])


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.extra = nn.Parameter(torch.ones(2))


@on_ranks(3)
def test_failures_are_told_to_every_trainer_and_leave_complete_weights_or_none() -> None:
    """Every trainer is told, nothing changes, and the next publication arrives."""
    strategy = load(FSDP2, {**FIRST, "bucket_mib": SMALL})
    impatient = load(FSDP2, {**FIRST, "timeout_s": 1.0})
    impatient.start()
    if strategy.role == "rollout":
        model = prepared(strategy)
        before = copied(model.state_dict())
        other = strategy.prepare_model(Wider, role="rollout")
        with pytest.raises(
            WeightTransferError, match=r"gain .*\[1\] is published, and the engine has gain .*\[2\].*extra"
        ):
            strategy.receive_weights(TransformersEngine(other), timeout=60)
        engine = Unfinished(model)
        with pytest.raises(OSError, match="no room"):
            strategy.receive_weights(engine, timeout=60)
        for generate in (engine.generate, lambda: model(torch.zeros(1, 2, dtype=torch.long))):
            with pytest.raises(WeightTransferError, match="half of a set"):
                generate()
        assert strategy.receive_weights(engine, timeout=60) == 1 and engine.complete
        model(torch.zeros(1, 2, dtype=torch.long, device=strategy.device))
        after = copied(model.state_dict())
        assert not torch.equal(after["embed.weight"], before["embed.weight"])
        with pytest.raises(WeightTransferError, match="no weights were published in time"):
            strategy.receive_weights(engine, timeout=0.1)
        dist.barrier()
        dist.barrier()
        with pytest.raises(TrainingEnded):  # an offer that nobody waits for any more is none, and is not refused
            impatient.receive_weights(TransformersEngine(other), timeout=60)
        same_tensors(copied(model.state_dict()), after)
        return
    model = prepared(strategy)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    weights = copied(full_weights(model))
    for expected in ("rank 0 cannot load these weights: gain", "rank 0 failed: OSError: no room"):
        with pytest.raises(WeightTransferError, match=expected) as failure:
            strategy.publish_weights(model)
        assert failure.value.ranks == (0,)
    same_tensors(copied(full_weights(model)), weights)
    strategy.publish_weights(model)
    train(strategy, model, optimizer, 1)
    dist.barrier()
    with pytest.raises(WeightTransferError, match="did not answer within 1 s") as failure:
        impatient.publish_weights(model)
    assert failure.value.ranks == (0,)
    train(strategy, model, optimizer, 1, first=1)
    dist.barrier()
    impatient.close()


class Deadly(TransformersEngine):
    """Whose process is killed when the second bucket of the second set arrives."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.version == 1 and not self.complete:
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_weights(weights)


def check_death(rank: int, folder: str) -> None:
    """The last rank is killed while it receives; the first two write down how it went on."""
    strategy = load(SINGLE, {"bucket_mib": SMALL, "ranks": 2, "timeout_s": TIMEOUT})
    if strategy.role == "rollout":
        _receive_until_death(strategy, Deadly if rank == 2 else TransformersEngine, Path(folder))
        return
    model, twin = prepared(strategy), prepared(strategy)
    optimizer, twin_optimizer = (strategy.create_optimizer(each, lr=1e-2) for each in (model, twin))
    train(strategy, model, optimizer, 1)
    strategy.publish_weights(model)
    train(strategy, model, optimizer, 1, first=1)
    with pytest.raises(WeightTransferError, match="rank 2 died or hangs") as failure:
        strategy.publish_weights(model)
    strategy.drop_rollout_workers(failure.value.ranks)
    train(strategy, model, optimizer, 1, first=2)
    version = strategy.publish_weights(model)
    train(strategy, twin, twin_optimizer, 3)
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    strategy.save_checkpoint(Path(folder, "after"), model, optimizer)
    report = {"ranks": failure.value.ranks, "version": version, "same": same}
    Path(folder, "trainer.json").write_text(json.dumps(report))


def _receive_until_death(strategy: Strategy, make: type[TransformersEngine], folder: Path) -> None:
    engine = make(prepared(strategy))
    strategy.receive_weights(engine)
    with pytest.raises(WeightTransferError, match="was not completed"):
        strategy.receive_weights(engine)
    complete = engine.complete
    strategy.receive_weights(engine)
    (folder / "survivor.json").write_text(json.dumps({"complete": complete, "version": engine.version}))


TIMEOUT = 10.0


def test_a_worker_that_dies_costs_the_trainer_an_error_and_nothing_else(tmp_path: Path) -> None:
    own = Pool(patience=60)  # its processes do not outlive this
    with pytest.raises(AssertionError, match="the process ended"):
        own.run(check_death, 3, folder=str(tmp_path))
    trainer = json.loads((tmp_path / "trainer.json").read_text())
    assert trainer == {"ranks": [2], "version": 2, "same": True}
    survivor = json.loads((tmp_path / "survivor.json").read_text())
    assert survivor == {**survivor, "version": 2}
    assert (tmp_path / "after").is_dir()


@on_ranks(3)
def test_a_closed_strategy_sends_and_receives_nothing() -> None:
    strategy = load(FSDP2, FIRST)
    model = prepared(strategy)
    strategy.close()
    calls = {
        "rollout": lambda: strategy.receive_weights(TransformersEngine(model)),
        "trainer": lambda: strategy.publish_weights(model),
    }
    with pytest.raises(ConfigError, match="this strategy has no process group: it was closed"):
        calls[strategy.role]()


@on_ranks(3)
def test_ranks_that_cannot_have_these_roles() -> None:
    for rollout, message in (
        ({"ranks": 3}, "at least one has to be left to train"),
        ({"ranks": [5]}, r"roles.rollout.ranks is \[5\] and 3 are running"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(FSDP2, rollout).start()
    load(FSDP2).start()
    with pytest.raises(ConfigError, match="the same roles"):
        load(FSDP2, {"ranks": [0]}).start()


# -- the examples -----------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHORT = "--warmup 2 --steps 4 --prompts 4 --group 2 --hidden 16 --layers 1 --output"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_example(folder: str) -> None:
    sys.argv = ["async_rollout.py", *SHORT.split(), folder]
    example("async_rollout").main()


def test_the_example_runs(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_example, 2, group=False, folder=str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["history"]) == 4 and (tmp_path / "rewards.png").stat().st_size > 0
    trainer, worker = result["memory"]
    assert (trainer["role"], worker["role"]) == ("trainer", "rollout")
    assert (
        trainer["weights"] == worker["weights"] > 0 == worker["optimizer"] == worker["gradients"] < trainer["optimizer"]
    )


def check_measured_memory(world_size: int) -> dict[str, int] | None:
    """Only what is above the allocator's and the libraries' noise: a model of 80 MB."""
    measuring, device = example("rollout_memory"), "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    sizes = {**measuring.SIZES["cpu"], "hidden_size": 720, "num_hidden_layers": 3, "vocab_size": 7040}
    return measuring.run_rank(measuring.WITH if world_size == 2 else measuring.WITHOUT, sizes, device, 0)


def test_the_memory_of_a_worker_is_measured(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, with_role = pool.run(check_measured_memory, 2, group=False)
    assert trainer is None
    weights = with_role["inference_weight_bytes"]
    # Beyond the weights: one layer on its way, and what torch and transformers allocate once in a process. Memory that
    # the process had freed before is used again, and not counted.
    assert weights < 2 * with_role["held_bytes"] and with_role["peak_bytes"] < 1.8 * weights
    measuring = example("rollout_memory")
    monkeypatch.setattr(measuring, "measured", lambda *_: with_role)
    monkeypatch.setattr(sys, "argv", ["rollout_memory.py", "--device", "cpu", "--output", str(tmp_path)])
    measuring.main()
    said, rows = capsys.readouterr().out, json.loads((tmp_path / "roles.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [measuring.WITHOUT, measuring.WITH] and all(
        row["name"] in said for row in rows
    )
    assert f"{with_role['peak_bytes'] / 1e9:.2f}" in said and rows[1]["held_bytes"] == with_role["held_bytes"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        measuring.main()
    assert "run it without torchrun" in capsys.readouterr().err
