"""Flips bytes of a history one at a time and asks `verify` for them.

Only what a file belongs to is verified: a checkpoint for the files of its folder, and for the files of a run a history
that holds this run without its steps. A file of a checkpoint is read by no other part of the verification.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from catalog_helpers import Piece, Run

import capture
from catalog.history import History
from catalog.paths import parse_step_dir
from catalog.records import CheckpointRef
from catalog.verify import Problem, verify

__all__ = ["Flips", "published", "small_history", "train"]


def train(root: Path, *, width: int, steps: int) -> None:
    """Capture a training with metrics, a tag and statistics."""
    torch.manual_seed(3)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with capture.enable(model, optimizer=optimizer, every=1, history=root, budget_bytes=32 << 20) as session:
        for _ in range(steps):
            model(torch.ones(2, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=1.0)
            session.wait()
        session.tag("end")


def small_history(root: Path) -> Path:
    """Make a history that has every kind of file: a captured training, and a run of two ranks."""
    train(root, width=2, steps=1)
    with Run(root, "two-ranks", world_size=2) as run:
        halves = [Piece("w", b"ab", shape=(4,), start=start, placement="partitioned") for start in (0, 2)]
        run.checkpoint(0, [halves[0]], [halves[1]], loss=1.0)
    return root


def published(root: Path) -> list[Path]:
    """Return every file of a history but the index, which is derived, and the locks: one that was damaged does not say
    where it was taken, and then the age of the run decides whether it is dead.
    """
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return sorted(path for path in files if not path.name.startswith("catalog."))


class Flips:
    """The flipped bytes of a history so far: how many were found, by kind of file, and which were missed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.counts: Counter[str] = Counter()
        self.missed: list[str] = []

    def every_byte(self, path: Path, *, every: int = 1, first: int = 0) -> None:
        """Flip one bit of each byte of a file, or of one byte in `every`, beginning with `first`; and make the file one
        byte shorter and longer."""
        self.flip(path, range(first, path.stat().st_size, every))
        whole = path.read_bytes()
        for changed, what in ((whole[:-1], "one byte shorter"), (whole + b"\0", "one byte longer")):
            self._found(path, changed, whole, what)

    def flip(self, path: Path, offsets: Iterable[int]) -> None:
        """Flip one bit of each of these bytes, one at a time; which bit differs from byte to byte."""
        whole = path.read_bytes()
        for offset in offsets:
            changed = bytearray(whole)
            changed[offset] ^= 1 << (offset * 5 + offset // 8) % 8
            self._found(path, changed, whole, f"byte {offset}")

    def _found(self, path: Path, changed: bytes | bytearray, whole: bytes, what: str) -> None:
        try:
            path.write_bytes(changed)
            problems = self._problems(path)
        finally:
            path.write_bytes(whole)
        name = str(path.relative_to(self.root))
        kind = path.parent.name if path.parent.name in ("journal", "statistics") else path.name.partition(".")[2]
        kind = path.name if kind == "json" else kind
        if name in {problem.file for problem in problems}:
            self.counts[kind] += 1
        else:
            self.missed.append(f"{name}: {what}: verify says {problems}")

    def _problems(self, path: Path) -> list[Problem]:
        history = History(self.root, uuid="")
        parts = path.relative_to(self.root).parts
        if len(parts) > 3 and parts[2] == "steps":
            step = parse_step_dir(parts[3])
            assert step is not None
            return verify(history, [CheckpointRef(parts[1], step)])
        # All else of the history, without the steps.
        hidden = {run / "steps": run / ".steps" for run in (self.root / "runs").iterdir()}
        for shown, aside in hidden.items():
            shown.rename(aside)
        try:
            return verify(history)
        finally:
            for shown, aside in hidden.items():
                aside.rename(shown)
