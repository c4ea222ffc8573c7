"""What must hold in every state after a power cut, and the recordings whose states are checked.

For each state: the checkpoints are those before or after the commit that was under way, none of which `wait` had said
that it is committed is missing, all their files are those that were written, `verify` finds nothing, SQL shows the same
checkpoints, a damaged index is rebuilt, and a next run collects the garbage and commits a checkpoint.

Most states differ only in files that a part of this does not read: SQL reads no lock and no temporary file, and neither
the files' own reader nor the next run reads the index. Each part is done once for what it reads.
"""

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import recorded_training
from capture_helpers import make, one_step
from catalog_helpers import Run, pieces_of
from crash_states import CrashState, Disk, Tree, crash_states
from file_calls import Call, Op, recorded_calls, recording_environment
from folders import fast_folder, measure_file_system
from recorded_training import BUDGET_BYTES

import capture
from catalog.access.liveness import DEAD_AFTER_S
from catalog.disk.durable import is_temporary
from catalog.gc import collect_garbage
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef
from catalog.verify import verify

__all__ = ["Checker", "Recording", "is_derived", "record", "states"]

STEPS = 3
_QUESTION = """
    SELECT 'checkpoints' AS of, run, step FROM checkpoints WHERE state = 'committed'
    UNION ALL SELECT DISTINCT 'tensors', run, step FROM tensors
"""
HISTORY = "history"


def _age(root: Path) -> None:
    """Let everything have happened long ago: a power cut may empty a lock file, which then decides by its age."""
    then = time.time() - 2 * DEAD_AFTER_S
    for path in (root, *root.rglob("*")):
        os.utime(path, (then, then))


