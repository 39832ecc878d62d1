"""Shards that rest on the host under FSDP2: the bits of a run that keeps them on the device."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.two_tensor import TwoTensor

import lightstep
from lightstep import ConfigError
from lightstep.distributed import like, local_tensor
from lightstep.state.host_fields import Field
from tests.covering import every_value
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.test_update_times import Skipping, prefetch_forward
from tests.distributed.training import FSDP2, LAYOUTS, PRECISIONS, Training, assert_same_bits, same_tensors
from tests.patience import PATIENCE
from tests.unit import test_host_weights as on_one_device
from tests.unit.test_exactness import CLASSES as OPTIMIZERS
from tests.unit.test_homes_and_times import HOMES, LIMITS

SHARDED = ["fsdp2", "fsdp2-kept-gathered", "fsdp2-checkpointed", "fsdp2-named-units"]


class Run(Training):
    """Every micro-batch is reduced.

    Args:
        mib: device memory for weights; ``None``: they are on the device.
        gib: more of it, for gradients that stay.
    """

    def __init__(self, values: dict[str, Any], mib: float | None, gib: float = 0, **more: Any) -> None:
        weights = {"placement": "host", "device_mib": mib, "gradients_gib": gib}
        self.on_host = mib is not None
        super().__init__({**values, "weights": weights if self.on_host else {}}, **more)

    def micro_batches(self) -> int:
        return 1 if self.optimizer.engine.update_time.in_backward else super().micro_batches()

    def accumulate(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return super().accumulate(last) if self.on_host else contextlib.nullcontext()


def settings(sharding: dict[str, Any], home: str, time: str, limit: str, precision: str) -> dict[str, Any]:
    clipping = {"max_norm": LIMITS[limit], **({"scope": "unit"} if time == "in_backward" else {})}
    own = dict(PRECISIONS[precision])
    if time == "in_backward" and precision == "fp16":
        own["loss_scale"] = {"kind": "constant", "scale": 64.0}
    return {
        "sharding": sharding,
        "precision": own,
        "clipping": clipping,
        "optimizer_state": {**HOMES[home], "update": time},
    }


def check_same_bits(
    values: dict[str, Any],
    mib: float,
    gib: float = 0,
    make: type[TinyTransformer] = TinyTransformer,
    change: Callable[[Any], None] = lambda model: None,
) -> None:
    time = values["optimizer_state"]["update"]
    plain = {"backend": "resident", "update": time if time == "in_backward" else "at_step"}
    expected = Run({**values, "optimizer_state": plain}, None, make=make)
    tested = Run(values, mib, gib, make=make)
    change(tested.inner)
    seed = zlib.crc32(f"{values} {mib}".encode()) + tested.rank
    assert_same_bits(tested, expected, "step", "step", "evaluate", "step", seed=seed)
    store, redone = tested.optimizer._backend, tested.optimizer.engine.queue.redone
    if time == "overlap" and store.name != "resident":
        limit = values["clipping"]["max_norm"]
        assert (redone > 0) is any(float(norm) > limit for norm in tested.norms[1:])  # the first step makes the state
        assert store._versions.host_bytes() > 0, "nothing was updated in backward"
    assert all(p.grad is None for p in tested.inner.parameters())
    assert all(local_tensor(p).device.type == "cpu" for p in tested.inner.parameters())
    tested.optimizer.close()


def turned(values: Iterable[str], by: int) -> list[str]:
    """Six of four, of which two meet others the second time."""
    listed = list(values)
    return [*listed, *listed[by:], *listed[:by]][:6]


@every_value(
    layout=SHARDED,
    home=turned(HOMES, 1),
    time=turned(["at_step", "next_forward", "overlap", "in_backward"], 2),
    precision=turned(PRECISIONS, 3),
    limit=LIMITS,
    memory=[(0.001, 0), (64.0, 0), (0.001, 2e-6), (64.0, 2e-6), (0.001, 1), (64.0, 1)],
)
@on_ranks(LAYOUTS)
def test_the_same_bits(
    sharding: dict[str, Any], home: str, time: str, limit: str, precision: str, memory: tuple[float, float]
) -> None:
    """Pairs have met on one device (``tests/unit/test_host_weights.py``)."""
    check_same_bits(settings(sharding, home, time, limit, precision), *memory)


@on_ranks(None, "ranks", [1, 3])
def test_other_numbers_of_ranks() -> None:
    """On one rank FSDP2 gathers nothing, and reads shards elsewhere; on three they are uneven."""
    check_same_bits(settings(FSDP2, "stream", "overlap", "clipped", "bf16"), mib=0.02)


@on_ranks(
    2,
    ("compute", "time", "more"),
    [
        ("bfloat16", "next_forward", {}),
        ("parameters", "overlap", {"make": Skipping}),
        ("parameters", "next_forward", {"change": prefetch_forward}),
    ],
)
def test_shards_that_are_cast_left_out_or_gathered_ahead(compute: str, time: str, more: dict[str, Any]) -> None:
    precision = "bf16" if compute == "parameters" else "fp32"
    check_same_bits(settings({**FSDP2, "compute": compute}, "stream", time, "clipped", precision), 0.001, **more)


# ---- other classes


@every_value(
    name=["SGD-plain", "SGD-foreach", "ASGD", "Lion"],
    home=["stream", "bulk", "resident"],
    time=["at_step", "next_forward", "overlap", "in_backward"],
)
@on_ranks(2)
def test_other_classes(name: str, home: str, time: str) -> None:
    """Without state, with one or several entries, and not torch's. All of them: ``tests/unit/test_exactness.py``."""
    optimizer_class, *groups, common = OPTIMIZERS[name]

    class Model(TinyTransformer):
        def split(self) -> list[dict[str, Any]]:
            listed = [group["params"] for group in super().split()]
            of_class = {"optimizer_class": optimizer_class, **common}
            return [{"params": params, **of_class, **own} for params, own in zip(listed, groups, strict=True)]

    check_same_bits(settings(FSDP2, home, time, "clipped", "bf16"), 0.001, make=Model)


