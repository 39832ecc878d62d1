"""torchtitan's container over sharded parts and over pipeline stages: one norm, one decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightstep import Rule, Strategy
from lightstep.distributed import local_tensor
from lightstep.integrations.torchtitan import OptimizersContainer
from lightstep.sharding.prepared_model import PreparedModel
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.training import slow_lanes
from tests.reference.pair import same_tree
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.tiny_model import representable
from tests.unit.test_torchtitan import PARTS, WIDTH, Stage, loss_of, parameters_of, stages


def whole(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


@on_ranks(None, "ranks", [2, 4])
def test_pipeline_stages_have_one_norm(rank: int, world_size: int) -> None:
    """Two stages, on one rank each or in shards on two: the whole model's loop, stage by stage."""
    device = device_of(rank, world_size)
    number = rank * 2 // world_size
    (part,) = stages(PARTS[number])
    expected = nn.ModuleList(stages(*PARTS)).to(device, torch.bfloat16)
    part = part.to(device, torch.bfloat16)
    if world_size > 2:
        mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("pp", "dp"))
        fully_shard(part, mesh=mesh["dp"])
    strategy = Strategy.load({"clipping": {"max_norm": 0.1}})
    container = OptimizersContainer(strategy, [part], lr=1e-2)
    reference = ReferenceLoop([{"params": list(expected.parameters())}], torch.optim.AdamW, max_norm=0.1, lr=1e-2)
    for step in range(4):
        reference.backward(loss_of(list(expected), step, 0))
        if step == 1:
            reference.sums[expected[1].layers["3"].up.bias].fill_(math.inf)  # known to the second stage only
        for mine, theirs in zip(part.parameters(), expected[number].parameters(), strict=True):
            gradient = reference.sums[theirs].bfloat16()
            if world_size > 2:
                gradient = shard_like(mine, gradient)
            mine.grad = gradient
        result = container.step()
        norms = [torch.zeros((), device=device) for _ in range(world_size)]
        dist.all_gather(norms, result.grad_norm)
        assert result.applied == (step != 1)
        assert all(torch.equal(norm, norms[0]) for norm in norms) or step == 1
        assert reference.step(result.grad_norm, same_bits=False) == result.applied
    assert reference.clipped_steps == 3
    same_tree("weights", whole(list(part.parameters())), list(expected[number].parameters()))


def shard_like(parameter: Any, gradient: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements)


@on_ranks(3)
def test_plain_copies_of_a_stage_are_refused(rank: int) -> None:
    parts = stages(PARTS[0] if rank < 2 else PARTS[1])
    with pytest.raises(ValueError, match=r"layers\.0\..* is on ranks \[0, 1\] and on no others"):
        OptimizersContainer(Strategy.load({"clipping": {"max_norm": 0.1}}), [parts[0].bfloat16()], lr=1e-2)


@on_ranks(2)
def test_parts_that_the_strategy_shards(rank: int) -> None:
    """Parts that the strategy shards: fp32 gradients of 16-bit shards reach the one optimizer."""
    values = {"sharding": {"kind": "fsdp2"}, "clipping": {"max_norm": 0.1}}
    one = Strategy.load(values)
    model = one.prepare_model(Stage(range(4)).bfloat16())
    (source,) = stages([0, 1, 2, 3])
    representable(source)
    parts = [one.prepare_model(representable(part)) for part in stages(*PARTS)]
    container = OptimizersContainer(one, parts, lr=1e-2)
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        mine.detach().copy_(shard_like(mine, theirs.detach().bfloat16()))
    optimizer = one.create_optimizer(model, lr=1e-2)
    for step in range(3):
        for micro in range(2):
            for several, optimizers, module in ((parts, container, container.model), ([model], optimizer, model)):
                with one.accumulate(module, last=micro == 1):
                    optimizers.backward(loss_of(several, step, 10 * rank + micro) / 2)
        results = container.step(), optimizer.step()
        assert results[0] and torch.equal(results[0].grad_norm, results[1].grad_norm)
    same_tree("weights", whole(parameters_of(parts)), whole(list(model.parameters())))


