"""Kills trainings of one or two ranks, before a certain call to the file system or at a certain time, and looks at what
they leave.

Run as a program under the recorder, this is the server that forks the ranks: torch is imported once for all rounds.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from file_calls import Op, calls_in, recording_environment
from folders import fast_folder, measure_file_system

from catalog.disk.durable import is_temporary
from catalog.gc import collect_garbage
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import verify

__all__ = ["Kill", "Killer", "killer"]

ROUNDS_PER_HISTORY = 20


@dataclass(frozen=True, slots=True)
class Kill:
    """One round: `rank` is killed before its `call`-th call, or after `seconds`; the others soon after, as a launcher
    would. With neither, the training ends by itself."""

    ranks: int = 2
    rank: int = 0
    call: int = 0
    seconds: float = 0.0
    steps: int = 2


class Killer:
    """Runs rounds in one history after the other, and checks the history after each."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._rounds = 0
        self._root = folder / "histories" / "0"
        self.kills = 0
        self.committed = 0

    def round(self, kill: Kill) -> tuple[list[str], list[int]]:
        """Return what is wrong after a round, and how many calls each rank has made."""
        logs = [self._folder / f"log-{rank}" for rank in range(kill.ranks)]
        for log in logs:
            log.unlink(missing_ok=True)
        before = set(_runs(self._root))
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        order = {**asdict(kill), "root": str(self._root), "logs": [str(log) for log in logs]}
        print(json.dumps(order), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the server has died"
        self.kills += json.loads(answer)["killed"]
        made = [calls_in(log, cut=True) if log.exists() else [] for log in logs]
        told = {call.path for calls in made for call in calls if call.op == Op.NOTE}
        wrong = self._check(set(_runs(self._root)) - before, told)
        self._rounds += 1
        if self._rounds % ROUNDS_PER_HISTORY == 0:
            wrong += self.finish()
        return wrong, [len(calls) for calls in made]

    def _check(self, new: set[str], told: set[str]) -> list[str]:
        if not (self._root / "history.json").exists():
            return [f"the history is gone, with {told}"] if told else []
        history = History.open(self._root)
        wrong = [f"{run} is held by a dead process" for run in new if history.held(run)]
        steps = {run: history.steps(run) for run in new}
        refs = [CheckpointRef(run, step) for run in sorted(steps) for step in steps[run]]
        lost = told - {f"committed {ref}" for ref in refs}
        if lost:
            wrong.append(f"lost: {sorted(lost)}")
        for run, there in steps.items():
            if there and there != list(range(there[0], there[-1] + 1)):
                wrong.append(f"{run} has a gap: {there}")
        wrong += [str(problem) for problem in verify(history, refs)]
        rows = history.query("SELECT run, step FROM checkpoints WHERE state = 'committed'").to_pylist()
        if {CheckpointRef(row["run"], row["step"]) for row in rows if row["run"] in new} != set(refs):
            wrong.append(f"SQL: {rows}, the files: {refs}")
        self.committed += len(refs)
        return wrong

    def finish(self) -> list[str]:
        """Check the whole history, collect its garbage, and begin another one."""
        wrong = []
        if (self._root / "history.json").exists():
            history = History.open(self._root)
            refs = {CheckpointRef(run, step) for run in _runs(self._root) for step in history.steps(run)}
            collect_garbage(history.paths)
            wrong += [str(problem) for problem in verify(history)]
            if history.reindex() != len(refs) or set(history.checkpoints()) != refs:
                wrong.append("reindex: other checkpoints")
            for run in _runs(self._root):
                wrong += [str(path) for path in history.paths.run_dir(run).rglob(".*") if is_temporary(path.name)]
        shutil.rmtree(self._root, ignore_errors=True)
        self._root = self._folder / "histories" / str(self._rounds)
        return wrong


def _runs(root: Path) -> list[str]:
    return [facts.run for facts in History(root, uuid="").runs()] if root.exists() else []


@contextmanager
def killer() -> Iterator[Killer]:
    """Yield a killer with its server and a folder of its own."""
    folder = fast_folder()
    own = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    measure_file_system(folder)
    (folder / "histories").mkdir()
    environment = {**recording_environment(root=folder / "histories", log=None), **own}
    program = [sys.executable, "-W", "ignore", __file__]
    server = subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Killer(server, folder)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(timeout=60)
        shutil.rmtree(folder)


def _serve() -> None:
    # What a training imports late is imported once, before the forks: it takes longer than the rest of a round.
    import duckdb  # noqa: F401
    import torch._dynamo
    import torch.nn.parallel
    from recorded_training import train

    import capture.enable  # noqa: F401
    import catalog.gc
    import catalog.index.index  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        meeting = Path(order["root"]).parent / f"meeting-{random.getrandbits(64):x}"
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                _train(train, order, rank, meeting)
            pids.append(pid)
        killed = _end(pids, order)
        meeting.unlink(missing_ok=True)
        print(json.dumps({"killed": killed}), flush=True)


def _train(train, order, rank: int, meeting: Path) -> None:
    output = os.open(f"{order['logs'][rank]}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(order["ranks"]), MEETING=str(meeting), DSHISTORY_RECORD_LOG=order["logs"][rank]
    )
    status = 1
    try:
        if order["call"] and rank == order["rank"]:
            os.environ["KILL_BEFORE"] = str(order["call"])
        train(Path(order["root"]), order["steps"])
        status = 0
    finally:
        os._exit(status)


def _end(pids: list[int], order) -> int:
    """Wait until the ranks have ended; return how many were killed. When one has died, the others are killed."""
    deadline = time.monotonic() + 120
    kill_at = time.monotonic() + order["seconds"] if order["seconds"] else deadline
    alive, killed = list(pids), 0
    while alive:
        if time.monotonic() > kill_at:
            victim = pids[order["rank"]] if kill_at < deadline else alive[0]
            if victim in alive:
                os.kill(victim, signal.SIGKILL)
            kill_at = deadline
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            alive.remove(pid)
            if status:
                killed += os.waitstatus_to_exitcode(status) == -signal.SIGKILL
                time.sleep(random.random() * 0.02)
                for other in alive:
                    os.kill(other, signal.SIGKILL)
        time.sleep(0.001)
    return killed


if __name__ == "__main__":
    _serve()
