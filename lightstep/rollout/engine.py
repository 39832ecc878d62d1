"""What generates: the receiving end of published weights. Built in is a transformers model's own ``generate``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.rollout.transport import Bucket, WeightInfo, WeightTransferError, refuse_mismatch
from lightstep.sharding.model_names import named_tensors, unwrap_model


class RolloutEngine(ABC):
    """Something that generates with weights that are sent to it.

    Whatever can load a stream of ``(name, tensor)`` pairs becomes one by :attr:`device` and :meth:`load_weights`.

    Attributes:
        version: of the complete set of weights that it generates with; ``None`` before the first one.
    """

    version: int | None = None
    _broken: str | None = None
    _coming: int = 0
    _names: Mapping[str, WeightInfo] | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where :meth:`load_weights` is best given its tensors."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over some tensors of a set; called for one bucket after the other.

        Args:
            weights: names as the trained model has them, and whole tensors; valid until this returns.
        """

    def finish_loading(self) -> None:  # noqa: B027  (most have nothing to do)
        """The set is complete. For caches that were computed with the old weights."""

    def expects(self) -> Sequence[WeightInfo] | None:
        """The tensors that a set has to consist of; ``None``: whatever is sent, the engine checks for itself."""
        return None

    @property
    def complete(self) -> bool:
        """Whether all weights are of one version."""
        return self._broken is None

    def check_complete(self) -> None:
        """Raise if the last set broke off half-way. To be called before anything is generated.

        Raises:
            WeightTransferError: some weights are of one version and some of another.
        """
        if self._broken is not None:
            raise WeightTransferError(
                f"this engine holds half of a set of weights ({self._broken}); receive a complete one before generating"
            )

    def begin_set(self, version: int, infos: Sequence[WeightInfo]) -> None:
        """A set of these tensors is offered; nothing is written yet.

        Raises:
            ValueError: the engine :meth:`expects` others.
        """
        expected = self.expects()
        if expected is not None:
            refuse_mismatch(infos, expected)
        self._names = None if expected is None else {name: info for info in expected for name in info.names}
        self._coming = version

    def take(self, bucket: Bucket) -> None:
        """Load one bucket. From the first one on the engine is incomplete, until :meth:`end_set`."""
        self._broken = f"version {self._coming} broke off"
        self.load_weights((name, tensor) for info, tensor in bucket for name in self._called(info))

    def _called(self, info: WeightInfo) -> Sequence[str]:
        """The names under which a tensor is handed over: one for each tensor that it fills."""
        if self._names is None:
            return [info.name]
        return list({self._names[name]: name for name in reversed(info.names) if name in self._names}.values())

    def end_set(self) -> None:
        """All buckets are loaded."""
        self.finish_loading()
        self._broken, self.version = None, self._coming


class TransformersEngine(RolloutEngine):
    """``generate`` of a transformers model; any module that is only called will do too.

    The model itself refuses to be called while it holds half of a set.

    Args:
        model: what ``strategy.prepare_model(factory, role="rollout")`` returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._targets = {name: named.tensor for named in named_tensors(model) for name in named.names}
        unwrap_model(model).register_forward_pre_hook(lambda *_: self.check_complete())

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self._targets.values()), torch.device("cpu"))

    def expects(self) -> Sequence[WeightInfo]:
        return [WeightInfo.of(named) for named in named_tensors(self.model)]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._targets[name].copy_(tensor)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``generate``.

        Raises:
            WeightTransferError: the last set of weights broke off half-way.
        """
        self.check_complete()
        return unwrap_model(self.model).generate(*args, **kwargs)  # type: ignore[operator]
