"""torchtitan's container of optimizers, in a loop of the shape of its ``train_step``."""

from __future__ import annotations

import copy
import importlib.util
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from lightstep import ConfigError, Rule, Strategy
from lightstep.integrations.torchtitan import OptimizersContainer
from lightstep.sharding.prepared_model import PreparedModel
from tests.distributed.models import Block
from tests.reference.pair import same_tree
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.several_classes import SeveralClasses
from tests.snippets import CHECKOUT
from tests.unit.test_stream import random_delays

WIDTH = 7


class Stage(nn.Module):
    """One part of a model, its layers under the names that they have in the whole one."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block(WIDTH) for layer in layers})
        self.heads: list[nn.Module] = []

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def stages(*layers: Sequence[int]) -> list[Stage]:
    """The same weights however the layers are divided."""
    torch.manual_seed(0)
    whole = Stage(range(4))
    parts = [Stage(part) for part in layers]
    for part in parts:
        for number in part.layers:
            part.layers[number] = copy.deepcopy(whole.layers[number])
    return parts


PARTS = [[0, 1], [2, 3]]
GROUPS = [{"pattern": r"norm|bias", "weight_decay": 0.0, "lr": 2e-2}, {"pattern": ".*", "betas": (0.9, 0.95)}]


def loss_of(parts: Sequence[nn.Module], step: int, micro: int) -> Tensor:
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
    hidden = hidden.to(next(parts[0].parameters()))
    for part in parts:
        hidden = part(hidden)
    return hidden.float().square().mean()


def parameters_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter for part in parts for parameter in part.parameters()]


def train(container: Any, parts: Sequence[nn.Module], steps: range, max_norm: float | None = 0.1) -> list[Tensor]:
    """torchtitan's order: backward of its own, one norm over all parts, step; returns the norms."""
    norms = []
    for step in steps:
        container.zero_grad()
        for micro in range(2):
            (loss_of(parts, step, micro) / 2).backward()
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters_of(parts), max_norm, foreach=True))
        container.step()
    return norms


def named_groups(part: nn.Module) -> list[dict[str, Any]]:
    """Those that ``GROUPS`` mean, as torch takes them."""
    members: list[list[Tensor]] = [[], []]
    for name, parameter in part.named_parameters():
        members[re.search(GROUPS[0]["pattern"], name) is None].append(parameter)
    plain = ({key: value for key, value in group.items() if key != "pattern"} for group in GROUPS)
    return [{**group, "params": params} for group, params in zip(plain, members, strict=True)]


class PlainContainer:
    """What torchtitan does with ``torch.optim``: optimizers for each part, one after the other."""

    def __init__(self, parts: Sequence[nn.Module], **hyperparameters: Any) -> None:
        self.optimizers = [torch.optim.AdamW(named_groups(part), fused=True, **hyperparameters) for part in parts]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def strategy_for(backend: str = "resident", parameters: str = "float32", **values: Any) -> Strategy:
    values = {"precision": {"parameters": parameters}, "clipping": {"max_norm": None}, **values}
    return Strategy.load({"optimizer_state": {"backend": backend}, **values})


def container_of(parts: Sequence[nn.Module], strategy: Strategy | None = None, **settings: Any) -> OptimizersContainer:
    strategy = strategy or strategy_for()
    for part in parts:
        strategy.prepare_model(part)
    given = {"param_groups": GROUPS, "lr": 1e-2, **settings}
    return OptimizersContainer(strategy, parts, **{key: value for key, value in given.items() if value is not None})


def same(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(mine) == len(theirs) > 8
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_a_loop_of_torchtitans_shape(backend: str) -> None:
    parts, expected = stages(*PARTS), stages(*PARTS)
    container, plain = container_of(parts, strategy_for(backend)), PlainContainer(expected, lr=1e-2)
    assert len(container) == 1 and list(container) == container.optimizers
    assert isinstance(container, torch.optim.Optimizer) and container.model_parts == parts
    called: list[str] = []
    container.register_step_pre_hook(lambda *_: called.append("before"))
    container.register_step_post_hook(lambda *_: called.append("after"))
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        for optimizer in (*container, *plain.optimizers)
    ]
    for steps in (range(3), range(3, 5)):
        norms = train(container, parts, steps)
        assert norms == train(plain, expected, steps) and all(norm > 0.1 for norm in norms)
        for scheduler in schedulers:
            scheduler.step()
    assert called == ["before", "after"] * 5
    same(parameters_of(parts), parameters_of(expected))
    container.init_cache_state_dict()


