"""Programs over several ranks beside the textbook loops: what :mod:`tests.distributed.test_programs` runs."""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Adafactor

from lightstep.distributed import like, local_tensor
from lightstep.optimizer import queue
from lightstep.state.snapshot import Snapshot
from lightstep.state.store import AHEAD
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.sharded_reference import DistributedLoop, GatheringLoop, ReplicatedLoop, ShardedLoop, units_of
from tests.distributed.training import DEFERRED, OVERLAP, RESIDENT, STREAM, Training, slow_lanes
from tests.reference.own_classes import EachParameter
from tests.reference.pair import check_state, same
from tests.reference.several_classes import SeveralClasses
from tests.unit.test_exactness import CLASSES
from tests.unit.test_fuzz import delay_lanes

PARTLY = {"resident_gib": 3 * 2.0**-20}
STATES: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "stream": STREAM,
    "next_forward": DEFERRED,
    "overlap": OVERLAP,
    "in_backward": {**STREAM, "update": "in_backward"},
    "bulk": {"backend": "bulk"},
    "bulk overlap": {"backend": "bulk", "update": "overlap"},
    "resident next_forward": {**RESIDENT, "update": "next_forward"},
    "resident in_backward": {**RESIDENT, "update": "in_backward"},
    "next_forward without copies": {**DEFERRED, "spare_host_gib": 0.0},
    "partly next_forward": {**DEFERRED, **PARTLY},
    "partly overlap": {**OVERLAP, **PARTLY},
    "partly overlap versions": {**OVERLAP, **PARTLY, "previous_weights": "device"},
    "partly in_backward": {**STREAM, **PARTLY, "update": "in_backward"},
}
MOVES = ("resident", "stream", "next_forward", "overlap")
HOST = {"placement": "host", "device_mib": 0.001}
REFUSALS = {
    "unreduced": "not been reduced",
    "unseen": "no backward since the last step was reduced over the ranks",
    "unscaled": r"call optimizer\.backward\(loss\)",
    "written": r"was written to in place .* beside it, in fp32",
}


class Skipping(TinyTransformer):
    """Leaves some of its blocks out."""

    skipped: frozenset[int] = frozenset()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for index, block in enumerate(self.blocks):
            hidden = hidden if index in self.skipped else block(hidden)
        return self.head(hidden)


