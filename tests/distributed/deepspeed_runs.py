"""The run of ``tests/reference/converted_run.py`` under DeepSpeed itself, on the ranks of the pool."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.reference.converted_run import ADAMW, AFTER, BEFORE, SCALE, make_groups, make_net, tokens

CLIENT = {"epoch": 3, "order": [1, 2]}

WINDOW = 8
"""Longer than the runs: in a step in which its scale grows, DeepSpeed divides the gradients by the grown scale."""


@contextlib.contextmanager
def deepspeed_on_cpu() -> Iterator[Any]:
    """DeepSpeed with nothing to compile, and without its memory of groups and modules that are gone."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.comm.comm
    import deepspeed.ops
    import deepspeed.utils.groups
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    deepspeed.ops.__compatible_ops__.clear()
    # Stage 3 numbers modules in a process and compares the numbers over ranks, which have run other checks before.
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)
    try:
        yield deepspeed
    finally:
        importlib.reload(deepspeed.utils.groups)
        deepspeed.comm.comm.cdb = None


def make_engine(deepspeed: Any, stage: int, dtype: str, universal: bool = False, **zero: Any) -> Any:
    model = make_net()
    optimizer = torch.optim.AdamW(make_groups(model), **ADAMW)
    precision: dict[str, Any] = {"enabled": True}
    if dtype == "float16":
        precision |= {"initial_scale_power": 8, "loss_scale_window": WINDOW, "hysteresis": SCALE["hysteresis"]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        {"bfloat16": "bf16", "float16": "fp16"}[dtype]: precision,
        "checkpoint": {"load_universal": universal},
        "steps_per_print": 10**9,
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(engine: Any, steps: Iterable[int]) -> None:
    """Every rank has the same batch, so that one process has the same gradients as two."""
    for step in steps:
        engine.backward(engine(tokens(step)))
        engine.step()


def content(engine: Any) -> dict[str, Any]:
    """Masters and moments in full, put together from what the ranks have in memory, and what goes with them."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    full = _full_of_stage_3 if engine.zero_optimization_stage() == 3 else _full_of_stages_1_and_2
    state = {names[parameter]: entries for parameter, entries in full(engine.optimizer)}
    groups = [{k: v for k, v in g.items() if k not in ("params", "step")} for g in engine.optimizer.param_groups]
    steps = sorted({int(entries["step"]) for entries in engine.optimizer.optimizer.state.values()})
    scaler = vars(engine.optimizer.loss_scaler)
    return {
        "state": state,
        "groups": groups,
        "steps": steps,
        "scale": scaler["cur_scale"],
        "grown_in": _growth(engine.optimizer.loss_scaler),
        "scheduler": engine.lr_scheduler.state_dict(),
        "global_steps": engine.global_steps,
    }


def _full_of_stages_1_and_2(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            entries = {}
            for key, partition in sorted({"master": flat.detach(), **optimizer.optimizer.state[flat]}.items()):
                if partition.dim():
                    entries[key] = torch.zeros(parameter.numel())
                    if (mapping := parameter._hp_mapping) is not None:
                        own, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                        part = partition.narrow(0, there.start, there.numel)
                        entries[key].narrow(0, own.start, own.numel).copy_(part)
                    dist.all_reduce(entries[key])
                    entries[key] = entries[key].view(parameter.shape)
            yield parameter, entries


def _full_of_stage_3(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    for parameter in (p for group in optimizer.fp16_groups for p in group):
        entries = {"master": safe_get_full_fp32_param(parameter).clone()}
        for key in ("exp_avg", "exp_avg_sq"):
            entries[key] = safe_get_full_optimizer_state(parameter, key).clone()
        yield parameter, entries


def _growth(scaler: Any) -> int | None:
    """After how many more good steps the scale grows."""
    scaler, steps = copy.deepcopy(scaler), 0
    before = scaler.cur_scale
    while scaler.dynamic and scaler.cur_scale == before:
        scaler.update_scale(False)
        steps += 1
    return steps if scaler.dynamic else None


def save_stages(rank: int, world_size: int, folder: str, runs: list[tuple[int, str]]) -> dict[str, Any]:
    """Each run is trained, saved and trained further; what it was at both times."""
    found = {}
    with deepspeed_on_cpu() as deepspeed:
        for stage, dtype in runs:
            engine = make_engine(deepspeed, stage, dtype)
            train(engine, BEFORE)
            engine.save_checkpoint(f"{folder}/{stage}-{dtype}", client_state=CLIENT)
            at = content(engine)
            train(engine, AFTER)
            found[f"{stage}-{dtype}"] = (at, content(engine))
            engine.destroy()
    return found


def resume_universal(
    rank: int, world_size: int, folder: str, stage: int, dtype: str, steps: Iterable[int] = AFTER
) -> tuple[Any, Any, Any]:
    """The client state, the content after loading, and after more steps."""
    with deepspeed_on_cpu() as deepspeed:
        engine = make_engine(deepspeed, stage, dtype, universal=True)
        _, client = engine.load_checkpoint(folder)
        if stage == 3:
            # DeepSpeed gives every group the settings of the first, and all of them one step count together.
            for group, saved in zip(engine.optimizer.param_groups, client["lightstep"]["param_groups"], strict=True):
                group.update(saved)
            for entries in engine.optimizer.optimizer.state.values():
                entries["step"] = entries["step"].clone()
        at = content(engine)
        train(engine, steps)
        after = content(engine)
        engine.destroy()
    return client, at, after


def scale_histories(
    rank: int, world_size: int, histories: list[tuple[dict[str, Any], list[bool]]]
) -> list[list[float]]:
    """The scales that DeepSpeed's scaler goes through, from a state on."""
    found = []
    with deepspeed_on_cpu() as deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        for state, overflows in histories:
            scaler = DynamicLossScaler(1.0, 1, 1.0, 1, False)
            vars(scaler).update(state)
            scales = []
            for overflow in overflows:
                scaler.update_scale(overflow)
                scales.append(float(scaler.cur_scale))
            found.append([scales, vars(scaler)])
    return found
