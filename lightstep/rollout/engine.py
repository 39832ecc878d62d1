"""Rollout engines, which generate with published weights; one of them for transformers models is built in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.rollout.transport import Bucket, WeightInfo, WeightTransferError, refuse_mismatch
from lightstep.sharding.model_names import named_tensors, unwrap_model


class RolloutEngine(ABC):
    """Generates with weights that are sent to it.

    A subclass needs :attr:`device` and :meth:`load_weights`, which loads ``(name, tensor)`` pairs.

    Attributes:
        version: the version of the last complete set of weights; ``None`` before the first one.
    """

    version: int | None = None
    _incomplete: str | None = None
    """Why the weights are not all of one version; ``None`` if they are."""
    _loading_version: int = 0
    _expected: Mapping[str, WeightInfo] | None = None
    """By name; ``None`` if the engine checks for itself."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which :meth:`load_weights` should get its tensors."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors of a set. Called for one bucket after the other.

        Args:
            weights: the trained model's names, and whole tensors. The tensors are valid until this returns.
        """

    def finish_loading(self) -> None:  # noqa: B027  (most engines have nothing to do)
        """Called when a set is complete, for example to drop caches that were computed with the old weights."""

    def expects(self) -> Sequence[WeightInfo] | None:
        """The tensors that a set must consist of; ``None`` if the engine checks for itself."""
        return None

    @property
    def complete(self) -> bool:
        """Whether all weights are of one version."""
        return self._incomplete is None

    def check_complete(self) -> None:
        """Check that the last transfer was completed. Call this before generating.

        Raises:
            WeightTransferError: some weights are of one version and some of another.
        """
        if self._incomplete is not None:
            raise WeightTransferError(
                f"this engine holds half of a set of weights ({self._incomplete}); receive a complete one before "
                "generating"
            )

    def begin_set(self, version: int, infos: Sequence[WeightInfo]) -> None:
        """Prepare to load a set of these tensors. Nothing is written yet.

        Raises:
            ValueError: the engine :meth:`expects` other tensors.
        """
        expected = self.expects()
        if expected is not None:
            refuse_mismatch(infos, expected)
        self._expected = None if expected is None else {name: info for info in expected for name in info.names}
        self._loading_version = version

    def load_bucket(self, bucket: Bucket) -> None:
        """Load one bucket. From the first one until :meth:`end_set` the engine is incomplete."""
        self._incomplete = f"version {self._loading_version} was not completed"
        self.load_weights((name, tensor) for info, tensor in bucket for name in self._target_names(info))

    def _target_names(self, info: WeightInfo) -> Sequence[str]:
        """The names under which a published tensor is loaded: one for each of the engine's tensors that it fills."""
        if self._expected is None:
            return [info.name]
        return list({self._expected[name]: name for name in reversed(info.names) if name in self._expected}.values())

    def end_set(self) -> None:
        """Finish the set. All buckets have been loaded."""
        self.finish_loading()
        self._incomplete, self.version = None, self._loading_version


class TransformersEngine(RolloutEngine):
    """Generates with a transformers model's ``generate``. Any module that is only called works too.

    The model raises if it is called while its weights are incomplete.

    Args:
        model: what ``strategy.prepare_model(factory, role="rollout")`` returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.expects()
        unwrap_model(model).register_forward_pre_hook(lambda *_: self.check_complete())

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in unwrap_model(self.model).state_dict().values()), torch.device("cpu"))

    def expects(self) -> Sequence[WeightInfo]:
        """The model's tensors. It may have exchanged them since the last set (``load_state_dict(assign=True)``)."""
        tensors = named_tensors(self.model)
        self._targets: dict[str, Tensor] = {name: named.tensor for named in tensors for name in named.names}
        return [WeightInfo.of(named) for named in tensors]

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._targets[name].copy_(tensor)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``generate``.

        Raises:
            WeightTransferError: the last transfer of weights was not completed.
        """
        self.check_complete()
        return unwrap_model(self.model).generate(*args, **kwargs)  # type: ignore[operator]
