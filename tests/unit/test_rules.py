"""Several optimizer classes in one optimizer, and rules that say which parameter gets which."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import lightstep
from lightstep import Rule
from lightstep.optimizer.rules import KINDS, described_parameters
from tests.covering import every_value
from tests.reference.pair import (
    BACKENDS,
    IN_BACKWARD,
    TWO_GROUPS,
    Pair,
    same_tree,
    scale_for,
    through_bytes,
)
from tests.reference.several_classes import SeveralClasses
from tests.reference.tiny_model import representable

FP32 = lightstep.Strategy.load("fp32")
MUON = {"lr": 0.02, "weight_decay": 0.05}
RMS = {"lr": 1e-2, "momentum": 0.9, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}


class MuonPair(Pair):
    """Muon on the matrices and AdamW on the rest, beside torch's two optimizers with one norm over both."""

    def __init__(self, muon: dict[str, Any], **settings: Any) -> None:
        super().__init__(SeveralClasses, muon, TWO_GROUPS["AdamW"][2], **settings)  # type: ignore[arg-type]

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        groups = super().param_groups(model)
        classes = (torch.optim.Muon, torch.optim.AdamW)
        return [{**group, "optimizer_class": chosen} for group, chosen in zip(groups, classes, strict=True)]

    def build_optimizer(self, strategy: Any, model: nn.Module) -> Any:
        return strategy.create_optimizer(model, param_groups=self.param_groups(model), lr=123.0)  # AdamW's, unused


@every_value(
    backend=["bulk", "resident", "stream-overlap-resident-in-part", "stream-in-backward-and-forward", *IN_BACKWARD],
    parameters=["bfloat16", "float16", "float32"],
    muon=[MUON, RMS],
    micro_batches=[1, 2],
    resumed=[None, "model first", "optimizer first"],
)
def test_muon_and_adamw_under_one_norm_and_one_scale(
    backend: str, parameters: str, muon: dict[str, Any], micro_batches: int, resumed: str | None
) -> None:
    """Or with updates in backward, by the norm of each layer."""
    in_backward = backend in IN_BACKWARD
    pair = MuonPair(
        muon,
        backend=backend,
        parameters="bfloat16" if in_backward and parameters == "float16" else parameters,
        micro_batches=micro_batches,
        max_norm=0.1 if in_backward else 0.5,
        scope="unit" if in_backward else "global",
        late_from=2,
        overflow_at={1} if parameters == "float16" else (),
        **({} if in_backward else scale_for(parameters)),
    )
    pair.train(4)
    if resumed:
        pair.resume(resumed)
    pair.train(3)
    assert pair.reference.clipped_steps > 0
    assert pair.optimizer.param_groups[0]["optimizer_class"] == "torch.optim.Muon"
    assert "betas" not in pair.optimizer.param_groups[0]


