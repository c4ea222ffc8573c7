"""Refuses to run with another project's module named `capture`, `catalog` or `native`: the names are ordinary words."""

import importlib.util
import sys
from pathlib import Path

__all__ = ["check_siblings"]


def check_siblings(package_file: str, names: tuple[str, ...]) -> None:
    """Raise ImportError, naming the file in the way, unless every package of `names` stands beside `package_file`'s."""
    home = Path(package_file).resolve().parent.parent
    for name in names:
        found = _file_of(name)
        if found is None or found.parent != home / name:
            raise ImportError(
                f"DSHistory needs its own package {name!r} from {home / name}, but `import {name}` finds "
                f"{found or 'nothing'}: rename that file, or put it after DSHistory on sys.path"
            )


def _file_of(name: str) -> Path | None:
    """Return the file that `import name` finds, or has found."""
    if name in sys.modules:
        # The module itself: one that a program has made, or runs as its script, may have no spec.
        file = getattr(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        file = None if spec is None else spec.origin
    return None if file is None else Path(file).resolve()
