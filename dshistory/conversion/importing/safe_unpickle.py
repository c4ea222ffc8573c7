"""The two ways in which an import unpickles anything: both make what stands on a list of known names, and nothing else.

Files of torch.save go through torch.load with weights_only=True. DCP's metadata is a bare pickle of a protocol that torch's
restricted unpickler does not know, so it has one of its own, stricter: no name is allowed but the given ones."""

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from catalog.errors import FormatError, UnsupportedError

__all__ = ["load_pickle", "load_trusted"]

_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")
"""How torch's own error names what it refused."""


def load_trusted(path: Path, *, known: Sequence[tuple[type, str]] = ()) -> Any:
    """The content of a file of torch.save; tensors are mapped from the file, not read, where its format allows.

    `known` are further classes by the name that the file gives them; data alone, since what stands in for them is ours.
    UnsupportedError names the classes that are not known, FormatError a file that can't be read."""
    mapped = zipfile.is_zipfile(path)
    try:
        # The names that stand in for classes are only known to torch while this file is read.
        with torch.serialization.safe_globals(list(known)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        strangers = _strangers(path, known) if mapped else _GLOBAL.findall(str(error))
        named = (
            f"the classes {', '.join(strangers)}" if strangers else "what torch.load(weights_only=True) does not read"
        )
        raise UnsupportedError(
            f"{path} holds more than data: {named}; loading it could run any code, so it is not imported: save the state "
            "dicts alone"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise FormatError(
            f"{path} can't be read as a file of torch.save: {str(error).partition(chr(10))[0]}"
        ) from error


def _strangers(path: Path, known: Sequence[tuple[type, str]]) -> list[str]:
    names = {name for _, name in known}
    return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - names)


class _Strict(pickle.Unpickler):
    known: Mapping[str, Any]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self.known:
            raise pickle.UnpicklingError(f"the class {full}")
        return self.known[full]


def load_pickle(path: Path, *, known: Mapping[str, Any]) -> Any:
    """The content of a bare pickle, whose names may only be those of `known`, which must be harmless to call.

    UnsupportedError names the first that is not known, FormatError a file that is no pickle."""
    try:
        with path.open("rb") as file:
            unpickler = _Strict(file)
            unpickler.known = known
            return unpickler.load()
    except pickle.UnpicklingError as error:
        raise UnsupportedError(f"{path} holds more than data: {error}; it is not imported") from error
    except (EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} can't be read: {error}") from error
