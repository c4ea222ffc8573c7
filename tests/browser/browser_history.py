"""Real histories for the browser: one of a finished training, and one of a training that continues on request."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

SPIKE = 60
"""The step at which the learning rate jumps."""
STEPS = 80
TRAINING = [sys.executable, str(ROOT / "tests" / "browser" / "browser_training.py")]
GRACE_S = 60


class Training:
    """A training in a separate process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def go_on(self, steps: int) -> int:
        """Train for that many steps; return the last one once it is committed."""
        assert self._process.stdin
        assert self._process.stdout
        print(steps, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def training(history: Path, *options: str) -> Iterator[Training]:
    """Capture a training into `history` that waits for requests to continue; at the end its session is closed."""
    command = [*TRAINING, str(history), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Training(process)
            assert process.stdin
            process.stdin.close()
            assert process.wait(GRACE_S) == 0
        finally:
            process.kill()