class Experts(nn.Module):
    """A stack of matrices, as layers of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Parameter(torch.randn(3, 8, 20))
        self.down = nn.Parameter(torch.randn(3, 20, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = torch.einsum("bd,edh->ebh", hidden, self.up).tanh()
        return self.head(self.norm(torch.einsum("ebh,ehd->bd", hidden, self.down)))


RULES: list[Callable[[], Rule]] = [
    lambda: Rule(torch.optim.Muon, kinds="hidden_matrices", **MUON),
    lambda: Rule(torch.optim.AdamW, kinds=["norms", "biases"], lr=3e-3, weight_decay=0.0),
    lambda: Rule(torch.optim.AdamW, kinds="rest", lr=3e-3, weight_decay=0.1),
]


def made(backend: str = "resident", make: Callable[[], nn.Module] = Experts, **values: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    strategy = lightstep.Strategy.load({"clipping": {"max_norm": 1.0}, "optimizer_state": BACKENDS[backend], **values})
    model = strategy.prepare_model(representable(make()))
    return strategy, model, strategy.create_optimizer(model, rules=[rule() for rule in RULES])


def tokens(step: int) -> Tensor:
    return torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return nn.functional.cross_entropy(model(tokens(step)).float(), tokens(step + 1000))


def test_each_expert_is_a_matrix_of_its_own() -> None:
    _, model, optimizer = made("stream")
    plain = copy.deepcopy(model)
    masters = {name: parameter.detach().float() for name, parameter in plain.named_parameters()}
    experts = {name: list(masters[name]) for name in ("up", "down")}
    still = [masters[name] for name in ("norm.weight", "norm.bias", "head.bias")]
    rest = [masters[name] for name in ("embed.weight", "head.weight")]
    muon = torch.optim.Muon([matrix for stack in experts.values() for matrix in stack], **MUON)  # type: ignore[arg-type]
    adamw = torch.optim.AdamW(
        [{"params": still, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}], lr=3e-3, fused=True
    )
    for step in range(4):
        optimizer.backward(loss_of(model, step))
        assert optimizer.step()
        loss_of(plain, step).backward()
        gradients = {name: parameter.grad.float().contiguous() for name, parameter in plain.named_parameters()}
        torch.nn.utils.clip_grads_with_norm_(
            (stand_ins := [fake(gradient) for gradient in gradients.values()]),
            1.0,
            torch.nn.utils.get_total_norm(gradients.values()),
        )
        for (name, master), stand_in in zip(masters.items(), stand_ins, strict=True):
            own = stand_in.grad if name in experts else [stand_in.grad]
            for matrix, gradient in zip(experts.get(name, [master]), own, strict=True):
                matrix.grad = gradient
        muon.step()
        adamw.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.grad = None
                parameter.copy_(torch.stack(experts[name]) if name in experts else masters[name])
        optimizer.synchronize()
        for (name, tested), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(tested, expected), f"step {step}: {name}"
    for name, stack in experts.items():
        buffers = torch.stack([muon.state[matrix]["momentum_buffer"] for matrix in stack])
        assert torch.equal(optimizer.state[model.get_parameter(name)]["momentum_buffer"], buffers)


def fake(gradient: Tensor) -> Tensor:
    stand_in = torch.zeros_like(gradient)
    stand_in.grad = gradient
    return stand_in


# -- saved and loaded


def test_a_checkpoint_keeps_the_classes(tmp_path: Path) -> None:
    strategy, model, optimizer = made("stream")
    for step in range(2):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    again, other_model, other = made("resident")
    again.load_checkpoint(tmp_path / "a", other_model, other)
    runs = [(model, optimizer), (other_model, other), pickle.loads(pickle.dumps((model, optimizer)))]
    for run_model, run in runs:
        run.backward(loss_of(run_model, 7))
        run.step()
        run.synchronize()
        assert all(map(torch.equal, run_model.state_dict().values(), model.state_dict().values()))

    torch.manual_seed(0)
    third = again.prepare_model(Experts())
    swapped = again.create_optimizer(third, torch.optim.AdamW, lr=1e-3)
    with pytest.raises(lightstep.CheckpointError, match="state of AdamW \\+ Muon, the optimizer is AdamW"):
        again.load_checkpoint(tmp_path / "a", third, swapped)


@pytest.mark.parametrize("named", [0, 1])
def test_classes_that_have_changed_places_are_refused(tmp_path: Path, named: int) -> None:
    """Of the groups on each side, one names its class, and the other has the optimizer's own."""

    def build(muon: int) -> tuple[nn.Module, Any]:
        model = FP32.prepare_model(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
        groups: list[dict[str, Any]] = [{"params": [layer.weight]} for layer in model]
        own = torch.optim.AdamW if muon == named else torch.optim.Muon
        groups[named]["optimizer_class"] = torch.optim.Muon if muon == named else torch.optim.AdamW
        return model, FP32.create_optimizer(model, own, param_groups=groups)

    with warnings.catch_warnings(action="ignore"):  # the last layer passes for a head
        (model, optimizer), (other_model, other) = build(0), build(1)
    optimizer.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    FP32.save_checkpoint(tmp_path / "a", model, optimizer)
    packed, before = through_bytes(optimizer.state_dict()), through_bytes(other.state_dict())
    message = r"group 0 is updated by (torch.optim.)?AdamW, .* of (torch.optim.)?Muon"
    with pytest.raises(lightstep.CheckpointError, match=message):
        FP32.load_checkpoint(tmp_path / "a", other_model, other)
    here, saved = ("Muon", "AdamW") if named else ("AdamW", "Muon")
    message = rf"group {named} is updated by torch.optim.{here}, .* the state of torch.optim.{saved}"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(packed)
    same_tree("other", through_bytes(other.state_dict()), before)
    FP32.load_checkpoint(tmp_path / "a", model, optimizer)


# -- rules


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(8, 8), "norm": nn.RMSNorm(8)}) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.out = nn.Linear(8, 11, bias=False)


