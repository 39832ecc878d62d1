"""Masters follow the model: what a user writes into the weights is adopted, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.covering import every_pair, every_value
from tests.reference.pair import BACKENDS, DTYPES, TWO_GROUPS, Pair, same, scale_for


def by_load_state_dict(model: nn.Module, name: str, new: Tensor) -> None:
    model.load_state_dict({name: new}, strict=False)


def by_copy(model: nn.Module, name: str, new: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter(name).copy_(new)


def by_data_copy(model: nn.Module, name: str, new: Tensor) -> None:
    model.get_parameter(name).data.copy_(new)


def by_data_swap(model: nn.Module, name: str, new: Tensor) -> None:
    model.get_parameter(name).data = new.clone()


EDITS = [by_load_state_dict, by_copy, by_data_copy, by_data_swap]
LOW = ["bfloat16", "float16"]

backends = pytest.mark.parametrize("backend", list(BACKENDS))


def build(parameters: str, backend: str, name: str = "AdamW") -> Pair:
    return Pair(
        *TWO_GROUPS[name],
        parameters=parameters,
        backend=backend,
        micro_batches=2,
        max_norm=0.35,
        late_from=3,
        **scale_for(parameters),
    )


def edit_both(pair: Pair, name: str, edit: Callable[[nn.Module, str, Tensor], None]) -> None:
    """Give ``name`` new values, all of them different, in both models; the reference adopts them."""
    old = pair.model.get_parameter(name).detach()
    new = (old * -1.5 + 0.3).clone()
    assert bool((new != old).all())
    expected = pair.reference_model.get_parameter(name)
    edit(pair.model, name, new)
    expected.data.copy_(new)
    pair.reference.adopt(expected)
    assert torch.equal(pair.model.get_parameter(name), new)


SOME = [["hidden.weight"], ["dead.weight", "frozen.weight", "late.weight"], []]


@every_pair(names=SOME, before=[0, 2, 5], edit=EDITS, parameters=DTYPES, backend=BACKENDS)
def test_an_edit_is_adopted(
    names: list[str],
    before: int,
    edit: Callable[[nn.Module, str, Tensor], None],
    parameters: str,
    backend: str,
) -> None:
    """Of one parameter, of layers without gradients, or of the whole model: the masters of these start again, their
    moments and every other master go on untouched."""
    pair = build(parameters, backend)
    pair.train(before)
    for name in names or dict(pair.model.named_parameters()):
        edit_both(pair, name, edit)
    pair.train(4)
    edit_both(pair, "gain", edit)
    pair.train(2)


@every_value(parameters=LOW, backend=BACKENDS)
def test_one_edited_row_is_never_reverted(parameters: str, backend: str) -> None:
    """A row is zeroed, as for a padding token; a step with zero gradient and no decay leaves it exactly there."""
    pair = build(parameters, backend, "SGD-momentum")
    for group in pair.optimizer.param_groups:
        group.update(weight_decay=0.0, momentum=0.0, nesterov=False)
    pair.optimizer.backward(pair.model.embed.weight.float().square().sum())
    pair.optimizer.step()
    with torch.no_grad():
        pair.model.embed.weight[3] = 0.0
    edited = pair.model.embed.weight.detach().clone()
    for _ in range(3):
        pair.model.embed.weight.grad = torch.zeros_like(pair.model.embed.weight)
        pair.optimizer.step()
    assert torch.equal(pair.model.embed.weight, edited)


@every_value(parameters=LOW, backend=BACKENDS)
def test_loading_the_weights_that_are_there_loses_no_digits(parameters: str, backend: str) -> None:
    pair = build(parameters, backend)
    pair.train(5)
    pair.model.load_state_dict({name: value.clone() for name, value in pair.model.state_dict().items()})
    pair.train(5)


@every_value(parameters=LOW, backend=BACKENDS)
def test_a_skipped_step_keeps_an_edit(parameters: str, backend: str) -> None:
    pair = build(parameters, backend)
    pair.overflow_at = frozenset({5})
    pair.train(5)
    edit_both(pair, "hidden.weight", by_copy)
    pair.train(4)
    assert pair.reference.skipped_steps == 1


@every_value(parameters=LOW, backend=BACKENDS)
def test_refresh_rebuilds_every_master_from_the_model(parameters: str, backend: str) -> None:
    pair = build(parameters, backend)
    pair.train(5)
    rounded = 0
    for _, tested, expected in pair.named():
        if not tested.requires_grad or not pair.reference.state(expected):
            continue
        rounded += int(not torch.equal(pair.optimizer.state[tested]["master"].to(tested.device), tested.float()))
        pair.reference.adopt(expected)
    assert rounded >= 5, "the masters held digits that the weights do not"
    pair.optimizer.refresh_master_weights()
    for name, tested, expected in pair.named():
        if pair.reference.state(expected):
            same(name, pair.optimizer.state[tested]["master"], tested.detach().float())
    pair.train(5)


@backends
def test_fp32_parameters_are_their_own_masters(backend: str) -> None:
    pair = build("float32", backend)
    pair.train(2)
    assert all("master" not in pair.optimizer.state[p] for p in pair.model.parameters() if p in pair.optimizer.state)
    pair.optimizer.refresh_master_weights()
    pair.train(2)


@backends
def test_updates_smaller_than_a_bf16_digit_add_up(backend: str) -> None:
    """Why masters exist: 100 steps of 2^-15 move a bf16 weight of 1 by 0.003; without masters it would not move."""
    pair = build("bfloat16", backend, "SGD-momentum")
    for group in pair.optimizer.param_groups:
        group.update(lr=2.0**-13, weight_decay=0.0, momentum=0.0, nesterov=False)
    gain = pair.model.gain
    with torch.no_grad():
        gain.fill_(1.0)
    for _ in range(100):
        gain.grad = torch.full_like(gain, 0.25)
        pair.optimizer.step()
    assert gain.item() == float(torch.tensor(1 - 100 * 2.0**-15).bfloat16())
