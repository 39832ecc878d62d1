"""``torch.set_default_dtype`` and ``torch.set_default_device`` are the user's, and change nothing here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightstep
from lightstep.precision.split import probe_masters
from tests.covering import every_value
from tests.reference.lion import Lion
from tests.reference.pair import DTYPES, EVERY_TIME, IN_BACKWARD


@contextlib.contextmanager
def default(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Tensors are made in this dtype and on this device, unless somebody says otherwise."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


PLAIN, OTHERS = (torch.float32, "cpu"), [(torch.float64, "meta"), (torch.bfloat16, "meta")]


def run(
    what: tuple[torch.dtype, str], kind: str, parameters: str, optimizer_class: type[torch.optim.Optimizer]
) -> list[Tensor]:
    """Weights and state after training, releasing, saving and resuming under these defaults."""
    torch.manual_seed(0)
    scale = {"kind": "constant", "scale": 256.0} if parameters == "float16" else "none"
    strategy = lightstep.Strategy.load(
        {
            "precision": {"parameters": parameters, "loss_scale": scale},
            "clipping": {"max_norm": 0.1, "scope": "unit"},
            "optimizer_state": {**EVERY_TIME, **IN_BACKWARD}[kind],
        }
    )
    model = strategy.prepare_model(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)))
    batches = torch.randn(6, 5, 6).to(model[0].weight.dtype)

    def train(optimizer: Any, *numbers: int) -> None:
        for number in numbers:
            optimizer.backward(model(batches[number]).float().square().mean())
            assert optimizer.step()

    with default(*what):
        first = strategy.create_optimizer(model, optimizer_class, lr=1e-2)
        train(first, 0, 1)
        first.release_device_memory()
        train(first, 2)
        saved = first.state_dict()
        first.close()
        second = strategy.create_optimizer(model, optimizer_class, lr=1e-2)
        second.load_state_dict(saved)
        train(second, 3, 4)
        second.synchronize()
        entries = [value for state in second.state.values() for value in state.values()]
    return [*model.state_dict().values(), *(value for value in entries if isinstance(value, Tensor))]


@every_value(
    what=OTHERS, kind=[*EVERY_TIME, *IN_BACKWARD], parameters=DTYPES, optimizer_class=[torch.optim.AdamW, Lion]
)
def test_defaults_of_torch_change_no_bit(what: Any, kind: str, parameters: str, optimizer_class: Any) -> None:
    """A tensor that is made without a dtype or a device shows under either of these."""
    expected, found = (run(one, kind, parameters, optimizer_class) for one in (PLAIN, what))
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("what", OTHERS)
def test_kernels_are_tried_out_with_the_same_numbers(what: tuple[torch.dtype, str]) -> None:
    expected = probe_masters(torch.device("cpu")).view(torch.int32)
    with default(*what):
        found = probe_masters(torch.device("cpu")).view(torch.int32)
    assert torch.equal(found, expected)
