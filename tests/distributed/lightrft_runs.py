"""Checkpoints as LightRFT's FSDP strategy writes them, on the ranks of the pool."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.reference.converted_run import ADAMW, BEFORE, make_groups, make_net, tokens


def save(rank: int, world_size: int, folder: str, frozen: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """Train on fp32 masters of FSDP2 shards and save: DCP weights, one file of the optimizer per rank.

    Returns:
        Weights, state and groups in full; names of each group.
    """
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    model = make_net(frozen)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(make_groups(model), **ADAMW)
    shards: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
    masters = {number: [shard.data.float() for shard in group] for number, group in enumerate(shards)}
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = masters[number]
    pairs = [
        (shard, master)
        for number, group in enumerate(shards)
        for shard, master in zip(group, masters[number], strict=True)
    ]
    for step in BEFORE:
        model(tokens(step)).backward()
        for shard, master in pairs:
            master.grad = None if shard.grad is None else shard.grad.float()
            shard.grad = None
        optimizer.step()
        for shard, master in pairs:
            shard.data.copy_(master)
            master.grad = None
    _write(Path(folder), model, optimizer, masters, rank)
    names = {id(shard): name for name, shard in model.named_parameters()}
    state = {}
    for shard, master in pairs:
        moments = {key: value.full_tensor() if value.dim() else value for key, value in optimizer.state[master].items()}
        state[names[id(shard)]] = {**moments, "master": master.full_tensor()}
    weights = {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in model.state_dict().items()}
    called = [[names[id(shard)] for shard in group] for group in shards]
    groups = [
        {**group, "params": own, "initial_lr": group["lr"]}
        for group, own in zip(optimizer.param_groups, called, strict=True)
    ]
    return {"state": state, "model": weights, "groups": groups}, called


def save_copies(rank: int, world_size: int, folder: str) -> None:
    """One step of layers that are all alike, of which every rank has a whole copy."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard")))
    masters = {0: [parameter.data.clone() for parameter in model.parameters()]}
    optimizer = torch.optim.AdamW(masters[0])
    for number, master in enumerate(masters[0]):
        master.grad = torch.full_like(master, number)
    optimizer.step()
    _write(Path(folder), model, optimizer, masters, rank)


def save_groups(rank: int, world_size: int, folder: str) -> None:
    """``dcp.save`` of a flattened optimizer state, whose settings it divides among the ranks."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    fully_shard(model)
    groups = [{"params": [layer.weight for layer in model], "lr": 0.1}, {"params": [layer.bias for layer in model]}]
    optimizer = torch.optim.AdamW(groups)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def _write(folder: Path, model: Any, optimizer: Any, masters: dict[int, list[Any]], rank: int) -> None:
    (folder / "optim_states").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    scaler = {"_scale": 1.0, "_growth_step": 3, "_hysteresis_step": 0}
    content = {"grad_scaler": scaler, "base_optim_states": optimizer.state_dict(), "flat_fp32_weights": masters}
    torch.save(content, folder / "optim_states" / f"_rank{rank}")
    if rank == 0:
        torch.save({"epoch": 3}, folder / "client_state.pt")