def test_one_norm_over_all_parts_when_the_strategy_clips() -> None:
    parts, expected = stages(*PARTS), stages(*PARTS)
    container = container_of(parts, strategy_for("stream", "bfloat16", clipping={"max_norm": 0.1}))
    groups = named_groups(nn.ModuleList(part.bfloat16() for part in expected))
    order = nn.ModuleList(expected).parameters()
    reference = ReferenceLoop(groups, torch.optim.AdamW, max_norm=0.1, model=order, lr=1e-2)
    for step in range(5):
        for micro in range(2):
            container.backward(loss_of(parts, step, micro) / 2)
            reference.backward(loss_of(expected, step, micro) / 2)
        result = container.step()
        assert reference.step(result.grad_norm)
    assert reference.clipped_steps == 5
    same(parameters_of(parts), parameters_of(expected))


@pytest.mark.parametrize("layers", [[[0, 1, 2, 3]], PARTS])
def test_whole_parts_that_rest_on_the_host(layers: list[list[int]]) -> None:
    """Parts on the device go there together; they stay on the host after an interrupt and an evaluation."""
    found = []
    for weights in ({}, {"placement": "host", "device_mib": 0.002}):
        strategy = strategy_for("stream", "bfloat16", clipping={"max_norm": 0.1}, weights=weights)
        parts = stages(*layers)
        for part in parts:
            strategy.cast_parameters(part)
        container = OptimizersContainer(strategy, parts, param_groups=GROUPS, lr=1e-2)
        visits = [PreparedModel.of(part).weight_visits for part in parts]
        assert all((one is not None) is bool(weights) and one is visits[0] for one in visits)
        del container  # another one takes over
        container = OptimizersContainer(strategy, parts, param_groups=GROUPS, lr=1e-2)
        seen = []
        for step in range(4):
            for micro in range(2):
                container.backward(loss_of(parts, step, micro) / 2)
            seen.append(container.step().grad_norm.item())
            if step == 1:
                interrupt(parts)
            with torch.no_grad():
                seen.append(loss_of(parts, 9, 0).item())
            if visits[0] is not None and step == 0:
                random_delays(visits[0].weights.lanes, 0)
        container.optimizer.synchronize()
        found.append((seen, container.state_dict(), [parameter.detach().clone() for parameter in parameters_of(parts)]))
    same_tree("on the host", found[1], found[0])
    assert all(norm > 0.1 for norm in found[0][0][::2])


def interrupt(parts: Sequence[Any]) -> None:
    """In the last part."""

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = list(parts[-1].layers.values())[-1].register_forward_pre_hook(raising)
    with pytest.raises(KeyboardInterrupt):
        loss_of(parts, 0, 0)
    handle.remove()


@pytest.mark.parametrize(("parameters", "trained"), [("float32", True), ("bfloat16", False), ("float16", True)])
def test_a_checkpoint_goes_on_in_another_division(tmp_path: Path, parameters: str, trained: bool) -> None:
    scale = {"kind": "dynamic", "init_scale": 64.0, "growth_interval": 2} if parameters == "float16" else "none"
    settings: dict[str, Any] = {"precision": {"parameters": parameters, "loss_scale": scale, "reduce": "parameters"}}

    def run(container: OptimizersContainer, parts: Sequence[nn.Module], steps: range) -> None:
        for step in steps:
            container.backward(loss_of(parts, step, 0))
            assert container.step()

    parts = stages(*PARTS)
    container = container_of(parts, strategy_for(**settings))
    run(container, parts, range(2 if trained else 0))
    dcp.save({"optimizer": container}, checkpoint_id=tmp_path / "step", no_dist=True)
    later = stages([0], [1, 2], [3])
    for part, number in ((0, "0"), (1, "1"), (1, "2"), (2, "3")):
        source = parts[int(number) // 2].layers[number]
        later[part].layers[number].load_state_dict(source.state_dict())
    other = container_of(later, strategy_for("stream", **settings))
    dcp.load({"optimizer": other}, checkpoint_id=tmp_path / "step", no_dist=True)
    run(container, parts, range(2, 4))
    run(other, later, range(2, 4))
    same(parameters_of(later), parameters_of(parts))
    mine, theirs = other.state_dict(), container.state_dict()
    assert mine.keys() == theirs.keys()
    scales = [{key: value for key, value in state.items() if key.startswith("loss_scale")} for state in (mine, theirs)]
    assert scales[0] == scales[1] and bool(scales[0]) == (parameters == "float16")


def test_a_state_of_other_groups_changes_nothing() -> None:
    container = divided()
    state = container.state_dict()
    rates = [key for key in state if key.startswith("param_groups.") and key.endswith(".lr")]
    groups = [key for key in state if key.startswith("param_groups.")]
    for changed, lost, message in (
        ({rates[1]: 5.0}, [], "are in one group, and were saved with different hyper-parameters"),
        ({}, rates[:1], "different hyper-parameters"),
        ({}, groups, "has no hyper-parameters"),
    ):
        wrong = {key: value for key, value in (state | changed).items() if key not in lost}
        with pytest.raises(ValueError, match=message):
            container.load_state_dict(wrong)
    same_tree("state", container.state_dict(), state)


def test_modules_of_a_single_part_may_be_named_part0() -> None:
    models = [nn.ModuleDict({f"part{n}": nn.Linear(3, 3, bias=False) for n in range(2)}) for _ in range(2)]
    container, other = (OptimizersContainer(strategy_for(), [model], lr=1e-2) for model in models)
    for number, module in enumerate(models[0].children(), 1):
        (module.weight.sum() * number).backward()  # type: ignore[operator]
    container.step()
    saved = container.state_dict()
    assert {f"state.part{number}.weight.exp_avg" for number in range(2)} <= saved.keys()
    assert not torch.equal(saved["state.part0.weight.exp_avg"], saved["state.part1.weight.exp_avg"])
    other.load_state_dict(saved)
    same_tree("loaded", other.state_dict(), saved)


RULES = [
    Rule(torch.optim.AdamW, names=r"^layers\.[02]\.(norm|up\.bias)", lr=2e-2, weight_decay=0.0),
    Rule(torch.optim.Muon, kinds="hidden_matrices", lr=3e-2),
    Rule(torch.optim.AdamW, kinds="rest", lr=1e-2),
]


class TwoClasses(SeveralClasses):
    def __init__(self, parts: Sequence[nn.Module]) -> None:
        named = [item for part in parts for item in part.named_parameters()]
        matrices = [p for _, p in named if p.dim() == 2]
        first = [p for name, p in named if re.match(RULES[0].names[0], name)]  # type: ignore[index]
        rest = [p for _, p in named if all(p is not other for other in [*first, *matrices])]
        listed = zip(RULES, (first, matrices, rest), strict=True)
        super().__init__([{**rule.group(), "params": params} for rule, params in listed])
        self.parts = parts

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def test_rules_see_the_names_of_the_undivided_model() -> None:
    parts, expected = stages(*PARTS), stages(*PARTS)
    container = container_of(parts, param_groups=None, lr=None, rules=RULES)
    assert [len(group["params"]) for group in container.optimizer.param_groups] == [6, 8, 6]
    assert train(container, parts, range(3)) == train(TwoClasses(expected), expected, range(3))
    same(parameters_of(parts), parameters_of(expected))
    (later,) = stages(range(4))
    other = container_of([later], param_groups=None, lr=None, rules=RULES)
    other.load_state_dict(container.state_dict())
    assert other.state_dict().keys() == container.state_dict().keys()


def divided(strategy: Strategy | None = None, **settings: Any) -> OptimizersContainer:
    return container_of(stages(*PARTS), strategy, **settings)


ON_HOST = {"placement": "host"}
DEFERRED = {"backend": "stream", "update": "next_forward"}
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "pattern": (
        lambda: divided(param_groups=[{"pattern": "head"}, {"pattern": ""}]),
        ValueError,
        r"Rule\(AdamW, names='head'\) matches no parameter",
    ),
    "uncovered": (
        lambda: divided(param_groups=[{"pattern": "bias"}]),
        ValueError,
        r"layers\.0\.norm\.weight of shape \(\d+,\) \(norms\) is trained, and matches no rule; rules: .*'bias'",
    ),
    "a group's own value": (
        lambda: divided(param_groups=[{"pattern": "", "lr": -1.0}], lr=1e-2),
        ValueError,
        r"Rule\(AdamW, names=''\): Invalid learning rate: -1\.0",
    ),
    "rules and groups": (lambda: divided(rules=RULES), TypeError, "leave all other arguments out"),
    "repeated": (
        lambda: container_of(stages([0, 1], [1, 2])),
        ValueError,
        r"two model parts have a parameter 'layers\.1\.norm\.weight'",
    ),
    "next_forward": (
        lambda: divided(strategy_for(optimizer_state=DEFERRED)),
        ConfigError,
        "there are 2 model parts; set it to 'at_step'",
    ),
    "prepared parts on the host": (
        lambda: divided(strategy_for(weights=ON_HOST)),
        ConfigError,
        r"rest on the host already, each by itself .*leave prepare_model out, cast the parts with strategy\.cast_param",
    ),
    "no strategy": (lambda: OptimizersContainer("stream", stages(*PARTS)), TypeError, "one from Strategy.load"),  # type: ignore[arg-type]
    "no list": (lambda: OptimizersContainer(strategy_for(), Stage([0])), TypeError, "a list of one or more modules"),  # type: ignore[arg-type]
    "no parts": (lambda: OptimizersContainer(strategy_for(), []), TypeError, "a list of one or more modules"),
    "another model": (lambda: divided().load_state_dict({}), ValueError, "no hyper-parameters of 12 parameters"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed; make does it")
def test_the_example_trains_as_torchtitans_own_container(capsys: pytest.CaptureFixture[str]) -> None:
    """``examples/torchtitan_config.py``, and what it refuses."""
    example = runpy.run_path(str(CHECKOUT / "examples" / "torchtitan_config.py"))
    example["main"]()
    assert "every bit equal" in capsys.readouterr().out
    off, groups = {"clipping.max_norm": None}, example["titan"].default_adamw(lr=1e-2).param_groups
    on_host = {"clipping.max_norm": 0.1, "weights.placement": "host"}
    by_unit = on_host | {"clipping.scope": "unit", "optimizer_state.update": "in_backward"}
    for strategy, overrides, fields, message in (
        ("fp32-stream", {}, {}, "training.max_norm"),
        ("fp32-stream", on_host | off, {}, "before torchtitan can clip them: set it to the value"),
        ("fp32-stream", by_unit, {}, "asks for the norm before the step"),
        ("fp32-stream", off | {"sharding.kind": "fsdp2"}, {}, "torchtitan shards"),
        ("fp16", off, {}, r"loss\.backward\(\)"),
        ("fp32-stream", off, {"implementation": "fused_opt_states_bf16"}, "optimizer_state.moments: bfloat16"),
    ):
        with pytest.raises(ConfigError, match=message):
            example["optimizer_config"](strategy, overrides, param_groups=groups, **fields).build(model_parts=[])
    parts = example["stages"]()
    container = example["optimizer_config"]("fp32-stream", on_host, param_groups=groups).build(model_parts=parts)
    parameters = [p for part in parts for p in part.parameters()]
    with pytest.raises(ConfigError, match=r"training\.max_norm is 1\.0, and fp32-stream has clipping\.max_norm 0\.1"):
        example["dist_utils"].clip_grad_norm_(parameters, 1.0, foreach=True)
    del container, parts, parameters
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert float(example["dist_utils"].clip_grad_norm_(other.parameters(), 0.1)) > 1
    assert float(torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])) == pytest.approx(0.1, rel=1e-3)
