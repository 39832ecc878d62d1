"""Real servers of vLLM and SGLang: ``make test-servers VLLM_PYTHON=... SGLANG_PYTHON=...``.

Each variable names an interpreter in whose environment the server is installed, and lightstep beside vLLM. A server
that is not named is left out. They run on CPUs, and start within a minute or two. ``VLLM_WORKERS=2``: so many
tensor-parallel ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightstep import SglangFolder, Strategy, WeightTransferError
from lightstep.rollout.publishing import PublishedWeights
from lightstep.rollout.server_calls import Pause
from tests.ports import free_port
from tests.rollout_faults import CLIENTS, Faults

pytestmark = pytest.mark.timeout(1800)

WORKERS = os.environ.get("VLLM_WORKERS", "1")
COUNT = int(os.environ.get("ROLLOUT_FAULTS", "5"))

PROMPT = [2, 3, 11, 4, 5, 12]
VLLM = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SGLANG = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}


class RealServer:
    """A process that serves the Llama in ``folder/model``.

    Args:
        options: of its command.
    """

    def __init__(self, kind: str, python: str, folder: Path, options: Sequence[str] = ()) -> None:
        self.kind, self._python, self._folder, self.port = kind, python, folder, free_port()
        self._options = options
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        model, log = self._folder / "model", (self._folder / f"{self.kind}.log").open("ab")
        if self.kind == "vllm":
            command = [self._python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", self.port]
            command += ["--served-model-name", "model", "--dtype", "bfloat16", "--max-model-len", 128]
            command += ["--tensor-parallel-size", WORKERS]
            command += ["--enforce-eager", "--weight-transfer-config", '{"backend": "lightstep"}']
        else:
            command = [self._python, "-m", "sglang.launch_server", "--model-path", model, "--port", self.port]
            command += ["--device", "cpu", "--max-total-tokens", 4096, "--mem-fraction-static", 0.05]
        command += self._options
        own = {**os.environ, **VLLM, **SGLANG, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            list(map(str, command)), env=own, stdout=log, stderr=log, start_new_session=True
        )
        for _ in range(1500):
            with contextlib.suppress(OSError):
                self.ask("/health")
                return
            assert self.process.poll() is None, (self._folder / f"{self.kind}.log").read_text()[-2000:]
            time.sleep(1)
        pytest.fail(f"{self.kind} did not start")

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def freeze(self, stopped: bool) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def ask(self, path: str, timeout: float = 60.0, **payload: Any) -> Any:
        body = json.dumps(payload).encode() if payload else None
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
        return json.loads(text) if text.strip().startswith(b"{") else None

    def checksums(self) -> dict[str, str]:
        """Of all weights, as the server has them."""
        if self.kind == "vllm":
            return dict(self.ask("/weight_checker", action="checksum")["checksums"])
        ranks = self.ask("/weights_checker", action="checksum")["ranks"]
        return {name: value for rank in ranks for name, value in rank["checksums"].items()}

    def answer(self) -> list[int] | None:
        """A greedy answer; ``None`` if the server is paused."""
        try:
            return self.tokens(timeout=8.0)
        except OSError:
            return None

    def tokens(self, timeout: float = 60.0, count: int = 8) -> list[int]:
        """A greedy answer."""
        if self.kind == "vllm":
            settings = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            return list(
                self.ask("/v1/completions", timeout, model="model", prompt=PROMPT, **settings)["choices"][0][
                    "token_ids"
                ]
            )
        settings = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        return list(self.ask("/generate", timeout, input_ids=PROMPT, sampling_params=settings)["output_ids"])


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    others = {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=0, eos_token_id=13, **sizes, **others))


@pytest.fixture(scope="module", params=["vllm", "sglang"], name="server")
def _server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    python = os.environ.get(f"{request.param.upper()}_PYTHON")
    if not python:
        pytest.skip(f"{request.param.upper()}_PYTHON names no interpreter")
    folder = tmp_path_factory.mktemp(request.param)
    make_model().bfloat16().save_pretrained(folder / "model")
    vocabulary = {"_": 0, **{f"<{number}>": number for number in range(1, 256)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="_", pad_token="_").save_pretrained(folder / "model")
    server = RealServer(request.param, python, folder)
    server.start()
    yield server
    server.kill()


class Training:
    def __init__(self, server: RealServer, **settings: Any) -> None:
        self.strategy = Strategy.load("stream", overrides={"roles.rollout": {"bucket_mib": 0.1}})
        self.model = self.strategy.prepare_model(make_model())
        self.optimizer = self.strategy.create_optimizer(self.model, lr=1e-2)
        self.servers = CLIENTS[server.kind](server.url, **settings)

    def step(self, lr: float = 1e-2) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        batch = torch.randint(1, 256, (4, 12))
        self.optimizer.backward(self.model(input_ids=batch, labels=batch).loss)
        self.optimizer.step()

    def publish(self, version: int | None = None) -> int:
        return self.strategy.publish_weights(self.model, to=self.servers, version=version)

    def report(self) -> PublishedWeights:
        """Of the last set."""
        report = self.strategy.wait_for_publication()
        assert report is not None
        return report


def test_what_is_published_is_what_the_server_would_load_from_disk(server: RealServer) -> None:
    """And coming back to these weights brings back all of their bits."""
    training, from_disk = Training(server), server.checksums()
    kept = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    others = []
    for _ in range(2):
        training.step()
        training.publish()
        others.append((server.checksums(), server.tokens()))
    assert from_disk != others[0][0] != others[1][0]
    training.model.load_state_dict(kept)
    assert training.publish() == 3
    assert server.checksums() == from_disk
    training.servers.close()


def test_deltas_leave_what_the_server_would_load_from_disk(server: RealServer) -> None:
    """A whole set, then deltas; the same bits as whole sets have; and to a restarted server a whole set."""
    if server.kind != "vllm":
        pytest.skip("SGLang loads whole tensors only")
    training, whole = Training(server, deltas=True), Training(server)
    sent = []
    for number in range(4):
        if number:
            training.step(lr=1e-4)
        training.publish()
        sent.append(training.report())
    assert sent[0].nbytes == sent[0].whole_nbytes
    assert all(0 < report.nbytes < report.whole_nbytes for report in sent[1:])
    by_deltas, tokens = server.checksums(), server.tokens()
    server.kill()
    server.start()
    assert server.checksums() != by_deltas
    training.publish()
    assert training.report().nbytes == training.report().whole_nbytes
    assert server.checksums() == by_deltas and server.tokens() == tokens
    training.servers.close()
    whole.model.load_state_dict(training.model.state_dict())
    whole.publish()
    assert server.checksums() == by_deltas
    whole.servers.close()


def test_a_folder_brings_what_a_process_group_brings(server: RealServer, tmp_path: Path) -> None:
    if server.kind != "sglang":
        pytest.skip("vLLM gets no sets by files")
    training = Training(server)
    training.step()
    training.publish()
    expected, tokens = server.checksums(), server.tokens()
    kept = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    folder = SglangFolder(server.url, tmp_path)
    training.step()
    training.strategy.publish_weights(training.model, to=folder)
    assert server.checksums() != expected
    training.model.load_state_dict(kept)
    training.strategy.publish_weights(training.model, to=folder)
    assert server.checksums() == expected and server.tokens() == tokens
    training.servers.close()


@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_requests_that_run_meanwhile_are_answered(server: RealServer, pause: Pause) -> None:
    """In full, unless they are aborted. Afterwards the answers are those of the new weights."""
    if pause not in CLIENTS[server.kind].protocol.pauses:
        pytest.skip(f"{server.kind} does not have {pause}")
    training, count = Training(server, pause=pause), 100

    def request() -> tuple[int, float]:
        return len(server.tokens(count=count)), time.monotonic()

    with ThreadPoolExecutor(4) as pool:
        training.publish()
        training.step()
        running = [pool.submit(request) for _ in range(4)]
        time.sleep(0.2)
        begin = time.monotonic()
        training.publish()
        lengths, ends = zip(*(each.result() for each in running), strict=True)
    assert max(ends) > begin, "nothing ran any more"
    assert set(lengths) == {count} or (pause == "abort" and max(lengths) <= count)
    tokens = server.tokens()
    training.publish()
    assert server.tokens() == tokens
    training.servers.close()


def test_another_model_is_refused_and_the_server_goes_on(server: RealServer) -> None:
    before, tokens = server.checksums(), server.tokens()
    training = Training(server)
    training.model.extra = torch.nn.Linear(4, 4)
    with pytest.raises(WeightTransferError, match=r"extra.weight is unknown"):
        training.publish()
    assert server.checksums() == before and server.tokens() == tokens
    training.servers.close()


@pytest.fixture(scope="module", name="faults")
def _faults(server: RealServer) -> Iterator[Faults]:
    server.kill()  # others have published, too
    server.start()
    faults = Faults(server, make_model, limit=30.0, short_limit=30.0, deltas=server.kind == "vllm")
    yield faults
    faults.close()


@pytest.mark.timeout(600 + 120 * COUNT)
@pytest.mark.parametrize(("kind", "count"), [("of_trainers", COUNT), ("of_servers", COUNT // 5), ("of_networks", 1)])
def test_never_is_half_a_set_served(faults: Faults, kind: str, count: int) -> None:
    """``ROLLOUT_FAULTS=50``: so many trainers are killed, and a fifth as many servers, which take long to start."""
    outcome = getattr(faults, kind)(count)
    sys.stdout.write(f"{kind}: {outcome}\n")
