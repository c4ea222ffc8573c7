"""Progress of long work: a bar on a terminal's stderr or in a notebook, never in a pipe or a log file, or a listener in
place of the bar."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from dshistory.display.cell_bar import CellBar

__all__ = ["ByteProgress", "CountProgress", "listening"]

_PATIENCE_S = 0.5
"""Work that takes less time shows no bar."""

_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[float], None]) -> Iterator[None]:
    """Report the progress of this thread's work to `listener`, as a share from 0 to 1, in place of a bar. An exception
    of the listener ends the work."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class CountProgress:
    """A bar that counts items, as a context manager. It shows in notebooks and on terminals only; `quiet` hides it."""

    def __init__(self, total: int, *, description: str, quiet: bool, **unit: Any) -> None:
        self._listener = _listener.get()
        self._total, self._done = total, 0
        self._bar: Any = None
        # tqdm takes a lock of the whole process even for a bar that is not shown. Ctrl-C can leave that lock with the
        # main thread, and a worker thread with a listener would then wait for it forever.
        if self._listener is None and not quiet and _in_notebook():
            self._bar = CellBar(total, description=description, patience_s=_PATIENCE_S)
        elif self._listener is None and not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=description, leave=False, delay=_PATIENCE_S, **unit)

    @property
    def is_shown(self) -> bool:
        """True when somebody may see the bar."""
        return self._bar is not None

    def describe(self, text: str) -> None:
        """Show `text` beside the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def advance(self, count: int) -> None:
        """Report that `count` more items are done."""
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
    """A bar that counts bytes."""

    def __init__(self, total_bytes: int, *, description: str, quiet: bool) -> None:
        super().__init__(
            total_bytes, description=description, quiet=quiet, unit="B", unit_scale=True, unit_divisor=1024
        )


def _in_notebook() -> bool:
    app = sys.modules.get("ipykernel.kernelapp")
    return app is not None and bool(app.IPKernelApp.initialized())
