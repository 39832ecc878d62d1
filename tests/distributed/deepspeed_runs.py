"""The run of ``tests/reference/converted_run.py`` under DeepSpeed itself, on the ranks of the pool."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightstep import Strategy
from lightstep.deepspeed.optimizer import EngineLossScale
from tests.reference.converted_run import ADAMW, AFTER, BEFORE, SCALE, make_groups, make_net, tokens

CLIENT = {"epoch": 3, "order": [1, 2]}

WINDOW = 8
"""Longer than the runs: in a step in which its scale grows, DeepSpeed divides the gradients by the grown scale."""


def number_anew() -> None:
    """Stage 3 numbers modules in a process and compares the numbers over ranks, which have run other checks before."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    allow_fp16()
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)


def allow_fp16() -> None:
    """Have DeepSpeed train in fp16 on a CPU without fast instructions for it: torch computes in it, with the same bits.

    Such a CPU reports bf16 alone, and the cases of fp16 would have to run in that.
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True


@contextlib.contextmanager
def deepspeed_on_cpu() -> Iterator[Any]:
    """DeepSpeed with nothing to compile, and without its memory of groups and modules that are gone."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.comm.comm
    import deepspeed.ops
    import deepspeed.utils.groups

    deepspeed.ops.__compatible_ops__.clear()
    number_anew()
    _forget_groups(deepspeed)  # those of an earlier check in this process, too
    try:
        yield deepspeed
    finally:
        _forget_groups(deepspeed)


def _forget_groups(deepspeed: Any) -> None:
    importlib.reload(deepspeed.utils.groups)
    deepspeed.comm.comm.cdb = None


def make_engine(deepspeed: Any, stage: int, dtype: str, zero: Any = None, accumulate: str | None = None) -> Any:
    model = make_net()
    optimizer = torch.optim.AdamW(make_groups(model), **ADAMW)
    precision: dict[str, Any] = {"enabled": dtype != "float32"}
    if dtype == "float16":
        precision |= {"initial_scale_power": 8, "loss_scale_window": WINDOW, "hysteresis": SCALE["hysteresis"]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "fp16" if dtype == "float16" else "bf16": precision,
        "data_types": {"grad_accum_dtype": accumulate},
        "steps_per_print": 10**9,
    }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def train(engine: Any, steps: Iterable[int]) -> None:
    """Every rank has the same batch, so that one process has the same gradients as two."""
    for step in steps:
        engine.backward(engine(tokens(step)))
        engine.step()


def content(engine: Any, scheduler: Any = None) -> dict[str, Any]:
    """Masters and moments in full, put together from what the ranks have in memory, and what goes with them."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    full = _full_of_stage_3 if engine.zero_optimization_stage() == 3 else _full_of_stages_1_and_2
    if engine.zero_round_robin_gradients():
        full = _full_of_shuffled
    state = {names[parameter]: entries for parameter, entries in full(engine.optimizer)}
    groups = [{k: v for k, v in g.items() if k not in ("params", "step")} for g in engine.optimizer.param_groups]
    steps = sorted({int(entries["step"]) for entries in engine.optimizer.optimizer.state.values() if entries})
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "state": state,
        "groups": groups,
        "steps": steps,
        "scale": None if scaler is None else scaler.cur_scale,
        "grown_in": None if scaler is None else _growth(scaler),
        "scheduler": (scheduler or engine.lr_scheduler).state_dict(),
        "global_steps": engine.global_steps,
    }


def _full_of_stages_1_and_2(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    bf16 = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for group, flat in zip(groups, flats, strict=True):
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


def _full_of_shuffled(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The parameters' own mapping is of the order before the shuffling; the flat one is of the order after it."""
    flats = optimizer.single_partition_of_fp32_groups
    for group, flat in zip(optimizer.round_robin_bit16_groups, flats, strict=True):
        whole = {}
        for key, partition in sorted({"master": flat.detach(), **optimizer.optimizer.state[flat]}.items()):
            if partition.dim():
                parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, partition)
                whole[key] = torch.cat(parts)
        start = 0
        for parameter in group:
            own = {key: values[start : start + parameter.numel()] for key, values in whole.items()}
            yield parameter, {key: values.view(parameter.shape).clone() for key, values in own.items()}
            start += parameter.numel()


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


