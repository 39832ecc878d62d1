"""What strategies are compared with: loops by hand with torch alone, and the offloading optimizers of libraries.

By hand: state on the GPU, whole, sharded or streamed by layers; AdamW on the CPU. Libraries: FSDP2's
`CPUOffloadPolicy`, torchao's `CPUOffloadOptimizer`, DeepSpeed's `CPUAdam`, dion.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightstep.bench.run import (
    ADAMW,
    MUON,
    OPTIMIZERS,
    Contender,
    Skipped,
    Task,
    clip_coefficient,
    hidden_matrices,
    split_matrices,
    torch_optimizers,
    total_norm,
)
from lightstep.distributed import like, local_tensor, world_size


class TorchResident(Contender):
    """The usual loop: fp32 masters, `clip_grad_norm_`, AdamW (and Muon), copy to the bf16 weights."""

    name = "torch"
    about = "by hand: bf16 gradients cast to fp32, clip_grad_norm_, AdamW(fused=True), copy; all state on the device"
    optimizers = tuple(OPTIMIZERS)
    implementation: ClassVar[dict[str, Any]] = {"fused": True}

    def __init__(self, task: Task) -> None:
        self.model = self.make_model(task)
        parameters = [parameter.detach() for parameter in self.model.parameters() if parameter.requires_grad]
        self._weights = [local_tensor(parameter) for parameter in parameters]
        self._masters = [nn.Parameter(parameter.float()) for parameter in parameters]
        self._optimizers = self.make_optimizers(task.optimizer)

    def make_model(self, task: Task) -> nn.Module:
        return task.model_for_peers()

    def make_optimizers(self, name: str) -> list[torch.optim.Optimizer]:
        return torch_optimizers(name, self.model, self._masters, **self.implementation)

    def step(self, gradients: Sequence[Tensor]) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = like(master, local_tensor(gradient).float())
        self.grad_norm = nn.utils.clip_grad_norm_(self._masters, self.max_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, [local_tensor(master.detach()) for master in self._masters])


class TorchForeach(TorchResident):
    """`TorchResident` with torch's default implementation of AdamW on a GPU."""

    name = "torch-foreach"
    about = "by hand: gradients cast to fp32, clip_grad_norm_, AdamW(foreach=True), copy; all state on the device"
    implementation: ClassVar[dict[str, Any]] = {"foreach": True}


class TorchEmptyHooks(TorchForeach):
    """`TorchForeach` with a hook on each parameter that does nothing: what a call of Python costs in backward."""

    name = "torch-empty-hooks"
    about = "the same loop with a hook on each parameter that does nothing"

    def make_model(self, task: Task) -> nn.Module:
        model = super().make_model(task)
        for parameter in model.parameters():
            parameter.register_hook(_do_nothing)
        return model


def _do_nothing(gradient: Tensor) -> None: ...


class TorchResidentFloatGradients(TorchResident):
    """`TorchResident` with fp32 gradients, for which `float()` copies nothing."""

    name = "torch-fp32-grads"
    about = "the same loop given fp32 gradients"
    gradient_dtype = torch.float32


def shard(
    model: nn.Module, units: Iterable[nn.Module], device: torch.device, policy: MixedPrecisionPolicy, **settings: Any
) -> DeviceMesh:
    """`fully_shard` on the units, then on the model, over all ranks. Returns the mesh."""
    mesh = init_device_mesh(device.type, (world_size(),))
    for module in (*units, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **settings)
    return mesh


