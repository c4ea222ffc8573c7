"""The processes of a soak, each an endless loop on one history: `python soak_roles.py train|read|verify HISTORY`.

A training that captures every step, a reader that asks for a log, a diff and a tensor, and a verification, mostly of
the newest checkpoints. Each prints a line of JSON when it has done something; being killed is their only end.
"""

import json
import random
import sys
import time
from pathlib import Path

NEWEST = 20


def train(root: Path) -> None:
    """Train on, from the newest checkpoint; print the reference of each step that `wait` has said is committed. When
    the newest run is that of the other training, which lives, train from the start."""
    from capture_helpers import make, one_step

    import capture
    from catalog.errors import NotFoundError
    from catalog.history import History

    try:
        history = History.open(root)
        resume = not history.held(history.current_run())
    except NotFoundError:
        resume = False
    model, optimizer = make(32)
    session = capture.enable(
        model, optimizer=optimizer, every=1, history=root, resume="auto" if resume else None, budget_bytes=16 << 20
    )
    say(run=session.run, resumed=resume)
    while True:
        for _ in range(10):
            one_step(model, optimizer)
        step = session.snapshot()
        session.wait()
        say(run=session.run, step=step)


def read(root: Path) -> None:
    """Ask the same questions again and again: for the log of all checkpoints, and about the newest ones. Print the
    seconds that each took, and how many checkpoints the log has."""
    import dshistory
    from catalog.errors import NotFoundError

    history = dshistory.open(root)
    questions = {
        "log": lambda: history.log(),
        "diff": lambda: history.diff(-2, -1),
        "tensor": lambda: history.tensor("inner.weight", -1),
    }
    while True:
        took = {}
        checkpoints = 0
        for name, question in questions.items():
            began = time.perf_counter()
            try:
                answer = question()
            except NotFoundError:
                # The questions are about the newest run, which has two checkpoints only after a while.
                break
            took[name] = time.perf_counter() - began
            if name == "log":
                checkpoints = len(answer)
        if took.keys() == questions.keys():
            say(checkpoints=checkpoints, **took)


def verify(root: Path) -> None:
    """Verify the newest checkpoints again and again, and now and then the whole history, which others write meanwhile;
    print how many of the newest that were, and what is wrong."""
    from catalog.history import History
    from catalog.verify import verify as problems

    history = History.open(root)
    while True:
        # By chance: killed every few seconds, it may never come to a certain turn.
        newest = history.checkpoints()[-NEWEST:] if random.random() < 0.8 else None
        found = [str(problem) for problem in problems(history, newest)]
        say(verified=len(newest or ()), whole=newest is None, problems=found)


def say(**what: object) -> None:
    """Print one line of JSON at once."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    {"train": train, "read": read, "verify": verify}[sys.argv[1]](Path(sys.argv[2]))
