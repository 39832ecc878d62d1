"""Programs over several ranks against the textbook loops: micro-batches, reductions and edits in any order.

Something wrong that people have met, or would meet, is one row; beside the rows there are random programs, in the same
words. Every rank runs the same program on data of its own. Under DDP the ranks may leave out different layers.

``LIGHTSTEP_FUZZ_SECONDS=600 pytest tests/distributed/test_programs.py`` goes on with other seeds for that long in all.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lightstep.distributed import local_tensor
from lightstep.optimizer.host_gradients import HostGradients
from lightstep.state.host_activations import HostActivations
from tests.covering import every_value
from tests.distributed.programs import HOST, STATES, WHOLE, Program
from tests.distributed.ranks import on_ranks
from tests.distributed.training import DEFERRED, FSDP2, HSDP, LAYOUTS, PRECISIONS, SINGLE_BUCKETS, UNITS
from tests.unit.test_next_forward import host_activations_of
from tests.unit.test_stream import random_delays

PLACES = {
    **LAYOUTS,
    "fsdp2-alone": (1, FSDP2),
    "fsdp2-on-three": (3, FSDP2),  # some shards are empty, and others have fewer rows
    "hsdp-named-units": (4, {**HSDP, "wrap": UNITS["wrap"]}),
    "fsdp2-cast": (2, {**FSDP2, "compute": "bfloat16"}),
    "ddp-on-three": (3, SINGLE_BUCKETS),
    "ddp-checkpointed": (2, {**SINGLE_BUCKETS, "activation_checkpointing": True}),
}
SECONDS = float(os.environ.get("LIGHTSTEP_FUZZ_SECONDS", "0"))

ROUTES = {
    "reduced twice": "micro:without=1 micro:without=1",
    "another branch": "micro:without=1 micro:without=0",
    "one rank changes": "micro:without=1 micro:without=1/0",
    "back again": "micro:without=1/0 micro:without=0/1 micro:without=1",
    "summed first": "sum:without=1/0 micro:without=1",
    "summed, and DDP does not see the forward": "sum:unseen,without=1/0 sum:unseen,without=1/0 micro:without=1",
    "summed between": "micro:without=0 sum:without=1/0 micro:without=1",
}
"""DDP's ranks leave out other blocks in other micro-batches."""

ON_THE_HOST = ("fsdp2, next_forward, bf16, host", "fsdp2, overlap, fp32, host")
COPIES = ("copies, next_forward, bf16", "copies, overlap, bf16")
NAMED_UNITS = ("fsdp2-named-units, stream, bf16", "hsdp-named-units, overlap, bf16")
SHARDS = ("fsdp2, resident, bf16", "fsdp2, overlap, bf16", "fsdp2-alone, next_forward, bf16", *ON_THE_HOST)
REPLICAS = ("ddp, resident, fp32", "ddp, stream, bf16", *COPIES)

PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    # -- gradients
    "two micro-batches, an overflow, and one": (
        "sum micro step:check sum micro:inf step:check micro step:check",
        (
            *("fsdp2, resident, bf16", "fsdp2-on-three, stream, fp16", "hsdp, resident, bf16-reduced-in-bf16"),
            *("fsdp2, resident, bf16-reduced-in-bf16", "fsdp2-checkpointed, resident, fp32"),
            *("ddp, resident, bf16", "ddp, stream, fp16", "ddp, resident, bf16-reduced-in-bf16"),
            *("ddp-checkpointed, resident, fp32", "ddp-on-three, resident, fp32", "ddp, resident, bf16, SGD"),
            "fsdp2, resident, bf16, SGD",
        ),
    ),
    "classes that need whole tensors": (
        "sum micro step:check sum micro:inf step micro step micro step exchanges micro step",
        (
            *("fsdp2-alone, overlap, bf16, Muon", "fsdp2-on-three, next_forward, bf16, Muon, short"),
            *("fsdp2, bulk, bf16, Muon", "fsdp2, resident, bf16, Muon-settings", "hsdp, overlap, bf16, Muon"),
            *("ddp, resident, bf16, Muon", "ddp, overlap, bf16, Muon"),
            *("fsdp2-on-three, next_forward, bf16, Adafactor", "hsdp, next_forward, bf16, Adafactor"),
            *("fsdp2, overlap, bf16, Adafactor-rate", "fsdp2, resident, bf16, Lamb"),
            *("fsdp2-on-three, stream, bf16, ByColumns", "fsdp2, resident, fp32, ByColumns"),
            *("fsdp2, next_forward, bf16, Muon-few, small ring", "fsdp2, overlap, bf16, Muon, host"),
        ),
    ),
    "every time and place of the state": (
        "slow micro step micro step evaluate micro:without=1 step sum micro step evaluate micro step",
        (
            *("fsdp2-kept-gathered, partly next_forward, bf16", "fsdp2-checkpointed, bulk overlap, fp32"),
            *("fsdp2-named-units, in_backward, bf16", "ddp, resident next_forward, fp32", "ddp, overlap, bf16"),
            *("ddp, partly in_backward, fp32, in_backward", "copies, resident in_backward, bf16, in_backward"),
            *("copies, partly overlap, bf16", "copies, partly overlap versions, fp16", "hsdp, partly overlap, fp16"),
            *("ddp-on-three, stream, bf16", "fsdp2-on-three, overlap, fp32", "fsdp2, overlap, bf16", *ON_THE_HOST),
            *("fsdp2-cast, resident, fp32", "fsdp2-cast, next_forward, fp32", "fsdp2-cast, next_forward, fp32, host"),
        ),
    ),
    "other classes": (
        "micro step sum micro:inf step micro step micro step",
        (  # without state, with one or several entries, and not torch's
            *("fsdp2, resident, bf16, host, SGD-plain", "fsdp2, bulk overlap, bf16, host, SGD-foreach"),
            *("fsdp2, next_forward, bf16, host, ASGD", "fsdp2, overlap, bf16, host, Lion", "ddp, stream, bf16, Lion"),
        ),
    ),
    "blocks are gathered ahead": (
        "slow ahead micro step micro step evaluate micro step", ("fsdp2, next_forward, bf16", *ON_THE_HOST),
    ),
    **{name: (f"{route} step", ("ddp, resident, bf16",)) for name, route in ROUTES.items()},
    **{
        f"{name}, by hand": (f"{route} step".replace("without", "hand,without"), ("ddp, resident, bf16",))
        for name, route in ROUTES.items()
    },
    "micro-batches are dropped": (
        "sum sum micro zero_grad micro step sum sum zero_grad micro step micro sum zero_grad micro step",
        ("fsdp2, resident, bf16", "fsdp2, resident, bf16-reduced-in-bf16", "ddp, resident, fp32", *ON_THE_HOST),
    ),
    "sums while units are tried": ("micro:hand micro:hand micro step " * 3, ("fsdp2-named-units, overlap, bf16",)),
    "gradients are edited": (
        "micro micro gradients:1,in_place step micro gradients:0.3 step micro gradients:0.3,in_place micro step "
        "micro gradients:0.3,,blocks.1.up.weight micro step micro gradients:2,,embed.weight step",
        ("fsdp2-named-units, resident, bf16", "hsdp-named-units, stream, bf16", "ddp, resident, bf16"),
    ),
    "gradients are edited, by hand": (
        "micro:hand gradients:0.3 step micro:hand gradients:0.3,in_place micro:hand step",
        ("fsdp2, resident, bf16", "hsdp, stream, bf16", "ddp, resident, fp32"),
    ),
    "gradients are set": ("micro step add:0.125 micro micro:hand step micro add:0.125 step", SHARDS),
    "zeros are gradients": (
        "zeros micro:without=1 step zeros micro:without=0 step " * 3,
        ("ddp, stream, fp32", "fsdp2, next_forward, fp32", "ddp, in_backward, fp32", "fsdp2, overlap, fp32"),
    ),
    "a backward that begins in the middle": (
        "middle step micro step middle step", (*SHARDS, "fsdp2, in_backward, bf16, in_backward"),
    ),
    "a penalty": (
        "micro:penalty step micro penalty step penalty micro step micro penalty:hand step micro micro:penalty step",
        NAMED_UNITS,
    ),
    "a penalty is dropped": (
        "micro penalty step micro penalty zero_grad:model micro penalty step", (*NAMED_UNITS, "ddp, resident, bf16"),
    ),
    "micro-batches whose last one was not reduced": (
        "sum refuse:unreduced micro step micro sum refuse:unreduced micro:hand step sum:hand refuse:unreduced",
        ("fsdp2, resident, bf16", "ddp, resident, bf16", "ddp, resident, fp32"),
    ),
    "a penalty instead of the last micro-batch": (
        "sum penalty refuse:unreduced micro evaluate step sum:hand penalty:hand refuse:unreduced micro step",
        ("fsdp2-named-units, resident, bf16", "hsdp-named-units, stream, bf16"),
    ),
    "a penalty alone instead of the last micro-batch": (
        "sum penalty refuse:unreduced", ("fsdp2-named-units, resident, fp32", "ddp, resident, fp32"),
    ),
    "micro-batches that DDP has not seen": (
        "micro:unseen refuse:unseen zero_grad micro step micro:unseen micro:unseen refuse:unseen zero_grad",
        ("ddp, resident, bf16",),
    ),
    "a backward that was not scaled": (
        "micro step micro:hand refuse:unscaled zero_grad micro step",
        ("fsdp2, resident, fp16", "ddp, resident, fp16"),
    ),
    "writes to a penalty": (
        "micro penalty write_gradients refuse:written zero_grad micro penalty step", ("ddp, resident, bf16",),
    ),
    "a forward that is interrupted": (
        "micro interrupt:forward_pre step interrupt:forward_pre micro interrupt:forward step micro step",
        ("fsdp2, next_forward, bf16", *ON_THE_HOST),
    ),
    "a backward that is interrupted": (
        "micro step interrupt:full_backward_pre micro step interrupt:full_backward micro step",
        ("fsdp2, next_forward, bf16", *ON_THE_HOST) if hasattr(FSDPModule, "reset_iter_state") else (),
    ),
    "clipped, skipped and neither": (
        "clip:1e6 micro step micro step clip:0.05 micro step clip:1e6 micro:inf step micro step clip:0.05 micro step "
        "rewind micro step clip:1e6 micro:inf step micro step move:overlap clip:0.05 micro step micro step",
        ("fsdp2-named-units, overlap, fp16",),
    ),
    # -- layers that come and go
    "a unit that was frozen in the first forward": (
        "freeze:blocks.1 micro step sum micro step freeze:blocks.1 micro step sum micro step", (*SHARDS, *COPIES),
    ),
    # -- weights and state that others write to
    "weights are edited": (
        "micro step micro step edit:blocks.0,-0.5 micro step edit:head,0.5,local micro step edit:,0.25,data micro step "
        "edit:blocks,0.25,load micro step",
        (*SHARDS, *REPLICAS),
    ),
    "weights are read and edited": ("micro step edit:blocks.1,0.5 " * 5, REPLICAS),
    "weights are read and edited before they arrive elsewhere": (
        "slow " + "micro step edit:blocks.0,0.5 micro step edit:blocks.1,0.5 micro step edit:blocks.2,0.5 " * 2,
        ("ddp, next_forward, bf16", *COPIES),
    ),
    "weights are used": (
        "micro step micro step read micro step evaluate micro step forward micro evaluate step evaluate micro step",
        ("fsdp2, next_forward, bf16", *SHARDS),
    ),
    "state is edited": (
        "micro step micro step state:written micro step state:assigned micro step state:forgotten micro step",
        ("ddp-on-three, resident, fp32", "ddp, stream, bf16", "fsdp2, overlap, fp32", "copies, next_forward, bf16"),
    ),
    # -- memory
    "memory comes and goes": (
        "micro step resident:1e-6 micro step resident:1 micro step memory micro step resident:1e-6 micro step rewind "
        "micro step",
        ("fsdp2, overlap, bf16", *COPIES),
    ),
    **{
        f"a model is moved {when}": (
            text,
            ("fsdp2, resident, fp16", "fsdp2, next_forward, fp32", "fsdp2, in_backward, bf16", *COPIES, *ON_THE_HOST),
        )
        for when, text in (("at first", "displace micro step micro step"), ("later", "micro step displace " * 2))
    },
    # -- checkpoints
    "weights on the host and on the device": (
        "micro step move:next_forward,host micro step move:resident,device micro step move:overlap,host micro step",
        ("fsdp2, resident, bf16", "fsdp2-alone, overlap, fp16"),
    ),
    "checkpoints": (
        "micro step rewind micro step rewind:late micro step reload micro step move:overlap micro step "
        "move:resident,late micro step move:stream,state_dicts micro step move:resident,state_dicts micro step",
        (
            *("fsdp2, next_forward, bf16", "ddp, next_forward without copies, bf16", "hsdp, stream, fp16"),
            *("fsdp2, overlap, bf16", "copies, stream, bf16"),
        ),
    ),
}  # fmt: skip


