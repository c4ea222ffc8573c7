"""`__all__` states what a module offers: every name in it exists, and no public name is left out."""

import ast
import importlib

import pytest
from architecture import LAYERS
from project_helpers import all_modules, relative

WITHOUT_NAMES = ("__main__.py",)


def public_definitions(tree):
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def stated(tree):
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("path", [p for p in all_modules() if p.name not in WITHOUT_NAMES], ids=relative)
def test_a_module_states_its_public_names(path):
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text())
    names = stated(tree)
    assert names is not None, "no __all__"
    assert len(set(names)) == len(names)
    if path.name != "__init__.py":
        hidden = public_definitions(tree) - set(names)
        assert not hidden, "public by name, but not in __all__"


@pytest.mark.parametrize("package", LAYERS)
def test_every_name_of_a_package_is_available(package):
    module = importlib.import_module(package)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing
    assert "open" not in module.__all__