class TorchFsdp2(Contender):
    """The usual FSDP2 loop: fp32 shards, `clip_grad_norm_`, `AdamW(fused=True)`.

    torch's Muon needs whole matrices, so every rank gathers the gradient of every matrix and updates all of it.
    """

    name = "torch-fsdp2"
    about = "by hand: fully_shard, fp32 shards and state on the device, clip_grad_norm_, AdamW(fused=True)"
    gradient_dtype = torch.float32
    optimizers = tuple(OPTIMIZERS)

    def __init__(self, task: Task) -> None:
        if world_size() == 1:
            raise Skipped("needs several ranks; start the bench with torchrun")
        self.model = stack = task.model_for_peers(torch.float32)
        hidden = hidden_matrices(stack) if task.optimizer == "muon" else [False] * len(list(stack.parameters()))
        wholes = [p.detach().clone() if inside else None for p, inside in zip(stack.parameters(), hidden, strict=True)]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(stack, stack.layers, task.device, policy)
        self._shards = list(stack.parameters())
        self._wholes = [(s, nn.Parameter(w)) for s, w in zip(self._shards, wholes, strict=True) if w is not None]
        matrices = iter([whole for _, whole in self._wholes])
        updated = [next(matrices) if inside else s for s, inside in zip(self._shards, hidden, strict=True)]
        self._optimizers = torch_optimizers(task.optimizer, stack, updated, fused=True)

    def placed(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return list(map(like, self._shards, gradients))

    def step(self, gradients: Sequence[Tensor]) -> None:
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.grad = gradient
        self.update()

    def update(self) -> None:
        self.grad_norm = nn.utils.clip_grad_norm_(self._shards, self.max_norm)
        for shard, whole in self._wholes:
            assert isinstance(shard.grad, DTensor)
            whole.grad, shard.grad = shard.grad.full_tensor(), None
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for shard, whole in self._wholes:
            assert isinstance(shard, DTensor)
            own = distribute_tensor(whole.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
            shard.to_local().detach().copy_(own.to_local())


def pinned_like(tensor: Tensor) -> Tensor:
    """A zeroed host tensor of the same shape and dtype, pinned by torch if `tensor` is on a GPU."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@dataclass(eq=False)
class HostSlot:
    """Host buffers of one parameter."""

    gradient: Tensor  # bf16, page-locked
    weight: Tensor  # bf16, page-locked
    master: nn.Parameter  # fp32
    optimizer: torch.optim.Optimizer


class CpuAdamW(Contender):
    """Copies gradients to page-locked memory, runs fused AdamW there per tensor as it arrives, copies weights back."""

    name = "cpu-adamw"
    about = "torch's fused CPU AdamW, gradients and weights sent per tensor from page-locked memory, overlapped"

    def __init__(self, task: Task) -> None:
        self.model = task.model_for_peers()
        self._weights = [parameter.detach() for parameter in self.model.parameters()]
        self._torch: Any = torch.get_device_module(task.device)  # on a CPU its streams do nothing
        self._to_host, self._to_device = self._torch.Stream(), self._torch.Stream()
        self._slots = [self._slot(weight) for weight in self._weights]
        self._scratch = torch.empty(max(weight.numel() for weight in self._weights))
        self._coefficient = pinned_like(torch.empty((), device=task.device))

    def _slot(self, weight: Tensor) -> HostSlot:
        master = nn.Parameter(weight.cpu().float())
        return HostSlot(pinned_like(weight), pinned_like(weight), master, self.make_optimizer([master]))

    def make_optimizer(self, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step(self, gradients: Sequence[Tensor]) -> None:
        self._coefficient.copy_(clip_coefficient(total_norm(gradients), self.max_norm), non_blocking=True)
        self._to_host.wait_stream(self._torch.current_stream())
        arrivals = [self._fetch(slot, gradient) for slot, gradient in zip(self._slots, gradients, strict=True)]
        for slot, weight, arrival in zip(self._slots, self._weights, arrivals, strict=True):
            arrival.synchronize()
            self._update(slot)
            with self._torch.stream(self._to_device):
                weight.copy_(slot.weight, non_blocking=True)
        self._torch.current_stream().wait_stream(self._to_device)

    def _fetch(self, slot: HostSlot, gradient: Tensor) -> Any:
        """Start copying a gradient to the host; returns the event of its arrival."""
        arrival = self._torch.Event()
        with self._torch.stream(self._to_host):
            slot.gradient.copy_(gradient, non_blocking=True)
            arrival.record()
        return arrival

    @torch.no_grad()
    def _update(self, slot: HostSlot) -> None:
        # Fused AdamW refuses a bf16 gradient for an fp32 parameter; one fp32 scratch buffer serves all tensors.
        slot.master.grad = self._scratch[: slot.master.numel()].view_as(slot.master).copy_(slot.gradient)
        self.apply(slot)
        slot.master.grad = None
        slot.weight.copy_(slot.master)

    def apply(self, slot: HostSlot) -> None:
        # The fused kernel divides by `grad_scale`, so clipping needs no extra pass.
        slot.optimizer.grad_scale = 1.0 / self._coefficient  # type: ignore[attr-defined]
        slot.optimizer.step()

    def host_tensors(self) -> list[Tensor]:
        entries = [value for slot in self._slots for value in slot.optimizer.state[slot.master].values()]
        state = [value for value in entries if torch.is_tensor(value)]
        slots = [t for slot in self._slots for t in (slot.gradient, slot.weight, slot.master.detach())]
        return [*slots, *state, self._scratch]


_PREFETCHED_LAYERS = 1


class LayerStream(Contender):
    """Streams Adam's moments layer by layer, after the publicly known design of verl's pull request 5364.

    What that design does, and this does: fp32 weights and fp32 gradients stay on the GPU; each parameter's two moments
    live in a pinned host tensor of their own; three streams (host to device, compute, device to host) are ordered by
    one event per layer and lane; one layer is prefetched ahead; device copies are allocated as they are needed and
    handed to the allocator with `record_stream`; the step ends by waiting for the last copy. What is left out, in its
    favour: the per-parameter step counters stay on the device (sending them costs a host sync per parameter), the
    update is torch's fused kernel instead of `foreach`, and `empty_cache()` is not called after each step.
    """

    name = "layer-stream"
    about = "per-layer m/v streamer, pinned copies per tensor, fp32 weights and gradients (verl pull request 5364)"
    gradient_dtype = torch.float32

    def __init__(self, task: Task) -> None:
        model = task.model(torch.float32)
        self._layers = model.layer_indices()
        self._masters = list(model.parameters())
        self._weights = [master.detach().bfloat16() for master in self._masters]
        self._steps = [torch.zeros((), device=task.device) for _ in self._masters]
        # By layer: the first moments of its parameters, then the second ones.
        self._host = [[pinned_like(self._masters[i]) for i in (*layer, *layer)] for layer in self._layers]
        self._torch: Any = torch.get_device_module(task.device)  # on a CPU its streams do nothing
        self._to_device, self._to_host = self._torch.Stream(), self._torch.Stream()
        self._device = task.device

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._masters, self.max_norm)
        staged = {i: self._prefetch(i) for i in range(min(_PREFETCHED_LAYERS + 1, len(self._layers)))}
        for index in range(len(self._layers)):
            moments, arrived = staged.pop(index)
            arrived.wait()
            self._update(index, moments)
            ahead = index + _PREFETCHED_LAYERS + 1
            if ahead < len(self._layers):
                staged[ahead] = self._prefetch(ahead)
            self._offload(index, moments)
        last = self._torch.Event()
        last.record(self._to_host)
        last.synchronize()
        torch._foreach_copy_(self._weights, [master.detach() for master in self._masters])
        for master in self._masters:
            master.grad = None

    def _prefetch(self, index: int) -> tuple[list[Tensor], Any]:
        """A layer's moments on their way to the device, and the event of their arrival."""
        arrived = self._torch.Event()
        with self._torch.stream(self._to_device):
            moments = [
                torch.empty_like(host, device=self._device).copy_(host, non_blocking=True) for host in self._host[index]
            ]
            arrived.record()
        return moments, arrived

    def _update(self, index: int, moments: list[Tensor]) -> None:
        layer = self._layers[index]
        masters = [self._masters[i] for i in layer]
        steps = [self._steps[i] for i in layer]
        torch._foreach_add_(steps, 1)
        beta1, beta2 = ADAMW["betas"]
        torch._fused_adamw_(
            [master.detach() for master in masters],
            [master.grad for master in masters if master.grad is not None],
            moments[: len(layer)],
            moments[len(layer) :],
            [],
            steps,
            lr=ADAMW["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=ADAMW["weight_decay"],
            eps=ADAMW["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _offload(self, index: int, moments: list[Tensor]) -> None:
        now = self._torch.current_stream()
        self._to_host.wait_stream(now)
        with self._torch.stream(self._to_host):
            for host, moment in zip(self._host[index], moments, strict=True):
                host.copy_(moment, non_blocking=True)
        for moment in moments if self._device.type == "cuda" else ():
            moment.record_stream(self._to_host)
            moment.record_stream(now)

    def weights(self) -> list[Tensor]:
        return self._weights

    def device_weights(self) -> list[Tensor]:
        return [*self._weights, *(master.detach() for master in self._masters)]

    def host_tensors(self) -> list[Tensor]:
        return [moment for layer in self._host for moment in layer]


# -- libraries ---------------------------------------------------------------------------------------------------------


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
        return _InjectGradients.apply(x, self.gradients, *self.parameters())


class Fsdp2Offload(Contender):
    """FSDP2 with `CPUOffloadPolicy`: fp32 shards on the CPU, `clip_grad_norm_` and fused AdamW there.

    FSDP moves weights and gradients in forward and backward, so a single step includes both passes, without their
    arithmetic.
    """

    name = "torch-offload"
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
        return model

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
