"""Peers from libraries: FSDP2's `CPUOffloadPolicy`, torchao's `CPUOffloadOptimizer`, DeepSpeed's `CPUAdam`, dion."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from lightstep.bench.contender import (
    ADAMW,
    MUON,
    Contender,
    Skipped,
    clip_coefficient,
    split_matrices,
    total_norm,
)
from lightstep.bench.peers import CpuAdamW, HostSlot, TorchResident, shard
from lightstep.bench.run import Task
from lightstep.distributed import local_tensor, world_size


class _InjectGradients(torch.autograd.Function):
    """Identity whose backward returns given gradients for the parameters: a backward pass without arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None, *ctx.gradients


class InjectionModule(nn.Module):
    """A module over the given parameters; backward gives them `gradients`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for i, parameter in enumerate(parameters):
            self.register_parameter(f"p{i}", parameter)
        self.gradients: Sequence[Tensor] = ()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _InjectGradients.apply(x, self.gradients, *self.parameters())
        return out


class Fsdp2Offload(Contender):
    """FSDP2 with `CPUOffloadPolicy`: fp32 shards on the CPU, `clip_grad_norm_` and fused AdamW there.

    FSDP moves weights and gradients in forward and backward, so a single step includes both passes, without their
    arithmetic.
    """

    name = "fsdp2-offload"
    about = "fully_shard(CPUOffloadPolicy), fp32 shards, bf16 compute, fused CPU AdamW; includes FSDP's own gathers"
    needs_group = True

    def __init__(self, task: Task) -> None:
        self.model = model = task.model_for_peers(torch.float32)
        self._shard(task, list(model.layers), reshard_after_forward=True)

    def _shard(self, task: Task, units: Sequence[nn.Module], reshard_after_forward: bool) -> None:
        """`fully_shard` on the units and the model, with fp32 shards on the CPU and bf16 compute on the device."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=task.device.type == "cuda")
        settings: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, "offload_policy": offload}
        shard(self.model, units, task.device, policy, **settings)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)

    def step(self, gradients: Sequence[Tensor]) -> None:
        raise NotImplementedError("takes its gradients from backward only")

    def update(self) -> None:
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def device_weights(self) -> list[Tensor]:
        return []

    def host_tensors(self) -> list[Tensor]:
        state = [entry for entries in self._optimizer.state.values() for entry in entries.values()]
        return [local_tensor(tensor.detach()) for tensor in [*self.model.parameters(), *state]]


class Fsdp2OffloadStep(Fsdp2Offload):
    """`Fsdp2Offload` for single steps."""

    def __init__(self, task: Task) -> None:
        model = task.model(torch.float32)
        parameters, layers = list(model.parameters()), model.layer_indices()
        self._shapes = [torch.empty_like(parameter, device="meta") for parameter in parameters]
        self._order = [i for layer in layers for i in layer]
        self._units = [InjectionModule([parameters[i] for i in layer]) for layer in layers]
        self.model = nn.Sequential(*self._units).to("cpu")
        self._shard(task, self._units, reshard_after_forward=False)  # weights are copied once
        self._input = torch.zeros(1, device=task.device, requires_grad=True)

    def step(self, gradients: Sequence[Tensor]) -> None:
        ordered = iter([gradients[i] for i in self._order])
        for unit in self._units:
            unit.gradients = [next(ordered) for _ in unit.parameters()]
        self.model(self._input).sum().backward()
        self.update()

    def weights(self) -> list[Tensor]:
        shards = dict(zip(self._order, super().weights(), strict=True))
        return [shards[i] for i in sorted(shards)]

    def gradient_weights(self) -> list[Tensor]:
        return self._shapes