class Matrices(TinyTransformer):
    """Muon's, and AdamW's parameters."""

    def split(self) -> list[dict[str, Any]]:
        groups = super().split()
        groups[0] = {"params": groups[0]["params"], "optimizer_class": torch.optim.Muon, "lr": 3e-3}
        return groups


@on_ranks(2, ("home", "time"), [("resident", "next_forward"), ("stream", "overlap")])
def test_muon_on_shards(home: str, time: str) -> None:
    check_same_bits(settings(FSDP2, home, time, "clipped", "bf16"), 0.001, make=Matrices)


# ---- checkpoints, and what users do between steps


@on_ranks(2)
def test_a_run_that_changes_its_placement(tmp_path: Path) -> None:
    """A run changes its placement, and its home, at each resume."""
    on_device = settings(FSDP2, "resident", "at_step", "clipped", "bf16")
    next_forward, overlap = (settings(FSDP2, "stream", time, "clipped", "bf16") for time in ("next_forward", "overlap"))
    expected = Run(on_device, None)
    losses = expected.train(6)
    found: list[list[float]] = []
    for part, (values, mib) in enumerate([(next_forward, 0.001), (on_device, None), (overlap, 64.0)]):
        run = Run(values, mib)
        if part:
            run.strategy.load_checkpoint(tmp_path / str(part - 1), run.model, run.optimizer)
        run.steps = 2 * part
        found += [run.step()]
        saved = run.strategy.save_checkpoint(tmp_path / f"early{part}", run.model, run.optimizer, asynchronous=True)
        found += [run.step()]
        saved.result(PATIENCE)
        run.strategy.save_checkpoint(tmp_path / str(part), run.model, run.optimizer)
        snapshot = run.snapshot()
        run.optimizer.close()
    assert found == losses
    same_tensors(snapshot, expected.snapshot())


def read_weights(run: Run) -> None:
    assert all(torch.isfinite(local_tensor(value)).all() for value in run.inner.state_dict().values())


def write_shards(run: Run) -> None:
    run.optimizer.synchronize()
    local_tensor(run.inner.head.weight).mul_(0.5)
    run.optimizer.refresh_master_weights()


def backward_by_autograd(run: Run) -> None:
    (loss_of(run.model, 5, 0, run.rank, run.device) / 2).backward()


def move_the_model(run: Run) -> None:
    run.inner.to(run.device)


def set_gradients_before(run: Run) -> None:
    for weight in (run.inner.blocks[1].up.weight, run.inner.gain):
        weight.grad = like(weight, torch.full_like(local_tensor(weight), 0.125))
    run.optimizer.backward(loss_of(run.model, 5, 0, run.rank, run.device))
    loss_of(run.model, 6, 0, run.rank, run.device).backward()
    run.optimizer.step()


