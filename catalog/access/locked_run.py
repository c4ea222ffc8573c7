"""A run that certainly nobody writes, locked so that nobody begins to: whoever removes its files holds it meanwhile."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from catalog.access.liveness import is_certainly_dead
from catalog.disk.locks import free_lock, try_lock
from catalog.disk.regular_file import check_folders
from catalog.paths import HistoryPaths
from catalog.read.runs import run_facts

__all__ = ["locked_run"]


@contextmanager
def locked_run(paths: HistoryPaths, run: str) -> Iterator[bool]:
    """Lock `run.json` and every rank of a run until the end of the body. Yields False unless the run is certainly
    dead."""
    with ExitStack() as held:
        check_folders(paths.locks_dir(run), root=paths.root)
        world_size = run_facts(paths, run).world_size
        # A run always has this file, so that two of those who call this exclude each other whatever else is there.
        for path in (paths.run_json(run), *(paths.lock(run, rank) for rank in range(world_size))):
            try:
                lock = try_lock(path, create=False)
            except FileNotFoundError:
                # The rank was killed before it took its lock, or somebody has removed the file.
                continue
            if lock is None:
                yield False
                return
            held.callback(free_lock, lock)
        yield is_certainly_dead(paths, run, world_size=world_size)
