"""``lightstep params``: the optimizer class and settings of each parameter."""

from __future__ import annotations

from lightstep.optimizer.param_table import param_table
from lightstep.strategy import Strategy
from lightstep.trainer.config import TrainConfig
from lightstep.trainer.model import load_tokenizer, make_model, model_config
from lightstep.trainer.optimization import make_optimizer


def describe_params(config: TrainConfig) -> str:
    """The parameter groups of a training file. No weights are loaded.

    Raises:
        ConfigError: as ``lightstep train`` would.
    """
    tokenizer = load_tokenizer(config.model)
    model = make_model(config.model, model_config(config.model, tokenizer, config.batch.length), meta=True)
    with Strategy.load("fp32") as strategy:
        return param_table(model, make_optimizer(strategy, model, config.optimizer))
