"""Full fine-tuning of Llama-3.1-8B with everything on the host, and a limit on the device's memory.

    python -m tests.measure_offload --gpu-memory 24
    export CUBLAS_WORKSPACE_CONFIG=:4096:8            # for runs that are compared
    python -m tests.measure_offload --save FOLDER     # three steps, a checkpoint, two steps
    python -m tests.measure_offload --load FOLDER     # in a new process: the same two steps
    python -m tests.measure_offload --folder FOLDER --write      # a random model of transformers in shards
    python -m tests.measure_offload --folder FOLDER              # set-up from it, and two steps
    torchrun --nproc-per-node 2 -m tests.measure_offload --folder FOLDER

The first prints what the link does, time and peak memory of forward and backward alone (without a limit, weights on the
device) with the tokens of the largest micro-batch, and of a step for each of `--steps`. It needs a GPU with room for
weights and gradients (32 GB) and activations, for that.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import lightstep
from lightstep.bench.models import LlamaShape
from lightstep.distributed import local_tensor
from lightstep.plan.timing import measure_link

SEQUENCE = 4096


def batch(shape: LlamaShape, tokens: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(shape.vocabulary, (tokens // SEQUENCE, SEQUENCE + 1), device="cuda")
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def timed(what: str, work: Callable[[], object], times: int = 3) -> float:
    """Says how long it takes and what it needs; the peak of the device in GB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin, retries = time.perf_counter(), torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    took, peak = (time.perf_counter() - begin) / times * 1e3, torch.cuda.max_memory_allocated() / 1e9
    reserved, retries = torch.cuda.max_memory_reserved() / 1e9, torch.cuda.memory_stats()["num_alloc_retries"] - retries
    say(f"{what}: {took:.0f} ms, peak {peak:.1f} GB of {reserved:.1f} reserved, {retries} retries of the allocator")
    return peak


def alone(shape: LlamaShape, tokens: int, recomputation: bool | str) -> None:
    """The computation and its activations: weights and gradients are on the device, and nothing is updated."""
    strategy = lightstep.Strategy.load("resident", overrides={"sharding.activation_checkpointing": recomputation})
    model = strategy.prepare_model(shape.make(torch.device("cuda"), length=SEQUENCE))
    words = batch(shape, tokens)

    def iterate() -> None:
        model(*words).backward()

    iterate()
    inputs = "host" if recomputation == "host" else "device"
    peak = timed(f"forward and backward alone, {tokens} tokens, inputs of blocks on the {inputs}", iterate, 2)
    held = sum(parameter.nbytes + parameter.grad.nbytes for parameter in model.parameters())
    say(f"activations: {peak - held / 1e9:.1f} GB beside {held / 1e9:.1f} GB of weights and gradients")
    strategy.close()


def set_up(shape: LlamaShape, gpu_memory: float, keys: dict[str, Any]) -> tuple[lightstep.Strategy, Any, Any]:
    """A strategy, a prepared model, and its optimizer."""
    torch.cuda.set_per_process_memory_fraction(gpu_memory * 1e9 / torch.cuda.mem_get_info()[1])
    begin = time.perf_counter()
    strategy = lightstep.Strategy.load("offload", overrides=keys)
    model = strategy.prepare_model(shape.make(torch.device("cuda"), length=SEQUENCE))
    torch.cuda.empty_cache()
    optimizer = strategy.create_optimizer(model, lr=1e-6)
    say(f"set-up: {time.perf_counter() - begin:.0f} s; {host_peak()}")
    return strategy, model, optimizer


def host_peak() -> str:
    return (
        f"host memory of the process at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.0f} GB"
    )


def saved(made: tuple[lightstep.Strategy, Any, Any], shape: LlamaShape, folder: Path, loads: bool) -> None:
    """Steps before and after a checkpoint, or after it alone. Losses and norms of those after it are printed."""
    torch.use_deterministic_algorithms(True)  # attention's backward is not deterministic with `warn_only`
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic
    strategy, model, optimizer = made
    torch.manual_seed(1)
    batches = [batch(shape, SEQUENCE) for _ in range(5)]

    def train(*numbers: int) -> list[tuple[float, float]]:
        found = []
        for number in numbers:
            loss = model(*batches[number])
            optimizer.backward(loss)
            found.append((loss.item(), optimizer.step().grad_norm.item()))
        return found

    if not loads:
        train(0, 1, 2)
    begin = time.perf_counter()
    (strategy.load_checkpoint if loads else strategy.save_checkpoint)(folder, model, optimizer)
    seconds, nbytes = (
        time.perf_counter() - begin,
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    )
    say(f"{'loaded' if loads else 'saved'} {nbytes / 1e9:.1f} GB in {seconds:.0f} s; {host_peak()}")
    say(f"losses and norms of the next two steps: {train(3, 4)}; {host_peak()}")
    strategy.close()


def offloaded(made: tuple[lightstep.Strategy, Any, Any], shape: LlamaShape, steps: list[tuple[int, int]]) -> None:
    strategy, model, optimizer = made

    def step(tokens: int, micro_batches: int) -> Callable[[], None]:
        def iterate() -> None:
            for number in range(micro_batches):
                with strategy.accumulate(model, last=number == micro_batches - 1):
                    optimizer.backward(model(*batch(shape, tokens)) / micro_batches)
            optimizer.step()

        return iterate

    timed("first step", step(SEQUENCE, 1), 1)
    for micro_batches, tokens in steps:
        step(tokens, micro_batches)()
        timed(f"{micro_batches} x {tokens} tokens", step(tokens, micro_batches))
    report = optimizer.memory_report()
    say(f"host: {report['host_bytes'] / report['parameters']:.2f} bytes per parameter")


