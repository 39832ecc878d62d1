"""verl's engine on a strategy, compared with its own FSDP2 engine. ``make test-verl`` installs verl and runs this."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightstep import ConfigError
from tests.distributed.ranks import Pool, on_ranks
from tests.verl_engines import (
    HAS_VERL,
    import_verl,
    log_probs,
    make_batch,
    make_engine,
    save_model,
    train,
    weights_for_rollout,
)

pytestmark = pytest.mark.skipif(not HAS_VERL, reason="verl is not installed: make test-verl")

LENGTHS = [5, 9, 7, 12]
DOCS = Path(__file__).parents[2] / "docs" / "reinforcement-learning.md"


def batches(rank: int, count: int, first: int = 0) -> list[Any]:
    return [make_batch(100 * rank + number, LENGTHS, micro_batch=2) for number in range(first, first + count)]


def trained(backend: str, folder: Path, rank: int, steps: int = 4, **settings: Any) -> tuple[Any, ...]:
    """Losses and norms of updates between rollouts, the weights for rollout, and log-probabilities after it all.

    With torch's fused AdamW, which lightstep runs anyway: torch's default rounds otherwise.
    """
    engine = make_engine(backend, folder, override_optimizer_config={"fused": True}, **settings)
    results = []
    for batch in batches(rank, steps):
        results += train(engine, batch)
        weights = weights_for_rollout(engine)
    return results, weights, log_probs(engine, make_batch(7, LENGTHS))


def check_equal(rank: int, folder: Path, lightstep: Any, **settings: Any) -> None:
    import_verl()
    own = {key: value for key, value in settings.items() if key != "overrides"}
    expected, expected_weights, expected_probs = trained("fsdp2", folder, rank, **own)
    found, weights, probs = trained("lightstep", folder, rank, lightstep=lightstep, **settings)
    assert found == expected
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected_weights[name].to(tensor.dtype)), name
    assert all(map(torch.equal, probs, expected_probs))


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.mark.parametrize(
    ("ranks", "lightstep", "settings"),
    [
        (1, "fsdp2", {"optimizer_offload": True, "param_offload": True}),
        (2, "fsdp2-fp32", {}),
        (2, "fsdp2", {"optimizer_offload": True, "param_offload": True}),
        (2, "fsdp2-stream", {"optimizer_offload": True, "clip_grad": 0.5}),
        (2, "fsdp2", {"overrides": {"optimizer_state.update": "next_forward"}}),
        (2, "fsdp2-stream-overlap", {"use_no_sync_for_gradient_accumulation": False}),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_the_same_losses_and_weights_as_with_verls_engine(
    pool: Pool, folder: Path, ranks: int, lightstep: str, settings: dict[str, Any]
) -> None:
    pool.run(check_equal, ranks, cpu=True, folder=folder, lightstep=lightstep, **settings)


def check_resumed(rank: int, folder: Path, target: Path) -> None:
    """And the folder for rollout or evaluation has the trained weights."""
    from transformers import AutoModelForCausalLM

    import_verl()
    engine = make_engine("lightstep", folder, lightstep="fsdp2-stream", optimizer_offload=True)
    train(engine, *batches(rank, 2))
    engine.save_checkpoint(str(target / "global_step_2"), global_step=2, max_ckpt_to_keep=1)
    weights = weights_for_rollout(engine)
    expected = train(engine, *batches(rank, 2, first=2)), weights_for_rollout(engine)
    other = make_engine("lightstep", folder, lightstep="fsdp2-stream", optimizer_offload=True)
    other.load_checkpoint(str(target / "global_step_2"))
    assert train(other, *batches(rank, 2, first=2)) == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in weights_for_rollout(other).items())
    exported = AutoModelForCausalLM.from_pretrained(target / "global_step_2" / "huggingface").state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())
    engine.save_checkpoint(str(target / "global_step_4"), global_step=4, max_ckpt_to_keep=1)
    torch.distributed.barrier()
    assert [path.name for path in target.iterdir()] == ["global_step_4"]


def test_checkpoints_go_on_where_they_were_saved(pool: Pool, folder: Path, tmp_path: Path) -> None:
    pool.run(check_resumed, 2, cpu=True, folder=folder, target=tmp_path)


@on_ranks(2, cpu=True)
def test_a_reference_has_no_optimizer(rank: int, folder: Path) -> None:
    import_verl()
    settings = {"forward_only": True}
    own, ours = make_engine("lightstep", folder, **settings), make_engine("lightstep", folder)
    batch = make_batch(rank, LENGTHS)
    assert own.optimizer is None and all(map(torch.equal, log_probs(own, batch), log_probs(ours, batch)))


IN_A_WORKER = """
from tests.verl_engines import import_verl
import_verl()
from pathlib import Path
import sys
import verl
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry
with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
    settings = compose("ppo_trainer", overrides=sys.argv[1:]).actor_rollout_ref
