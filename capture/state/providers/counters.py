"""A loop's own counters, as plain numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capture.state.interface import Available, ReadAt, TensorItem
from catalog.records import Placement

__all__ = ["Counters"]


class Counters:
    """Counters that one function reads and another puts back; the same on every rank."""

    read_at: ReadAt = "before_update"

    def __init__(self, read: Callable[[], Mapping[str, int]], write: Callable[[Mapping[str, int]], None]) -> None:
        self._read = read
        self._write = write

    def __repr__(self) -> str:
        return f"<Counters: {', '.join(f'{name} {value}' for name, value in self._read().items())}>"

    def tensors(self) -> Sequence[TensorItem]:
        return ()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {"counters": (dict(self._read()), "replicated")}

    def prepare(self, available: Available) -> None:
        """Nothing to make."""

    def finish(self, available: Available) -> None:
        if "counters" in available.objects:
            self._write(available.objects["counters"])