def is_derived(path: str) -> bool:
    """Return whether a file is the index or a lock, by its path below the recorded folder."""
    return _is_index(path) or path.endswith(".lock")


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls of a training, and the folder below which they were recorded. The history is its folder `history`."""

    root: str
    calls: Sequence[Call]
    final: Tree


def record(*, ranks: int, killed_before: bool = False, steps: int = STEPS) -> Recording:
    """Record a training, after one that was killed in its second step if `killed_before`.

    AssertionError when the calls do not give the folder that the training has left: then the recorder has missed one.
    """
    base = fast_folder()
    try:
        root = base / "root"
        root.mkdir()
        program = [sys.executable, "-W", "ignore", recorded_training.__file__]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        measure_file_system(base)
        log = base / "log"
        train = [*program, str(root / HISTORY), str(steps)]
        if killed_before:
            first = {**recording_environment(root=root, log=log), **own, "KILL_BEFORE": "85"}
            assert subprocess.run(train, env=first, check=False).returncode == -9
        group = {**own, "WORLD_SIZE": str(ranks), "MEETING": str(base / "meeting")}
        calls = recorded_calls(
            [train] * ranks, root=root, log=log, environments=[{**group, "RANK": str(rank)} for rank in range(ranks)]
        )
        disk = Disk(str(root))
        for call in calls:
            disk.apply(call)
        left = {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
        assert disk.now() == left, "the recorded calls do not give the files that the training has left"
        return Recording(str(root), calls, left)
    finally:
        shutil.rmtree(base)


def states(recording: Recording) -> Iterator[CrashState]:
    """Yield every state that a power cut may leave during a recording."""
    return crash_states(recording.calls, root=recording.root, is_derived=is_derived)


_Key = frozenset[tuple[str, int | None]]
"""Some files of a state with the hashes of their contents."""


class Checker:
    """Opens states one after the other in one folder, and remembers what has been looked at already."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._base = fast_folder()
        self._root = self._base / HISTORY
        self._there: dict[str, bytes | None] = {}
        self._clock = 0
        self._verified: dict[_Key, list[str]] = {}
        self._asked: set[_Key] = set()
        self._gone_on: set[tuple[_Key, frozenset[CheckpointRef]]] = set()
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        shutil.rmtree(self._base)

    def __enter__(self) -> "Checker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check(self, state: CrashState, *, next_training: bool = False) -> list[str]:
        """Return everything that is wrong in a state; an empty list when all is as it must be, or when no part of it is
        new. With `next_training`, a training resumes from it."""
        self.counts["states"] += 1
        certain, possible = self._committed(state.calls)
        question = _key(state.tree, lambda path: not _is_temporary(path) and not path.endswith(".lock"))
        files = (_key(state.tree, lambda path: not _is_index(path)), frozenset(certain))
        ask, go_on = question not in self._asked, files not in self._gone_on
        self._asked.add(question)
        self._gone_on.add(files)
        if not (ask or go_on or next_training):
            return []
        try:
            self._materialize(state.tree)
            if not (self._root / "history.json").exists():
                self.counts["before the history"] += 1
                wrong = [f"the history is gone, with {sorted(map(str, certain))}"] if certain else []
            else:
                wrong = self._problems(state, certain, possible, ask=ask)
            if not wrong and (go_on or next_training):
                wrong = self._next_run(next_training=next_training)
        except Exception as error:  # noqa: BLE001 - whatever comes out of a state is what the proof is about
            wrong = [f"{type(error).__name__}: {error}"]
        return wrong

    def _committed(self, count: int) -> tuple[set[CheckpointRef], set[CheckpointRef]]:
        """Return the checkpoints that must be there after so many calls, and those that may be."""
        certain, possible = set(), set()
        for call in self._recording.calls[:count]:
            if call.op == Op.NOTE:
                run, _, step = call.path.removeprefix("committed ").partition(":")
                certain.add(CheckpointRef(run, int(step)))
            elif call.op == Op.LINK and call.other.endswith("commit.json"):
                run, _, step, _ = call.other.split("/")[-4:]
                possible.add(CheckpointRef(run, int(step)))
        return certain, possible

    def _problems(
        self, state: CrashState, certain: set[CheckpointRef], possible: set[CheckpointRef], *, ask: bool
    ) -> list[str]:
        history = History.open(self._root)
        there = _checkpoints(history)
        wrong = []
        if not certain <= there:
            wrong.append(f"lost: {sorted(map(str, certain - there))}")
        if not there <= possible:
            wrong.append(f"never committed: {sorted(map(str, there - possible))}")
        for ref in there:
            for part in history.marker(ref).parts:
                for file in (part.manifest, part.data):
                    if state.tree.get(f"{HISTORY}/{file}") != self._recording.final[f"{HISTORY}/{file}"]:
                        wrong.append(f"{file} is not what was written, and {ref} is committed")
        wrong += self._verify(history, state)
        return wrong or (self._ask(history, there) if ask else [])

    def _verify(self, history: History, state: CrashState) -> list[str]:
        """Verify each content of the published files once: nothing else is read."""
        key = _key(state.tree, lambda path: not is_derived(path) and not _is_temporary(path))
        if key not in self._verified:
            self.counts["verified"] += 1
            self._verified[key] = [f"verify: {problem}" for problem in verify(history)]
        return self._verified[key]

    def _ask(self, history: History, there: set[CheckpointRef]) -> list[str]:
        self.counts["asked"] += 1
        with warnings.catch_warnings(record=True) as told_of_the_index:
            warnings.simplefilter("always")
            rows = history.query(_QUESTION).to_pylist()
        self.counts["torn indexes"] += bool(told_of_the_index)
        wrong = []
        for table in ("checkpoints", "tensors"):
            told = {CheckpointRef(row["run"], row["step"]) for row in rows if row["of"] == table}
            if told != there:
                wrong.append(f"SQL: {table} of {sorted(map(str, told))}, the files: {sorted(map(str, there))}")
        return wrong

    def _next_run(self, *, next_training: bool) -> list[str]:
        """Go on from the state with a new run, and return what is wrong afterwards."""
        # Whatever this writes has to be undone before the next state.
        self._there = {}
        exists = (self._root / "history.json").exists()
        before = _checkpoints(History.open(self._root)) if exists else set()
        if exists:
            _age(self._root)
        if next_training:
            self.counts["trainings resumed"] += 1
            model, optimizer = make(8)
            with capture.enable(
                model, optimizer=optimizer, every=1, history=self._root, backend="posix", budget_bytes=BUDGET_BYTES
            ) as session:
                one_step(model, optimizer)
            after = {CheckpointRef(session.run, step) for step in (0, 1)}
        else:
            self.counts["next runs"] += 1
            if exists:
                collect_garbage(HistoryPaths(self._root))
            with Run(self._root, "next") as run:
                run.checkpoint(0, pieces_of({"w": b"next"}), register=False)
                collect_garbage(HistoryPaths(self._root))
            after = {CheckpointRef("next", 0)}
        history = History.open(self._root)
        there = _checkpoints(history)
        wrong = [] if there == before | after else [f"after the next run: {sorted(map(str, there))}"]
        for run in history.runs():
            folder = history.paths.run_dir(run.run)
            wrong += [f"not collected: {path}" for path in folder.rglob(".*") if is_temporary(path.name)]
        if next_training:
            wrong += [f"after the next run: {problem}" for problem in verify(history)]
            wrong += [] if history.reindex() == len(there) else ["reindex: not all checkpoints"]
        return wrong

    def _materialize(self, tree: Tree) -> None:
        """Make the folder hold exactly these files; only what differs is written."""
        if not self._there:
            shutil.rmtree(self._base)
            self._base.mkdir()
        for path in sorted(self._there.keys() - tree.keys(), reverse=True):
            at = self._base / path
            if self._there[path] is None:
                at.rmdir()
            else:
                at.unlink()
        for path in sorted(tree):
            data = tree[path]
            at = self._base / path
            if data is None:
                at.mkdir(exist_ok=True)
            elif path not in self._there or self._there[path] != data:
                at.write_bytes(data)
                # The clock of the file system is coarse, and caches tell files apart by their time.
                self._clock += 1
                os.utime(at, ns=(self._clock, self._clock))
        self._there = dict(tree)
        # Questions and the rebuilding of the index leave files that no state has.
        for path in self._base.rglob("catalog.*"):
            if str(path.relative_to(self._base)) not in tree:
                path.unlink()


def _key(tree: Tree, is_read: Callable[[str], bool]) -> _Key:
    return frozenset((path, data and hash(data)) for path, data in tree.items() if is_read(path))


def _is_index(path: str) -> bool:
    return path.rpartition("/")[2].startswith("catalog.")


def _is_temporary(path: str) -> bool:
    return is_temporary(path.rpartition("/")[2])


def _checkpoints(history: History) -> set[CheckpointRef]:
    """Return the committed checkpoints as the files alone show them."""
    return {CheckpointRef(run.run, step) for run in history.runs() for step in history.steps(run.run)}