# -- from a folder


def write_random(shape: LlamaShape, folder: Path) -> None:
    """A Llama of transformers with random weights in bf16, in shards, made tensor by tensor."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // shape.head,
        num_key_value_heads=shape.key_value // shape.head,
        tie_word_embeddings=shape.tied_embeddings,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        named = dict(LlamaForCausalLM(config).named_parameters())
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shard, places = dict[str, Tensor](), dict[str, str]()
    most = min(2**31, sum(parameter.nbytes for parameter in named.values()) // 4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, (name, parameter) in enumerate(named.items()):
        drawn = torch.randn(parameter.shape, dtype=torch.bfloat16, device=device) * 0.02
        shard[name] = (drawn + 1 if name.endswith("norm.weight") else drawn).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > most or number == len(named) - 1:
            file = f"model-{len(set(places.values())):05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def anonymous() -> int:
    """Bytes of this process that no file backs: what is read of safetensors is the system's cache."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@contextmanager
def watching() -> Iterator[list[int]]:
    """The most anonymous memory in the body."""
    most, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def check_loaded(model: nn.Module, folder: Path, rank: int, ranks: int) -> None:
    """Every weight is the file's, bit for bit."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        with safe_open(folder / places[name], "pt") as file:
            wanted = file.get_tensor(name)
        own = local_tensor(parameter).detach().cpu()
        parts = wanted.chunk(ranks) if ranks > 1 else (wanted,)
        assert torch.equal(own, parts[rank] if rank < len(parts) else wanted[:0]), name


def from_folder(folder: Path, gpu_memory: float, keys: dict[str, Any]) -> None:
    """Set up from a folder, compare, and train two steps."""
    ranks, on_gpu = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
    strategy = lightstep.Strategy.load("fsdp2-offload" if ranks > 1 else "offload", overrides=keys)
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(gpu_memory * 1e9 / torch.cuda.mem_get_info()[1])
    with torch.device("meta"):
        made = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    before, begin = anonymous(), time.perf_counter()
    with watching() as most:
        model = strategy.prepare_model(made, weights=folder)
        seconds = time.perf_counter() - begin
    own = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    device = f", on the device {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if on_gpu else ""
    peak = f"at most {(most[0] - before) / 1e9:.2f} GB of the host{device}"
    say(f"rank {strategy.rank}: {own / 1e9:.2f} GB of weights in {seconds:.0f} s, {peak}")
    check_loaded(model, folder, strategy.rank, ranks)
    optimizer = strategy.create_optimizer(model, lr=1e-6)
    generator = torch.Generator().manual_seed(strategy.rank)
    words = torch.randint(model.config.vocab_size, (1, 512), generator=generator).to(strategy.device)
    for _ in range(2):
        loss = model(input_ids=words, labels=words).loss
        optimizer.backward(loss)
        say(f"rank {strategy.rank}: loss {loss.item():.6f}, norm {optimizer.step().grad_norm.item():.6f}")
    strategy.close()


def micro_batches_and_tokens(text: str) -> tuple[int, int]:
    micro_batches, tokens = text.split("x")
    return int(micro_batches), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-memory", type=float, default=24.0, help="GB that this process may allocate")
    parser.add_argument("--update", default="next_forward", help="optimizer_state.update")
    parser.add_argument("--moments", default="float32", help="optimizer_state.moments")
    parser.add_argument("--params", type=float, default=8e9)
    parser.add_argument(
        "--steps",
        type=micro_batches_and_tokens,
        nargs="+",
        metavar="MICRO_BATCHESxTOKENS",
        default=[(1, SEQUENCE), (1, 4 * SEQUENCE), (4, 4 * SEQUENCE), (2, 8 * SEQUENCE)],
    )
    parser.add_argument("--inputs", choices=["device", "host"], default="device", help="those of recomputed blocks")
    parser.add_argument("--device-mib", type=int, default=3600, help="weights.device_mib")
    parser.add_argument("--ring-mib", type=int, default=512, help="optimizer_state.ring_mib")
    parser.add_argument("--gradients-gib", default="0", help="weights.gradients_gib")
    parser.add_argument("--reduce", default="parameters", help="precision.reduce")
    parser.add_argument("--folder", type=Path, help="of a model of transformers")
    parser.add_argument("--write", action="store_true", help="write a random model there, and no more")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    parser.add_argument("--load", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    shape = LlamaShape.nearest(int(given.params), released=True)
    keys = {
        "optimizer_state.update": given.update,
        "optimizer_state.moments": given.moments,
        "optimizer_state.ring_mib": given.ring_mib,
        "precision.reduce": given.reduce,
        "weights.device_mib": given.device_mib,
        "weights.gradients_gib": "auto" if given.gradients_gib == "auto" else float(given.gradients_gib),
        "sharding.activation_checkpointing": "host" if given.inputs == "host" else True,
    }
    if given.folder:
        if given.write:
            write_random(shape, given.folder)
        else:
            from_folder(given.folder, given.gpu_memory, keys)
        return
    made = partial(set_up, shape, given.gpu_memory, keys)
    if given.save or given.load:
        saved(made(), shape, given.save or given.load, bool(given.load))
        return
    link = measure_link(torch.device("cuda"))
    say(f"link: {link}")
    tokens, recomputation = max(tokens for _, tokens in given.steps), keys["sharding.activation_checkpointing"]
    for setting in [True] if recomputation is True else [True, recomputation]:
        alone(shape, tokens, setting)
        torch.cuda.empty_cache()
    offloaded(made(), shape, given.steps)


if __name__ == "__main__":
    main()