def change_gradients(run: Run) -> None:
    """Before the step, which clips by the norm of what is there then."""
    run.optimizer.backward(loss_of(run.model, 5, 0, run.rank, run.device))
    for weight in (run.inner.blocks[1].up.weight, run.inner.gain):
        own = like(weight, torch.full_like(local_tensor(weight), 0.125))
        weight.grad = own if weight.grad is None else weight.grad + own
    norm = lightstep.global_grad_norm(run.inner.parameters())
    assert torch.equal(norm.cpu(), run.optimizer.step().grad_norm.cpu())


def use_one_block(run: Run) -> None:
    """A backward that begins in the middle of the model."""
    found: list[torch.Tensor] = []
    handle = run.inner.blocks[0].register_forward_hook(lambda *arguments: found.append(arguments[2]))
    loss_of(run.model, 5, 0, run.rank, run.device)
    handle.remove()
    run.optimizer.backward(found[0].float().square().mean())
    run.optimizer.step()


def shared(action: Callable[[Any, Path], None]) -> Callable[[Run], None]:
    """What is tested on one device, too."""
    return functools.wraps(action)(lambda run: action(run, Path()))


WITH_WEIGHTS: list[Callable[[Run], None]] = [
    *(read_weights, shared(on_one_device.write_in_place), write_shards, shared(on_one_device.load_own_weights)),
    *(shared(on_one_device.evaluate), shared(on_one_device.forward_without_backward), move_the_model),
]
WITH_GRADIENTS: list[Callable[[Run], None]] = [
    *(backward_by_autograd, shared(on_one_device.drop_gradients), shared(on_one_device.zero_gradients)),
    *(set_gradients_before, change_gradients, shared(on_one_device.freeze), use_one_block),
]


@on_ranks(2, ("time", "mib", "actions"), [("next_forward", 64.0, WITH_WEIGHTS), ("overlap", 0.001, WITH_GRADIENTS)])
def test_what_users_do_between_steps(rank: int, time: str, mib: float, actions: list[Callable[[Run], None]]) -> None:
    """One run does all of it, one after the other, each while updates are pending.

    Weights are on the device while they are written to; updates are tried while gradients are changed.
    """
    values = settings(FSDP2, "stream", "at_step", "clipped", "bf16")

    def content(time: str, mib: float | None) -> Iterator[tuple[str, Any]]:
        home = "resident" if mib is None else "stream"
        run = Run({**values, "optimizer_state": {**HOMES[home], "update": time}}, mib)
        run.step()
        if mib is not None:
            run.delay(rank)
        run.step()
        for action in actions:
            action(run)
            yield action.__name__, run.step()
        yield from run.snapshot().items()
        run.optimizer.close()

    expected = list(content("at_step", None))
    for (name, wanted), (_, found) in zip(expected, content(time, mib), strict=True):
        assert torch.equal(wanted, found) if isinstance(wanted, torch.Tensor) else wanted == found, name


@on_ranks(2)
def test_what_is_written_to_data_between_two_evaluations_counts() -> None:
    """Nobody counts such a write, and no read through the model says that there may be one."""
    losses = []
    for time, mib in (("at_step", None), ("at_step", 64.0), ("next_forward", 64.0)):
        run = Run(settings(FSDP2, "resident", time, "clipped", "bf16"), mib)
        weight = run.inner.blocks[1].up.weight  # FSDP2 keeps those of the root gathered
        run.step()
        run.step()  # the first one defers nothing
        with torch.no_grad():
            losses.append([loss_of(run.model, 5, 0, run.rank, run.device).item()])
            local_tensor(weight).data.mul_(0.5)
            losses[-1].append(loss_of(run.model, 5, 0, run.rank, run.device).item())
        run.optimizer.close()
    assert losses[0] == losses[1] == losses[2] and losses[0][0] != losses[0][1]


