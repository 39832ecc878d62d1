"""Weights on the host under the Trainer and Fabric, on a GPU: the bits of the same run with weights on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.test_host_weights_elsewhere import ARGUMENTS, TIMES, Run, nobody_moves_it, same, values

__all__ = ["nobody_moves_it"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_accelerate")]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_the_trainer(arguments: str, time: str, tmp_path: Path) -> None:
    runs = []
    for placement in ("device", "host"):
        preset = dict(values(placement, time))
        if "max_grad_norm" in ARGUMENTS[arguments]:
            preset.pop("clipping")
        given = {**ARGUMENTS[arguments], "use_cpu": False}
        run = Run(tmp_path / placement, preset, arguments=given, evaluates_first="bf16" in given)
        where = {parameter.device.type for parameter in run.trainer.model.parameters()}
        assert where == {"cpu" if placement == "host" else "cuda"}
        runs.append(run)
    same(
        {name: value.cpu() for name, value in runs[1].weights.items()}, {n: v.cpu() for n, v in runs[0].weights.items()}
    )
    assert (runs[1].logs, runs[1].first, runs[1].last) == (runs[0].logs, runs[0].first, runs[0].last)


def test_generation(tmp_path: Path) -> None:
    written = []
    for placement in ("device", "host"):
        run = Run(tmp_path / placement, values(placement), arguments={"use_cpu": False})
        model = run.trainer.model.eval()
        for device in ("cuda", str(model.device)):
            tokens = torch.arange(6, device=device)[None]
            found = model.generate(input_ids=tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)
            written.append(found.cpu())
    assert all(torch.equal(found, written[0]) for found in written)
