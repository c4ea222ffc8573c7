"""docs/coverage.md, made from the sources of the DeepSpeed cases; started as a script it writes the file anew."""

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "coverage.md"
REFUSALS = "deepspeed_cases_refused.py"
HEAD = """# Which DeepSpeed configurations are covered

Made from the tests by `make coverage-table`; a test fails when it is stale.

## Captured, restored, trained on to the same bits

Each row is a test on a real DeepSpeed engine, in one to four processes over gloo on CPU, with gradient clipping, dropout, two param groups,
a tied head, a frozen parameter and a buffer that forward changes, unless its row says otherwise. The cases of `deepspeed_cases_state`,
`_variants` and `_reshard` take the state and put it back in memory, by the same State Providers; the others go through a history on disk. What moves to another world
size, stage or split is tested for equal logical tensors and a training that goes on, for other ranks draw other random numbers.

| configuration | test |
|---|---|
"""
REFUSED = """
## Refused by `capture.enable`, by name

The message goes on: "can't be captured safely; turn it off in the DeepSpeed configuration". Nothing is written, and the engine trains on. Most of
these can't be started on a CPU: the refusal is tested on a real engine that answers as one with that configuration does.

| configuration | message |
|---|---|
"""
TAIL = """
Also refused: pipeline stages or experts without ZeRO, bf16 or fp16; optimizer state that is not laid out element by element; optimizers with
error feedback per rank (1-bit Adam and its kin); and any optimizer wrapper of DeepSpeed that is not known here, such as the one that MiCS had, by its
class name. DeepSpeed 0.19.8 itself refuses MiCS.
"""


def coverage_page() -> str:
    """The text that docs/coverage.md must have."""
    covered = "".join(f"| {what} | `{module}.{case}` |\n" for what, module, case in sorted(_covered()))
    refused = "".join(f"| {configuration} | {message} |\n" for configuration, message in _refused())
    return f"{HEAD}{covered}{REFUSED}{refused}{TAIL}"


def _covered() -> Iterator[tuple[str, str, str]]:
    """What each case is marked to cover, its module, its name."""
    for path in sorted(HERE.glob("deepspeed_cases_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "covers":
                        yield ast.literal_eval(mark.args[0]), path.stem, node.name


def _refused() -> Iterator[tuple[str, str]]:
    for node in ast.parse((HERE / REFUSALS).read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REFUSED" and node.value is not None:
            yield from ((configuration, message) for configuration, message, _ in ast.literal_eval(node.value))


if __name__ == "__main__":
    PAGE.write_text(coverage_page())
