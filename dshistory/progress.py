"""The progress bar of long work: on a terminal's stderr or in a notebook, never into a pipe or a log file."""

import sys

from tqdm.auto import tqdm

__all__ = ["ByteProgress"]

_PATIENCE_S = 0.5
"""What is done sooner shows no bar."""


class ByteProgress:
    """A bar over bytes, a context manager. Shown in notebooks and on terminals, nowhere else; `quiet` hides it
    everywhere."""

    def __init__(self, total_bytes: int, *, description: str, quiet: bool) -> None:
        self._bar = tqdm(
            total=total_bytes,
            desc=description,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            delay=_PATIENCE_S,
            disable=quiet or not (_in_notebook() or sys.stderr.isatty()),
        )

    def advance(self, nbytes: int) -> None:
        """Say that nbytes more are done."""
        self._bar.update(nbytes)

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _in_notebook() -> bool:
    app = sys.modules.get("ipykernel.kernelapp")
    return app is not None and bool(app.IPKernelApp.initialized())
