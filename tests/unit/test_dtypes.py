"""Which tensors of a model a strategy casts: all as ``model.to(dtype)`` does, but what a model or a quantiser keeps."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from lightstep import ConfigError, Strategy, TransformersEngine
from lightstep.integrations.checks import check_one_dtype
from lightstep.sharding.dtypes import planned_by_tensor
from tests.covering import every_value
from tests.quantised import dequantised, quantised_by_bitsandbytes
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.tiny_llama import make_llama

STRATEGIES = ("stream", "resident", "fp16", "fp32")
ROLES = ("trainer", "reference", "rollout")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
TOKENS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def glm() -> PreTrainedModel:
    """Keeps a buffer, its routing bias."""
    config = Glm4MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2,
                           num_local_experts=8, n_shared_experts=1, n_group=1, topk_group=1,
                           first_k_dense_replace=1)  # fmt: skip
    model = Glm4MoeForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.uniform_(6.8, 7.1)
    return model


def ernie() -> PreTrainedModel:
    """Keeps parameters: trainable routers, and their frozen biases."""
    config = Ernie4_5_MoeConfig(**SIZES, moe_intermediate_size=16, moe_num_experts=4, moe_k=2, moe_layer_start_index=0)
    return Ernie4_5_MoeForCausalLM(config)


def lfm() -> PreTrainedModel:
    """Makes its routing bias in fp32, without naming it in a list."""
    config = Lfm2MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_dense_layers=1,
                           layer_types=["conv", "full_attention"])  # fmt: skip
    return Lfm2MoeForCausalLM(config)


def m2m() -> PreTrainedModel:
    """Its positions are a buffer that is added to hidden states."""
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    return M2M100ForConditionalGeneration(M2M100Config(vocab_size=64, d_model=32, decoder_start_token_id=2, **layers))


def t5() -> PreTrainedModel:
    """Keeps ``wo`` under float16 only."""
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def made(build: Any) -> Any:
    torch.manual_seed(0)
    return build()


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()]}


# -- models of transformers -------------------------------------------------------------------------------------------


@every_value(name=["stream", "fp16"], build=[glm, ernie, lfm, m2m, t5])
def test_a_model_of_transformers_has_the_dtypes_of_from_pretrained(name: str, build: Any, tmp_path: Path) -> None:
    """However it was given; in whatever role it was loaded."""
    model = made(build)
    model.save_pretrained(tmp_path)
    dtype = Strategy.load(name).parameter_dtype
    expected = type(model).from_pretrained(tmp_path, dtype=dtype)
    given = {"fp32": model, "loaded": copy.deepcopy(expected), "rounded": copy.deepcopy(model).to(dtype)}
    for how, one in given.items():
        for role in ROLES if how == "fp32" else ROLES[:1]:
            prepared = Strategy.load(name).prepare_model(copy.deepcopy(one), role=role)
            assert dtypes(prepared) == dtypes(expected), (how, role)
            if how != "rounded":
                for tensor, other in zip(prepared.state_dict().values(), expected.state_dict().values(), strict=True):
                    assert torch.equal(tensor, other), (how, role)
    with torch.device("meta"):
        without_memory = build()
    assert dtypes(Strategy.load(name).prepare_model(without_memory)) == dtypes(expected)


@pytest.mark.parametrize("build", [glm, ernie, m2m, t5])
def test_under_float32_nothing_is_left_in_16_bits(build: Any) -> None:
    prepared = Strategy.load("fp32").prepare_model(made(build).bfloat16())
    assert set(dtypes(prepared).values()) - {torch.int64} == {torch.float32}


def test_the_names_of_adapters_hide_nothing() -> None:
    """PEFT wraps modules: their names have another part, and the outermost model is not of transformers."""

    class Wrapped(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = layer

    model = made(glm)
    for layer in model.model.layers[1:]:
        layer.mlp.gate = Wrapped(layer.mlp.gate)
    model.model.rotary_emb = Wrapped(model.model.rotary_emb)
    outer = nn.ModuleDict({"model": nn.Sequential(model)})
    kept = {name.rpartition(".")[2] for name, dtype in dtypes(Strategy.load("stream").prepare_model(outer)).items()
            if dtype == torch.float32}  # fmt: skip
    assert kept == {"e_score_correction_bias", "inv_freq", "original_inv_freq"}


def test_a_class_that_cannot_be_constructed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_llama()

    class Particular(type(model)):  # type: ignore[misc]
        def __init__(self, config: Any, needed: int) -> None:
            raise AssertionError

    model.__class__ = Particular
    with caplog.at_level(logging.WARNING, "lightstep"):
        prepared = Strategy.load("stream").prepare_model(model)
    assert "Particular could not be constructed" in caplog.text
    assert prepared.model.rotary_emb.inv_freq.dtype == torch.float32


def test_looking_for_what_is_kept_changes_nothing() -> None:
    model = made(lfm)
    config, before = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()
    planned_by_tensor(model, torch.float16)
    assert torch.equal(before, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32
    assert model.config.to_dict() == config


# -- own models -------------------------------------------------------------------------------------------------------


class FrozenBatchNorm(nn.Module):
    """Its weights are buffers of a module without parameters, as in DETR."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.5, "running_mean": 0.1, "running_var": 1.3}.items():
            self.register_buffer(name, torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.running_var.rsqrt() + self.bias - self.running_mean


class Buffers(nn.Module):
    """All kinds of buffers: in a list of their own as VeRA's, frozen norms, statistics, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 2)
        self.matrices = nn.ParameterDict()
        self.matrices.register_buffer("A", torch.randn(3, 6))
        self.norm, self.statistics = FrozenBatchNorm(6), nn.BatchNorm1d(6, affine=False)
        self.register_buffer("wide", torch.ones(2, dtype=torch.float64))
        self.register_buffer("count", torch.ones(2, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.statistics(self.norm(self.up(x) + x @ self.matrices.A.T @ self.matrices.A)))


@every_value(name=STRATEGIES, role=ROLES)
def test_other_buffers_follow_the_parameters_as_with_model_to(name: str, role: str) -> None:
    strategy, model, x = Strategy.load(name), made(Buffers), torch.randn(5, 6)
    model.register_buffer("turn_weight", None)
    expected = copy.deepcopy(model).to(strategy.parameter_dtype)
    # No packed storage, for all its name. Afterwards: torch would drop the imaginary part.
    model.turn_weight = expected.turn_weight = torch.ones(2, dtype=torch.complex64)
    buffers = dict(model.named_buffers())
    prepared = strategy.prepare_model(model, role=role)
    assert dtypes(prepared) == dtypes(expected)
    assert all(prepared.get_buffer(buffer) is tensor for buffer, tensor in buffers.items())
    x = x.to(strategy.parameter_dtype)
    assert torch.equal(prepared(x), (expected if role == "trainer" else expected.eval())(x))


class Routed(nn.Module):
    """A router that its class keeps in fp32, with a bias that is a buffer, and experts that are cast."""

    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["router"]
    _keep_in_fp32_modules: ClassVar[set[str]] = {"up.*bias"}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.router = nn.Linear(8, 3)
        self.router.register_buffer("balance", torch.rand(3))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.linear(x.to(self.up.bias.dtype), self.up.weight.to(self.up.bias.dtype), self.up.bias)
        share = (self.router(hidden.to(self.router.weight.dtype)) + self.router.balance).softmax(-1)
        hidden = hidden.to(self.experts[0].weight.dtype)
        return sum(e(hidden).to(share.dtype) * s for e, s in zip(self.experts, share.split(1, -1), strict=True))  # type: ignore[return-value]


def test_the_lists_of_an_own_class_count() -> None:
    model = nn.Sequential(Routed(), Routed())
    for name, kept in (("stream", {"router"}), ("fp16", {"router", "up"})):
        found = dtypes(Strategy.load(name).prepare_model(copy.deepcopy(model)))
        fp32 = {n for n, dtype in found.items() if dtype == torch.float32}
        assert {n.split(".")[1] for n in fp32} == kept and len(fp32) == (6 if name == "stream" else 8)


@pytest.mark.parametrize("name", ["resident", "stream", "stream-overlap", "fp16", "bulk"])
def test_kept_parameters_are_trained_in_fp32(name: str, tmp_path: Path) -> None:
    """The plain loop over the same dtypes has the same bits; so has a run that is resumed from a checkpoint."""
    strategy = Strategy.load(name, {"clipping.max_norm": 0.05, "precision.loss_scale": "none"})
    given = made(Routed)
    plain = copy.deepcopy(given).to(strategy.parameter_dtype)
    for part, other in ((given.router, plain.router), (given.up, plain.up)):
        if part is given.router:
            other.to(torch.float32).load_state_dict(part.state_dict())
        elif name == "fp16":
            other.bias.data = part.bias.data.clone()
    values = dict(given.named_parameters())
    masters = {p: values[n].detach().clone() for n, p in plain.named_parameters()}
    reference = ReferenceLoop(
        [{"params": plain.parameters()}], torch.optim.AdamW, lr=1e-2, max_norm=0.05, masters=masters
    )
    model = strategy.prepare_model(given)
    assert dtypes(model) == dtypes(plain)
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(strategy.parameter_dtype)
        if step == 3:
            strategy.save_checkpoint(tmp_path / "c", model, optimizer)
            model = strategy.prepare_model(Routed())
            optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
            strategy.load_checkpoint(tmp_path / "c", model, optimizer)
        optimizer.backward(model(x).float().square().mean())
        reference.backward(plain(x).float().square().mean())
        result = optimizer.step()
        assert reference.step(result.grad_norm)
    optimizer.synchronize()
    for (path, tensor), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), path


def test_an_export_has_what_is_kept_in_fp32(tmp_path: Path) -> None:
    strategy, given = Strategy.load("stream"), made(glm)
    bias = given.model.layers[1].mlp.gate.e_score_correction_bias.clone()
    model = strategy.prepare_model(given)
    strategy.export_model(tmp_path, model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    assert dtypes(loaded) == dtypes(model)


def test_published_weights_keep_it_too() -> None:
    strategy = Strategy.load("stream")
    model = strategy.prepare_model(made(ernie))
    engine = TransformersEngine(strategy.prepare_model(ernie, role="rollout"))
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    optimizer.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
    optimizer.step()
    strategy.publish_weights(model, to=engine)
    assert dtypes(engine.model) == dtypes(model)
    for tensor, other in zip(engine.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other)
    fp32 = Strategy.load("fp32", {"roles.rollout.parameters": "bfloat16"})
    trained = fp32.prepare_model(made(ernie))
    engine = TransformersEngine(fp32.prepare_model(ernie, role="rollout"))
    fp32.publish_weights(trained, to=engine)
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name].to(tensor.dtype)), name


# -- quantised storage ------------------------------------------------------------------------------------------------


class Packed(nn.Parameter):
    """What lightstep sees of bitsandbytes' ``Params4bit``."""

    quant_state: Any = None

    def __deepcopy__(self, memo: Any) -> Packed:
        return Packed(self.data.clone(), requires_grad=False)


class Quantised(nn.Module):
    """Two packed 4-bit numbers in each byte of ``storage``; the scales are fp32."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.weight = Packed(torch.randint(256, (32,), dtype=torch.uint8).view(storage), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("zero_point", torch.rand(4))
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        values = self.weight.view(torch.uint8)[:16].view(4, 4) / 256 * self.weight_scale - self.zero_point
        return x @ values.to(x.dtype) + self.bias.to(x.dtype)


def bytes_of(model: nn.Module) -> Tensor:
    return model[0].weight.detach().view(torch.uint8).clone()  # type: ignore[index,operator]


@every_value(storage=[torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8], name=STRATEGIES)
def test_packed_storage_is_not_touched(name: str, storage: torch.dtype) -> None:
    for role in ROLES:
        strategy, given = Strategy.load(name), nn.Sequential(made(lambda: Quantised(storage)), nn.Linear(4, 2))
        packed, weight, scales = given[0].weight, bytes_of(given), given[0].weight_scale.clone()
        model = strategy.prepare_model(given, role=role)
        assert model[0].weight is packed and packed.dtype == storage and torch.equal(bytes_of(model), weight)
        assert torch.equal(model[0].weight_scale, scales) and model[0].zero_point.dtype == torch.float32
        assert model[0].bias.dtype == model[1].weight.dtype == strategy.parameter_dtype
        if role == "trainer":
            optimizer = strategy.create_optimizer(model, lr=1e-2)
            optimizer.backward(model(torch.randn(3, 4).to(strategy.parameter_dtype)).float().mean() / 64)
            assert optimizer.step() and torch.equal(bytes_of(model), weight)


@every_value(name=STRATEGIES, storage=["int8", "uint8", "float16", "bfloat16", "float32"])
def test_weights_of_bitsandbytes_stay_what_they_are(name: str, storage: str) -> None:
    layer = quantised_by_bitsandbytes(storage, "cpu")
    right = dequantised(layer)
    for role in ROLES:
        strategy, given = Strategy.load(name), nn.Sequential(copy.deepcopy(layer), nn.Linear(64, 2))
        model = strategy.prepare_model(given, role=role)
        assert torch.equal(dequantised(model[0]), right)
        x = torch.randn(3, 64)
        assert torch.allclose(model[0](x), x @ right.T, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("method", ["VeraConfig", "LoraConfig"])
def test_adapters_with_matrices_in_buffers_train(method: str) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, method)(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4)
    torch.manual_seed(0)
    strategy, given = Strategy.load("stream"), peft.get_peft_model(make_llama(), config)
    plain = copy.deepcopy(given).bfloat16()
    for name, buffer in given.named_buffers():
        if "inv_freq" in name:
            plain.get_buffer(name).data = buffer.clone()
    model = strategy.prepare_model(given)
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-3)
    loss = model(input_ids=TOKENS % 48, labels=TOKENS % 48).loss
    optimizer.backward(loss)
    assert optimizer.step()
    assert torch.equal(loss, plain(input_ids=TOKENS % 48, labels=TOKENS % 48).loss)


# -- what cannot keep it ----------------------------------------------------------------------------------------------


def test_deepspeed_refuses_what_it_would_cast() -> None:
    strategy: Any = Strategy.load("deepspeed-zero2")
    strategy._refuse_kept(made(glm))  # a buffer
    with pytest.raises(ConfigError, match=r"gate.weight of this Ernie4_5_MoeForCausalLM is kept in float32.*fsdp2"):
        strategy._refuse_kept(made(ernie))
    with pytest.raises(
        ConfigError, match=r"0.weight of this Sequential is quantised.*casts every parameter to bfloat16"
    ):
        strategy._refuse_kept(nn.Sequential(Quantised(torch.float16)))


def test_shards_of_accelerate_have_one_dtype() -> None:
    strategy = Strategy.load("fsdp2")
    check_one_dtype(strategy, made(m2m).bfloat16())
    model = made(ernie)
    strategy.cast_parameters(model)
    with pytest.raises(ConfigError, match=r"keeps 2 trainable parameters in float32.*let the strategy shard"):
        check_one_dtype(strategy, model)