omega_conf_to_dataclass(settings.model)
print("before the actor:", EngineRegistry.get_engine_cls("language_model", settings.ref.strategy).__name__)
print(omega_conf_to_dataclass(settings.actor).engine.lightstep)
"""


def test_the_engine_is_known_when_verls_worker_builds_a_reference(folder: Path) -> None:
    """The worker reads the settings of the model, then those of the reference, then those of the actor."""
    command = re.search(r"verl\.trainer\.main_ppo \\\n(.*?) \.\.\.", DOCS.read_text(), re.DOTALL)
    assert command is not None
    documented = command[1].replace("\\\n", "").split()
    others = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.actor.use_kl_loss=True"]
    others += [f"actor_rollout_ref.model.path={folder}", "+actor_rollout_ref.model.load_tokenizer=False"]
    started = subprocess.run(
        [sys.executable, "-c", IN_A_WORKER, *documented, *others], capture_output=True, text=True, check=False
    )
    assert started.stdout.splitlines() == ["before the actor: LightstepEngine", "fsdp2-stream"], started.stderr


@on_ranks(1, cpu=True)
def test_adapters(rank: int, folder: Path) -> None:
    """Only the adapters are trained, and merged weights are sent."""
    import_verl()
    settings: dict[str, Any] = {"model": {"lora_rank": 4, "lora": {"merge": True}}}
    torch.manual_seed(0)
    expected, expected_weights, _ = trained("fsdp2", folder, rank, **settings)
    torch.manual_seed(0)
    found, weights, _ = trained("lightstep", folder, rank, lightstep="fsdp2-fp32", **settings)
    assert found == expected
    assert all(torch.equal(tensor, weights[name]) for name, tensor in expected_weights.items())


@on_ranks(2, cpu=True)
def test_a_loss_scale(rank: int, folder: Path) -> None:
    """Backward is the optimizer's. A step that is not finite changes nothing; others do."""
    import_verl()
    for scale, trains in (({"kind": "constant", "scale": 2.0**40}, False), ({"kind": "constant", "scale": 64.0}, True)):
        scaled = {"precision.parameters": "float16", "precision.loss_scale": scale}
        engine = make_engine("lightstep", folder, overrides=scaled)
        before = weights_for_rollout(engine)
        (_, norm), *_ = train(engine, *batches(rank, 2))
        assert math.isfinite(norm) == trains
        assert (
            any(not torch.equal(tensor, before[name]) for name, tensor in weights_for_rollout(engine).items()) == trains
        )


@on_ranks(1, cpu=True)
def test_refusals(folder: Path) -> None:
    import_verl()
    with pytest.raises(ConfigError, match=r"needs 'fsdp2'"):
        make_engine("lightstep", folder, lightstep="stream")
    with pytest.raises(ConfigError, match=r"offload_policy is set"):
        make_engine("lightstep", folder, offload_policy=True)
    with pytest.raises(ConfigError, match=r"enable_activation_offload is set"):
        make_engine("lightstep", folder, model={"enable_activation_offload": True})
