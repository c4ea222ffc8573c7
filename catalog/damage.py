"""Finds the checkpoints whose bytes are gone, by the names and sizes of their files; no tensor is read.

A checkpoint needs its manifests, its data files, and those of earlier checkpoints to which it refers. The catalog knows
them all, so this takes one query and a look at each file; only of a packed image the table is read, which names the
files that it was packed against. `catalog.verify` reads the bytes themselves.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from catalog.data_files.needed_files import NeededFile, missing_file
from catalog.paths import HistoryPaths, manifest_file
from catalog.records import CheckpointRef

if TYPE_CHECKING:
    from catalog.index.index import Asking

__all__ = ["Needs", "damaged_checkpoints", "needs_of"]

_NEEDED = """
SELECT run, step, file, max("offset" + nbytes) AS nbytes FROM fragments
WHERE $run IS NULL OR run = $run GROUP BY run, step, file ORDER BY run, step, file
"""
_WORLD = "SELECT run, step, world_size FROM checkpoints WHERE state = 'committed' AND ($run IS NULL OR run = $run)"


class Needs(NamedTuple):
    """The files that checkpoints need, as the catalog knows them: data files, and the number of manifests."""

    files: pa.Table
    worlds: pa.Table


def needs_of(ask: "Asking", run: str | None = None) -> Needs:
    """Return the needs of the committed checkpoints of a run, or of all. `ask` is that of `History.asking`, whose body
    ends before anybody looks at the files: writers of the index wait for it."""
    return Needs(ask(_NEEDED, {"run": run}), ask(_WORLD, {"run": run}))


def damaged_checkpoints(paths: HistoryPaths, needs: Needs) -> Mapping[CheckpointRef, str]:
    """Return the checkpoints that need a file which is gone or too short, each with what it needs: "needs
    runs/.../rank-00000.safetensors (step 20), which is gone"."""
    needed: defaultdict[CheckpointRef, list[NeededFile]] = defaultdict(list)
    for row in needs.files.to_pylist():
        needed[CheckpointRef(row["run"], row["step"])].append(NeededFile(row["file"], row["nbytes"]))
    worlds = {CheckpointRef(row["run"], row["step"]): row["world_size"] for row in needs.worlds.to_pylist()}
    found = {}
    for ref, world_size in worlds.items():
        manifests = (manifest_file(ref.run, ref.step, rank) for rank in range(world_size))
        gone = next((file for file in manifests if not os.path.lexists(f"{paths.root}/{file}")), None)
        if gone is None:
            problem = missing_file(paths, needed[ref])
        else:
            problem = f"needs {gone}, which is gone"
        # One that is removed meanwhile is not damaged.
        if problem and os.path.lexists(paths.marker(ref.run, ref.step)):
            found[ref] = problem
    return found
