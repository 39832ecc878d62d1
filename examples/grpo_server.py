"""GRPO with a server of vLLM, which gets the trained weights after every step.

    python examples/grpo_server.py --server-python VENV/bin/python     # starts the server, which has vLLM and lightstep

The model and its task are those of async_rollout.py: a small Llama learns to add two numbers, first by imitation and
then from nothing but whether its answer is right. Trainer and server work in turn, so that every sample is of the
newest weights.

Prints the reward, and writes ``result.json`` to ``--output``: rewards, seconds of each publication, and the share of
greedy answers that are the same from server and trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from async_rollout import (
    ALPHABET,
    ANSWER,
    PROMPT,
    exercises,
    grpo_loss,
    imitation,
    make_model,
    rewards_of,
)
from torch import Tensor, nn

from lightstep import Strategy


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="stream", help="a preset or a strategy file")
    parser.add_argument("--server-python", type=Path, required=True, help="starts a server with this interpreter")
    parser.add_argument("--warmup", type=int, default=600, help="supervised steps at most")
    parser.add_argument("--warmup-until", type=float, default=0.3, help="share of right answers that ends them")
    parser.add_argument("--steps", type=int, default=100, help="steps of GRPO")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--warmup-lr", type=float, default=2e-3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--largest", type=int, default=49, help="largest number to add")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/grpo-server"))
    return parser.parse_args()


# -- the server -------------------------------------------------------------------------------------------------------


def save_model(folder: Path, args: argparse.Namespace) -> None:
    """What the server starts with: the model's shapes, other weights, and a tokenizer of single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_model(args.hidden, args.layers).bfloat16().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(ALPHABET)}, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="_", pad_token="_", eos_token=".")
    fast.save_pretrained(folder)


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """The URL of a server."""
    folder = args.output / "model"
    save_model(folder, args)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [args.server_python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", port]
    command += ["--served-model-name", "model", "--dtype", "bfloat16", "--max-model-len", PROMPT + ANSWER]
    command += ["--enforce-eager", "--weight-transfer-config", '{"backend": "lightstep"}']
    own = {"VLLM_SERVER_DEV_MODE": "1"}
    if not torch.cuda.is_available():
        own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (args.output / "server.log").open("w") as log:
        process = subprocess.Popen(list(map(str, command)), env={**os.environ, **own}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, args.output / "server.log")
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """A server starts within a minute or two; on a busy machine it takes longer."""
    print("the server starts", flush=True)
    for _ in range(900):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}; see {log}")
        time.sleep(1)
    sys.exit(f"the server did not start within 15 minutes; see {log}")


def complete(url: str, prompts: Tensor, **settings: Any) -> list[Any]:
    """The server's choices for prompts [n, 6]."""
    question = {"model": "model", "prompt": prompts.tolist(), "max_tokens": ANSWER, "ignore_eos": True, **settings}
    body = json.dumps({**question, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])


def generated(url: str, args: argparse.Namespace, random_numbers: random.Random) -> dict[str, Any]:
    """Prompts, a group of answers to each, their log-probabilities and rewards."""
    prompts, right = exercises(args.prompts, args.largest, random_numbers)
    choices = complete(url, prompts, n=args.group, temperature=1.0, logprobs=0, seed=random_numbers.getrandbits(30))
    answers = torch.tensor([choice["token_ids"] for choice in choices])
    return {
        "tokens": torch.cat([prompts.repeat_interleave(args.group, 0), answers], 1),
        "log_probabilities": torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices]),
        "rewards": rewards_of(answers, [answer for answer in right for _ in range(args.group)]),
        "group": args.group,
    }


# -- training ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def agreement(url: str, model: nn.Module, device: torch.device, args: argparse.Namespace) -> float:
    """The share of 64 greedy answers that are the same from server and trainer."""
    prompts, _ = exercises(64, args.largest, random.Random(args.seed))
    theirs = torch.tensor([choice["token_ids"] for choice in complete(url, prompts, temperature=0.0)])
    tokens = prompts.to(device)
    for _ in range(ANSWER):
        tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    return (tokens[:, PROMPT:].cpu() == theirs).all(1).float().mean().item()


def train(url: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(args.seed)
    servers = {"kind": "vllm", "urls": [url]}
    strategy = Strategy.load(args.strategy, overrides={"roles.rollout": {"servers": servers}})
    model = strategy.prepare_model(lambda: make_model(args.hidden, args.layers))
    with contextlib.closing(imitation(strategy, model, args)) as shares:
        next((share for share in shares if share >= args.warmup_until), None)
    optimizer = strategy.create_optimizer(model, lr=args.lr, weight_decay=0.0)
    random_numbers = random.Random(args.seed)
    rewards, seconds = [], []
    for step in range(args.steps):
        begin = time.monotonic()
        strategy.publish_weights(model)
        seconds.append(time.monotonic() - begin)
        batch = generated(url, args, random_numbers)
        rewards.append(float(batch["rewards"].mean()))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20)
        optimizer.backward(grpo_loss(model, batch, strategy.device, args.clip))
        optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}: reward {sum(rewards[-20:]) / 20:.3f}", flush=True)
    strategy.publish_weights(model)
    same = agreement(url, model, strategy.device, args)
    strategy.close()
    return {"rewards": rewards, "publish_seconds": seconds, "same_greedy_answers": same}


def main() -> None:
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    with server(args) as url:
        result = train(url, args)
    rewards, seconds = result["rewards"], sorted(result["publish_seconds"])
    window = max(1, min(20, len(rewards) // 2))
    first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    print(f"reward {first:.3f} -> {last:.3f} in {len(rewards)} steps")
    print(f"{result['same_greedy_answers']:.0%} of greedy answers are the same from server and trainer")
    print(f"a publication took {seconds[len(seconds) // 2]:.2f} s (median)")
    (args.output / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