@on_ranks(2)
def test_parameters_that_were_replaced_are_refused() -> None:
    run = Run(settings(FSDP2, "stream", "next_forward", "clipped", "bf16"), 0.02)
    run.step()
    run.inner.load_state_dict({name: value.clone() for name, value in run.inner.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"is another parameter than the one that rests.*load without assign=True"):
        run.evaluate()


# ---- errors


@on_ranks(2, ("time", "mib"), [("next_forward", None), ("overlap", 0.001)])
def test_a_run_goes_on_after_an_interrupt(rank: int, mib: float | None, time: str) -> None:
    """A forward or backward that is interrupted is as if it had not been."""
    values = settings(FSDP2, "stream", time, "clipped", "bf16")
    expected = Run(values, mib)
    losses = expected.train(5)

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    def interrupt(register: Any) -> None:
        handle = register(raising)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.backward(loss_of(run.model, 5, 0, run.rank, run.device))
        handle.remove()
        run.optimizer.zero_grad()

    run = Run(values, mib)
    found = [run.step()]
    run.delay(rank)
    block, can_forget = run.inner.blocks[1], hasattr(FSDPModule, "reset_iter_state")
    in_backward = [block.register_full_backward_pre_hook, block.register_full_backward_hook]
    for register in [block.register_forward_pre_hook, block.register_forward_hook, *in_backward * can_forget]:
        interrupt(register)
        found.append(run.step())
    found += [run.step() for _ in losses[len(found) :]]
    assert found == losses
    same_tensors(run.snapshot(), expected.snapshot())
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        interrupt(block.register_full_backward_hook)
        with pytest.raises(RuntimeError, match=r"the last backward ended with an error.*or use torch 2\.13"):
            run.step()


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch has it from 2.13 on")
@on_ranks(2, ("time", "counts"), [("at_step", (1, 5)), ("next_forward", (3,))])
def test_a_run_goes_on_after_a_failure(time: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """No room for the same weights on all ranks: the run goes on from a checkpoint, in the same process."""
    run = Run(settings(FSDP2, "stream", time, "clipped", "bf16"), 0.02)
    run.step()
    run.strategy.save_checkpoint(tmp_path / time, run.model, run.optimizer)
    start, bring, left = run.steps, Field.bring, 0
    wanted = run.train(2)

    def failing(field: Field) -> None:
        nonlocal left
        left -= 1
        if left <= 0:  # until somebody needs it: a copy that is queued ahead is left out
            raise torch.OutOfMemoryError("out of memory")
        bring(field)

    messages = []
    for count in counts:
        run.strategy.load_checkpoint(tmp_path / time, run.model, run.optimizer)
        run.steps, left = start, count
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Field, "bring", failing)
            try:
                run.train(2)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                messages.append(str(error))
        run.optimizer.zero_grad()
        run.strategy.load_checkpoint(tmp_path / time, run.model, run.optimizer)
        run.steps = start
        assert run.train(2) == wanted, (count, messages[-1])
    assert messages
    assert all(re.search("no room for the .*weights.device_mib", text) for text in messages)


@on_ranks(2, "mib", [None, 0.001])
def test_a_forward_after_the_step_has_its_weights(mib: float | None) -> None:
    """It leaves weights gathered, which are from before the step."""
    run = Run(settings(FSDP2, "stream", "next_forward", "clipped", "bf16"), mib)
    run.step()
    run.optimizer.backward(loss_of(run.model, 5, 0, run.rank, run.device))
    before = run.evaluate()
    run.optimizer.step()
    found = run.evaluate()
    run.inner.reshard()
    assert found == run.evaluate() != before


@on_ranks(2)
def test_a_model_that_is_given_up_leaves_no_memory() -> None:
    run = Run(settings(FSDP2, "stream", "overlap", "clipped", "bf16"), 0.02)
    run.train(2)
    weights, model = weakref.ref(run.optimizer.engine._host_weights), weakref.ref(run.inner)
    del run
    gc.collect()
    gc.collect()  # what is kept for the model goes after it
    assert weights() is None and model() is None


@on_ranks(2)
def test_other_tensors_are_refused() -> None:
    model = TinyTransformer()
    model.head.weight = torch.nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    values = {"sharding": {"kind": "fsdp2"}, "precision": PRECISIONS["fp32"], "weights": {"placement": "host"}}
    with pytest.raises(ValueError, match=r"head\.weight is a TwoTensor, and weights that rest on the host are plain"):
        lightstep.Strategy.load(values).prepare_model(model)


def test_replicas_are_refused() -> None:
    for sharding in ({"kind": "fsdp2", "mesh": {"replicate": 2, "shard": "auto"}}, {"kind": "ddp"}):
        with pytest.raises(ConfigError, match=r"set sharding\.kind: single, or fsdp2 with mesh\.replicate: 1"):
            lightstep.Strategy.load({"sharding": sharding, "weights": {"placement": "host"}})
