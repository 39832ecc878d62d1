"""``optimizer.state``: reading and changing state entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, cast

from torch import Tensor

from lightstep.optimizer.engine import Engine
from lightstep.optimizer.state_edits import Reading, Standing, noticing, plain
from lightstep.optimizer.update import KEPT, copied

__all__ = ["Entries", "StateView"]


class StateView(MutableMapping[Tensor, dict[str, Any]]):
    """``optimizer.state``: parameter → entries, read from the state backend at each access.

    What is read is a copy, under every backend. Assigning replaces a parameter's state or an entry; writing into a
    copy, or into a view of it, changes the state, too, until the next update: then it raises. The optimizer applies the
    changes, and checks them, before it uses the state. As in torch, a parameter without state has ``{}``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if isinstance(parameter, str):
            return self._shared()[parameter]
        edits = self._engine.edits
        edit, reading = edits.unapplied.get(parameter), edits.reading(parameter)

        def unedited() -> dict[str, Any]:
            return {key: reading.copies.get(key, value) for key, value in self._engine.read_state(parameter).items()}

        return Entries(unedited() if edit is None else edit.applied_to(unedited), reading)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """``default`` for a parameter that is not in it, as in torch."""
        if parameter not in self:
            return default
        return self[parameter]

    def __setitem__(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        self._engine.guard.check("changing state")
        edits = self._engine.edits
        edits.release([parameter])
        shared = isinstance(entries, dict) and not (isinstance(entries, Entries) and not entries.is_own)
        edits.replace(parameter, entries if shared else dict(entries))  # type: ignore[arg-type]

    def __delitem__(self, parameter: Tensor) -> None:
        self._engine.refuse_if_closed()
        self._engine.guard.check("changing state")
        self._engine.edits.replace(parameter, {})

    def __contains__(self, parameter: object) -> bool:
        if isinstance(parameter, str):
            return parameter in self._shared()
        edit = self._engine.edits.unapplied.get(cast(Tensor, parameter))
        item = self._engine.managed.get(parameter)
        if edit is not None and (edit.whole or edit.entries):
            return bool(edit.entries)
        return item is not None and item.updated

    def _shared(self) -> dict[str, Any]:
        """A copy of the entries under keys that are no parameters (``state["k"]``), which are kept in a group."""
        self._engine.queue.wait_for_update()
        classes = (each for group in self._engine.param_groups for each in group.get(KEPT, {}).values())
        return copied({key: value for each in classes for key, value in each["state"].items()})

    def __iter__(self) -> Iterator[Tensor]:
        listed = dict.fromkeys([*(item.param for item in self._engine.managed), *self._engine.edits.unapplied])
        return (parameter for parameter in listed if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Entries(dict[str, Any]):
    """One parameter's entries as they were read; assigning to an entry or deleting it changes the state.

    Once the parameter's state has been deleted or replaced as a whole it is an ordinary dictionary, as in torch.
    """

    def __init__(self, entries: Mapping[str, Any], reading: Reading) -> None:
        super().__init__({key: noticing(value, key, reading) for key, value in entries.items()})
        self._reading = reading

    @property
    def is_own(self) -> bool:
        """Whether it belongs to no parameter (any more)."""
        return self._reading.standing is Standing.RELEASED

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        if not self.is_own:
            self._reading = self._reading.change({}, [key])

    def update(self, *arguments: Any, **entries: Any) -> None:
        new = {key: plain(value) for key, value in dict(*arguments, **entries).items()}
        if not self.is_own:
            self._reading = self._reading.change(new, ())
            new = {key: noticing(value, key, self._reading) for key, value in new.items()}
        super().update(new)

    def __ior__(self, other: Any) -> Entries:  # type: ignore[misc,override]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        super().clear()
        if not self.is_own:
            self._reading.clear()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
