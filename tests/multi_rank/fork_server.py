"""A process that has imported torch and forks the ranks of process groups.

Every DeepSpeed engine needs torch and its compiler, and importing them takes five seconds of processor time, more than
the cases of most groups. The fork server imports them once, before any thread or process group exists, and imports
nothing else. The ranks of one server share the seed of Python's hashes, so the ranks of a group come from several
servers.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["ForkServer"]

_FIXED = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONWARNINGS": "ignore"}
_GRACE_S = 10.0


class ForkServer:
    """A fork server, as the tests use it."""

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

    def begin(self, module: str, folder: Path, *, places: Sequence[dict[str, str]], timeout_s: float) -> None:
        """Start ranks; each element of `places` is the environment of one rank."""
        assert self._process.stdin is not None
        job = {"module": module, "folder": str(folder), "places": list(places), "timeout_s": timeout_s}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def finish(self) -> dict[int, str]:
        """Wait for the ranks and kill those that hang. Return an error text for each rank that did not end well."""
        assert self._process.stdout is not None
        return {int(rank): trouble for rank, trouble in json.loads(self._process.stdout.readline()).items()}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Stop the server and all ranks that it still has."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2 * _GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _serve() -> dict[str, Any] | None:
    """Fork ranks for one job after the other. Return the work of a rank in that rank, and None in the server at its
    end.
    """
    ranks: dict[int, int] = {}
    try:
        for line in sys.stdin:
            job = json.loads(line)
            ranks.clear()
            for place in job["places"]:
                pid = os.fork()
                if pid == 0:
                    return {**job, "place": place}
                ranks[pid] = int(place["RANK"])
            print(json.dumps(_end(ranks, deadline=time.monotonic() + job["timeout_s"])), flush=True)
    except KeyboardInterrupt:
        _end(ranks, deadline=time.monotonic())
    return None


def _end(ranks: dict[int, int], *, deadline: float) -> dict[int, str]:
    """Wait for the ranks, and interrupt those that hang before they are killed.

    A rank that is killed while it compiles a DeepSpeed extension would leave the lock of torch's extension cache
    behind, and every later process would wait for it forever.
    """
    troubles: dict[int, str] = {}
    orders = [(deadline, signal.SIGINT), (deadline + _GRACE_S, signal.SIGKILL)]
    while ranks:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = ranks.pop(pid)
                if status:
                    troubles.setdefault(rank, f"it ended with {os.waitstatus_to_exitcode(status)}")
        if orders and time.monotonic() > orders[0][0]:
            _, order = orders.pop(0)
            for pid, rank in ranks.items():
                troubles[rank] = f"it was still there at its time limit and was sent {order.name}"
                os.kill(pid, order)
        time.sleep(0.02)
    return troubles


def _become(rank: dict[str, Any]) -> None:
    """Give the process the environment, folder and output of a fresh one."""
    os.environ.update(rank["place"])
    os.chdir(rank["folder"])
    log = os.open(f"{rank['module']}-{rank['place']['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for standard, own in ((0, nothing), (1, log), (2, log)):
        os.dup2(own, standard)


if __name__ == "__main__":
    import torch._inductor.compile_fx  # noqa: F401 - DeepSpeed's first engine imports this

    # DeepSpeed collects garbage for each engine that it makes, and would look through all of torch each time.
    gc.freeze()
    work = _serve()
    if work is not None:
        _become(work)
        from ranks import main

        main(work["module"], Path(work["folder"]))
