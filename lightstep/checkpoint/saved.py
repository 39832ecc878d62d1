"""A complete checkpoint on disk, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightstep.checkpoint.errors import DamagedError
from lightstep.checkpoint.layout import (
    INDEX,
    Manifest,
    data_folder,
    read_checked,
    read_manifest,
    refuse_engine_files,
    refuse_replaced,
)
from lightstep.checkpoint.read import read_whole
from lightstep.checkpoint.small_state import read_state
from lightstep.checkpoint.tensors import Index, file_sizes, parse_index


def read_index(folder: Path, manifest: Manifest) -> Index:
    """The index of the tensors.

    Raises:
        DamagedError: it is damaged, or names bytes that its files do not have.
    """
    index, data = parse_index(read_checked(folder, manifest, INDEX)), manifest.get("folder")
    for name, size in file_sizes(index).items():
        if size > manifest["files"].get(f"{data}/{name}" if data else name, 0):
            file = data_folder(folder, manifest) / INDEX
            raise DamagedError(f"{file} cannot be read: {name} has fewer bytes than the {size} that it names")
    return index


@dataclass
class SavedCheckpoint:
    """Manifest, index and small state of one save. The tensors stay on disk."""

    folder: Path
    manifest: Manifest
    index: Index
    state: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, manifest: Manifest | None = None) -> SavedCheckpoint:
        """Read the checkpoint in ``folder``.

        Args:
            manifest: the folder's, if it has been read already.

        Raises:
            CheckpointError: the checkpoint is incomplete or damaged, or was replaced in the meantime.
        """
        manifest = read_manifest(folder) if manifest is None else manifest
        refuse_engine_files(folder, manifest)
        try:
            index = read_index(folder, manifest)
            return cls(folder, manifest, index, read_state(folder, manifest))
        finally:
            refuse_replaced(folder, manifest)

    @property
    def data(self) -> Path:
        """The folder with the tensors."""
        return data_folder(self.folder, self.manifest)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors -> the name under which the tensor is saved."""
        return dict(self.manifest.get("aliases") or {})

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """Hyper-parameters, loss scale and plain state values; ``None`` if no optimizer was saved."""
        return self.state.get("optimizer")

    @property
    def groups(self) -> list[list[str]]:
        """Parameter names of each parameter group."""
        return list(self.manifest.get("groups") or [])

    @property
    def base(self) -> dict[str, Any] | None:
        """``name`` and ``shapes`` of the frozen base if it was left out; ``None`` if everything was saved."""
        return self.manifest.get("base")

    @property
    def base_shapes(self) -> dict[str, list[int]]:
        """The shapes of the frozen base by name; empty if everything was saved."""
        return dict((self.base or {}).get("shapes") or {})

    def model_names(self) -> set[str]:
        """The names of the model's tensors that were saved."""
        return {key.removeprefix("model.") for key in self.index if key.startswith("model.")}

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors on the host by name; tied names share one. The calling thread reads them."""
        found = {
            name: read_whole(self.data, f"model.{name}", self.index[f"model.{name}"]) for name in self.model_names()
        }
        return found | {alias: found[name] for alias, name in self.aliases.items() if name in found}
