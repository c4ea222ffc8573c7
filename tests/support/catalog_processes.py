"""Programs that tests of the catalog run as separate processes: `python catalog_processes.py <role> <arguments>`."""

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

import duckdb
from catalog_helpers import Piece, Run

from catalog.history import History
from catalog.run_writer import create_history

TENSORS = 4
TABLES = ("runs", "checkpoints", "tensors", "fragments", "metrics", "events", "tags")


def train(root: Path, run: str, steps: int) -> None:
    """Commit and register at every step; print how many checkpoints the index took in."""
    ingested = 0
    with Run(root, run) as training:
        for step in range(steps):
            pieces = [Piece(f"layer.{index}", bytes([step % 251, index]) * 64) for index in range(TENSORS)]
            training.checkpoint(step, pieces, register=False, loss=float(step))
            ingested += training.register(patience_s=0.1)
    print(f"ingested {ingested}")


def read(root: Path, stop: Path) -> None:
    """Query in a loop until `stop` exists; every checkpoint seen once must stay visible, complete and unique."""
    history = History.open(root)
    seen = rounds = 0
    while not stop.exists():
        rows = history.query(
            "SELECT (SELECT count(*) FROM checkpoints WHERE state = 'committed') AS checkpoints,"
            " (SELECT count(DISTINCT (run, step)) FROM checkpoints WHERE state = 'committed') AS different,"
            " (SELECT count(DISTINCT run) FROM checkpoints WHERE state = 'committed') AS runs,"
            " (SELECT count(*) FROM tensors) AS tensors, (SELECT count(*) FROM tensors WHERE changed IS NULL) AS first,"
            " (SELECT max(ranks) FROM metrics) AS ranks, (SELECT count(*) FROM events) AS events"
        ).to_pylist()[0]
        assert rows["checkpoints"] == rows["different"] >= seen, rows
        assert rows["tensors"] == TENSORS * rows["checkpoints"], rows
        assert rows["first"] == TENSORS * rows["runs"], rows
        assert rows["ranks"] in (None, 1), rows
        assert rows["events"] == 0, rows
        seen = rows["checkpoints"]
        rounds += 1
    print(f"rounds {rounds} seen {seen}")


def hold(path: Path, seconds: float) -> None:
    """Open the index for writing, as a foreign client would, and keep it open for `seconds`."""
    while True:
        try:
            with duckdb.connect(str(path)):
                print("holding", flush=True)
                time.sleep(seconds)
                return
        except duckdb.IOException:
            time.sleep(0.01)


def train_until_killed(root: Path, run: str) -> None:
    """Commit and register forever; print each step when its marker exists."""
    with Run(root, run) as training:
        print("born", flush=True)
        step = 0
        while True:
            pieces = [Piece(f"layer.{index}", bytes([step % 251, index]) * 4096) for index in range(TENSORS)]
            training.checkpoint(step, pieces, register=False, loss=float(step))
            print(step, flush=True)
            training.register()
            step += 1


FILE_CALLS = frozenset({"open", "os.rename", "os.link", "os.mkdir", "os.remove"})


def train_killed_everywhere(root: Path) -> None:
    """Train repeatedly, each time killed one file system call later, until one training completes."""
    create_history(root)
    for kill in count(1):
        child = os.fork()
        if child == 0:
            train_killed_at(root, f"run-{kill:04d}", kill)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            print(kill - 1)
            return


def train_killed_at(root: Path, run: str, kill: int) -> None:
    calls = count(1)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # A file that is only read makes no difference, and a new run reads those of all runs that are there.
        reads = event == "open" and not int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
        if event in FILE_CALLS and not reads and str(root) in str(arguments[0]) and next(calls) == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    with Run(root, run, world_size=2) as training:
        for step in range(2):
            ranks = [[Piece(f"layer.{rank}", bytes([step, rank]))] for rank in range(2)]
            training.checkpoint(step, *ranks, register=False, loss=float(step))


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "train":
        train(Path(arguments[0]), arguments[1], int(arguments[2]))
    elif role == "read":
        read(Path(arguments[0]), Path(arguments[1]))
    elif role == "hold":
        hold(Path(arguments[0]), float(arguments[1]))
    elif role == "train-until-killed":
        train_until_killed(Path(arguments[0]), arguments[1])
    elif role == "train-killed-everywhere":
        train_killed_everywhere(Path(arguments[0]))
    else:
        sys.exit(f"no role {role}")
