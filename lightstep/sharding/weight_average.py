"""An exponential moving average of a model's weights, however and whenever they are updated.

torch's ``AveragedModel`` copies the model, which FSDP2 does not allow, and averages in the weights' dtype: in bf16 most
steps change nothing. The arithmetic here is torch's (:func:`torch.optim.swa_utils.get_ema_multi_avg_fn`), over fp32
averages that are sharded as the weights are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightstep.distributed import DTensor, like, local_tensor
from lightstep.sharding.engine_model import EngineModel
from lightstep.sharding.model_names import named_tensors, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

logger = logging.getLogger(__name__)


class WeightAverage:
    """Averages of the trainable weights: ``average = decay * average + (1 - decay) * weight`` at each :meth:`update`.

    They start as the present weights. A weight that is unfrozen later has none, which is logged. Checkpoints of the
    model hold them, except those of weights alone, and a load restores them. After a load from a checkpoint without
    averages they start as the weights in it.

    Args:
        model: what ``prepare_model`` returned. It has one average at a time.
        decay: between 0 and 1.

    Attributes:
        tensors: the averages by parameter name: fp32, DTensors if the parameters are. 4 bytes per element of this
            rank's shards, on their device.

    Raises:
        ValueError: another decay, no trainable weights, or weights that DeepSpeed's engine keeps.
        RuntimeError: from its methods: a parameter has been sharded, moved or given another shape since.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}; a number between 0 and 1 is needed, such as 0.999")
        if isinstance(model, EngineModel):
            raise ValueError("DeepSpeed's engine keeps these weights; averages need another kind of sharding")
        self.decay, self._model = decay, unwrap_model(model)
        self._record = PreparedModel.of(self._model)
        self._record.wait_for_updates()
        known = [named for named in named_tensors(model) if named.tensor.is_floating_point()]
        self._weights = {named.name: named.tensor for named in known if named.tensor.requires_grad}
        self._frozen = {named.name: named.tensor for named in known if not named.tensor.requires_grad}
        if not self._weights:
            raise ValueError(f"{type(self._model).__name__} has no trainable weights to average")
        modules = self._model.modules()
        holders = {id(weight): (module, key) for module in modules for key, weight in module._parameters.items()}
        self._holders = {name: holders[id(weight)] for name, weight in self._weights.items() if id(weight) in holders}
        self.tensors = {name: _fp32_copy(weight) for name, weight in self._weights.items()}
        self._update_average = get_ema_multi_avg_fn(decay)
        self._record.average = self

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's shard of each average and of its weight."""
        self._record.wait_for_updates()
        self._find_replaced()
        for name, weight in self._weights.items():
            yield local_tensor(self.tensors[name]), local_tensor(weight).detach()

    def _find_replaced(self) -> None:
        """Find parameters that ``load_state_dict(assign=True)`` has replaced. FSDP2's shards are left out: while they
        are gathered, the model holds other parameters in their place."""
        for name, (module, key) in self._holders.items():
            weight, now = self._weights[name], module._parameters.get(key)
            if now is weight or isinstance(weight, DTensor):
                continue
            if now is None or isinstance(now, DTensor) or now.shape != weight.shape or now.device != weight.device:
                raise RuntimeError(
                    f"{name} was replaced by another parameter after its average was made; make the WeightAverage "
                    "after prepare_model(), and a new one when the model's parameters change"
                )
            self._weights[name] = now

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights of the last step; waits for its deferred updates.

        Between a forward and its backward there is nothing to wait for.
        """
        self._warn_of_unfrozen()
        for average, weight in self._pairs():
            self._update_average([average], [weight.float()], None)

    def _warn_of_unfrozen(self) -> None:
        found = [name for name, weight in self._frozen.items() if weight.requires_grad]
        if found:
            logger.warning(
                "%d weights are trained since the averages were made, and have none (%s%s): evaluations and exports "
                "with averages use them as they are; make the WeightAverage before they are frozen",
                len(found),
                ", ".join(found[:3]),
                ", ..." if len(found) > 3 else "",
            )
        for name in found:
            del self._frozen[name]

    @torch.no_grad()
    def restart(self, names: Iterable[str] | None = None) -> None:
        """Set these averages (default: all) to the present weights."""
        chosen = self.tensors.keys() if names is None else set(names)
        for name, (average, weight) in zip(self.tensors, list(self._pairs()), strict=True):
            if name in chosen:
                average.copy_(weight)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In the body the model has the averages, rounded to its dtype; afterwards its own weights again, bit for bit.

        For evaluation and export, between steps. Meanwhile the weights are kept on their device.
        """
        pairs = list(self._pairs())
        kept = [weight.clone() for _, weight in pairs]
        try:
            self._write((weight, average) for average, weight in pairs)
            yield
        finally:
            self._write((weight, own) for (_, weight), own in zip(pairs, kept, strict=True))

    @torch.no_grad()
    def _write(self, weights: Iterable[tuple[Tensor, Tensor]]) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):  # a forward without backward leaves gathered weights in the root
                module.reshard()
        for weight, value in weights:
            weight.copy_(value)


def _fp32_copy(weight: Tensor) -> Tensor:
    local = local_tensor(weight).detach()
    return like(weight, torch.empty_like(local, dtype=torch.float32).copy_(local))
