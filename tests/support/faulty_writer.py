"""Sessions and checkpoint engines whose writer is slow, or fails, on purpose."""

import contextlib
import functools
from collections.abc import Iterator

import native
from capture.snapshot import writer_choice

__all__ = ["faults_in_new_writers"]


@contextlib.contextmanager
def faults_in_new_writers(faults: native.Faults | None) -> Iterator[None]:
    """Make the writers that sessions and checkpoint engines make inside with `faults`. None: without any, for a rank
    whose disk is sound. The writers that measure a disk are not among them.

    `capture.enable` makes its writer at once; the engine of `capture.checkpoint_engine` at its first save.
    """
    real = writer_choice.Writer
    writer_choice.Writer = functools.partial(real, faults=faults)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        writer_choice.Writer = real  # type: ignore[misc]
