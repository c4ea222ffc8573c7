"""The two ways in which an import unpickles: both create objects of a given list of classes, and of no other.

Files of torch.save go through torch.load with weights_only=True. DCP's metadata is a bare pickle, in a protocol that
torch's restricted unpickler does not support; it goes through an unpickler here that allows the given names alone."""

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from capture.deepspeed_checkpoints.torch_files import MALFORMED
from catalog.errors import FormatError, UnsupportedError

__all__ = ["load_pickle", "load_torch_file"]

_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")
"""The form in which torch's own error names a class that it refuses."""


def load_torch_file(path: Path, *, known: Sequence[tuple[Any, str]] = ()) -> Any:
    """Return the content of a file of torch.save; tensors are mapped from the file, not read, where its format allows.

    `known` are stand-ins for further classes, with the name of each in the file: only attributes are loaded. Raises
    UnsupportedError with the classes that are not known, FormatError for a file that cannot be read or is damaged."""
    mapped = zipfile.is_zipfile(path)
    try:
        if mapped:
            _require_whole(path)
        # torch knows the stand-ins only while this file is read.
        with torch.serialization.safe_globals(list(known)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        unknown = _unknown_classes(path, known) if mapped else _GLOBAL.findall(str(error))
        if not unknown:
            raise UnsupportedError(
                f"{path} is damaged, or holds more than data, which can't be told apart: torch.load(weights_only=True) "
                "does not read it; it is not imported: take another copy of the file, or save only the state dicts"
            ) from error
        raise UnsupportedError(
            f"{path} holds more than data: the classes {', '.join(unknown)}; loading it could run any code, so it is "
            "not imported: save only the state dicts"
        ) from error
    except MALFORMED as error:
        raise FormatError(
            f"{path} can't be read as a file of torch.save: {str(error).partition(chr(10))[0]}"
        ) from error


def _require_whole(path: Path) -> None:
    """Raise FormatError when the zip file's own marks or the checksum of its pickle show damage."""
    with path.open("rb") as file:
        head = file.read(4)
    if head != b"PK\x03\x04":
        raise FormatError(f"{path} is damaged: it begins with {head!r}, and a file of torch.save with b'PK\\x03\\x04'")
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    archive.read(name)
    except zipfile.BadZipFile as error:
        raise FormatError(f"{path} is damaged: {error}") from error


def _unknown_classes(path: Path, known: Sequence[tuple[Any, str]]) -> list[str]:
    names = {name for _, name in known}
    return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - names)


class _RestrictedUnpickler(pickle.Unpickler):
    known: Mapping[str, Any]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self.known:
            raise pickle.UnpicklingError(f"the class {full}")
        return self.known[full]


def load_pickle(path: Path, *, known: Mapping[str, Any]) -> Any:
    """Return the content of a bare pickle that uses only the names in `known`, whose values must be harmless to call.

    Raises UnsupportedError with the first name that is not known, FormatError for a file that is not a pickle."""
    try:
        with path.open("rb") as file:
            unpickler = _RestrictedUnpickler(file)
            unpickler.known = known
            return unpickler.load()
    except pickle.UnpicklingError as error:
        raise UnsupportedError(f"{path} holds more than data: {error}; it is not imported") from error
    except MALFORMED as error:
        raise FormatError(f"{path} can't be read: {error}") from error
