"""verl's engines on tiny models, without ray and on CPUs: stand-ins for what verl imports and does not use here.

``make test-verl`` installs verl beside the tests.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HAS_VERL = importlib.util.find_spec("verl") is not None

_UNUSED = ("ray", "datasets", "pandas")
"""What verl imports, and its engines do not use."""


class _Empty(types.ModuleType):
    """A module in which every name is a class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _missing() else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _missing() -> set[str]:
    return {name for name in _UNUSED if importlib.machinery.PathFinder.find_spec(name) is None}


def import_verl() -> None:
    """Import verl, and let it use CPUs where there is no GPU. In a process that knows verl already, do nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.workers.engine  # noqa: F401
        from verl.plugin.platform import platform_manager
        from verl.plugin.platform.platform_cuda import PlatformCUDA
    if torch.cuda.is_available() or platform_manager._current_platform.device_name == "cpu":
        return

    class OnCpu(PlatformCUDA):
        device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu

        def current_device(self) -> Any:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

        def is_available(self) -> bool:
            return True

    platform_manager._current_platform = OnCpu()
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.device_name = "cpu"
    for backends in EngineRegistry._engines.values():
        for engines in backends.values():
            engines.setdefault("cpu", engines.get("cuda"))


def save_model(folder: Path, device: str = "cpu", **sizes: Any) -> None:
    """A Llama in fp32 with random weights from ``device``, as a Hugging Face folder."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    others = {"vocab_size": 64, "pad_token_id": 0, "initializer_range": 0.2}
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**{**shape, **others, **sizes}))
    model.save_pretrained(folder)


def make_engine(backend: str, folder: Path, *, lightstep: Any = "fsdp2", model: Any = None, **settings: Any) -> Any:
    """An initialised engine: verl's ``fsdp2``, or ``lightstep``.

    Args:
        model: settings of the model.
        settings: of the engine, or of the optimizer (``lr``, ``clip_grad``, ...).
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from lightstep.integrations.verl import LightstepEngineConfig

    of_optimizer = {key: settings.pop(key) for key in list(settings) if key in FSDPOptimizerConfig.__dataclass_fields__}
    common = {"use_torch_compile": False, "use_dynamic_bsz": False, **settings}
    config = (
        FSDPEngineConfig(strategy="fsdp2", **common)
        if backend == "fsdp2"
        else LightstepEngineConfig(lightstep=lightstep, **common)
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=backend,
        model_config=HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            **{
                "use_remove_padding": False,
                "enable_gradient_checkpointing": False,
                "override_config": {"attn_implementation": "eager"},
                **(model or {}),
            },
        ),
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-2, "total_training_steps": 100, **of_optimizer}),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    engine.initialize()
    return engine


def make_batch(seed: int, lengths: list[int], vocabulary: int = 64, micro_batch: int | None = None) -> Any:
    """Sequences of these lengths, as verl's trainers hand them to an engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]

    def nested(tensors: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested(sequences),
            "position_ids": nested([torch.arange(len(each)) for each in sequences]),
            "loss_mask": nested([torch.ones(len(each)) for each in sequences]),
        },
        batch_size=[len(sequences)],
    )
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro_batch or len(sequences),
        pad_mode=DatasetPadMode.NO_PADDING,
    )
    return data


def train(engine: Any, *batches: Any) -> list[tuple[float, float]]:
    """Updates by verl's supervised loss, between two rollouts: the losses, and the norms of the gradients."""
    from verl.workers.utils.losses import sft_loss

    with engine.train_mode():
        outputs = [engine.train_batch(batch, loss_function=partial(sft_loss, None)) for batch in batches]
    return [(sum(output["loss"]), output["metrics"]["grad_norm"]) for output in outputs]


def log_probs(engine: Any, batch: Any) -> list[Tensor]:
    """Of each sequence's tokens, without gradients."""
    with engine.eval_mode():
        found = engine.infer_batch(batch)["model_output"]["log_probs"]
    return [each.cpu() for each in found.unbind()]


def weights_for_rollout(engine: Any) -> dict[str, Tensor]:
    """All weights, as verl sends them to a rollout engine, on the host."""
    weights, _ = engine.get_per_tensor_param()
    return {name: tensor.detach().cpu().clone() for name, tensor in weights}