MORE: dict[str, dict[str, Any]] = {
    "host": {"weights": HOST},
    "SGD": {"optimizer": "SGD-momentum", "clipping": {"max_norm": 0.05, "norm_type": "inf"}},
    **{name: {"optimizer": name} for name in ("SGD-plain", "SGD-foreach", "ASGD", "Lion")},
    "in_backward": {"clipping": {"max_norm": None}},
    **{name: {"optimizer": name} for name in WHOLE},
    "small ring": {"optimizer_state": {**DEFERRED, "ring_mib": 0.006}},
    "short": {"optimizer_state": {**DEFERRED, "moments": "bfloat16"}},
}


def case_of(state: str, precision: str, *more: str) -> dict[str, Any]:
    case = {"optimizer_state": STATES[state], "precision": PRECISIONS[precision]}
    for name in (state, *more):
        case |= MORE.get(name, {})
    return case


@pytest.mark.parametrize(
    ("layout", "case", "text"),
    [
        pytest.param(layout, case, text, id=f"{name} ({layout}, {', '.join(case)})")
        for name, (text, cases) in PROGRAMS.items()
        for layout, *case in (listed.split(", ") for listed in cases)
    ],
)
@on_ranks(PLACES)
def test_written_programs(sharding: dict[str, Any], case: list[str], text: str) -> None:
    program = Program(sharding, case_of(*case), text)
    program.run()
    program.strategy.close()


