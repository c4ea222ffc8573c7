"""The time of queries to a history, while another process publishes a checkpoint each second into it.

The histories are synthetic: their tensors are holes, which no query reads. Everything else is written as in a training:
manifests, markers, journals with 50 metrics for each checkpoint, statistics and sketches of 256 numbers for each
tensor, and the index. 10,000 checkpoints of 1,000 tensors would take 30 GB here, so growth is also shown with 100
tensors. *open* is `import dshistory` and `dshistory.open` in a new process, and *first log* is the first `h.log()`
there. The others are calls in one process that has answered each of them once: `h.log()`, `h.trajectory` of one tensor
(`norm`, `update_ratio`), `h.diff` from sketches of two checkpoints that are half the history apart,
`h.trajectory(metric="mean", by="layer")` and `h.anomalies()`. *publish* is the time of the other process for a
checkpoint, including its registration.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.made_up import OF_A_LAYER, names
from benchmarks.measure import Rows, Series, clock, rotations
from dshistory.explorer import Explorer

QUERIES: dict[str, Callable[[Explorer, str, int], object]] = {
    "log": lambda h, name, last: h.log(),
    "norm": lambda h, name, last: h.trajectory(name, metric="norm", quiet=True),
    "update ratio": lambda h, name, last: h.trajectory(name, metric="update_ratio", quiet=True),
    "diff": lambda h, name, last: h.diff(last // 20 * 10, last, quiet=True),
    "layer means": lambda h, name, last: h.trajectory(metric="mean", by="layer", quiet=True),
    "anomalies": lambda h, name, last: h.anomalies(),
}
COLUMNS = {"open": "ms", "first log": "ms", **dict.fromkeys(QUERIES, "ms"), "publish": "ms", "index": "MB"}

_NEW_PROCESS = """
import sys, time
begun = time.perf_counter()
import dshistory
explorer = dshistory.open(sys.argv[1])
opened = time.perf_counter()
explorer.log()
print(opened - begun, time.perf_counter() - opened)
"""


def run(
    scratch: Path, *, sizes: tuple[tuple[int, int], ...], times: int, pause_s: float
) -> tuple[Rows, dict[str, object]]:
    """Measure every query once per rotation, for each size (checkpoints, tensors) and in a rotating order."""
    rows: Rows = {label(*size): defaultdict(Series) for size in sizes}
    roots = {size: scratch / f"history-{size[0]}-{size[1]}" for size in sizes}
    writers = {size: Writer(roots[size], *size, pause_s=pause_s) for size in sizes}
    for writer in writers.values():
        writer.make()
    print("the histories are made: measuring", file=sys.stderr, flush=True)
    for size, writer in writers.items():
        row = rows[label(*size)]
        writer.begin()
        measure(roots[size], size, row, times=times)
        for seconds in writer.end():
            row["publish"].add(seconds)
        row["index"].add((roots[size] / "catalog.duckdb").stat().st_size)
    return rows, {"sizes": sizes, "rotations": times, "seconds between checkpoints": pause_s}


def measure(root: Path, size: tuple[int, int], row: dict[str, Series], *, times: int) -> None:
    explorer = Explorer.open(root)
    checkpoints, tensors = size
    about = names(tensors)[len(OF_A_LAYER)], (checkpoints - 1) * 10
    for ask in QUERIES.values():
        ask(explorer, *about)
    for what in rotations(("open", *QUERIES), times=times):
        if what == "open":
            opened, listed = new_process(root)
            row["open"].add(opened)
            row["first log"].add(listed)
        else:
            with clock() as took:
                QUERIES[what](explorer, *about)
            row[what].add(took.seconds)


def new_process(root: Path) -> tuple[float, float]:
    done = subprocess.run([sys.executable, "-c", _NEW_PROCESS, str(root)], capture_output=True, text=True, check=True)
    opened, listed = map(float, done.stdout.split())
    return opened, listed


class Writer:
    """The process that creates a history and later publishes into it."""

    def __init__(self, root: Path, checkpoints: int, tensors: int, *, pause_s: float) -> None:
        self._arguments = [str(root), str(checkpoints), str(tensors), str(pause_s)]

    def make(self) -> None:
        """Return when the history exists."""
        command = [sys.executable, "-m", "benchmarks.publishing", *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._expect("made")

    def begin(self) -> None:
        """Return when the first of many checkpoints has been published."""
        self._tell("begin")
        self._expect("publishing")

    def end(self) -> list[float]:
        """Return the seconds that each checkpoint took, without the first."""
        said, _ = self._process.communicate("end\n")
        if self._process.returncode:
            raise ChildProcessError(f"the writer ended with {self._process.returncode}")
        took: list[float] = json.loads(said)
        return took

    def _tell(self, word: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _expect(self, word: str) -> None:
        assert self._process.stdout
        said = self._process.stdout.readline().strip()
        if said != word:
            raise ChildProcessError(f"the writer said {said!r}, not {word!r}")


def label(checkpoints: int, tensors: int) -> str:
    return f"{checkpoints:,} checkpoints x {tensors:,} tensors"
