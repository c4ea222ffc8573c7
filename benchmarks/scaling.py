"""The cost of a save against the number of bytes, and against the number of ranks that write one checkpoint.

Every setting is a separate training that waits for its turn, with one process for each rank. The ranks hold replicas,
and the checkpoint contains each tensor once. *Snapshot call* is the time of the slowest rank. *Durable* is the time
until the whole checkpoint is committed, with the parts of all ranks. *Written by rank 0* shows how the ranks share the
work.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.measure import Rows, Series, make_durable, rotations

COLUMNS = {"snapshot call": "s", "durable": "s", "rate": "GB/s", "written by rank 0": "MB"}
ROOT = Path(__file__).parent.parent


class Group:
    """The processes of one training."""

    def __init__(self, folder: Path, nbytes: int, ranks: int, tensors: int) -> None:
        self.name = f"{nbytes / 1e6:.0f} MB, {ranks} rank{'s' if ranks > 1 else ''}"
        folder.mkdir()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.scaling_rank"]
                + [str(value) for value in (rank, ranks, nbytes, tensors, folder.resolve())],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def save(self) -> list[dict[str, float]]:
        """Take one snapshot on all ranks; return their answers."""
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError(f"a rank of '{self.name}' ended early: its output says why")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(timeout=60)


@contextmanager
def _groups(scratch: Path, settings: list[tuple[int, int]], tensors: int) -> Iterator[list[Group]]:
    with ExitStack() as stack:
        groups = []
        for number, (nbytes, ranks) in enumerate(settings):
            groups.append(Group(scratch / str(number), nbytes, ranks, tensors))
            stack.callback(groups[-1].close)
            groups[-1].save()  # the first snapshot imports and plans
        yield groups


def run(
    scratch: Path, *, sizes: tuple[int, ...], ranks: tuple[int, ...], tensors: int, times: int
) -> tuple[Rows, dict[str, object]]:
    """Measure every size with one rank, and the largest one with each number of `ranks`, `times` times each."""
    settings = [(nbytes, 1) for nbytes in sizes] + [(max(sizes), count) for count in ranks if count > 1]
    with _groups(scratch, settings, tensors) as groups:
        rows: Rows = {group.name: defaultdict(Series) for group in groups}
        for group in rotations(groups, times=times):
            make_durable(scratch)
            answers, row = group.save(), rows[group.name]
            durable = max(answer["durable"] for answer in answers)
            row["snapshot call"].add(max(answer["call"] for answer in answers))
            row["durable"].add(durable)
            row["rate"].add(sum(answer["bytes"] for answer in answers) / durable)
            row["written by rank 0"].add(answers[0]["bytes"])
    return rows, {"sizes": sizes, "ranks": ranks, "tensors": tensors, "rotations": times}
