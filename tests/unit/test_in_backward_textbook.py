"""Updates in backward, and layers that are clipped by their own norms at any time, against the textbook loop."""

from __future__ import annotations

from typing import Any

import pytest

from lightstep.state import units as units_module
from tests.covering import every_pair, every_value
from tests.reference.lion import Lion
from tests.reference.pair import BACKENDS, DTYPES, EVERY_TIME, IN_BACKWARD, TWO_GROUPS, Pair

OVERFLOWS = (3, 6)
CONSTANT = {"kind": "constant", "scale": 256.0}

kinds = pytest.mark.parametrize("kind", list(IN_BACKWARD))


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tiny tensors as large ones are cut."""
    monkeypatch.setattr(units_module, "CUT_ELEMENTS", 64)


def scale_for(parameters: str) -> Any:
    return CONSTANT if parameters == "float16" else "none"


@every_pair(name=TWO_GROUPS, parameters=DTYPES, kind=IN_BACKWARD, micro_batches=[1, 3], max_norm=[0.1, None])
def test_equal_to_the_textbook_loop(
    name: str, parameters: str, kind: str, micro_batches: int, max_norm: float | None
) -> None:
    """Every layer is there: always used, used now and then, late, frozen, dead; one of them overflows now and then."""
    pair = Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=kind,
        micro_batches=micro_batches,
        max_norm=max_norm,
        scope="unit",
        overflow_at=OVERFLOWS,
        late_from=5,
        intermittent=True,
        loss_scale=scale_for(parameters),
    )
    pair.train(8)
    assert pair.reference.skipped_steps == len(OVERFLOWS)
    assert max_norm is None or pair.reference.clipped_steps > 2
    pair.resume()
    pair.check()
    pair.train(5)


@pytest.mark.parametrize(("scale", "max_norm"), [(256.0, 0.1), (1000.0, None)])
@every_pair(parameters=DTYPES, kind=IN_BACKWARD)
def test_constant_loss_scales(scale: float, max_norm: float | None, parameters: str, kind: str) -> None:
    """Under a scale that is no power of two the last bit of a layer's norm is the order of its additions."""
    pair = Pair(
        *TWO_GROUPS["AdamW"],
        parameters=parameters,
        backend=kind,
        micro_batches=2,
        max_norm=max_norm,
        scope="unit",
        overflow_at=OVERFLOWS,
        loss_scale={"kind": "constant", "scale": scale},
    )
    pair.train(9)


@kinds
@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
def test_a_first_update_that_overflows_makes_no_state(parameters: str, kind: str) -> None:
    pair = Pair(*TWO_GROUPS["AdamW"], parameters=parameters, backend=kind, overflow_at=(0, 1))
    pair.train(1)
    assert "exp_avg" not in pair.optimizer.state[pair.model.hidden.weight]
    assert "exp_avg" in pair.optimizer.state[pair.model.head.weight]
    pair.train(4)


@kinds
@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
def test_any_element_wise_optimizer(parameters: str, kind: str) -> None:
    pair = Pair(Lion, {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 3e-4}, parameters=parameters, backend=kind)
    pair.overflow_at = frozenset({2})
    pair.train(6)


@kinds
def test_gradients_added_in_the_parameters_dtype(kind: str) -> None:
    pair = Pair(*TWO_GROUPS["AdamW"], backend=kind, micro_batches=3, intermittent=True, reduce="parameters")
    pair.train(6)


@every_value(kind=EVERY_TIME, parameters=DTYPES)
def test_each_layer_is_clipped_by_its_own_norm_at_every_time(kind: str, parameters: str) -> None:
    pair = Pair(
        *TWO_GROUPS["AdamW"],
        parameters=parameters,
        backend=kind,
        micro_batches=2,
        max_norm=0.1,
        scope="unit",
        overflow_at=OVERFLOWS,
        intermittent=True,
        loss_scale=scale_for(parameters),
    )
    pair.train(9)
    assert pair.reference.clipped_steps > 2


@every_value(norm_type=[1.0, 3.0, float("inf")], kind=[*BACKENDS, *IN_BACKWARD])
def test_other_norms_of_each_layer(kind: str, norm_type: float) -> None:
    pair = Pair(*TWO_GROUPS["AdamW"], backend=kind, max_norm=0.05, norm_type=norm_type, scope="unit", overflow_at=(2,))
    pair.train(6)
    assert pair.reference.clipped_steps > 2
