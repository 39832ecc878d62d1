"""GRPO with rollout workers of their own: some processes train, others generate with the weights they were last sent.

    torchrun --nproc-per-node 2 examples/async_rollout.py                       # one trains, one generates
    torchrun --nproc-per-node 3 examples/async_rollout.py                       # two train
    torchrun --nproc-per-node 8 examples/async_rollout.py --rollout-ranks 4     # on GPUs as on CPUs

A small Llama learns to add two numbers: first by imitation until it is right now and then, then by reinforcement, from
nothing but whether its answer is right. Both sides work at the same time: samples may be a few versions of the weights
old (``--staleness``). The importance ratio to the log-probabilities of the worker that drew them, clipped as in PPO,
accounts for that.

Writes ``rewards.png`` (rewards, and what each role holds in memory) and ``result.json`` to ``--output``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightstep import Strategy, TrainingEnded, TransformersEngine

ALPHABET = "_0123456789+=."  # the first one pads, the last one ends an answer
PAD, END = 0, len(ALPHABET) - 1
PROMPT = len("12+34=")
ANSWER = len("198.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp2", help="a preset or a strategy file, for the trainers")
    parser.add_argument("--rollout-ranks", type=int, default=1, help="how many of the processes generate")
    parser.add_argument("--warmup", type=int, default=600, help="supervised steps at most")
    parser.add_argument("--warmup-until", type=float, default=0.3, help="share of right answers that ends them")
    parser.add_argument("--steps", type=int, default=200, help="steps of GRPO")
    parser.add_argument("--prompts", type=int, default=48, help="prompts of one trainer's step")
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--clip", type=float, default=0.2, help="the importance ratio stays within 1 ± this")
    parser.add_argument("--staleness", type=int, default=4, help="samples of older versions than this are dropped")
    parser.add_argument("--warmup-lr", type=float, default=2e-3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--largest", type=int, default=49, help="largest number to add")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/async-rollout"))
    return parser.parse_args()


# -- the task ---------------------------------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def exercises(count: int, largest: int, random_numbers: random.Random) -> tuple[Tensor, list[str]]:
    """Prompts [count, 6] and the right answers."""
    pairs = [(random_numbers.randint(0, largest), random_numbers.randint(0, largest)) for _ in range(count)]
    return torch.tensor([encode(f"{a:02d}+{b:02d}=") for a, b in pairs]), [f"{a + b}." for a, b in pairs]


def rewards_of(answers: Tensor, right: list[str]) -> Tensor:
    """1 for every answer [n, 4] that is right up to its end, else 0."""
    texts = ["".join(ALPHABET[token] for token in row) for row in answers.tolist()]
    return torch.tensor([float(text.split(".")[0] + "." == want) for text, want in zip(texts, right, strict=True)])


def make_model(hidden: int, layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=PROMPT + ANSWER,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of the tokens [n, length] under the logits [n, length, vocabulary] that they were drawn from, in fp32."""
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def until_end(answers: Tensor) -> Tensor:
    """1 for the tokens of an answer up to its end, 0 behind it: [n, length]."""
    ended = (answers == END).cumsum(-1)
    return (ended - (answers == END).long() == 0).float()


# -- samples, from the workers to the trainers ------------------------------------------------------------------------


class Samples:
    """A queue for each trainer, in a store that rank 0 hosts. Nobody has to be waiting at the other end."""

    def __init__(self) -> None:
        host, port = os.environ["MASTER_ADDR"], [0]
        if dist.get_rank() == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            port = [self._store.port]
        dist.broadcast_object_list(port, src=0)
        if dist.get_rank() != 0:
            self._store = dist.TCPStore(host, port[0], is_master=False, wait_for_workers=False)

    def push(self, queue: str, content: dict[str, Any]) -> None:
        packed = io.BytesIO()
        torch.save(content, packed)
        self._store.queue_push(queue, packed.getvalue())

    def pop(self, queue: str) -> dict[str, Any]:
        """The oldest in the queue, once there is one."""
        while self.waiting(queue) == 0:
            time.sleep(0.002)
        return torch.load(io.BytesIO(self._store.queue_pop(queue)), weights_only=True)

    def waiting(self, queue: str) -> int:
        return self._store.queue_len(queue)


# -- the rollout worker -----------------------------------------------------------------------------------------------


