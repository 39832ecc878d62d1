"""A complete checkpoint on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightstep.checkpoint.layout import (
    INDEX,
    Manifest,
    data_folder,
    read_checked,
    read_manifest,
    refuse_engine_files,
    refuse_replaced,
)
from lightstep.checkpoint.small_state import read_state
from lightstep.checkpoint.tensors import Index, parse_index


@dataclass
class Saved:
    """Its manifest, index and small state, which belong to one save; tensors are still on disk."""

    folder: Path
    manifest: Manifest
    index: Index
    state: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, manifest: Manifest | None = None) -> Saved:
        """Of ``manifest``, if somebody has read it already.

        Raises:
            CheckpointError: it is not complete, or was replaced meanwhile.
        """
        manifest = read_manifest(folder) if manifest is None else manifest
        refuse_engine_files(folder, manifest)
        try:
            index = parse_index(read_checked(folder, manifest, INDEX))
            return cls(folder, manifest, index, read_state(folder, manifest))
        finally:
            refuse_replaced(folder, manifest)

    @property
    def data(self) -> Path:
        """The folder with the tensors."""
        return data_folder(self.folder, self.manifest)

    @property
    def aliases(self) -> dict[str, str]:
        """Names of tied tensors, and the name under which each is saved."""
        return dict(self.manifest.get("aliases") or {})

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """Hyper-parameters, loss scale and plain state values, when an optimizer was saved."""
        return self.state.get("optimizer")

    @property
    def groups(self) -> list[list[str]]:
        """Parameter names of each group."""
        return list(self.manifest.get("groups") or [])

    @property
    def base(self) -> dict[str, Any] | None:
        """``name`` and ``shapes`` of the frozen base, when only what was trained was saved."""
        return self.manifest.get("base")

    @property
    def base_shapes(self) -> dict[str, list[int]]:
        """Of the frozen base; empty when everything was saved."""
        return dict((self.base or {}).get("shapes") or {})

    def model_names(self) -> set[str]:
        return {key.removeprefix("model.") for key in self.index if key.startswith("model.")}
