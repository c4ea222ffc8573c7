"""This module makes the page docs/guarantees.md: each promise, the tests that break what it guards, and their figures.

The promises stand here. A test names the promise that it guards with `@pytest.mark.guards(title)`, a case of several
ranks with `@guards(title)`. The figures are those that the fixture `figure` recorded in the last `make guarantees`.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "guarantees.md"
FIGURES = ROOT / "docs" / "guarantees.json"

HEAD = """# What is guaranteed, and which tests break it

This page is made from the tests by `make guarantees`; a test fails when it is stale. Each promise is followed by the
tests that break what the promise protects: they kill the process, fail the disk, flip the bit, edit the memory. The
figures are those that the tests themselves counted or measured when the page was made.
"""

PROMISES = {
    "The training goes on": (
        "Bytes move during the next forward and backward. The loop waits only right before the next update, and only "
        "for bytes that are not safe yet. Capturing changes no bit of the training, and a failure of it ends none."
    ),
    "A checkpoint holds one step": (
        "It is never a mixture of two: a barrier stands before every way into the optimizer, and memory that was "
        "written to past the barrier fails the snapshot by name."
    ),
    "Resume is exact": (
        "A training that is restored in a new process continues with the losses, weights, moments, schedules and "
        "random numbers of the training that never stopped. Under another world size or ZeRO stage the logical tensors "
        "are equal."
    ),
    "A packed checkpoint is the checkpoint": (
        "What was packed takes less disk and gives every reader the very bytes of before. It is unpacked again and "
        "compared before the original goes, and a base that others need is kept."
    ),
    "A checkpoint exists whole or not at all": (
        "This also holds after SIGKILL and after a loss of power at any moment. Published files never change, and the "
        "index repairs itself."
    ),
    "A full or failing disk costs that snapshot only": (
        "The failure is reported; the training and all earlier checkpoints stay as they are, and the next snapshot is "
        "written."
    ),
    "A replay gives the same bits": "Or it names the step, tensor, rank and element where it parts, and what on record "
    "may be the cause.",
    "A redo step has the bits of the training": (
        "A step that is made again from its redo log is what a capture of that step would have been. Where that can't "
        "be known, or is not so, the step is refused, with its number and the reason. Of writes that torch does not "
        'count, those of single elements may be missed by a sample; `redo_check` and `check="hash"` miss none.'
    ),
    "Damage is found and named": "Every byte has a checksum: `dshistory verify` names the file and the field.",
    "Nothing is unpickled": (
        "Opening a history executes nothing from it, and hostile files cost a named error, no hang and a bounded "
        "amount of memory. `enable` refuses state that is not plain data, by name."
    ),
    "Memory stays within the budget": (
        "A capture takes `budget_bytes`, 128 MiB, and 12 KiB for each tensor, and nothing grows with the number of "
        "checkpoints. What the training lets go is free at once, but for less than 2 MiB at its ends, and a forked "
        "child does not get the budget."
    ),
    "A removed checkpoint is removed whole": (
        "Wherever a removal is cut off, every listed checkpoint has its bytes, those that it shares with others too. "
        "Nothing goes that somebody reads, has tagged, or goes on from."
    ),
    "The newest healthy checkpoint stays": (
        "Whatever a policy says, also where the last ones are full of NaN, or may yet turn out to be."
    ),
    "A byte budget holds": (
        "What a session may take on the disk is asked for before it is written: a snapshot, a step of the redo log, "
        "the image of a checkpoint that is packed. What has no room is not written, by name, and the training goes on."
    ),
    "Nothing of others is deleted": (
        "Garbage collection removes only unfinished checkpoints of runs that certainly nobody writes any more, what is "
        "left of removed ones, and only files that the format names. It follows no link."
    ),
    "The process keeps its life": (
        "Ctrl-C is heard at once. Fork, exceptions, SIGTERM and the exit of the interpreter end as they would without "
        "capture: nothing hangs, and no thread or file of the parent is touched by a child."
    ),
}


def guarantees_page(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return the text that docs/guarantees.md must have, with the `figures` of tests by their node ids."""
    guards = list(guarding_tests())
    return HEAD + "".join(
        f"\n## {title}\n\n{text}\n\n{_table([test for promise, test in guards if promise == title], figures)}"
        for title, text in PROMISES.items()
    )


def recorded_figures() -> dict[str, dict[str, float]]:
    """Return the figures of the last `make guarantees`, by the node ids of tests."""
    figures: dict[str, dict[str, float]] = json.loads(FIGURES.read_text())
    return figures


def guarding_tests() -> Iterator[tuple[str, str]]:
    """Yield the title of a promise and the node id of a test that guards it, for each mark."""
    for path in sorted(TESTS.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) in ("pytest.mark.guards", "guards"):
                        yield ast.literal_eval(mark.args[0]), f"{file}::{node.name}"


def _table(tests: list[str], figures: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        f"| `{test.removeprefix('tests/')}` | {'; '.join(f'{value:,} {name}' for name, value in shown.items())} |\n"
        for test in tests
        for shown in [figures.get(test, {})]
    ]
    return "| test | it counted |\n|---|---|\n" + "".join(lines)


if __name__ == "__main__":
    if sys.argv[1:]:
        # What `make guarantees` has just recorded takes the place of the older figures, and of tests that are gone.
        tests = {test for _, test in guarding_tests()}
        fresh = json.loads(Path(sys.argv[1]).read_text())
        kept = {test: shown for test, shown in recorded_figures().items() if test in tests and test not in fresh}
        FIGURES.write_text(json.dumps({**kept, **fresh}, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(guarantees_page(recorded_figures()))