def roll_out(strategy: Strategy, samples: Samples, args: argparse.Namespace) -> None:
    """Generate for all trainers in turn, with the newest weights that were published, until there will be no more."""
    model = strategy.prepare_model(lambda: make_model(args.hidden, args.layers), role="rollout")
    engine = TransformersEngine(model)
    random_numbers = random.Random(1000 * args.seed + strategy.rank)
    torch.manual_seed(1000 * args.seed + strategy.rank)
    queues = [f"trainer {number}" for number in range(len(strategy.roles.trainer_ranks))]
    with contextlib.suppress(TrainingEnded):
        strategy.receive_weights(engine, timeout=3600)  # behind the warm-up
        while True:
            strategy.receive_weights(engine, wait=False)
            queue = min(queues, key=samples.waiting)
            if samples.waiting(queue) < 2:
                samples.push(queue, generated(engine, strategy.device, args, random_numbers))
            else:
                time.sleep(0.002)  # the trainers are behind: what would be generated now would be old
    samples.push("reports", memory_of("rollout", strategy.device, model))


def generated(engine: TransformersEngine, device: torch.device, args: Any, random_numbers: random.Random) -> Any:
    """One trainer's step: prompts, a group of answers to each, their log-probabilities and rewards."""
    prompts, right = exercises(args.prompts, args.largest, random_numbers)
    prompts = prompts.repeat_interleave(args.group, 0).to(device)
    drawn = engine.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=ANSWER,
        min_new_tokens=ANSWER,  # an answer goes on behind its end, where nobody looks
        eos_token_id=None,
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answers = drawn.sequences[:, PROMPT:]
    rewards = rewards_of(answers, [answer for answer in right for _ in range(args.group)])
    return {
        "version": engine.version,
        "tokens": drawn.sequences.cpu(),
        "log_probabilities": log_probabilities(torch.stack(drawn.logits, 1), answers).cpu(),
        "rewards": rewards,
    }


# -- the trainer ------------------------------------------------------------------------------------------------------


def warm_up(strategy: Strategy, model: nn.Module, samples: Samples, args: argparse.Namespace) -> None:
    """Imitation, until some answers are right."""
    with contextlib.closing(imitation(strategy, model, args)) as shares:
        for share in shares:
            if agreed(strategy, samples, share >= args.warmup_until):
                break


def imitation(strategy: Strategy, model: nn.Module, args: argparse.Namespace) -> Generator[float, None, None]:
    """Supervised steps; the share of answers that would be right, after every 20."""
    optimizer = strategy.create_optimizer(model, lr=args.warmup_lr, weight_decay=0.0)
    random_numbers = random.Random(7919 * (args.seed + 1) + strategy.rank)
    same_everywhere = random.Random(args.seed)
    try:
        for step in range(args.warmup):
            for group in optimizer.param_groups:
                group["lr"] = args.warmup_lr * min(1.0, (step + 1) / 50)
            scores = answer_scores(model, *exercises(128, args.largest, random_numbers), strategy.device)
            optimizer.backward(-scores.mean() / ANSWER)
            optimizer.step()
            if (step + 1) % 20 == 0:
                with torch.no_grad():
                    scores = answer_scores(model, *exercises(256, args.largest, same_everywhere), strategy.device)
                share = scores.exp().mean().item()
                if strategy.is_main:
                    print(f"warm-up {step + 1:4d}: {share:.0%} of the answers would be right", flush=True)
                yield share
    finally:
        optimizer.close()


def agreed(strategy: Strategy, samples: Samples, stop: bool) -> bool:
    """The first trainer's word: one that went on alone would wait for the others."""
    if not strategy.is_main:
        return samples.pop(f"warm-up {strategy.rank}")["stop"]
    for number in range(1, strategy.world_size):
        samples.push(f"warm-up {number}", {"stop": stop})
    return stop


def answer_scores(model: nn.Module, prompts: Tensor, right: list[str], device: torch.device) -> Tensor:
    """The log-probabilities [n] with which the model gives the right answers."""
    answers = torch.tensor([encode(answer.ljust(ANSWER, "_")) for answer in right])
    tokens = torch.cat([prompts, answers], 1).to(device)
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
    return (log_probabilities(logits, tokens[:, PROMPT:]) * until_end(tokens[:, PROMPT:])).sum(-1)


def grpo_loss(model: nn.Module, batch: dict[str, Any], device: torch.device, clip: float) -> Tensor:
    """The clipped objective of PPO, with the mean reward of an answer's group as its baseline."""
    tokens, rewards = batch["tokens"].to(device), batch["rewards"].to(device).view(-1, batch["group"])
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
    answers = tokens[:, PROMPT:]
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
    ratio = torch.exp(log_probabilities(logits, answers) - batch["log_probabilities"].to(device))
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    mask = until_end(answers)
    return -(gain * mask).sum() / mask.sum()


