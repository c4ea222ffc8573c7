"""A soak: one training captures every step while another one, readers and a verification are killed at random.

Each is started again at once. Nothing that was committed is lost, and memory, descriptors and threads stay flat.

It lasts for SOAK_S seconds: a few by default, ten minutes in `make soak`.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from catalog.history import History
from catalog.verify import verify

ROLES = Path(__file__).with_name("soak_roles.py")
SOAK_S = float(os.environ.get("SOAK_S", "5"))
MAX_GROWTH_BYTES = 16 << 20
MAX_PEAK_GROWTH_BYTES = 24 << 20
"""A registration takes some MiB for a moment, which may meet one half of the samples and not the other."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SOAK_S * 3 + 600)]


class Role:
    """A process of the soak that is started again after each kill, and the lines that it and its forerunners said."""

    def __init__(self, name: str, root: Path) -> None:
        self.said: list[dict[str, Any]] = []
        self.kills = 0
        self.kills_at_work = 0
        self._command = [sys.executable, "-W", "ignore", str(ROLES), name, str(root)]
        self._start()

    @property
    def pid(self) -> int:
        """The process that plays the role now."""
        return self._process.pid

    @property
    def works(self) -> bool:
        """Whether the process has said anything since it began."""
        return len(self.said) > self._said_before

    def kill(self, *, and_start: bool) -> None:
        """Send SIGKILL, and let the next process begin if asked to."""
        self.kills_at_work += self.works
        self._process.kill()
        self._process.wait()
        self._listener.join()
        self._process.stderr.close()
        self.kills += 1
        if and_start:
            self._start()

    def require_alive(self) -> None:
        """Assert that the process has not ended by itself."""
        assert self._process.poll() is None, f"{self._command[-2]} ended by itself: {self._errors()}"

    def _start(self) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
        environment = {**os.environ, "PYTHONPATH": paths}
        self._said_before = len(self.said)
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,))
        self._listener.start()

    def _listen(self, lines: Any) -> None:
        with lines:
            for line in lines:
                # The last line of a killed process may be cut.
                if line.endswith("}\n"):
                    self.said.append(json.loads(line))

    def _errors(self) -> str:
        return self._process.stderr.read()[-2000:]


@pytest.mark.guards("A checkpoint exists whole or not at all")
@pytest.mark.guards("Memory stays within the budget")
def test_a_soak_loses_nothing_and_stays_flat(tmp_path: Path, figure: Callable[[str, float], None]) -> None:
    """Ask at the end for every checkpoint that any training was told to be committed."""
    root = tmp_path / "h"
    steady = Role("train", root)
    roles: list[Role] = []
    chance = random.Random(3)
    samples: list[tuple[int, int, int]] = []
    try:
        _wait_until(lambda: len(steady.said) > 1, steady)
        roles += [Role(name, root) for name in ("read", "read", "verify", "train")]
        ends = time.monotonic() + SOAK_S
        next_kill = time.monotonic() + 2
        while time.monotonic() < ends:
            time.sleep(0.25)
            for role in (steady, *roles):
                role.require_alive()
            samples.append(_size_of(steady.pid))
            if time.monotonic() > next_kill:
                # Most kills meet a process at its work: to start takes one longer than the time between two kills.
                working = [role for role in roles[1:] if role.works]
                if working or chance.random() < 0.1:
                    chance.choice(working or roles[1:]).kill(and_start=True)
                next_kill = time.monotonic() + chance.uniform(0.5, 3)
        # The first reader was never killed: the times of its answers span the whole soak.
        answers = roles[0].said[:]
    finally:
        for role in (steady, *roles):
            role.kill(and_start=False)
    history = History.open(root)
    committed = {(ref.run, ref.step) for ref in history.checkpoints()}
    trainings = [said for role in (steady, roles[-1]) for said in role.said]
    promised = {(said["run"], said["step"]) for said in trainings if "step" in said}
    assert promised
    assert promised <= committed
    assert not [said for role in roles for said in role.said if said.get("problems")]
    assert verify(history) == []
    assert history.reindex() == len(committed)
    half = len(samples) // 2
    peak, descriptors, threads = ([max(column[:half]), max(column[half:])] for column in zip(*samples, strict=True))
    memory = [statistics.median(size for size, _, _ in part) for part in (samples[:half], samples[half:])]
    assert memory[1] - memory[0] < MAX_GROWTH_BYTES, "the training grows"
    assert peak[1] - peak[0] < MAX_PEAK_GROWTH_BYTES, "the training's peak grows"
    assert descriptors[1] <= descriptors[0] + 4
    assert threads[1] <= threads[0] + 1
    resumed = sum(said.get("resumed", False) for said in trainings)
    assert resumed or SOAK_S < 300, "no training that was killed has gone on"
    figure("seconds", float(SOAK_S))
    figure("checkpoints, none lost", len(committed))
    figure("of them promised by `wait`", len(promised))
    figure("trainings resumed", resumed)
    figure("kills", sum(role.kills for role in roles))
    figure("kills of a process at its work", sum(role.kills_at_work for role in roles))
    figure("checkpoints verified meanwhile", sum(said.get("verified", 0) for role in roles for said in role.said))
    figure("times the whole history meanwhile", sum(said.get("whole", False) for role in roles for said in role.said))
    figure("questions answered meanwhile", sum(3 for role in roles for said in role.said if "log" in said))
    figure("MiB more in the second half", max(0.0, round((memory[1] - memory[0]) / 2**20, 1)))
    figure("MiB more at most in the second half", max(0.0, round((peak[1] - peak[0]) / 2**20, 1)))
    times = {f"`{name}`": [said[name] for said in answers] for name in ("log", "diff", "tensor")}
    # The log lists every checkpoint, of which there are more and more.
    times["`log` for each checkpoint"] = [said["log"] / said["checkpoints"] for said in answers]
    for name, taken in times.items():
        if len(taken) >= 4:
            before, after = taken[: len(taken) // 2], taken[len(taken) // 2 :]
            ratio = statistics.median(after) / statistics.median(before)
            figure(f"times the first half's median of {name} in the second half", round(ratio, 2))


def _wait_until(happened: Callable[[], bool], role: Role) -> None:
    while not happened():
        role.require_alive()
        time.sleep(0.02)


def _size_of(pid: int) -> tuple[int, int, int]:
    """Return a process's resident private memory in bytes, and the number of its descriptors and threads."""
    process = Path("/proc") / str(pid)
    resident, shared = map(int, (process / "statm").read_text().split()[1:3])
    return (
        (resident - shared) * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir(process / "fd")),
        len(os.listdir(process / "task")),
    )
