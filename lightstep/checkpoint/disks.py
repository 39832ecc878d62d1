"""Hosts that share no disk: which ranks see the same files, and the parts that such a save consists of.

Before a save the first rank creates a folder beside the checkpoint's path. The ranks that do not see it have another
disk; their first one creates a folder too, until every rank has seen one. The first rank of each disk, its *lead*, does
there what one rank does alone on a shared disk.

A save on several disks has one *part* for each: a folder with the manifest, the index and the small state of the whole
save, and the tensors that the ranks of this disk wrote. A tensor that ranks of several disks have is in the part of
each. The manifest lists the files of all parts, and under ``parts`` whose they are. All parts copied into one folder
are an ordinary checkpoint.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.layout import absent_files, find_checkpoint
from lightstep.checkpoint.storage import FolderKind, is_seen, storage_for, temporary_mark
from lightstep.distributed import Ranks

Result = TypeVar("Result")


@dataclass(frozen=True)
class Disks:
    """The disks that the ranks save to."""

    leads: Sequence[int]
    """For each rank, the first rank that sees the same files."""
    paths: Sequence[Path]
    """For each rank, where the checkpoint will be."""
    ranks: Ranks

    @classmethod
    def behind(cls, path: Path, ranks: Ranks) -> Disks:
        """The disks behind ``path``, this rank's path of a checkpoint. Called by all ranks."""
        if not ranks.is_distributed:
            return cls([0], [path], ranks)
        leads: dict[int, int] = {}
        paths: dict[int, Path] = {}
        while len(leads) < ranks.size:
            lead = next(rank for rank in range(ranks.size) if rank not in leads)
            with ExitStack() as until_seen:
                marking = temporary_mark(path) if ranks.rank == lead else nullcontext()
                own = ranks.together(partial(until_seen.enter_context, marking))
                marked, mark = ranks.gather((path, own))[lead]
                sees = ranks.gather(ranks.rank == lead or mark is None or is_seen(mark, path))
            found = [rank for rank, seen in enumerate(sees) if seen and rank not in leads]
            leads |= dict.fromkeys(found, lead)
            paths |= dict.fromkeys(found, marked)
        order = range(ranks.size)
        return cls([leads[rank] for rank in order], [paths[rank] for rank in order], ranks)

    @property
    def path(self) -> Path:
        """Where this rank's disk will have the checkpoint."""
        return self.paths[self.ranks.rank]

    @property
    def is_lead(self) -> bool:
        return self.leads[self.ranks.rank] == self.ranks.rank

    @property
    def are_several(self) -> bool:
        return len(set(self.leads)) > 1

    def on_each(self, step: Callable[[], Result]) -> Result:
        """Run ``step`` on the lead of each disk; every rank gets the result of its own one. All fail if one does."""
        result = self.ranks.together(lambda: step() if self.is_lead else None)
        own: Result = self.ranks.gather(result)[self.leads[self.ranks.rank]]
        return own

    @contextmanager
    def new_folders(self, kind: FolderKind) -> Iterator[Path]:
        """A temporary folder on each disk, for what will be at :attr:`path`."""
        with ExitStack() as stack:
            folder = storage_for(self.path).new_folder(self.path, kind)
            yield self.on_each(lambda: stack.enter_context(folder))

    def parts(self, files: Sequence[Iterable[str]]) -> list[dict[str, Any]]:
        """The entry ``parts`` of the manifest. Called by all ranks.

        Args:
            files: those that each rank wrote.
        """
        hosts = self.ranks.gather(socket.gethostname())
        found = []
        for lead in sorted(set(self.leads)):
            members = [rank for rank, its_lead in enumerate(self.leads) if its_lead == lead]
            names = sorted({name for rank in members for name in files[rank]})
            found.append({"host": hosts[lead], "path": str(self.paths[lead]), "ranks": members, "files": names})
        return found


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Look:
    """What a rank finds at its path."""

    rank: int
    host: str
    folder: Path | None = None
    save_id: str | None = None
    parts: Sequence[dict[str, Any]] = ()
    """The entry of the manifest."""
    here: frozenset[int] = frozenset()
    """The numbers of the parts that the folder has."""
    problem: str = ""

    @classmethod
    def at(cls, path: Path, rank: int) -> _Look:
        host = socket.gethostname()
        try:
            folder, manifest = find_checkpoint(path)
        except CheckpointError as error:
            return cls(rank, host, problem=str(error))
        parts, absent = manifest.get("parts") or (), absent_files(folder, manifest)
        here = frozenset(number for number, part in enumerate(parts) if absent.isdisjoint(part["files"]))
        return cls(rank, host, folder, manifest.get("save_id"), parts, here, f"{folder} is of another save")


def own_part(path: Path, ranks: Ranks) -> Path | None:
    """This rank's folder of a save in parts; ``None`` if what the ranks find at their paths is no such save.

    Called by all ranks.

    Raises:
        CheckpointError: a rank has no part; it says which are missing, and where. All ranks raise.
    """
    looks = ranks.gather(_Look.at(path, ranks.rank))
    first = next((look for look in looks if look.parts), None)
    if first is None:
        return None
    of_this_save = [look for look in looks if look.save_id == first.save_id]
    lost = [part for number, part in enumerate(first.parts) if not any(number in look.here for look in of_this_save)]
    without = {look.host: look for look in reversed(looks) if look not in of_this_save}
    if without:  # else each rank finds out whether all that it needs is here
        missing = [f"the part of ranks {_listed(p['ranks'])} (saved by {p['host']} in {p['path']})" for p in lost]
        reasons = [f"rank {look.rank} on {host}: {look.problem}" for host, look in sorted(without.items())]
        raise CheckpointError(
            f"it was saved in {len(first.parts)} parts, one on each disk, and "
            f"{' and '.join(missing) or 'one of them here'} is missing; {'; '.join(reasons)}"
        )
    return looks[ranks.rank].folder


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