def by_kind(model: nn.Module) -> dict[str, set[str]]:
    """The names of the trained parameters of each kind."""
    described = [(name, kind) for name, parameter, kind in described_parameters(model) if parameter.requires_grad]
    return {kind: {name for name, own in described if own == kind} for kind in KINDS}


def test_kinds_of_parameters() -> None:
    model, blocks = Named(), ("blocks.0", "blocks.1")
    assert by_kind(model) == {
        "hidden_matrices": {"experts", *(f"{block}.mix.weight" for block in blocks)},
        "embeddings": {"tokens.weight"},
        "head": {"out.weight"},
        "norms": {f"{block}.norm.weight" for block in blocks},
        "biases": {f"{block}.mix.bias" for block in blocks},
        "rest": {"scale"},
    }
    layers = nn.ModuleDict({"up": nn.Linear(4, 4, bias=False), "down": nn.Linear(4, 3, bias=False)})
    assert [kind for _, _, kind in described_parameters(layers)] == ["hidden_matrices", "head"]
    model.out.weight = model.tokens.weight
    assert not by_kind(model)["head"]


class Owner(nn.Module):
    """Parameters that no layer of torch's owns, by the names and the shapes that models have for them."""

    def __init__(self, **shapes: Sequence[int]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape)))


class RMSNormalization(Owner):
    pass