def train(strategy: Strategy, samples: Samples, args: argparse.Namespace) -> dict[str, Any] | None:
    torch.manual_seed(args.seed)
    model = strategy.prepare_model(lambda: make_model(args.hidden, args.layers))
    warm_up(strategy, model, samples, args)
    optimizer = strategy.create_optimizer(model, lr=args.lr, weight_decay=0.0)
    version = strategy.publish_weights(model)
    history: list[dict[str, float]] = []
    dropped, began = 0, time.monotonic()
    for step in range(args.steps):
        while True:
            batch = samples.pop(f"trainer {strategy.rank}")
            age = version - batch["version"]
            if age <= args.staleness:
                break
            dropped += 1
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20)
        optimizer.backward(grpo_loss(model, {**batch, "group": args.group}, strategy.device, args.clip))
        optimizer.step()
        version = strategy.publish_weights(model)
        history.append({"reward": float(batch["rewards"].mean()), "age": age})
        if strategy.is_main and (step + 1) % 20 == 0:
            reward = sum(entry["reward"] for entry in history[-20:]) / 20
            print(f"step {step + 1:4d}: reward {reward:.3f}, samples {age} versions old", flush=True)
    seconds = time.monotonic() - began
    samples.push("reports", memory_of("trainer", strategy.device, model, optimizer))
    return {"history": history, "dropped": dropped, "seconds": seconds} if strategy.is_main else None


# -- what it cost -----------------------------------------------------------------------------------------------------


def memory_of(role: str, device: torch.device, model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Bytes of weights, gradients and optimizer state on this process, and the peak of all that it had."""
    weights = sum(_local(parameter).nbytes for parameter in model.parameters())
    report = {"weights": weights, "gradients": 0, "optimizer": 0}
    if optimizer is not None:
        held = optimizer.memory_report()
        report["gradients"] = 4 * int(held["parameters"])  # fp32, as they are reduced
        report["optimizer"] = int(held["device_bytes"] + held["host_bytes"])
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"role": role, "rank": dist.get_rank(), **report, "peak": peak}


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def show(result: dict[str, Any], reports: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print it, and write result.json and rewards.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rewards = [entry["reward"] for entry in result["history"]]
    window = max(1, min(20, len(rewards) // 2))
    first, last = (sum(part) / max(1, len(part)) for part in (rewards[:window], rewards[-window:]))
    ages = [entry["age"] for entry in result["history"]]
    print(f"reward {first:.3f} -> {last:.3f} in {len(rewards)} steps, {result['seconds']:.0f} s")
    print(f"samples up to {max(ages, default=0)} versions old, {result['dropped']} batches dropped for their age")
    for report in reports:
        parts = ", ".join(f"{what} {report[what] / 1e6:.2f} MB" for what in ("weights", "gradients", "optimizer"))
        print(f"rank {report['rank']} ({report['role']}): {parts}; peak of the process {report['peak'] / 1e6:.0f} MB")
    args.output.mkdir(parents=True, exist_ok=True)
    values = {"reward_first": first, "reward_last": last, **result, "memory": reports}
    (args.output / "result.json").write_text(json.dumps(values, indent=1) + "\n")

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(rewards, color="#D0D0D0", label="a step")
    means = [sum(rewards[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(rewards))]
    left.plot(means, color="#0072B2", label=f"mean of {window}")
    left.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    left.legend(frameon=False)
    names, below = [f"rank {report['rank']}\n{report['role']}" for report in reports], [0.0] * len(reports)
    for what, color in (("weights", "#0072B2"), ("gradients", "#E69F00"), ("optimizer", "#D55E00")):
        heights = [report[what] / 1e6 for report in reports]
        right.bar(names, heights, bottom=below, color=color, edgecolor="black", linewidth=0.6, label=what)
        below = [bottom + height for bottom, height in zip(below, heights, strict=True)]
    right.set(ylabel="held by the process, MB")
    right.legend(frameon=False)
    figure.savefig(args.output / "rewards.png", dpi=150)
    print(f"{args.output / 'rewards.png'} and {args.output / 'result.json'} written")


def main() -> None:
    args = arguments()
    rollout = {"mode": "async", "ranks": args.rollout_ranks, "timeout_s": 600}
    strategy = Strategy.load(args.strategy, overrides={"roles.rollout": rollout})
    strategy.start()
    samples = Samples()
    if strategy.role == "rollout":
        with strategy:
            roll_out(strategy, samples, args)
        return
    processes = dist.get_world_size()
    with strategy:  # its end tells the rollout workers that there is nothing more to generate for
        result = train(strategy, samples, args)
    if result is not None:
        reports = sorted((samples.pop("reports") for _ in range(processes)), key=lambda report: report["rank"])
        show(result, reports, args)


if __name__ == "__main__":
    main()
