"""A process that has imported torch, and forks the ranks of process groups from itself.

Importing torch and its compiler, which every DeepSpeed engine asks for, takes five seconds of a processor: more than most
groups' cases. Here it is done once, before any thread or process group exists. Nothing else is imported, so a rank sees
what a fresh process would.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Nursery"]

_FIXED = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Nursery:
    """The process, seen from the tests."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **_FIXED, "PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, module: str, folder: Path, *, places: Sequence[dict[str, str]], timeout_s: float) -> None:
        """Run one group of ranks to its end, each with its place in the group as environment; those that hang are ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"module": module, "folder": str(folder), "places": list(places), "timeout_s": timeout_s}
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "done\n", f"the nursery died while it ran {module}"
        except BaseException:
            self.stop()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it, and the ranks that it still has."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self.alive:
                os.killpg(self._process.pid, number)
                try:
                    self._process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    continue


def _serve() -> dict[str, Any] | None:
    """Fork ranks for one job after the other. In a rank: what it is to do; in the nursery, at the end: None."""
    for line in sys.stdin:
        job = json.loads(line)
        ranks = []
        for rank, place in enumerate(job["places"]):
            pid = os.fork()
            if pid == 0:
                return {**job, "rank": rank, "place": place}
            ranks.append(pid)
        _end(ranks, deadline=time.monotonic() + job["timeout_s"])
        print("done", flush=True)
    return None


def _end(ranks: Sequence[int], *, deadline: float) -> None:
    """Wait for the ranks. Those that hang are interrupted first: killed while it compiles a DeepSpeed extension, one would leave the
    lock of torch's extension cache behind, and every later process would wait for it for ever.
    """
    running = set(ranks)
    orders = [(deadline, signal.SIGINT), (deadline + 10, signal.SIGKILL)]
    while running:
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0] == pid}
        if orders and time.monotonic() > orders[0][0]:
            _, order = orders.pop(0)
            for pid in running:
                os.kill(pid, order)
        time.sleep(0.02)


def _become(rank: dict[str, Any]) -> None:
    """A fresh process's environment, folder and output."""
    os.environ.update(rank["place"])
    os.chdir(rank["folder"])
    log = os.open(f"{rank['module']}-{rank['rank']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for standard, own in ((0, nothing), (1, log), (2, log)):
        os.dup2(own, standard)


if __name__ == "__main__":
    import torch._inductor.compile_fx  # noqa: F401 - what DeepSpeed's first engine imports

    work = _serve()
    if work is not None:
        _become(work)
        from deepspeed_ranks import main

        main(work["module"], Path(work["folder"]))