class WithExperts(Skipping):
    """Four experts, so that a rank of three has none; a matrix of one row, so that most have none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 7, 7))
        self.row = nn.Linear(7, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        hidden = self.embed(tokens)
        mixed = torch.einsum("bld,edh->blh", hidden, self.experts).tanh()
        return logits + mixed[..., : logits.shape[-1]] + self.row(hidden)


class Lamb(EachParameter):
    """Scales the update of each tensor by its norm, and keeps its moment in bf16."""

    whole_tensors = True

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        moment = state.setdefault("moment", torch.zeros_like(p, dtype=torch.bfloat16))
        moment.mul_(0.9).add_(grad, alpha=0.1)
        ratio = p.norm() / (moment.float().norm() + 1e-6)
        p.sub_(moment * (group["lr"] * ratio))


class ByColumns(EachParameter):
    """Keeps a moment whose last dimension is the outermost in memory: sums over it have other last bits by rows."""

    whole_tensors = True

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        dims = [*range(p.dim())][::-1]
        new = torch.zeros_like(p.permute(dims).contiguous()).permute(dims)
        moment = state.setdefault("moment", new).mul_(0.9).add_(grad)
        last_bits = float(moment.sum()) * 2**20 % 1
        p.sub_(moment, alpha=group["lr"] * (1 + last_bits))


Chosen = tuple[Callable[[Tensor], bool], type, dict[str, Any]]

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05}
CHANGED = {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "lr": 3e-3}
NEWTON_SCHULZ = {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"}
ADAFACTOR = {"lr": 1e-2, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1}
WHOLE: dict[str, list[Chosen]] = {
    "Muon": [(lambda p: p.dim() >= 2, torch.optim.Muon, MUON)],
    "Muon-settings": [  # neither group has torch's
        (lambda p: p.dim() == 2 and p.shape[0] > p.shape[1], torch.optim.Muon, CHANGED),
        (lambda p: p.dim() >= 2, torch.optim.Muon, MUON | NEWTON_SCHULZ),
    ],
    # between two units that ranks update together there are several others
    "Muon-few": [(lambda p: p.dim() == 3 or (p.dim() == 2 and p.shape[0] < p.shape[1]), torch.optim.Muon, MUON)],
    "Adafactor": [(lambda p: True, Adafactor, ADAFACTOR)],
    "Adafactor-rate": [(lambda p: True, Adafactor, {"lr": None})],  # its own
    "Lamb": [(lambda p: True, Lamb, {"lr": 1e-2})],
    "ByColumns": [(lambda p: True, ByColumns, {"lr": 1e-2})],
}
"""Classes that need whole tensors, and which parameters are theirs; AdamW has the others."""


def whole_groups(name: str, model: Any) -> list[dict[str, Any]]:
    chosen: list[Chosen] = [*WHOLE[name], (lambda p: True, torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1})]
    groups = [{"params": list[Tensor](), "optimizer_class": kind, **settings} for _, kind, settings in chosen]
    for parameter in model.parameters():
        number = next(number for number, (takes, _, _) in enumerate(chosen) if takes(parameter))
        groups[number]["params"].append(parameter)
    return [group for group in groups if group["params"]]


class Program(Training):
    """A run and the textbook's loop, on the same data on every rank.

    The words of a program are methods, with their arguments behind a colon. :attr:`words` are those that were done.
    """

    def __init__(
        self,
        sharding: dict[str, Any],
        case: dict[str, Any],
        text: str = "",
        seed: int = 0,
        make: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.frozen: set[str] = set()
        self.text, self.words = text, list[str]()
        self.is_slow = text.startswith("slow") if text else seed % 2 == 0
        self.values = {"sharding": sharding, "precision": {}, "clipping": {"max_norm": 0.5}, **copy.deepcopy(case)}
        name = self.values.pop("optimizer", "AdamW")
        self.whole = [kind for _, kind, _ in WHOLE.get(name, ())]
        ddp = sharding["kind"] == "ddp"  # torch's Muon, which the reference has there, knows matrices alone
        make = make or (WithExperts if self.whole and not ddp else Skipping)
        optimizer_class, *settings, more = CLASSES.get(name, (torch.optim.AdamW, {}, {}, {}))
        common: dict[str, Any] = {"lr": 3e-3, **more}

        def of_class(model: Any) -> list[dict[str, Any]]:
            groups = model.split()
            own = zip(groups, settings, strict=True)
            return groups if name == "AdamW" else [{"params": group["params"], **given} for group, given in own]

        groups = partial(whole_groups, name) if self.whole else of_class
        torch.manual_seed(0)
        self.replica: Any = make()
        first = 5 * dist.get_rank()  # the first rank's weights count
        super().__init__(self.values, make, optimizer_class=optimizer_class, groups=groups, seed=first, **common)
        self.initial = {p: p.detach().clone().to(self.device) for p in self.replica.parameters()}
        self.is_cast = "compute" in sharding  # the tested weights are masters then
        self.replica.to(self.device, torch.bfloat16 if self.is_cast else self.strategy.parameter_dtype)
        self.spoil(self.replica)
        self.reference = self._reference(groups(self.replica), optimizer_class, sharding, common)
        self.chance, self.own_chance = random.Random(seed), random.Random(f"{seed} {self.rank}")
        self.alike = sharding["kind"] != "ddp"  # the ranks run the same layers
        # DDP itself adds fp32 gradients to what is in p.grad, and reduces the sum once more.
        self.in_place = not self.alike and self.strategy.parameter_dtype == torch.float32
        self.reduces_each = bool(self.values.get("weights"))  # on the host: so that gradients need no more room
        self.batches = 0
        self.last: list[Tensor] = []  # had gradients in the last step
        self.reduced = True  # nothing is left on its rank
        self.drops = False  # what was left on its rank has been dropped, and no backward has been reduced since

    def _reference(self, groups: Any, optimizer_class: Any, sharding: dict[str, Any], common: Any) -> DistributedLoop:
        precision, clipping = self.values["precision"], self.values["clipping"]
        settings = {
            "units": units_of(self.replica),
            "initial": self.initial,
            "loss_scale": precision.get("loss_scale", "none"),
            "reduce": precision.get("reduce", "float32"),
            "max_norm": clipping["max_norm"],
            "norm_type": float(clipping.get("norm_type", 2.0)),
            **common,
        }
        if sharding["kind"] == "ddp":
            made: Any = SeveralClasses if self.whole else optimizer_class
            return ReplicatedLoop(self.replica, groups, made, **settings)
        shard = sharding.get("mesh", {}).get("shard")
        if self.whole:
            short = self.values["optimizer_state"].get("moments") == "bfloat16"
            return GatheringLoop(self.replica, groups, shard=shard, whole=self.whole, short=short, **settings)
        return ShardedLoop(self.replica, groups, optimizer_class, shard=shard, **settings)

    def named(self) -> list[tuple[str, Tensor, Tensor]]:
        pairs = zip(self.inner.named_parameters(), self.replica.parameters(), strict=True)
        return [(name, parameter, expected) for (name, parameter), expected in pairs]

    def check(self) -> None:
        self.optimizer.synchronize()
        for name, parameter, expected in self.named():
            where = f"rank {self.rank}, step {self.steps}: {name}"
            wanted = self.reference.master(expected) if self.is_cast else self.reference.part(expected)
            same(where, local_tensor(parameter.detach()), wanted)
            found = dict(self.optimizer.state[parameter]) if parameter in self.optimizer.state else {}
            found = {key: local_tensor(value) if isinstance(value, Tensor) else value for key, value in found.items()}
            low = parameter.dtype != torch.float32
            check_state(where, found, self.reference.state(expected), self.reference.master(expected) if low else None)

    def run(self, length: int = 0) -> None:
        """What it was given, or random words. An error tells those up to it.

        Few units are updated before somebody waits for them, except in random programs that are not slow.
        """
        try:
            at_once = 1 if self.is_slow or self.text else queue.SUBMIT_IN_STEP
            with mock.patch.object(queue, "SUBMIT_IN_STEP", at_once):
                for word in self.text.split() or self.draw(length):
                    self.words.append(word)
                    name, _, options = word.partition(":")
                    getattr(self, name)(*(options.split(",") if options else ()))
                self.check()
        except BaseException as error:
            error.add_note(f"after {' '.join(self.words)}")
            raise

    # -- the words

    def sum(self, *how: str) -> None:
        """A micro-batch whose gradients stay on their rank."""
        self.micro(*how, last=False)

    def micro(self, *how: str, last: bool = True) -> None:
        """A micro-batch that is reduced.

        Args:
            how: ``hand``: by ``loss.backward()``. ``plain``: outside of ``accumulate``. ``unseen``: past DDP. ``inf``:
                rank 1 overflows. ``penalty``: added to the loss. ``without=02/1``: even ranks leave out blocks 0 and 2.
                ``uses=a.b..head``: the parts of ``Branching``, which may differ over the ranks, too.
        """
        options = dict(one.partition("=")[::2] for one in how)
        without = options.get("without", "").split("/")
        self.inner.skipped = self.replica.skipped = frozenset(map(int, without[self.rank % len(without)]))
        if "uses" in options:
            uses = options["uses"].split("/")
            self.inner.uses = self.replica.uses = tuple(uses[self.rank % len(uses)].split("."))
        self.overflow = "inf" in options and self.rank == 1
        self.batches += 1
        batch = (self.batches, 0, self.rank, self.device)
        with contextlib.nullcontext() if "plain" in options else self.strategy.accumulate(self.model, last=last):
            loss = loss_of(self.inner if "unseen" in options else self.model, *batch)
            loss = loss + self._penalties() if "penalty" in options else loss
            loss.backward() if "hand" in options else self.optimizer.backward(loss)
        self.reference.backward(loss_of(self.replica, *batch))
        if last or self.reduces_each:
            self.reference.reduce()
            if self.in_place:
                self.reference.sums, self.reference.reduced = self.reference.reduced, {}
        if "penalty" in options:
            self._add_penalties()
        self.reduced, self.drops, self.overflow = last or self.reduces_each, self.drops and not last, False

    def penalty(self, *how: str) -> None:
        """A backward of the shards themselves, which neither FSDP2 nor DDP has a part in."""
        self._penalties().backward() if how else self.optimizer.backward(self._penalties())
        self._add_penalties()

    def _penalized(self) -> list[tuple[str, Tensor, Tensor]]:
        return [found for found in self.named() if found[0] in ("head.weight", "blocks.1.down.weight")]

    def _penalties(self) -> Tensor:
        parts = [p.to_local() if isinstance(p, DTensor) else p for _, p, _ in self._penalized()]
        factors = [torch.ones_like(part) for part in parts]  # torch 2.11 gathers an expanded gradient of a shard
        return torch.stack([(part * ones).sum() for part, ones in zip(parts, factors, strict=True)]).sum()

    def _add_penalties(self) -> None:
        for _, _, replica in self._penalized():
            gradient = torch.full_like(self.reference.part(replica), self.reference.loss_scale.scale).float()
            earlier = self.reference.reduced.get(replica)
            self.reference.reduced[replica] = gradient if earlier is None else earlier + gradient

    def middle(self) -> None:
        """A backward that begins in the middle of the model."""
        batch = (self.batches, 2, self.rank, self.device)
        for model, backward in ((self.model, self.optimizer.backward), (self.replica, self.reference.backward)):
            found: list[Tensor] = []
            inner = self.inner if model is self.model else model
            handle = inner.blocks[0].register_forward_hook(lambda *given, found=found: found.append(given[2]))
            loss_of(model, *batch)
            handle.remove()
            backward(found[0].float().square().mean())
        self.reference.reduce()

    def add(self, value: str) -> None:
        """To gradients that are there, and to what has none."""
        for _, parameter, replica in self._penalized():
            own = like(parameter, torch.full_like(local_tensor(parameter), float(value)))
            parameter.grad = own if parameter.grad is None else parameter.grad + own
            gradient = torch.full_like(self.reference.part(replica), float(value), dtype=torch.float32)
            earlier = self.reference.reduced.get(replica)
            self.reference.reduced[replica] = gradient if earlier is None else earlier + gradient

    def step(self, *how: str) -> None:
        """``norm``: it is asked for before. ``check``: everything is compared now, not only at the end."""
        if "norm" in how:
            self.optimizer.grad_norm()
        self.last = [*self.reference.reduced, *self.reference.sums]
        if self.in_place:
            self.reference.reduced, self.reference.sums = self.reference.sums, {}
        result = self.optimizer.step()
        seed = self.own_chance.randrange(1 << 30)
        slow_lanes(self.optimizer, seed, 2e-2) if self.is_slow else delay_lanes(self.optimizer, seed)
        assert self.reference.step(result.grad_norm) is bool(result)
        groups = self.optimizer.param_groups  # a read of the model's parameters waits for their updates
        assert all(parameter.grad is None for group in groups for parameter in group["params"])
        self.steps += 1
        if "check" in how:
            self.check()

    def refuse(self, why: str) -> None:
        """By the step, and by whoever asks for the norm."""
        for refused in (self.optimizer.step, self.optimizer.grad_norm):
            with pytest.raises(RuntimeError, match=REFUSALS[why]):
                refused()

    def write_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)

    def interrupt(self, where: str) -> None:
        """A forward is as if it had not been, and a backward is dropped; ``where``: as torch names the hook."""
        self.inner.skipped = frozenset()

        def raising(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = getattr(self.inner.blocks[1], f"register_{where}_hook")(raising)
        with pytest.raises(KeyboardInterrupt):
            self.optimizer.backward(loss_of(self.model, self.batches, 3, self.rank, self.device))
        handle.remove()
        if "backward" in where:
            self.zero_grad()

    def zero_grad(self, whose: str = "optimizer") -> None:
        (self.model if whose == "model" else self.optimizer).zero_grad()
        self.drops = self.drops or not (self.alike or self.reduced)
        self.reference.sums, self.reference.reduced, self.reduced = {}, {}, True

    def zeros(self) -> None:
        """Those of the gradients that are there, or of the last step's: zeros count as gradients."""
        given = [*self.reference.reduced, *self.reference.sums] or self.last
        self.optimizer.zero_grad(set_to_none=False)
        zeros = {p: torch.zeros_like(self.reference.part(p), dtype=torch.float32) for p in given}
        self.reference.sums, self.reference.reduced = (zeros, {}) if self.in_place else ({}, zeros)

    def freeze(self, name: str) -> None:
        """A module or parameter; the second time it is trained again."""
        thaw = name in self.frozen
        self.frozen ^= {name}
        for model in (self.inner, self.replica):
            _part(model, name).requires_grad_(thaw)

    def lr(self, group: str, value: str) -> None:
        for optimizer in (self.optimizer, self.reference.optimizer):
            optimizer.param_groups[int(group)]["lr"] = float(value)

    def clip(self, max_norm: str = "") -> None:
        self.optimizer.max_norm = self.reference.max_norm = float(max_norm) if max_norm else None

    def read(self, *ranks: str) -> None:
        """By all ranks, or by some alone."""
        if not ranks or str(self.rank) in ranks:
            for _, parameter, expected in self.named():
                same("a weight", local_tensor(parameter.detach()), self.reference.part(expected))

    def forward(self) -> None:
        """Without a backward."""
        loss_of(self.model, self.batches, 1, self.rank, self.device)

    def evaluate(self, uses: str = "") -> None:
        if uses:
            self.inner.uses = self.replica.uses = tuple(uses.split("."))
        batch = (self.batches, 1, self.rank, self.device)
        with torch.no_grad():
            assert torch.equal(loss_of(self.model, *batch), loss_of(self.replica, *batch))

    def edit(self, name: str, change: str, how: str = "") -> None:
        """Weights whose names begin so: as ``DTensor``, as ``local`` tensor, as ``data`` of that, or by a ``load``."""
        if how in ("local", "data"):
            self.optimizer.synchronize()
        changed = {}
        for path, expected in self.replica.named_parameters():
            if not path.startswith(name) or not expected.requires_grad:
                continue
            parameter = self.inner.get_parameter(path)  # nobody waits for the others
            with torch.no_grad():
                changed[path] = local_tensor(parameter) if how in ("local", "data") else parameter
                if how == "load":
                    changed[path] = parameter + float(change)
                else:
                    (changed[path].data if how == "data" else changed[path]).add_(float(change))
                expected.add_(float(change))
            self.reference.adopt(expected)
        if how == "load":
            self.inner.load_state_dict(changed, strict=False)
        if how == "data":
            self.refresh()

    def refresh(self) -> None:
        self.optimizer.refresh_master_weights()
        for expected in self.reference.masters:
            self.reference.adopt(expected)

    def gradients(self, factor: str, how: str = "", dropped: str = "") -> None:
        """In ``p.grad``: by another tensor, or ``in place``; one of them is dropped."""
        sums = self.reference.sums if self.in_place else self.reference.reduced
        penalized = [name for name, _, _ in self._penalized()]
        for name, parameter, replica in self.named():
            assert (parameter.grad is None) == (replica not in sums), name
            if parameter.grad is None:
                continue
            if name == dropped:
                parameter.grad = None
                del sums[replica]
                continue
            found = local_tensor(parameter.grad)  # in 16 bits if the penalty alone has made it
            assert found.dtype == sums[replica].dtype or name in penalized, name
            assert torch.allclose(found.to(sums[replica].dtype), sums[replica], 0, 0, equal_nan=True), name
            if how == "in_place":
                parameter.grad.mul_(float(factor))
            else:
                parameter.grad = parameter.grad * float(factor)
            sums[replica] = (sums[replica].to(found.dtype) * float(factor)).to(sums[replica].dtype)

    def state(self, how: str) -> None:
        """Read and written to, or ``assigned``; that of the first block is ``forgotten``, with its masters."""
        for name, parameter, expected in self.named():
            if not self.reference.state(expected):
                continue
            master = self.reference.masters[expected]
            ours, theirs = self.optimizer.state[parameter], self.reference.optimizer.state[master]
            for entries in (ours, theirs) if how == "assigned" else ():
                entries["exp_avg_sq"] = entries["exp_avg_sq"] * 2
            for entries in (ours, theirs) if how == "written" else ():
                entries["exp_avg"].mul_(0.5)
                entries["step"] += 3
            if how == "forgotten" and name.startswith("blocks.0"):
                self.optimizer.state.pop(parameter)
                self.reference.optimizer.state.pop(master)
                master.copy_(self.reference.part(expected))

    def reload(self) -> None:
        """Nothing changes."""
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.load_state_dict(state)

    def memory(self) -> None:
        self.optimizer.release_device_memory()

    def resident(self, gib: str) -> None:
        """Each rank keeps more than the one before it."""
        self.optimizer.set_residency(float(gib) * (1 + self.rank))

    def slow(self) -> None:
        """The lanes."""

    def ahead(self) -> None:
        """Each block's shards are gathered while the block before it runs."""
        for first, second in pairwise(self.inner.blocks):
            first.set_modules_to_forward_prefetch([second])

    def exchanges(self) -> None:
        """Several units of Muon were on their way among the ranks at a time; that memory is told, freed, made anew."""
        self.optimizer.synchronize()
        for exchange in self.optimizer.engine.classes.exchanges.values():
            units = [unit for unit in self.backend.units() if unit.parts[0][0].rows is not None]
            assert torch.optim.Muon not in self.whole or len(exchange._all) == min(AHEAD + 1, len(units)) > 1
            elements = sum(item.param.numel() for item in self.optimizer.engine.managed)
            assert 0 < exchange.nbytes() < 3 * 4 * elements
            assert exchange.nbytes() <= self.optimizer.memory_report()["exchange_bytes"]
        self.optimizer.release_device_memory()
        assert self.optimizer.memory_report()["exchange_bytes"] == 0
        for exchange in self.optimizer.engine.classes.exchanges.values():
            exchange.retain(frozenset(self.optimizer.engine.managed))  # as for new parameters

    def displace(self) -> None:
        """The model is moved to other memory, as :meth:`torch.nn.Module.to` does where it has something to do."""
        _displace(self.model, self.device)

    def move(self, state: str, how: str = "") -> None:
        """Into another model, and another backend or time.

        Args:
            how: through a checkpoint, which may be written ``late``; or as ``state_dicts``. ``host``, ``device``:
                through a checkpoint, to weights there.
        """
        with self._checkpoint(late=how == "late") as folder:
            saved = copy.deepcopy((dict(self.inner.state_dict()), self.optimizer.state_dict()))
            self.values["optimizer_state"] = STATES[state]
            if how in ("host", "device"):
                self.reduces_each = how == "host"
                self.values["weights"] = HOST if how == "host" else {}
            self.begin(self.values)
            if how == "state_dicts":
                self.inner.load_state_dict(saved[0])
                self.optimizer.load_state_dict(saved[1])
            else:
                self.strategy.load_checkpoint(folder, self.model, self.optimizer)
            self.optimizer.max_norm = self.reference.max_norm

    def rewind(self, how: str = "") -> None:
        """The same model goes back, after a step that is forgotten."""
        with self._checkpoint(late=how == "late") as folder:
            self._train_on()
            self.strategy.load_checkpoint(folder, self.model, self.optimizer)

    @contextlib.contextmanager
    def _checkpoint(self, late: bool) -> Iterator[Path]:
        places = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(places)
        folder = Path(places[0]) / "checkpoint"
        with slow_writer(self.own_chance) if late else contextlib.nullcontext():
            saved = self.strategy.save_checkpoint(folder, self.model, self.optimizer, asynchronous=late)
            if late:
                self._train_on()
                self._train_on()
                saved.result()
        yield folder
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(places[0])

    def _train_on(self) -> None:
        """A step that the checkpoint must not see."""
        self.optimizer.backward(loss_of(self.model, 0, 0, self.rank, self.device))
        self.optimizer.step()

    def begin(self, values: Mapping[str, Any]) -> None:
        super().begin(values)
        if self.whole:  # several small units, which are begun before others are updated
            self.backend.WHOLE_UNIT = self.backend._ring_plan.BULK_UNIT = 150

    def prepare(self, model: nn.Module) -> nn.Module:
        model.get_submodule("frozen").register_full_backward_hook(lambda module, gradients, outputs: None)
        prepared = super().prepare(model)
        for name in self.frozen:
            _part(self.strategy.unwrap_model(prepared), name).requires_grad_(False)
        if self.text.startswith("displace"):  # before there is an optimizer, too
            _displace(prepared, self.device)
        return prepared

    # -- random words

    @property
    def pending(self) -> bool:
        """Whether there are gradients."""
        return bool(self.reference.sums or self.reference.reduced)

    def draw(self, length: int) -> Iterator[str]:
        """So many, and a step at the end; each is chosen when those before it have been done."""
        chance = self.chance
        for _ in range(length):
            if chance.random() < 0.7:
                yield from [self._backward()] if chance.random() < 0.6 else self._step()
            else:
                yield from self._other()
        yield from self._step()

    def _backward(self, last: bool | None = None) -> str:
        chance = self.chance
        last = chance.random() < 0.6 if last is None else last
        ranks = 1 if self.alike else 2
        without = ["".join(block for block in "012" if chance.random() < 0.25) for _ in range(ranks)]
        # torch's FSDP2 adds up nothing for layers that it has not gathered; DDP takes them for used, and finds no
        # gradient, after some was dropped
        whole = self.drops or (self.alike and not (last and self.reduced))
        by_hand = self.reference.loss_scale.scale == 1 and chance.random() < 0.3
        how = [] if whole or not any(without) else [f"without={'/'.join(without)}"]
        how += ["hand"] * by_hand + ["inf"] * (chance.random() < 0.05)
        how += ["plain"] * (last and (self.reduced or not by_hand) and chance.random() < 0.3)
        return ("micro:" if last else "sum:") + ",".join(how)

    def _step(self) -> Iterator[str]:
        if not self.reduced or not self.pending:
            yield self._backward(last=True)
        yield "step:" + ",".join(how for how in ("norm", "check") if self.chance.random() < 0.25)

    def _other(self) -> list[str]:
        """None if there are gradients in its way."""
        chance, streamed = self.chance, self.values["optimizer_state"]["backend"] == "stream"
        anytime = {
            "zero_grad": [""],
            "lr": [f"{group},{value}" for group in range(2) for value in (1e-3, 3e-3)],
            "clip": ["", "0.3", "1e4"],
            "read": ["", "0", "1"],
            "interrupt": ["forward_pre", "forward"],  # a step follows: until then the root has no shards to be read
        }
        reduced = {
            "gradients": [
                f"{factor},{how}" for factor in (0.3, 2.0) for how in ("in_place", "", ",blocks.1.up.weight")
            ],
            "penalty": [""] if self.alike else [],
        }
        between = {
            "freeze": ["blocks.0.up", "blocks.1.norm", "embed"],
            "edit": [f"{name},{how}" for name in ("head", "blocks.2.up.weight") for how in ("0.5", "-0.25,local")],
            "state": ["written", "assigned", "forgotten"],
            "reload": [""],
            "memory": [""],
            "resident": ["0", "1e-6", "1"] if streamed else [],
            "move": [f"{state},{how}" for state in MOVES for how in ("", "late", "state_dicts")],
            "rewind": ["", "late"],
        }
        possible = anytime | (reduced if self.reduced else {}) | ({} if self.pending else between)
        name = chance.choice([name for group in (anytime, reduced, between) for name in group])
        given = possible.get(name, [])
        words = [f"{name}:{chance.choice(given)}"] if given else []
        return [*words, *self._step()] if name == "interrupt" else words


@contextlib.contextmanager
def slow_writer(chance: random.Random) -> Iterator[None]:
    """Each parameter's entries are read together, its master is joined once, and training goes on meanwhile."""
    take, taken = Snapshot.take, list[int]()

    def slowly(snapshot: Snapshot, parameter: Tensor, key: str) -> Tensor:
        time.sleep(chance.random() * 1e-3)
        taken.append(id(parameter))
        return take(snapshot, parameter, key)

    with mock.patch.object(Snapshot, "take", slowly):
        yield
    assert len([*groupby(taken)]) == len({*taken})


def _part(model: Any, name: str) -> Any:
    """A module or a parameter."""
    return dict(model.named_modules()).get(name) or model.get_parameter(name)


def _displace(model: nn.Module, device: torch.device) -> None:
    model.cpu()
    model._apply(torch.clone)
    model.to(device)