@on_ranks(2)
def test_rules_of_pipeline_stages(rank: int) -> None:
    """Each rank may have nothing of a rule; one that nobody has anything of is refused by all."""
    (part,) = stages(PARTS[rank])
    strategy = Strategy.load({"precision": {"parameters": "float32"}, "clipping": {"max_norm": None}})
    strategy.prepare_model(part)
    by_stage = [Rule(torch.optim.SGD, names=rf"layers\.[{2 * n}{2 * n + 1}]\.", lr=0.1 + n) for n in range(2)]
    container = OptimizersContainer(strategy, [part], rules=by_stage)
    groups = container.optimizer.param_groups
    assert [bool(group["params"]) for group in groups] == [rank == 0, rank == 1]
    before = [parameter.detach().clone() for parameter in part.parameters()]
    for parameter in part.parameters():
        parameter.grad = torch.ones_like(parameter)
    container.step()
    assert all(torch.equal(p, b - (0.1 + rank)) for p, b in zip(part.parameters(), before, strict=True))
    container.load_state_dict(container.state_dict())
    assert [group["lr"] for group in groups] == [0.1, 1.1]
    with pytest.raises(ValueError, match=r"7' matches none of the 20 parameters"):
        OptimizersContainer(strategy, [part], rules=Rule(torch.optim.SGD, names=["", r"layers\.7"], lr=0.1))
    with pytest.raises(ValueError, match=r"layers\.2\..* is trained, and matches no rule"):
        OptimizersContainer(strategy, [part], rules=by_stage[:1])


# -- weights on the host


class Run:
    """Parts that something else has sharded, trained as by torchtitan's loop, with clipping by the strategy.

    Args:
        time: of updates.
        compute: fp32 shards are cast when they are gathered.
        mesh: of two dimensions: with replicas.
    """

    def __init__(
        self, parts: Sequence[Any], placement: str, time: str, compute: bool = False, mesh: DeviceMesh | None = None
    ) -> None:
        self.parts = parts if compute else [part.bfloat16() for part in parts]
        policy = MixedPrecisionPolicy(torch.bfloat16 if compute else None, torch.float32)
        for part in self.parts:
            for unit in (*part.layers.values(), *part.heads, part):
                fully_shard(unit, mesh=mesh, mp_policy=policy)
        state = {"backend": "stream", "ring_mib": 0.05, "update": time}
        weights = {"placement": "host", "device_mib": 0.002} if placement == "host" else {}
        values: dict[str, Any] = {"optimizer_state": state, "weights": weights, "clipping": {"max_norm": 0.1}}
        values |= {"sharding": {"kind": "single" if mesh is None else "fsdp2"}}  # which shares updates over replicas
        strategy = Strategy.load({**values, "precision": {"parameters": "float32" if compute else "bfloat16"}})
        groups = [{"pattern": "bias", "weight_decay": 0.0}, {"pattern": ""}]
        self.container = OptimizersContainer(strategy, self.parts, lr=1e-2, param_groups=groups)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.container.optimizer, 0.9)
        self.rests = placement == "host"
        resting = {str(local_tensor(parameter).device) for parameter in parameters_of(self.parts)}
        assert not self.rests or resting == {"cpu"}
        assert (PreparedModel.of(self.container.model).weight_visits is not None) is self.rests

    def train(self, steps: range, rank: int) -> list[Any]:
        found = []
        for step in steps:
            self.container.zero_grad()
            found += [self.backward(step, 10 * rank + micro) for micro in range(2)]
            result = self.container.step()
            assert result and result.grad_norm > 0.1
            found.append(float(result.grad_norm))
            self.schedule.step()
            if self.rests and step == steps[0]:
                slow_lanes(self.container.optimizer, step + rank, 3e-4)
        with torch.no_grad():
            found.append(loss_of(self.parts, 9, 0).item())  # torchtitan validates so
        return found

    def backward(self, step: int, micro: int) -> float:
        loss = loss_of(self.parts, step, micro) / 2
        loss.backward()
        return loss.item()

    def weights(self) -> list[Tensor]:
        """This rank's shards."""
        self.container.optimizer.synchronize()
        return [local_tensor(parameter).detach().cpu().clone() for parameter in parameters_of(self.parts)]

    def states(self) -> dict[str, Any]:
        """What torchtitan's checkpoints hold: tensors that it has got once."""
        model = {key: value for part in self.parts for key, value in part.state_dict().items()}
        return {"model": model, "optimizer": self.container, "schedule": self.schedule}