class Attention(Owner):
    def __init__(self) -> None:
        super().__init__(gate_up_proj=(4, 8, 6), gate_up_proj_bias=(4, 6), A_log=(16, 8), time_mix=(1, 1, 8))
        self.heads = nn.MultiheadAttention(8, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley")
        self.router = Owner(weight=(4, 8))
        self.norm = RMSNormalization(weight=(8,))


class Vision(Owner):
    def __init__(self) -> None:
        super().__init__(cls_token=(1, 1, 8), pos_embed=(9, 8))
        self.patches = nn.Conv2d(3, 8, 4)
        self.positions, self.words = nn.Embedding(20, 8), nn.Embedding(33, 8)
        self.unembed = nn.Linear(8, 33)
        self.layers = nn.ModuleList([Attention()])
        self.merge = nn.Linear(8, 8)


VISION = {
    "hidden_matrices": "merge.weight 0.heads.in_proj_weight 0.heads.out_proj.weight 0.router.weight 0.gate_up_proj "
    "0.orthogonal.parametrizations.weight.original",
    "embeddings": "cls_token pos_embed positions.weight words.weight",
    "head": "unembed.weight",
    "norms": "0.norm.weight",
    "biases": "patches.bias unembed.bias merge.bias 0.heads.in_proj_bias 0.heads.out_proj.bias 0.normed.bias "
    "0.orthogonal.bias 0.gate_up_proj_bias",
    "rest": "patches.weight 0.normed.parametrizations.weight.original0 0.normed.parametrizations.weight.original1 "
    "0.A_log 0.time_mix",
}
"""A kernel and a table are no matrices by which a layer multiplies; the head is as large as the vocabulary."""


def test_kinds_of_what_no_layer_of_torchs_owns() -> None:
    found = {kind: {name.removeprefix("layers.") for name in names} for kind, names in by_kind(Vision()).items()}
    assert found == {kind: set(names.split()) for kind, names in VISION.items()}


class Adapted(nn.Module):
    """What PEFT puts in the place of a layer: of an embedding, of a matrix, or of a head that is trained as it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = layer.requires_grad_(False)
        if isinstance(layer, nn.Embedding):
            self.lora_embedding_A = nn.ParameterDict({"default": torch.randn(2, layer.num_embeddings)})
            self.lora_embedding_B = nn.ParameterDict({"default": torch.randn(layer.embedding_dim, 2)})
        else:
            self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer).requires_grad_(True)})


def test_kinds_of_adapters() -> None:
    """Matrices are transformers' Conv1D."""
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=16, tie_word_embeddings=False)
    for make, head in ((GPT2LMHeadModel, "lm_head"), (GPT2ForSequenceClassification, "score")):
        model: Any = make(config)
        setattr(model, head, Adapted(getattr(model, head)))
        model.transformer.wte = Adapted(model.transformer.wte)
        found = by_kind(model)
        assert found["head"] == {f"{head}.modules_to_save.default.weight"}
        adapters = {f"transformer.wte.lora_embedding_{side}.default" for side in "AB"}
        assert found["embeddings"] == {*adapters, "transformer.wpe.weight"}
        matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        assert found["hidden_matrices"] == {f"transformer.h.0.{name}.weight" for name in matrices}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule(torch.optim.AdamW, names="mix")], r"scale of shape \(8,\) \(rest\) is trained, and matches no rule"),
        (
            [Rule(torch.optim.AdamW), Rule(torch.optim.Muon, dims=2)],
            r"tokens.weight of shape \(11, 8\) matches Rule\(AdamW\) and Rule\(Muon, dims=2\)",
        ),
        (
            [Rule(torch.optim.AdamW, kinds="rest"), Rule(torch.optim.Muon, names=r"\.mux\.")],
            r"Rule\(Muon, names='\\\\.mux\\\\.'\) matches no parameter",
        ),
        (
            [Rule(torch.optim.AdamW, names=["tokens", r"^exprts"]), Rule(torch.optim.AdamW, kinds="rest")],
            r"Rule\(AdamW, names=\['tokens', '\^exprts'\]\): '\^exprts' matches none of the 1 parameters of the rule",
        ),
        ([], "rules are empty"),
    ],
)
def test_rules_that_do_not_divide_the_model_are_refused(rules: list[Rule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP32.create_optimizer(FP32.prepare_model(Named()), rules=rules)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule(torch.optim.AdamW, momentum=0.9), "Rule\\(AdamW\\): AdamW has no 'momentum'; it has lr, betas"),
        (lambda: Rule(torch.optim.AdamW, lr=-1.0), "Rule\\(AdamW\\): Invalid learning rate"),
        (lambda: Rule(torch.optim.Muon, kinds="matrices"), "'matrices' is not a kind of parameter; allowed: hidd"),
        (lambda: Rule(torch.optim.Muon, names=3), "a rule's names is 3; a string or a list of them is needed"),  # type: ignore[arg-type]
        (lambda: Rule(torch.optim.Muon, dims=["2"]), "a rule's dims is \\['2'\\]; a number or a list"),  # type: ignore[list-item]
        (lambda: Rule(torch.optim.Muon, names="("), "'\\(' in a rule's names is not a valid regular expression"),
        (lambda: Rule(torch.optim.AdamW([torch.zeros(1)])), "optimizer class is AdamW"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_rule_says_what_is_wrong(make: Callable[[], Rule], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_rules_replace_the_other_arguments() -> None:
    with pytest.raises(TypeError, match="leave all other arguments out"):
        FP32.create_optimizer(FP32.prepare_model(Named()), rules=[Rule(torch.optim.AdamW)], lr=1e-3)


class OurMuon(torch.optim.Muon):
    pass


@pytest.mark.parametrize("muon", [torch.optim.Muon, OurMuon])
def test_muon_on_an_embedding_warns(muon: type[torch.optim.Optimizer]) -> None:
    model = FP32.prepare_model(Named())
    rules = [Rule(muon, dims=[2, 3]), Rule(torch.optim.AdamW, dims=1)]
    message = rf"^{muon.__name__} will update tokens.weight \(embeddings\), out.weight \(head\): it is"
    with pytest.warns(UserWarning, match=message):
        FP32.create_optimizer(model, rules=rules)


def test_muon_on_what_is_no_matrix_is_refused_by_name() -> None:
    model = FP32.prepare_model(Named())
    message = r"Muon cannot update scale of shape \(8,\): Muon only supports 2D"
    with pytest.warns(UserWarning, match="Muon will update tokens"), pytest.raises(ValueError, match=message):
        FP32.create_optimizer(model, rules=[Rule(torch.optim.Muon)])
    with pytest.raises(ValueError, match=message):
        FP32.create_optimizer(model, torch.optim.Muon, param_groups=[model.scale])
    conv = FP32.prepare_model(nn.Sequential(nn.Conv2d(3, 8, 4)))
    with pytest.raises(ValueError, match=r"Muon cannot update 0.weight of shape \(8, 3, 4, 4\)"):
        FP32.create_optimizer(conv, torch.optim.Muon, param_groups=[conv[0].weight])
    model.scale.requires_grad_(False)
    later = FP32.create_optimizer(model, torch.optim.Muon, param_groups=[model.scale, model.experts])
    model.scale.requires_grad_(True).grad = torch.ones_like(model.scale)
    with pytest.raises(ValueError, match=message):
        later.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "a parameter group of Muon: Learning rate should be >= 0 but is: -1.0"),
        ({"lr": "0.1"}, "a parameter group of Muon: '<=' not supported"),
        ({"adjust_lr_fn": "rms"}, "a parameter group of Muon: Adjust learning rate function rms is not supported"),
        ({"ns_steps": 100}, "a parameter group of Muon: Number of steps must be less than 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "a parameter group of Muon: Coefficients must be a tuple of exactly 3"),
        ({"momentun": 0.9}, "group of Muon has 'momentun', which the class does not have; it has lr, weight_"),
    ],
)
def test_settings_that_the_class_refuses_are_refused_when_the_optimizer_is_made(
    settings: dict[str, Any], message: str
) -> None:
    model = FP32.prepare_model(nn.Sequential(nn.Linear(3, 3, bias=False)))
    group = {"params": [model[0].weight], **settings}
    with pytest.raises((TypeError, ValueError), match=message):
        FP32.create_optimizer(model, param_groups=[group | {"optimizer_class": torch.optim.Muon}])
    if "momentun" not in settings:  # which torch would keep in the group
        with pytest.raises((TypeError, ValueError), match=message):
            FP32.create_optimizer(model, torch.optim.Muon, param_groups=[group])


def test_a_group_is_added_to_an_optimizer_made_by_rules() -> None:
    _, model, optimizer = made("stream")
    defaults = dict(optimizer.defaults)
    model.extra = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"groups of this optimizer name their classes \(Muon \+ AdamW\)"):
        optimizer.add_param_group({"params": [model.extra.weight]})
    optimizer.add_param_group({"params": [model.extra.weight], "optimizer_class": torch.optim.SGD, "lr": 0.5})
    assert optimizer.defaults == defaults
    expected = model.extra.weight.detach().float()
    for step in range(3):
        penalty = model.extra(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().sum()
        optimizer.backward(loss_of(model, step) + penalty)
        gradient = model.extra.weight.grad.float()
        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_([stand_in := fake(gradient)], 1.0, norm)
        assert optimizer.step()
        optimizer.synchronize()
        expected.sub_(stand_in.grad, alpha=0.5)
        assert torch.equal(optimizer.state[model.extra.weight]["master"], expected)
        assert torch.equal(model.extra.weight, expected.bfloat16())


class NeedsDecay(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, decay: float, clamp: float = 1.0) -> None:
        self.clamp = clamp
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.mul_(1 - group["decay"]).add_(p.grad, alpha=-group["lr"] * self.clamp)


def test_a_group_without_what_its_class_needs_is_refused() -> None:
    model = FP32.prepare_model(nn.Linear(3, 3))
    weight, bias = ({"params": [parameter], "optimizer_class": NeedsDecay} for parameter in model.parameters())
    given = {"lr": 0.1, "decay": 0.1}
    rules = [Rule(NeedsDecay, dims=2, **given, clamp=2.0), Rule(NeedsDecay, dims=1, lr=0.1, decay=0.2)]
    differ = r"two parameter groups of NeedsDecay differ in settings .* \({'clamp': 2.0} and {'clamp': 3.0}\)"
    no_class = r"optimizer_class is 'Muon'; a subclass of torch.optim.Optimizer is needed"
    for chosen, error, message in (
        ([weight, bias], ValueError, "group of NeedsDecay has no lr and no decay, and NeedsDecay has no default"),
        ([weight | {"lr": 0.1}, bias], ValueError, "group of NeedsDecay has no decay, and NeedsDecay has no default"),
        ([weight | given | {"clamp": 2.0}, bias | given | {"lr": 0.2, "clamp": 3.0}], ValueError, differ),
        (rules, ValueError, r"Rule\(NeedsDecay, dims=2\) and Rule\(NeedsDecay, dims=1\) differ in settings"),
        ([weight | {"optimizer_class": "Muon"}], TypeError, no_class),
    ):
        with pytest.raises(error, match=message):
            FP32.create_optimizer(model, **{"rules" if chosen is rules else "param_groups": chosen})


def test_the_table_of_the_outcome() -> None:
    model = FP32.prepare_model(Named())
    model.scale.requires_grad_(False)
    rules = [
        Rule(torch.optim.Muon, kinds="hidden_matrices", lr=2e-2),
        Rule(torch.optim.SGD, names=["tokens", "out", "norm", "bias"], lr=1e-3),
    ]
    table = lightstep.param_table(model, FP32.create_optimizer(model, rules=rules))
    for said in (
        "Muon: lr 0.02",
        "blocks.*.mix.weight (2)",
        "SGD: lr 0.001",
        "208 elements",
        "in no group, 8 elements",
    ):
        assert said in table
