"""The stub `dshistory/__init__.pyi` is generated from the registry of verbs, and the checked-in file is up to date.

`python tests/dshistory/test_package_stub.py` rewrites it.
"""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dshistory
from dshistory.commands.verbs import all_verbs
from dshistory.registry import Verb

PATH = Path(dshistory.__file__).with_suffix(".pyi")

HEAD = '"""The package as type checkers see it, generated from the registry of verbs by a test."""'
IMPORTS = {
    "Any": "from typing import Any",
    "Explorer": "from dshistory.explorer import Explorer",
    "HistoryError": "from catalog.errors import HistoryError",
    "Report": "from dshistory.display.report import Report",
    "Table": "from dshistory.display.table import Table",
    "capture": "import capture as capture",
}
EXTENSION = (
    "def load_ipython_extension(ipython: Any) -> None: ...",
    "def unload_ipython_extension(ipython: Any) -> None: ...",
)


def generated() -> str:
    """Return the stub as it must be: imports, `__all__`, and each verb's signature as a function of the package."""
    definitions = sorted((definition(verb) for verb in all_verbs()), key=lambda node: node.name)
    imports = dict(IMPORTS)
    for verb in all_verbs():
        bound = imports_of(verb.function.__module__)
        imports |= {name: bound[name] for name in names_in(definition(verb)) if name in bound}
    public = f"__all__ = {dshistory.__all__!r}"
    functions = [f"{ast.unparse(node).rstrip('.').rstrip()} ..." for node in definitions]
    text = "\n".join([HEAD, *imports.values(), public, "__version__: str", *functions, *EXTENSION])
    return ruff("format", ruff("check", text, "--select", "I", "--fix", "--quiet"))


def test_the_checked_in_stub_is_up_to_date() -> None:
    assert PATH.read_text(encoding="utf-8") == generated(), f"rewrite it with: python {__file__}"


def definition(verb: Verb) -> ast.FunctionDef:
    """Return the verb as a function on the current history, without decorators, docstring and body."""
    source = inspect.getsource(verb.function)
    method = source.startswith(" ")
    node = ast.parse(f"class _:\n{source}" if method else source).body[0]
    function = node.body[0] if isinstance(node, ast.ClassDef) else node
    assert isinstance(function, ast.FunctionDef)
    if method:
        del (function.args.posonlyargs or function.args.args)[0]
    function.decorator_list, function.body = [], [ast.Expr(ast.Constant(...))]
    for part in ast.walk(function.args):
        if isinstance(part, ast.arg):
            part.annotation = unquoted(part.annotation)
    function.returns = unquoted(function.returns)
    return function


def unquoted(annotation: ast.expr | None) -> ast.expr:
    assert annotation is not None, "a verb without annotations"
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def names_in(function: ast.FunctionDef) -> Iterator[str]:
    """Return every name in the annotations."""
    return (node.id for node in ast.walk(function) if isinstance(node, ast.Name))


def imports_of(module: str) -> dict[str, str]:
    """Return, for each name, the import that binds it in a module, including imports for type checkers."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name: f"import {alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name: f"from {node.module} import {alias.name}" for alias in node.names}
    return found


def ruff(command: str, text: str, *options: str) -> str:
    arguments = [sys.executable, "-m", "ruff", command, *options, "--stdin-filename", str(PATH), "-"]
    return subprocess.run(arguments, input=text, capture_output=True, text=True, check=True, timeout=60).stdout


if __name__ == "__main__":
    PATH.write_text(generated(), encoding="utf-8")