@on_ranks(
    None,
    ("ranks", "layers", "time", "compute", "saved"),
    [
        (2, [[0, 1, 2, 3]], "next_forward", True, "host"),
        (2, PARTS, "at_step", False, "device"),
        (4, [[0, 1, 2, 3]], "overlap", False, "host"),
    ],
)
def test_shards_of_others_that_rest_on_the_host(
    rank: int, world_size: int, layers: Any, time: str, compute: bool, saved: str, tmp_path: Path
) -> None:
    """On four ranks two replicas of two shards. What was ``saved`` on one place goes on at the other one."""
    folder = tmp_path / time
    device, names = device_of(rank, world_size).type, ("replicate", "shard")
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=names) if world_size == 4 else None
    runs = {placement: Run(stages(*layers), placement, time, compute, mesh) for placement in ("device", "host")}
    expected, tested = runs.values()
    assert tested.train(range(2), rank) == expected.train(range(2), rank)
    dcp.save(runs.pop(saved).states(), checkpoint_id=folder)
    later = Run(stages(*layers), *runs, time, compute, mesh)
    dcp.load(later.states(), checkpoint_id=folder)
    wanted = expected.train(range(2, 4), rank)
    for run in (tested, later):
        assert run.train(range(2, 4), rank) == wanted
        same_tree("weights", run.weights(), expected.weights())


@on_ranks(2)
def test_shardings_that_cannot_rest_on_the_host() -> None:
    """Shardings that cannot go to the host. Nothing of them has been moved: they train on the device."""
    on_host = Strategy.load({"weights": {"placement": "host"}})

    def only_one_layer(part: Any) -> None:
        fully_shard(part.layers["0"])

    def by_a_policy(part: Any) -> None:
        fully_shard(part, offload_policy=CPUOffloadPolicy(pin_memory=False))

    for shard, message in (
        (by_a_policy, "CPUOffloadPolicy.*shard without the policy"),
        (only_one_layer, r"layers\.1\.\S+ is in no FSDP module.*call fully_shard on the root, too"),
    ):
        (part,) = stages(range(4))
        shard(part.bfloat16())
        with pytest.raises(ValueError, match=message):
            OptimizersContainer(on_host, [part], lr=1e-2)
        assert PreparedModel.of(part).weight_visits is None
        if shard is by_a_policy:
            container = OptimizersContainer(Strategy.load({}), [part], lr=1e-2)
            container.backward(loss_of([part], 0, 0))
            assert container.step()
    with torch.device("meta"):
        part = Stage(range(2)).bfloat16()
    fully_shard(part)
    with pytest.raises(ValueError, match=r"is on the meta device.*give the model memory and weights first"):
        OptimizersContainer(on_host, [part], lr=1e-2)


@on_ranks(2)
def test_an_optimizer_that_was_made_before(rank: int) -> None:
    """An optimizer that knows the model from before it was sharded, and before its shards went to the host."""
    found = []
    for early in (False, True):
        strategy = Strategy.load({"weights": {"placement": "host"}, "clipping": {"max_norm": 0.1}})
        (part,) = stages(range(4))
        part.bfloat16()
        optimizer = strategy.create_optimizer(part, lr=1e-2) if early else None
        if early:
            with strategy.preparing(part):
                fully_shard(part)
        else:
            fully_shard(part)
            optimizer = strategy.create_optimizer(part, lr=1e-2)
            strategy.place_weights(part)
            strategy.place_weights(part)
        assert optimizer is not None
        for step in range(3):
            optimizer.backward(loss_of([part], step, rank))
            assert float(optimizer.step().grad_norm) > 0.1
        assert {local_tensor(parameter).device.type for parameter in part.parameters()} == {"cpu"}
        optimizer.synchronize()
        found.append([local_tensor(parameter).clone() for parameter in part.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class WithHead(Stage):
    """The head is called outside of the forward, as torchtitan's loss in chunks calls it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(range(2))
        self.head: Any = nn.Linear(WIDTH, 11)
        self.heads = [self.head]


class InChunks(Run):
    def backward(self, step: int, micro: int) -> float:
        """The head is gathered once, and reduces its gradients in the last chunk."""
        (part,), total = self.parts, 0.0
        generator = torch.Generator().manual_seed(10 * step + micro)
        given = part(torch.randn(7, WIDTH, generator=generator).to(next(part.parameters())))
        cut = given.detach().requires_grad_()
        part.head.set_reshard_after_forward(False)
        part.head.set_reshard_after_backward(False)
        part.head.unshard()
        for number, chunk in enumerate(cut.chunk(3)):
            part.head.set_requires_gradient_sync(number == 2, recurse=False)
            loss = part.head(chunk).float().square().mean()
            loss.backward()
            total += loss.item()
        part.head.set_reshard_after_forward(True)
        part.head.set_reshard_after_backward(True)
        part.head.reshard()
        given.backward(cut.grad)
        return total


@on_ranks(2, "time", ["next_forward", "overlap"])
def test_a_head_that_is_called_in_chunks(rank: int, time: str) -> None:
    expected, tested = (InChunks([WithHead()], placement, time) for placement in ("device", "host"))
    assert tested.train(range(3), rank) == expected.train(range(3), rank)
    same_tree("weights", tested.weights(), expected.weights())
