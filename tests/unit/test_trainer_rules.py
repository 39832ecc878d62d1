"""Parameter-group rules of the Trainer: Muon beside AdamW, however they are spelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightstep import ConfigError, Rule, Strategy
from tests.reference.tiny_llama import make_llama
from tests.unit.test_transformers_trainer import on_the_cpu, trainer_of  # noqa: F401

MAPPINGS: list[dict[str, Any]] = [
    {"kinds": "hidden_matrices", "name": "Muon", "lr": 0.02, "arguments": {"momentum": 0.9}},
    {"kinds": ["norms", "biases"], "weight_decay": 0.0},
    {"kinds": "rest", "lr": "1e-3"},  # as YAML reads it
]
RULES = [
    Rule(torch.optim.Muon, kinds="hidden_matrices", lr=0.02, momentum=0.9),
    Rule(torch.optim.AdamW, kinds=["norms", "biases"], weight_decay=0.0),
    Rule(torch.optim.AdamW, kinds="rest", lr=1e-3),
]
VALUES = {"clipping": {"max_norm": 0.5}}
MINIMAL = [{"kinds": "hidden_matrices", "name": "Muon", "lr": 0.02}, {"kinds": "rest"}]


def make(folder: Path, *, seed: int = 0, options: Any = None, **arguments: Any) -> Any:
    values = VALUES | {"optimizer_state": {"backend": "stream"}}
    given = {"adam_beta2": 0.95, **arguments}
    return trainer_of(folder, values, options=options, model=make_llama(seed), **given)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_rules_train_as_those_of_the_strategy(tmp_path: Path) -> None:
    """However they are spelled. What they leave out is the Trainer's: 3e-3, a decay of 0.1, betas of 0.9 and 0.95."""
    strategy, model = Strategy.load(VALUES | {"optimizer_state": {"backend": "stream"}}), make_llama()
    own = {"betas": (0.9, 0.95), "eps": 1e-8}
    full = [
        RULES[0],
        Rule(torch.optim.AdamW, kinds=["norms", "biases"], lr=3e-3, weight_decay=0.0, **own),
        Rule(torch.optim.AdamW, kinds="rest", lr=1e-3, weight_decay=0.1, **own),
    ]
    optimizers = (strategy.create_optimizer(model, rules=full), None)
    expected = trainer_of(tmp_path, strategy, options={"optimizers": optimizers}, model=model, max_steps=2)
    expected.train()

    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"rules": MAPPINGS}))
    spellings: list[dict[str, Any]] = [{"options": {"rules": rules}} for rules in (MAPPINGS, RULES)]
    for spelling in (*spellings, {"optim_args": f"rules={file}"}):
        found = make(tmp_path, max_steps=2, **spelling)
        found.train()
        torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=0)
        groups = found.optimizer.param_groups
        assert [group["initial_lr"] for group in groups] == [0.02, 3e-3, 1e-3]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1]  # Muon's own, torch's
        assert [group["optimizer_class"] for group in groups] == ["torch.optim.Muon", *["torch.optim.AdamW"] * 2]


def test_a_run_with_rules_is_continued(tmp_path: Path) -> None:
    """The log has the first rule's rate. A lowest rate is in proportion to learning_rate, for every rule."""
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 3e-4}, "warmup_steps": 1}
    options = {"rules": MINIMAL, "asynchronous_saves": True}
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **schedule}
    through = make(tmp_path, options=options, **steps)
    through.train()
    logged = [entry["learning_rate"] for entry in through.state.log_history if "grad_norm" in entry]
    assert logged[:2] == [0.0, 0.02] and logged[1] > logged[2] > logged[3]
    assert [group["lr"] for group in through.optimizer.param_groups] == pytest.approx([0.002, 3e-4])
    resumed = make(tmp_path, seed=1, options=options, **steps)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(weights(resumed), weights(through), rtol=0, atol=0)
    tested, expected = (one.optimizer.optimizer.state_dict() for one in (resumed, through))
    torch.testing.assert_close(tested["state"], expected["state"], rtol=0, atol=0)
    assert tested["param_groups"] == expected["param_groups"]
    assert resumed.lr_scheduler.get_last_lr() == through.lr_scheduler.get_last_lr()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"kind": "rest"}], r"rules\[0\] has 'kind'.*'kinds'.*; allowed: names, kinds"),
        ([{"kinds": "rest", "name": "Muno"}], r"rules\[0\].name is 'Muno'.*Muon"),
        ([{"kinds": "rest", "lr": "much"}], r"rules\[0\]: could not convert string to float: 'much'"),
        ([{"kinds": "rest", "arguments": {"beta": 1}}], r"rules\[0\]: .*AdamW has no 'beta'"),
        (["rest"], r"rules\[0\] is 'rest'; a lightstep.Rule or a mapping"),
        (MINIMAL[:1], "is trained, and matches no rule"),
        ("- {kinds: rest}", "a.yaml holds a list; a mapping of keys is needed"),
        ("rules: {kinds: rest}", "a.yaml: one key is needed, rules, with a list"),
        ("optimizer: {rules: []}", "a.yaml: one key is needed, rules, with a list"),
        ("rules: [{kinds: rest, lr: 0.1, lr: 0.2}]", r"a\.yaml is not valid YAML: .*'lr' is there twice"),
    ],
    ids=str,
)
def test_rules_that_cannot_be_used(tmp_path: Path, rules: Any, message: str) -> None:
    """Or the text of a file with them."""
    if isinstance(rules, str):
        (tmp_path / "a.yaml").write_text(rules)
        rules = tmp_path / "a.yaml"
    with pytest.raises(ValueError, match=message):
        make(tmp_path, options={"rules": rules}).train()


def test_rules_that_are_given_twice_or_are_not_there(tmp_path: Path) -> None:
    for options, file, message in (
        ({"rules": MINIMAL}, "a.yaml", "given twice: as rules= and as optim_args='rules=a"),
        ({}, "missing.yaml", r"missing.yaml cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(tmp_path, options=options, optim_args=f"rules={file}").train()
    strategy, model = Strategy.load("resident"), make_llama()
    optimizers = (strategy.create_optimizer(model, lr=1e-3), None)
    with pytest.raises(ConfigError, match="both choose the optimizer"):
        trainer_of(tmp_path, strategy, options={"optimizers": optimizers, "rules": MINIMAL}, model=model)


def test_other_optim_args_still_count(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("rules: [{kinds: rest}]")
    trainer = make(tmp_path, optim="sgd", optim_args=f"momentum=0.5, rules={tmp_path / 'a.yaml'}", max_steps=1)
    trainer.train()
    (group,) = trainer.optimizer.param_groups
    assert (group["momentum"], group["weight_decay"], group["initial_lr"]) == (0.5, 0.1, 3e-3)
    assert trainer.args.optim_args.startswith("momentum=0.5")


def test_numbers_in_a_file_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In YAML 1.1, which PyYAML reads, ``1e-8`` is text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "rules: [{kinds: rest, lr: 1e-3, weight_decay: 1E-2, arguments: {eps: 1e-8, betas: [.9e0, 9.5e-1]}}]"
    (tmp_path / "rules.yaml").write_text(text)
    (group,) = make(tmp_path, options={"rules": "~/rules.yaml"}).create_optimizer().param_groups
    assert (group["lr"], group["weight_decay"], group["eps"], group["betas"]) == (1e-3, 1e-2, 1e-8, [0.9, 0.95])
