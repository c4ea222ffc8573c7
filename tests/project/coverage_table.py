"""This module makes the page docs/coverage.md from the sources of the cases, and as a script writes it."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CASES = TESTS / "multi_rank"
REFUSALS = CASES / "deepspeed_training" / "deepspeed_cases_refused.py"
PAGE = TESTS.parent / "docs" / "coverage.md"
HEAD = """# Which configurations are covered

This page is made from the tests by `make coverage-table`. A test fails when it is stale.

## DeepSpeed: captured, restored, trained on to the same bits

Each row is a test on a real DeepSpeed engine, in one to four processes over gloo on the CPU. Unless its row says
otherwise, the training has gradient clipping, dropout, two param groups, a tied head, a frozen parameter and a buffer
that forward changes. The cases of `deepspeed_cases_state`, `_variants`, `_reshard` and `_resharded` copy and restore
the state in memory, through the same State Providers. The other cases use a history on disk. Cases that move state to
another world size, stage or split test that the logical tensors are equal and the training continues, because other
ranks draw other random numbers.

| configuration | test |
|---|---|
"""
FRAMEWORKS = """
## Other frameworks: captured, restored, trained on to the same bits

Each row is a test on two ranks over gloo unless the row says otherwise. The training has a tied head, a frozen
parameter, buffers that forward changes (one of them not persistent), rows that two ranks can't share evenly, dropout,
two parameter groups and a scheduler.

| configuration | test |
|---|---|
"""
REFUSED = """
## DeepSpeed: refused by `capture.enable`, by name

Each message continues with "can't be captured safely; turn it off in the DeepSpeed configuration". Nothing is written,
and the engine trains on. Most of these configurations can't be started on a CPU, so the refusal is tested on a real
engine that reports such a configuration.

| configuration | message |
|---|---|
"""
TAIL = """
These are also refused: pipeline stages or experts without ZeRO, bf16 or fp16; optimizer state that is not laid out
element by element; optimizers with error feedback per rank (1-bit Adam and similar ones); and any optimizer wrapper of
DeepSpeed that is not known here, such as the one that MiCS had, with its class name in the message. DeepSpeed 0.19.8
itself refuses MiCS.
"""


def coverage_page() -> str:
    """Return the text that docs/coverage.md must have."""
    refused = "".join(f"| {configuration} | {message} |\n" for configuration, message in _refused())
    return f"{HEAD}{_covered('deepspeed')}{FRAMEWORKS}{_covered('frameworks')}{REFUSED}{refused}{TAIL}"


def _covered(family: str) -> str:
    """Return a line for each case of the family that has a `covers` mark."""
    marks = sorted(
        (ast.literal_eval(mark.args[0]), f"{path.stem}.{node.name}")
        for path in CASES.glob(f"*/{family}_cases_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "covers"
    )
    return "".join(f"| {what} | `{case}` |\n" for what, case in marks)


def _refused() -> Iterator[tuple[str, str]]:
    for node in ast.parse(REFUSALS.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REFUSED" and node.value is not None:
            yield from ((configuration, message) for configuration, message, _ in ast.literal_eval(node.value))


if __name__ == "__main__":
    PAGE.write_text(coverage_page())
