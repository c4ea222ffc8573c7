"""The progress of long work: a bar on a terminal's stderr or in a notebook, never in a pipe or a log file; or whoever listens
in its place.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from tqdm.auto import tqdm

__all__ = ["ByteProgress", "CountProgress", "heard"]

_PATIENCE_S = 0.5
"""What is done sooner shows no bar."""

_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)


@contextmanager
def heard(listener: Callable[[float], None]) -> Iterator[None]:
    """Work of this thread tells `listener` the share that is done, from 0 to 1, and shows no bar; what the listener raises
    ends the work."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class CountProgress:
    """A bar over a number of things, a context manager. Shown in notebooks and on terminals, nowhere else; `quiet` hides
    it everywhere."""

    def __init__(self, total: int, *, description: str, quiet: bool, **unit: Any) -> None:
        self._listener = _listener.get()
        self._total, self._done = total, 0
        self._bar: Any = None
        # tqdm takes a lock of the whole process even for a bar that is not shown. Ctrl-C can leave it with the main thread, which
        # goes on; whoever listens, in a thread of its own, would wait for it for ever.
        if self._listener is None and not quiet and (_in_notebook() or sys.stderr.isatty()):
            self._bar = tqdm(total=total, desc=description, leave=False, delay=_PATIENCE_S, **unit)

    def advance(self, count: int) -> None:
        """Say that so many more are done."""
        if self._bar is not None:
            self._bar.update(count)
        self._done += count
        if self._listener is not None:
            self._listener(min(1.0, self._done / max(1, self._total)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class ByteProgress(CountProgress):
    """A bar over bytes."""

    def __init__(self, total_bytes: int, *, description: str, quiet: bool) -> None:
        super().__init__(
            total_bytes, description=description, quiet=quiet, unit="B", unit_scale=True, unit_divisor=1024
        )


def _in_notebook() -> bool:
    app = sys.modules.get("ipykernel.kernelapp")
    return app is not None and bool(app.IPKernelApp.initialized())