class TorchaoOffload(Contender):
    """torchao's `CPUOffloadOptimizer` on fp32 weights: hooks copy gradients to the CPU, AdamW runs there.

    The hooks copy gradients before the global norm is known, so gradients are clipped before backward.
    """

    name = "torchao"
    about = "torchao CPUOffloadOptimizer(AdamW), fp32 weights and gradients on the device, clipped before its hooks run"
    gradient_dtype = torch.float32

    def __init__(self, task: Task) -> None:
        module = _installed("torchao.optim")
        if task.device.type != "cuda":
            raise Skipped("needs a GPU")
        self._module = InjectionModule(list(task.model(torch.float32).parameters()))
        self._weights = [parameter.detach().bfloat16() for parameter in self._module.parameters()]
        parameters = list(self._module.parameters())
        self._optimizer = module.CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True, **ADAMW)
        self._input = torch.zeros(1, device=task.device, requires_grad=True)

    def step(self, gradients: Sequence[Tensor]) -> None:
        torch._foreach_mul_(list(gradients), clip_coefficient(total_norm(gradients), self.max_norm))
        self._module.gradients = gradients
        self._module(self._input).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_(self._weights, [parameter.detach() for parameter in self._module.parameters()])

    def weights(self) -> list[Tensor]:
        return self._weights

    def device_weights(self) -> list[Tensor]:
        return [*self._weights, *(parameter.detach() for parameter in self._module.parameters())]

    def host_tensors(self) -> list[Tensor]:
        hosts = list(self._optimizer.param_d2h_map.values())
        states = [t for o in self._optimizer.optim_dict.values() for s in o.state.values() for t in s.values()]
        return [*hosts, *(host.grad for host in hosts), *states]


class DeepSpeedCpuAdam(CpuAdamW):
    """`CpuAdamW` with DeepSpeed's kernel, which takes no scale, so clipping is a pass over the staged gradient."""

    name = "deepspeed"
    about = "DeepSpeed CPUAdam with the transfers of cpu-adamw"

    def __init__(self, task: Task) -> None:
        self._library = _installed("deepspeed.ops.adam")
        self._optimizer: torch.optim.Optimizer | None = None
        self._groups: dict[Tensor, dict[str, Any]] = {}
        super().__init__(task)

    def make_optimizer(self, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """One optimizer, with a group per call: making one takes a second, because it examines the CPU.

        Raises:
            Skipped: the kernel, which DeepSpeed compiles on first use, cannot be built.
        """
        if self._optimizer is not None:
            self._optimizer.add_param_group({"params": masters})
        else:
            try:
                self._optimizer = self._library.DeepSpeedCPUAdam(masters, adamw_mode=True, **ADAMW)
            except RuntimeError as error:
                raise Skipped(f"its kernel cannot be built here ({error})") from error
        self._groups.update((master, self._optimizer.param_groups[-1]) for master in masters)
        return self._optimizer

    def apply(self, slot: HostSlot) -> None:
        assert slot.master.grad is not None
        slot.master.grad.mul_(self._coefficient)
        slot.optimizer.param_groups = [self._groups[slot.master]]
        slot.optimizer.step()


class Dion(TorchResident):
    """dion's `Muon` on fp32 masters of bf16 weights; on several ranks on FSDP2's shards.

    Each matrix is orthogonalized once, with dion's default: five compiled steps of Polar Express. torch's Muon has
    other coefficients, so the weights differ slightly.
    """

    name = "dion"
    about = "dion's Muon and AdamW on fp32 masters (in FSDP2's shards on several ranks), clip_grad_norm_, copy"
    optimizers = ("muon",)
    implementation: ClassVar[dict[str, Any]] = {}

    def make_model(self, task: Task) -> nn.Module:
        self._library = _installed("dion")
        if self.implementation.get("use_triton") and task.device.type != "cuda":
            raise Skipped("needs a GPU")
        self._mesh = None
        model: Any = super().make_model(task)
        if world_size() > 1:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            self._mesh = shard(model, model.layers, task.device, policy)
        whole: nn.Module = model
        return whole

    def make_optimizers(self, name: str) -> list[torch.optim.Optimizer]:
        matrices, rest = split_matrices(self.model, self._masters)
        beta1, beta2 = ADAMW["betas"]
        adamw = {"lr": ADAMW["lr"], "beta1": beta1, "beta2": beta2, "epsilon": ADAMW["eps"]}
        groups = [
            {"params": matrices},
            {"params": rest, "algorithm": "adamw", "weight_decay": ADAMW["weight_decay"], **adamw},
        ]
        muon = {"lr": MUON["lr"], "mu": 0.95, "weight_decay": MUON["weight_decay"]}
        muon |= {"nesterov": True, "adjust_lr": "rms_norm"}  # as torch's default and its match_rms_adamw
        return [self._library.Muon(groups, distributed_mesh=self._mesh, **muon, **self.implementation)]


class DionTriton(Dion):
    """`Dion` with its Triton kernels, which compute half of each symmetric product."""

    name = "dion-triton"
    about = "the same with use_triton=True: half of each symmetric product"
    implementation: ClassVar[dict[str, Any]] = {"use_triton": True}


def _installed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
    raise Skipped("not installed")
