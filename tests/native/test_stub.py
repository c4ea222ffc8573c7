"""The checked-in stub has the signatures that nanobind reads off the built module.

mypy's stubtest can't compare them, because it does not recognise nanobind's callables as functions.
"""

import ast
from pathlib import Path

import pytest
from nanobind.stubgen import StubGen

import native
from native import _core

Signature = tuple[tuple[str, ...], str]


def made() -> str:
    generator = StubGen(_core, quiet=True)
    generator.put(_core)
    return generator.get()


def signatures(stub: str) -> dict[str, Signature]:
    """Return the signature of every function and property by its qualified name: its arguments and its result. That of
    a constant is its type.
    """
    found: dict[str, Signature] = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = signature(node)
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = ((), head(node.annotation))
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ((), "")
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = signature(member)
    return found


def signature(node: ast.FunctionDef) -> Signature:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    positional, named = node.args.args, node.args.kwonlyargs
    defaults = [None] * (len(positional) - len(node.args.defaults)) + list(node.args.defaults)
    arguments = [
        f"{'*' if argument in named else ''}{argument.arg}: {head(argument.annotation)}"
        f"{'' if default is None else ' ='}"
        for argument, default in zip(positional + named, defaults + list(node.args.kw_defaults), strict=True)
    ]
    return tuple(decorators + arguments), head(node.returns)


def head(annotation: ast.expr | None) -> str:
    """Return a type without its parameters; numpy's arrays, and types that nanobind can't name, are Any."""
    name = "" if annotation is None else ast.unparse(annotation).split("[")[0]
    return "Any" if name in ("object", "Annotated") else name


def checked_in() -> str:
    assert native.__file__ is not None
    return (Path(native.__file__).parent / "_core.pyi").read_text(encoding="utf-8")


def test_the_stub_equals_what_nanobind_reads_off_the_module() -> None:
    assert signatures(checked_in()) == signatures(made())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("def abort(self)", "def cancel(self)"),
        ("timeout_s: float = -1.0", "timeout: float = -1.0"),
        ("timeout_s: float = -1.0", "timeout_s: float"),
        ("timeout_s: float = -1.0", "timeout_s: int = -1"),
        ("*, header: bytes", "header: bytes"),
        ("def released(self) -> bool", "def released(self) -> float"),
        ("@property\n    def extents", "def extents"),
        ("class WriteJob", "class Job"),
        ("SAMPLED_WHOLE_BYTES: int", "SAMPLED_WHOLE_BYTES: str"),
    ],
)
def test_a_wrong_stub_is_found(right: str, wrong: str) -> None:
    stub = checked_in()
    assert right in stub
    assert signatures(stub.replace(right, wrong)) != signatures(made())


def test_the_package_exports_what_the_extension_has() -> None:
    names = {name for name in signatures(made()) if "." not in name}
    assert set(native.__all__) == names
    assert all(getattr(native, name) is getattr(_core, name) for name in names)