def save_stages(rank: int, world_size: int, folder: str, runs: dict[str, tuple[int, str]]) -> dict[str, Any]:
    """Each run (stage, dtype) is trained, saved and trained further; what it was at both times."""
    found = {}
    with deepspeed_on_cpu() as deepspeed:
        for name, (stage, dtype) in runs.items():
            engine = make_engine(deepspeed, stage, dtype)
            train(engine, BEFORE)
            engine.save_checkpoint(f"{folder}/{name}", client_state=CLIENT)
            at = content(engine)
            train(engine, AFTER)
            found[name] = (at, content(engine))
            engine.destroy()
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "aligned": {"stage": 2, "dtype": "bfloat16", "zero": {"parameter_alignment": True}},
    "shuffled": {"stage": 2, "dtype": "bfloat16", "zero": {"round_robin_gradients": True}},
    "sub-groups": {
        "stage": 3,
        "dtype": "bfloat16",
        "zero": {"sub_group_size": 20, "stage3_param_persistence_threshold": 10**5},
    },
    "offloaded": {"stage": 2, "dtype": "bfloat16", "zero": {"offload_optimizer": {"device": "cpu"}}},
    "fp32": {"stage": 1, "dtype": "float32"},
    "bf16 optimizer": {"stage": 1, "dtype": "bfloat16", "accumulate": "fp32"},
}


def save_variants(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Layouts that settings of DeepSpeed lead to, and the content of each."""
    found = {}
    with deepspeed_on_cpu() as deepspeed:
        for name, settings in VARIANTS.items():
            engine = make_engine(deepspeed, **settings)
            train(engine, BEFORE)
            engine.save_checkpoint(f"{folder}/{name}")
            found[name] = content(engine)
            engine.destroy()
    return found


def scale_histories(
    rank: int, world_size: int, histories: list[tuple[dict[str, Any], list[bool]]]
) -> list[list[float]]:
    """The scales that DeepSpeed's scaler goes through, from a state of it or of ours on, and its state at the end."""
    found = []
    with deepspeed_on_cpu() as deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        for state, overflows in histories:
            scaler = DynamicLossScaler(1.0, 1, 1.0, 1, False)
            vars(scaler).update({key: value for key, value in state.items() if hasattr(scaler, key)})
            EngineLossScale(types.SimpleNamespace(loss_scaler=scaler, override_loss_scale=float)).load_state_dict(state)
            scales = []
            for overflow in overflows:
                scaler.update_scale(overflow)
                scales.append(float(scaler.cur_scale))
            found.append([scales, vars(scaler)])
    return found


def under_strategy(
    rank: int,
    world_size: int,
    stage: int,
    steps: Iterable[int],
    dtype: str = "bfloat16",
    offload: str = "none",
    save: str | None = None,
    load: str | None = None,
    before: Iterable[int] = (),
) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The run under our own DeepSpeed strategy: ``extra``, the content before and after ``steps``, and the weights.

    Args:
        before: steps before the load.
    """

    def train_for(wanted: Iterable[int]) -> None:
        for step in wanted:
            with strategy.accumulate(model):
                optimizer.backward(model(tokens(step)))
            if optimizer.step():
                scheduler.step()

    with deepspeed_on_cpu() as deepspeed:
        scale = {**SCALE, "growth_interval": WINDOW} if dtype == "float16" else "none"
        strategy = Strategy.load(
            {
                "sharding": {
                    "kind": "deepspeed",
                    "stage": stage,
                    "offload": offload,
                    "config": {"zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 20}},
                },
                "precision": {"parameters": dtype, "loss_scale": scale},
                "clipping": {"max_norm": None},
            }
        )
        model = strategy.prepare_model(make_net())
        optimizer = strategy.create_optimizer(model, param_groups=make_groups(model), **ADAMW)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        train_for(before)
        extra = None if load is None else strategy.load_checkpoint(load, model, optimizer, scheduler)
        at = None if load is None else content(optimizer.engine, scheduler)
        train_for(steps)
        if save is not None:
            strategy.save_checkpoint(save, model, optimizer, scheduler, {"epoch": 3})
        optimizer.prepare_for_checkpoint()  # gives the engine the rates that the scheduler has set
        after = content(optimizer.engine, scheduler)
        tensors = dict(strategy.unwrap_model(model).state_dict(keep_vars=True))
        parameters = [tensor for tensor in tensors.values() if isinstance(tensor, torch.nn.Parameter)]
        with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
            weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        strategy.close()
    return extra, at, after, weights
