"""The processes of a soak, each an endless loop on one history: `python soak_roles.py train|read|verify HISTORY`.

A training that captures every step, a reader that asks for a log, a diff and a tensor, and a verification of the newest
checkpoints. Each prints a line of JSON when it has done something; being killed is their only end.
"""

import json
import sys
import time
from pathlib import Path

NEWEST = 20


def train(root: Path) -> None:
    """Train on, from the newest checkpoint; print the reference of each step that `wait` has said is committed."""
    from capture_helpers import make, one_step

    import capture

    model, optimizer = make(32)
    session = capture.enable(model, optimizer=optimizer, every=1, history=root, resume="auto", budget_bytes=16 << 20)
    while True:
        for _ in range(10):
            one_step(model, optimizer)
        step = session.snapshot()
        session.wait()
        say(run=session.run, step=step)


def read(root: Path) -> None:
    """Ask the same questions about the newest checkpoints again and again; print the seconds that each took."""
    import dshistory

    history = dshistory.open(root)
    while True:
        took = {}
        for name, question in (
            ("log", lambda: history.log()),
            ("diff", lambda: history.diff(-2, -1)),
            ("tensor", lambda: history.tensor("inner.weight", -1)),
        ):
            began = time.perf_counter()
            question()
            took[name] = time.perf_counter() - began
        say(**took)


def verify(root: Path) -> None:
    """Verify the newest checkpoints again and again; print their number and what is wrong with them."""
    from catalog.history import History
    from catalog.verify import verify as problems

    history = History.open(root)
    while True:
        newest = history.checkpoints()[-NEWEST:]
        say(verified=len(newest), problems=[str(problem) for problem in problems(history, newest)])


def say(**what: object) -> None:
    """Print one line of JSON at once."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    {"train": train, "read": read, "verify": verify}[sys.argv[1]](Path(sys.argv[2]))