@on_ranks(2)
def test_an_interrupted_forward_before_torch_2_13() -> None:
    program = Program(FSDP2, case_of("next_forward", "bf16"), PROGRAMS["a forward that is interrupted"][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        program.run()
    program.strategy.close()


@on_ranks(2)
def test_what_waits_for_others_reads_its_own_gradient() -> None:
    """A shared unit waits for the turn that ranks have agreed on. FSDP2 reduces all matrices of the outermost module
    together, and only then do their gradients go to the host: after the updates, as on a device, where these do not run
    in a thread."""
    take, case = HostGradients.take, case_of("overlap", "bf16", "Muon", "host")
    program = Program(FSDP2, {**case, "clipping": {"max_norm": None}}, "sum micro step:check micro step micro step")

    def after_updates(self: HostGradients, group: Any) -> None:
        program.optimizer.engine.backend.lanes.compute.synchronize()
        take(self, group)

    with mock.patch.object(HostGradients, "take", after_updates):
        program.run()
    program.strategy.close()


CASES = [
    ("ddp", "stream", "bf16"),
    ("ddp", "next_forward", "fp16"),
    ("ddp", "overlap", "fp32"),
    ("fsdp2", "stream", "fp16"),
    ("fsdp2", "next_forward", "fp32"),
    ("fsdp2", "overlap", "bf16"),
    ("hsdp", "overlap", "fp16"),
]


@pytest.mark.parametrize(("layout", "state", "precision"), CASES)
@on_ranks(PLACES)
def test_random_programs(sharding: dict[str, Any], state: str, precision: str) -> None:
    """A program gets to resident state, and to other update times, by a move."""
    deadline = time.monotonic() + SECONDS / len(CASES)
    case = {"optimizer_state": STATES[state], "precision": PRECISIONS[precision]}
    for seed in itertools.count():
        program = Program(sharding, case, seed=seed)
        program.run(length=14)
        program.strategy.close()
        over = [time.monotonic() > deadline]
        dist.broadcast_object_list(over)
        if over[0]:
            break


@every_value(
    layout=["fsdp2", "fsdp2-alone", "fsdp2-on-three", "fsdp2-kept-gathered", "fsdp2-checkpointed", "fsdp2-named-units"],
    state=["resident", "bulk overlap", "next_forward", "overlap", "partly overlap", "in_backward"],
    precision=["bf16", "bf16", "fp16", "bf16-reduced-in-bf16", "fp32", "fp16"],
    max_norm=[0.3, 1e3, 0.3],
    memory=[(0.001, 0), (64.0, 0), (0.001, 2e-6), (64.0, 2e-6), (0.001, 1), (64.0, 1)],
)
@on_ranks(PLACES)
def test_weights_on_the_host(
    sharding: dict[str, Any], state: str, precision: str, max_norm: float, memory: tuple[float, float]
) -> None:
    """Pairs have met on one device (``tests/unit/test_host_weights.py``).

    Sums of three ranks in 16 bits have no order, and are in no case.

    Args:
        memory: of the device, for weights, in MiB, and for gradients that stay, in GiB.
    """
    case = {"clipping": {"max_norm": max_norm}, **case_of(state, precision)}
    if state == "in_backward" and precision == "fp16":
        case["precision"] = {"parameters": "float16", "loss_scale": {"kind": "constant", "scale": 64.0}}
    case["weights"] = {"placement": "host", "device_mib": memory[0], "gradients_gib": memory[1]}
    program = Program(sharding, case, "micro step sum micro step evaluate micro step")
    program.run()
    store = program.backend
    if "overlap" in state and store.name != "resident" and program.world_size > 1:
        assert store._versions.host_bytes() > 0, "nothing was updated in backward"
    assert all(local_tensor(parameter).device.type == "cpu" for parameter in program.inner.parameters())
    program.strategy.close()


@every_value(layout=["fsdp2", "fsdp2-kept-gathered", "ddp"], case=[("resident", "bf16"), ("stream", "fp16")])
@on_ranks(LAYOUTS)
def test_inputs_of_recomputed_blocks_that_rest_on_the_host(
    rank: int, sharding: dict[str, Any], case: tuple[str, str]
) -> None:
    text = "sum micro step:check sum micro:inf step:check sum micro step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostActivations, "SMALLEST", 1)
        program = Program({**sharding, "activation_checkpointing": "host"}, case_of(*case), text)
        (keeper,) = host_activations_of(program.model)
        random_delays(keeper.lanes, rank, 2e-3)
        program.run()
        assert keeper.sent >= 3 * 2 * 3 and keeper.brought > 0
