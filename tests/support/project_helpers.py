"""The project's own tree, for the tests of its rules."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from architecture import LAYERS
from places import ROOT


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def all_modules() -> list[Path]:
    return [path for package in LAYERS for path in modules(package)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path, *, names: bool = False) -> Iterator[tuple[str, int]]:
    """Yield every module that the file imports anywhere, also inside functions, with its line.

    Blocks for type checkers are left out. With `names`, `from a import b` gives `a.b`.
    """
    for node in _runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (
                (f"{module}.{alias.name}" if names else module, node.lineno)
                for alias in node.names[: None if names else 1]
            )


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from (other, *_runtime_nodes(other))
            continue
        yield child
        yield from _runtime_nodes(child)


def tracked_files() -> list[Path]:
    """Return the files that git tracks."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def run_python(*arguments: str, cwd: Path, python: str = sys.executable, **environment: str) -> str:
    """Run Python and return its output; raise an error with both of its streams when it fails."""
    return run([python, *arguments], cwd=cwd, **environment)


def run(command: Sequence[str], *, cwd: Path, timeout_s: float = 400, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{list(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
