"""Chooses the writer of a run, before the first snapshot, and warns once if it is not the fastest; it never changes."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from capture.collectives import Ranks
from capture.snapshot.writer_tuning import Settings, settings_for
from capture.user_warning import warn_user
from catalog.errors import SetupError
from native import Writer, probe_io_uring

__all__ = ["Backend", "ChosenWriter", "WriterOptions", "agree_on_writer"]

Backend = Literal["io_uring", "posix"]
"""The way in which a writer reaches the disk."""

LEAST_BLOCK_BYTES = 64 << 10

_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """The writer's options as a user gives them. `backend` None: io_uring where the host allows it, else POSIX threads.
    `budget_bytes`: the staging memory. SetupError, with the argument and its value, for one that it may not be.
    """

    backend: Backend | None
    budget_bytes: int

    def __post_init__(self) -> None:
        if self.backend is not None and self.backend not in get_args(Backend):
            raise SetupError(f'backend={self.backend!r}: give "io_uring", "posix" or None')
        budget: Any = self.budget_bytes
        if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget < 1 << 63:
            raise SetupError(f"budget_bytes={budget!r}: give a whole number of bytes, as 256 << 20")


@dataclass(frozen=True, slots=True)
class ChosenWriter:
    """A writer, and its description for the run's facts."""

    writer: Writer
    facts: dict[str, Any]


def agree_on_writer(
    root: Path,
    ranks: Ranks,
    *,
    options: WriterOptions,
    file_system: dict[str, Any],
) -> ChosenWriter:
    """Return this rank's writer for files below `root`, with the same settings on all ranks. A collective; SetupError
    on all ranks when one of them can't make its writer.

    `file_system` is what `native.probe_file_system(root)` has returned. The notices are warned of on rank 0 alone.
    """
    # Choosing may measure by writing to `root`. Only rank 0 does, since ranks that measure at once disturb each other.
    align = int(file_system["place_align"])
    settings = ranks.broadcast(
        ranks.agree(
            "choosing the writer",
            lambda: _choose_settings(root, backend=options.backend, align=align) if ranks.rank == 0 else None,
        )
    )
    return ranks.agree(
        "making the writer",
        lambda: _make_writer(
            root,
            options=options,
            settings=settings,
            file_system=file_system,
            quiet=ranks.rank != 0,
        ),
    )


def _choose_settings(root: Path, *, backend: str | None, align: int) -> dict[str, Any]:
    """Return block size and depth for the file system of `root`, as JSON that all ranks take from rank 0."""
    chosen = backend or ("posix" if probe_io_uring() else "io_uring")
    settings = settings_for(root, backend=chosen, align=align)
    return {"block_bytes": settings.block_bytes, "depth": settings.depth, "origin": settings.origin}


def _make_writer(
    root: Path,
    *,
    options: WriterOptions,
    settings: dict[str, Any],
    file_system: dict[str, Any],
    quiet: bool,
) -> ChosenWriter:
    """Make the writer that is asked for. SetupError when it can't be made.
    Anything that keeps it from the fastest way is warned of once in a process, unless `quiet`, and is in the facts.
    """
    notices = []
    chosen: str | None = options.backend
    if chosen is None:
        reason = probe_io_uring()
        chosen = "posix" if reason else "io_uring"
        if reason:
            notices.append(f"writing with POSIX threads, since io_uring is not available here: {reason}")
    if not file_system["direct"]:
        notices.append(
            f"writing through the page cache, since {root} is on {file_system['type']} without O_DIRECT: "
            f"{file_system['reason']}"
        )
    align = max(int(file_system["place_align"]), LEAST_BLOCK_BYTES)
    writer = _writer(chosen, options.budget_bytes, Settings(**settings), least_block_bytes=align)
    if chosen == "io_uring" and not writer.registered:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        notices.append(
            f"every write pins its memory anew, since the limit of locked memory (RLIMIT_MEMLOCK, {limit} bytes) does "
            f"not let the {options.budget_bytes} bytes of staging memory be registered; raise it with ulimit -l"
        )
    if not quiet:
        for notice in notices:
            _warn_once(notice)
    facts = {
        "backend": writer.backend,
        "budget_bytes": writer.budget_bytes,
        "block_bytes": writer.block_bytes,
        "depth": writer.depth,
        "settings": settings["origin"],
        "staging_registered": writer.registered,
        "writer_notices": notices,
        "file_system": file_system,
    }
    return ChosenWriter(writer, facts)


def _writer(backend: str, budget_bytes: int, settings: Settings, *, least_block_bytes: int) -> Writer:
    """Make a writer with blocks as large as the settings say, or as the budget allows."""
    block_bytes = settings.block_bytes
    while True:
        try:
            return Writer(backend=backend, budget_bytes=budget_bytes, block_bytes=block_bytes, depth=settings.depth)
        except ValueError as error:
            if block_bytes // 2 < least_block_bytes:
                raise SetupError(
                    f"budget_bytes={budget_bytes} is too little for the {backend} writer: {error}"
                ) from error
            block_bytes //= 2
        except OSError as error:
            raise SetupError(f"the {backend} writer with budget_bytes={budget_bytes} can't be made: {error}") from error


def _warn_once(notice: str) -> None:
    if notice not in _warned:
        _warned.add(notice)
        warn_user(notice)
