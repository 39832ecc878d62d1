"""Weights for servers of vLLM and SGLang, beside stand-ins that answer as those do."""

from __future__ import annotations

import multiprocessing
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from lightstep import SglangFolder, SglangServer, Strategy, VllmServer, WeightTransferError
from lightstep.rollout import roles
from lightstep.rollout.server_calls import Sglang, engine_names, refuse_other_names
from lightstep.rollout.servers import _in_thread
from lightstep.rollout.transport import WeightInfo
from tests.covering import every_value
from tests.python import python
from tests.rollout_servers import FakeServer, FakeSglang, FakeVllm, FakeVllmNccl, NcclOnCpu, Process, Refusal

KINDS: dict[str, tuple[type[FakeServer], Any]] = {
    "vllm": (FakeVllm, VllmServer),
    "vllm-nccl": (FakeVllmNccl, NcclOnCpu),
    "sglang": (FakeSglang, SglangServer),
    "sglang-folder": (FakeSglang, SglangFolder),
}
IN_GROUP = [kind for kind in KINDS if kind != "sglang-folder"]
both = pytest.mark.parametrize("kind", KINDS)


def make_model() -> nn.Module:
    """Sizes that are no multiples of 16 bytes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 11), nn.Linear(11, 3))


class Training:
    """A trained model, and servers with other weights."""

    def __init__(
        self, kind: str, servers: int = 1, timeout_s: float = 10.0, model: nn.Module | None = None, **settings: Any
    ) -> None:
        fake, transport = KINDS[kind]
        rollout = {"bucket_mib": 0.0005, "parameters": "bfloat16", **settings.pop("rollout", {})}
        self.strategy = Strategy.load("resident", overrides={"roles.rollout": rollout})
        self.model: Any = self.strategy.prepare_model(model or make_model())
        self.optimizer = self.strategy.create_optimizer(self.model, lr=1e-2)
        self.initial = {name: torch.zeros_like(tensor) for name, tensor in self.weights().items()}
        workers = settings.pop("workers", 1)
        self.folder = Path(tempfile.mkdtemp())
        if kind == "sglang-folder":
            settings["folder"] = self.folder
        self.fakes = [fake(self.initial, timeout_s, workers) for _ in range(servers)]
        self.servers = transport([each.url for each in self.fakes], timeout_s=timeout_s, **settings)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().bfloat16().clone() for name, tensor in self.model.named_parameters()}

    def step(self) -> None:
        self.optimizer.backward(self.model(torch.randn(4, 7).bfloat16()).float().square().mean())
        self.optimizer.step()

    def publish(self) -> int:
        return self.strategy.publish_weights(self.model, to=self.servers)

    def serves(self, version: str) -> bool:
        """Whether all servers generate, with the trained weights."""
        expected = self.weights()
        return all(
            each.version == version
            and not (each.paused or each.updating)
            and all(torch.equal(each.weights[name], tensor) for name, tensor in expected.items())
            for each in (fake.process for fake in self.fakes)
        )

    def sets(self) -> list[str]:
        """In the folder, if this kind of servers has one."""
        return [path.name for path in self.folder.iterdir()]

    def close(self) -> None:
        if self.servers.__class__ is not SglangFolder:
            self.servers.close()
        for each in self.fakes:
            each.kill()
        shutil.rmtree(self.folder)


@pytest.fixture(name="training")
def _training(kind: str) -> Iterator[Training]:
    made = Training(kind)
    yield made
    made.close()


@every_value(kind=KINDS, count=[(1, 2), (3, 1)])
def test_every_worker_of_every_server_gets_every_version(kind: str, count: tuple[int, int]) -> None:
    servers, workers = count
    training = Training(kind, servers, workers=workers)
    for version in range(1, 4):
        training.step()
        assert training.publish() == version and training.serves(str(version))
        assert training.sets() == [f"set-{version}"] * (kind == "sglang-folder"), "the last one"
    training.close()


CONVERSATIONS = {
    "vllm": [
        *("/version", "/get_world_size", "/get_world_size", "/init_weight_transfer_engine"),
        *("/start_weight_update", "/update_weights", "/finish_weight_update"),  # the comparison of names
        *("/pause?mode=wait", "/start_weight_update"),
        *("/update_weights", "/update_weights", "/update_weights", "/finish_weight_update"),
        *("/reset_prefix_cache", "/resume"),
    ],
    "vllm-nccl": [
        *("/version", "/get_world_size", "/get_world_size", "/init_weight_transfer_engine", "/weight_checker"),
        *("/pause?mode=wait", "/start_weight_update"),
        *("/update_weights", "/update_weights", "/update_weights", "/finish_weight_update"),
        *("/reset_prefix_cache", "/resume"),
    ],
    "sglang": [
        *("/server_info", "/end_weight_update", "/server_info", "/init_weights_update_group", "/weights_checker"),
        *("/pause_generation", "/begin_weight_update", *["/update_weights_from_distributed"] * 3, "/end_weight_update"),
        *("/update_weight_version", "/continue_generation"),
    ],
    "sglang-folder": [
        *("/server_info", "/weights_checker", "/pause_generation", "/update_weights_from_disk"),
        "/continue_generation",
    ],
}


@both
def test_what_a_server_is_told(kind: str, training: Training) -> None:
    training.publish()
    (server,) = training.fakes
    assert server.calls == CONVERSATIONS[kind]


@pytest.mark.parametrize(("kind", "deltas"), [("vllm", False), ("vllm", True), ("vllm-nccl", False), ("sglang", False)])
def test_a_strategy_file_names_servers(kind: str, deltas: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "VllmNcclServer", NcclOnCpu)
    training = Training(kind)
    named = {"kind": kind, "urls": [each.url for each in training.fakes], "deltas": deltas}
    strategy = Strategy.load("resident", overrides={"roles.rollout": {"servers": named, "timeout_s": 10}})
    model = strategy.prepare_model(make_model())
    assert [strategy.publish_weights(model) for _ in range(2)] == [1, 2]
    assert all(torch.equal(training.fakes[0].process.weights[n], p.bfloat16()) for n, p in model.named_parameters())
    report = strategy.wait_for_publication()
    assert report is not None and (report.nbytes == 0) == deltas and report.whole_nbytes > 0
    strategy.close()
    training.close()


def in_file(urls: list[str], kind: str = "vllm", mode: str = "sync", **more: Any) -> Strategy:
    servers = {"kind": kind, "urls": urls, **more}
    return Strategy.load("resident", overrides={"roles.rollout": {"servers": servers, "mode": mode}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: in_file([]), "urls"),
        (lambda: in_file(["host:8000"]), "urls"),
        (lambda: in_file(["http://host:8000"], "sglang", deltas=True), "leave deltas out"),
        (lambda: in_file(["http://host:8000"], "trl"), "kind"),
        (lambda: in_file(["http://host:8000"], mode="async"), "servers with mode async"),
        (lambda: VllmServer([]), "without a URL"),
        (lambda: SglangFolder([], "sets"), "without a URL"),
        (lambda: VllmServer("host:8000"), "host:8000"),
        (lambda: VllmServer("http://a", pause="never"), "pause is 'never'"),  # type: ignore[arg-type]
        (lambda: SglangServer("http://a", pause="wait"), "pause is 'wait'; SGLang has 'keep', 'abort'"),
        (lambda: SglangFolder("http://a", "sets", pause="wait"), "pause is 'wait'; SGLang has 'keep', 'abort'"),
        (lambda: SglangServer("http://a", deltas=True), "leave deltas out"),
        (lambda: VllmServer("http://a", deltas="fast"), "is 'fast'; allowed are False, True and 'auto'"),  # type: ignore[arg-type]
        (lambda: VllmServer("http://a").drop("http://a"), "one has to stay"),
    ],
)
def test_what_makes_no_sense(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "wait", "dtype", "deltas"),
    [
        ("vllm", True, "float32", True),
        ("vllm", False, "bfloat16", True),
        ("vllm-nccl", False, "float32", False),
        ("sglang", True, "bfloat16", False),
        ("sglang-folder", False, "bfloat16", False),
    ],
)
def test_experts_have_the_names_that_files_have(
    kind: str, wait: bool, dtype: str, deltas: bool, tmp_path: Path
) -> None:
    """transformers joins the experts of a layer, and those of a file have names of their own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    others = {"num_key_value_heads": 1, "num_local_experts": 3, "vocab_size": 40}
    model, rollout = MixtralForCausalLM(MixtralConfig(**sizes, **others)), {"parameters": dtype, "bucket_mib": 1.0}
    training = Training(kind, model=model, rollout=rollout, **({"deltas": True} if deltas else {}))
    (server,) = training.fakes
    for number in range(2):
        training.model.save_pretrained(tmp_path)
        in_file = {n: t.to(getattr(torch, dtype)) for n, t in load_file(tmp_path / "model.safetensors").items()}
        if number == 0:
            server.process.weights = {name: torch.zeros_like(tensor) for name, tensor in in_file.items()}
        training.strategy.publish_weights(training.model, to=training.servers, wait=wait)
        report = training.strategy.wait_for_publication()
        assert any(".experts.2." in name for name in in_file)
        assert all(torch.equal(server.process.weights[name], tensor) for name, tensor in in_file.items())
        for parameter in training.model.parameters():
            with torch.no_grad():
                parameter.view(-1)[:: max(7, parameter.numel() // 20)] += 1
    assert report is not None and (0 < report.nbytes < 0.5 * report.whole_nbytes) == deltas
    training.close()


# -- what a server refuses, before anything is sent --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "restarted"),
    [
        ("vllm", "unknown", False),
        ("vllm-nccl", "missing", True),
        ("sglang", "missing", False),
        ("sglang-folder", "unknown", True),
    ],
)
def test_another_model_is_refused_before_the_first_byte(
    kind: str, change: str, restarted: bool, training: Training
) -> None:
    """The first set, and one for a server that was restarted with another model."""
    (server,), other = training.fakes, dict(training.initial)
    if change == "unknown":
        del other["1.bias"]
    else:
        other["9.extra"] = torch.zeros(3)
    if restarted:
        training.publish()
    server.restart(other)
    with pytest.raises(WeightTransferError, match=r"1.bias is unknown|9.extra gets nothing"):
        training.publish()
    assert server.process.weights.keys() == other.keys()
    assert all(torch.equal(server.process.weights[name], tensor) for name, tensor in other.items())
    assert not server.process.paused and not server.process.updating and server.process.version == "default"
    assert training.sets() == ["set-1"] * (restarted and kind == "sglang-folder")


@pytest.mark.parametrize(
    ("kind", "software"), [("vllm", "0.27.1"), ("vllm-nccl", "0.34.0"), ("vllm-nccl", "0.31.2"), ("sglang", "0.6")]
)
def test_other_versions_are_refused(kind: str, software: str, training: Training) -> None:
    training.fakes[0].software = software  # type: ignore[attr-defined]
    with pytest.raises(WeightTransferError, match=rf"{software}; the protocols of"):
        training.publish()
    assert not training.fakes[0].process.paused


@pytest.mark.parametrize("kind", ["vllm"])
def test_a_server_that_is_not_in_development_mode_is_told_how(kind: str, training: Training) -> None:
    training.fakes[0].before = Breaking("/get_world_size", 1, "knows no such path", training.fakes[0])
    with pytest.raises(WeightTransferError, match="VLLM_SERVER_DEV_MODE=1"):
        training.publish()


def test_names_of_engines() -> None:
    names = ["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "b.experts.3.up_proj.weight"]
    infos = [WeightInfo((name,), (1,), torch.bfloat16) for name in names]
    assert engine_names(names[3])[-2:] == ["b.experts.w13_weight", "b.experts.routed_experts.w13_weight"]
    refuse_other_names(infos, ["a.qkv_proj.weight", "b.experts.w13_weight"], "a server")
    refuse_other_names(infos, names, "a server")
    with pytest.raises(WeightTransferError, match=r"a server has another model.*b.experts.3.up_proj.weight is unknown"):
        refuse_other_names(infos, ["a.qkv_proj.weight"], "a server")


# -- what breaks in the middle of a set --------------------------------------------------------------------------------


class Breaking:
    """Breaks at the ``number``-th call of a path."""

    def __init__(self, path: str, number: int, how: str, server: FakeServer) -> None:
        self.path, self.left, self.how, self.server = path, number, how, server

    def __call__(self, path: str) -> None:
        if path != self.path:
            return
        self.left -= 1
        if self.left:
            return
        if self.how == "refuses":
            raise Refusal(500, "the engine is unwell")
        if self.how == "knows no such path":
            raise Refusal(404, "Not Found")
        if self.how == "hangs":
            time.sleep(10)
        threading.Thread(target=self.server.kill).start()
        time.sleep(0.5)


BUCKETS = {
    "vllm": ("/update_weights", 2),
    "vllm-nccl": ("/update_weights", 1),
    "sglang": ("/update_weights_from_distributed", 1),
    "sglang-folder": ("/update_weights_from_disk", 1),
}
"""The call with the first bucket, and which of its path it is: the plugin's first one compares names."""


@pytest.mark.parametrize(("kind", "bucket"), [("vllm", 2), ("vllm-nccl", 1), ("sglang", 2), ("sglang-folder", 0)])
def test_a_failed_bucket_leaves_the_server_paused_until_a_set_is_complete(
    kind: str, bucket: int, training: Training
) -> None:
    (server,) = training.fakes
    training.publish()
    training.step()
    path, first = BUCKETS[kind]
    server.before = Breaking(path, first + bucket, "refuses", server)
    begin = time.monotonic()
    with pytest.raises(WeightTransferError, match="the engine is unwell") as error:
        training.publish()
    assert kind == "sglang-folder" or "will stay paused until a complete set" in str(error.value)
    assert time.monotonic() - begin < 8, "the broadcast was not given up"
    assert server.process.paused and server.process.version == "1"
    assert training.sets() == ["set-1"] * (kind == "sglang-folder")
    training.step()  # training goes on
    assert training.publish() == 2 and training.serves("2")


@pytest.mark.parametrize(
    ("kind", "path"), [("vllm", "/init_weight_transfer_engine"), ("sglang", "/init_weights_update_group")]
)
def test_a_server_that_does_not_join_costs_nothing(kind: str, path: str, training: Training) -> None:
    (server,), impatient = training.fakes, KINDS[kind][1](training.fakes[0].url, timeout_s=1.0)
    server.before = Breaking(path, 1, "refuses", server)
    with pytest.raises(WeightTransferError, match=r"no process group with .*the engine is unwell.*Nothing was sent"):
        training.strategy.publish_weights(training.model, to=impatient)
    assert not server.process.paused and not server.process.updating
    assert training.serves(str(training.publish()))
    while any(thread.name == "lightstep-servers" for thread in threading.enumerate()):
        time.sleep(0.01)  # one waits for the server until its limit, and the process may end with this test


@pytest.mark.parametrize("kind", ["vllm", "vllm-nccl"])
def test_answers_that_vllm_has_not_read_do_no_harm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers fail, and vLLM takes the second one's error for the answer to a later call."""
    training = Training(kind, timeout_s=60.0, workers=2)
    training.publish()
    (server,) = training.fakes

    update = server._update

    def broken(process: Process, info: dict[str, Any]) -> None:
        if info.get("check_only"):
            update(process, info)
            return
        process.updating = False
        raise Refusal(500, "no room")

    for _ in range(2):
        training.step()
        with monkeypatch.context() as patch:
            patch.setattr(server, "_update", broken)
            with pytest.raises(WeightTransferError, match=r"no room"):
                training.publish()
        assert server.process.paused
        assert training.serves(str(training.publish()))
    training.close()


@pytest.mark.parametrize(("kind", "how"), [("vllm", "dies"), ("vllm-nccl", "dies"), ("sglang", "hangs")])
def test_a_server_that_is_gone_is_noticed_in_time_and_may_be_replaced(kind: str, how: str) -> None:
    timeout_s = 3.0 if how == "hangs" else 60.0
    training = Training(kind, servers=2, timeout_s=timeout_s)
    training.publish()
    training.step()
    gone = training.fakes[1]
    path, first = BUCKETS[kind]
    gone.before = Breaking(path, first + 1, how, gone)
    begin = time.monotonic()
    said = f"{gone.url}.* did not answer: timed out" if how == "hangs" else gone.url
    with pytest.raises(WeightTransferError, match=said):
        training.publish()
    assert time.monotonic() - begin < (3 * timeout_s if how == "hangs" else timeout_s)  # who dies is not waited for
    assert training.fakes[0].process.paused and training.fakes[0].process.version == "1"
    replacement = KINDS[kind][0](training.initial, timeout_s)
    training.servers.drop(gone.url)
    training.servers.add(replacement.url)
    training.fakes[1] = replacement
    assert training.publish() == 2 and training.serves("2")
    training.close()


@pytest.mark.parametrize(("kind", "same_model"), [*((kind, True) for kind in IN_GROUP), ("vllm", False)])
def test_a_trainer_died_between_two_buckets(kind: str, same_model: bool, training: Training) -> None:
    """The next one's set is served, or refused. In neither case is half of the first one's."""
    (server,) = training.fakes
    training.publish()
    training.step()
    infos = [WeightInfo((name,), tuple(t.shape), t.dtype) for name, t in training.weights().items()]
    training.servers.begin(2, [infos[:3], infos[3:]])  # and then nothing more
    assert server.process.paused and server.process.updating
    other = KINDS[kind][1](server.url, timeout_s=10)
    if same_model:
        training.strategy.publish_weights(training.model, to=other, version=7)
        assert training.serves("7")
    else:
        server.process.weights["1.gain"] = torch.zeros(3)
        with pytest.raises(WeightTransferError, match=r"1.gain gets nothing"):
            training.strategy.publish_weights(training.model, to=other)
        assert server.process.paused and server.process.version == "1"
    other.close()


@both
def test_a_restarted_server_gets_the_next_set(kind: str, training: Training) -> None:
    training.publish()
    training.step()
    training.fakes[0].restart(training.initial)
    assert training.publish() == 2 and training.serves("2")


def test_nobody_answers() -> None:
    servers = VllmServer("http://127.0.0.1:9", timeout_s=3)
    strategy = Strategy.load("resident")
    model = strategy.prepare_model(make_model())
    with pytest.raises(WeightTransferError, match=r"127.0.0.1:9/version did not answer.*refused"):
        strategy.publish_weights(model, to=servers)


CLOSING = """
import threading, time
import torch
import torch.distributed as dist
from lightstep.distributed import let_gloo_finish_at_exit
from lightstep.rollout.servers import _in_thread
from lightstep.rollout.transport import WeightLink

def close() -> None:
    time.sleep(0.5)
    link.close()
    print("closed", flush=True)

link = WeightLink(1, dist.HashStore(), 0, 1, torch.device("cpu"), 10.0)
assert let_gloo_finish_at_exit.cache_info().currsize == 1
_in_thread(close)
"""


def test_a_process_ends_when_its_links_are_closed() -> None:
    """An interpreter that ends while gloo closes a group aborts."""
    ended = python("-c", CLOSING, cwd=Path.cwd())
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr


@pytest.mark.parametrize("end", ["answered", "given up", "killed"])
def test_a_call_that_nobody_waits_for_leaves_nothing_to_send(end: str) -> None:
    """Its connection is reset: else TCP sends the call again until the server has it, maybe in the middle of a set."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        process: Any = None
        if end == "killed":
            process = multiprocessing.get_context("fork").Process(target=Sglang(url, timeout_s=60, api_key=None).resume)
            process.start()
        else:
            call = _in_thread(Sglang(url, timeout_s=0.5 if end == "given up" else 60, api_key=None).resume)
        peer, _ = listening.accept()
        with peer:
            asked = b""
            while not asked.endswith(b"\r\n\r\n{}"):
                asked += peer.recv(4096)
            if end == "answered":
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                assert call.result() is None
                assert peer.recv(1) == b""
                return
            if process is not None:
                process.kill()
                process.join()
            else:
                with pytest.raises(WeightTransferError, match="did not answer: timed out"):
                    call.result()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
