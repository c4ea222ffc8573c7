"""Orbax among the contenders of `save`: each turn runs in the process of `orbax_peer`."""

import json
import subprocess
from pathlib import Path

from benchmarks.peers import UnavailableError
from benchmarks.training_state import Training

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-orbax" / "bin" / "python"


class Orbax:
    """A contender that holds a state of the same shapes in a separate process; a first turn is not measured."""

    name = "Orbax async"

    def __init__(self, training: Training, scratch: Path) -> None:
        if not PYTHON.exists():
            raise UnavailableError("not installed: make bench-orbax")
        self.folder = scratch / "orbax"
        self.process = subprocess.Popen(
            [str(PYTHON), "-m", "benchmarks.orbax_peer"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say({"shapes": {name: list(tensor.shape) for name, tensor in training.tensors().items()}})
        self.turn(window_s=0.0)

    def turn(self, *, window_s: float) -> dict[str, float]:
        """Return the figures of one turn."""
        self._say({"folder": str(self.folder.resolve()), "window_s": window_s})
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"benchmarks.orbax_peer ended with code {self.process.wait()}: its output says why")
        return json.loads(answer)

    def close(self) -> None:
        self.process.communicate()

    def _say(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
