"""What TRL does around the Trainer's loop, with the same calls: a reference model that follows, weights for vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback


class WeightsForVLLM:
    """``VLLMGeneration._iter_named_params`` with the ``DistributedBackend`` that it asks."""

    def __init__(self, model: nn.Module, accelerator: Any) -> None:
        self.model = model
        plugin = None if accelerator.state.deepspeed_plugin else getattr(accelerator.state, "fsdp_plugin", None)
        self.fsdp_version = getattr(plugin, "fsdp_version", None)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor() if self.fsdp_version == 2 else parameter.data  # type: ignore[operator]


class SyncReference(TrainerCallback):
    """``SyncRefModelCallback``: in every step the reference becomes the mean of itself and the model."""

    def __init__(self, reference: nn.Module, accelerator: Any) -> None:
        self.reference, self.accelerator = reference, accelerator

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self.accelerator.unwrap_model(kwargs["model"])
        for target, source in zip(self.reference.parameters(), model.parameters(), strict=True):
            target.data.mul_(0.5).add_(source.data, alpha=0.5)


class PublishWeights(TrainerCallback):
    """What vLLM would be given at the end of each step."""

    def __init__(self, weights: WeightsForVLLM) -> None:
        self.weights, self.published = weights, list[dict[str, Tensor]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.published.append({name: tensor.detach().clone() for name, tensor in self.weights})


class ReferenceTrainer(Trainer):
    """``DPOTrainer`` in what concerns its reference model, and the weights of ``GRPOTrainer``."""

    def __init__(self, model: Any, args: Any, reference: nn.Module, **kwargs: Any) -> None:
        super().__init__(model=model, args=args, **kwargs)
        self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.published = PublishWeights(WeightsForVLLM(self.model, self.accelerator))
        self.add_callback(SyncReference(self.reference, self.accelerator))
        self.add_callback(self.published)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            expected = self.reference(**inputs).logits.float()
        logits = model(**inputs).logits.float()
        return (logits - expected).square().mean() + nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )
