"""Refuse to run with another project's module named `capture`, `catalog` or `native`: the names are ordinary words."""

import importlib.util
from pathlib import Path

__all__ = ["check_siblings"]


def check_siblings(package_file: str, names: tuple[str, ...]) -> None:
    """Raise ImportError, naming the file in the way, unless every package of `names` stands beside `package_file`'s."""
    home = Path(package_file).resolve().parent.parent
    for name in names:
        spec = importlib.util.find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found is None or found.parent != home / name:
            raise ImportError(
                f"DSHistory needs its own package {name!r} from {home / name}, but `import {name}` finds "
                f"{found or 'nothing'}: rename that file, or put it after DSHistory on sys.path"
            )
