"""Files in torch.save's format: reading them without running code that they choose, and writing them durably."""

import pickle as pickling
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct, scalar

from catalog.disk.durable import publish, temporary_path
from catalog.errors import FormatError

__all__ = ["MALFORMED", "NUMPY", "load_torch_file", "redirect_torch_load", "save_torch_file", "to_map_location"]

MALFORMED: tuple[type[Exception], ...] = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    struct.error,
)
"""The errors of reading a file with an unpickler for bytes that are no pickle, beside an UnpicklingError."""

# numpy 2 moved these functions; files that numpy 1 wrote name them where they were.
_PLACES = ("numpy._core", "numpy.core")
NUMPY: Sequence[tuple[Any, str]] = (
    *((one, f"{place}.multiarray.{one.__name__}") for one in (_reconstruct, scalar) for place in _PLACES),
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    *((getattr(np.dtypes, name), f"numpy.dtypes.{name}") for name in np.dtypes.__all__),
)
"""The functions and classes by which files of torch.save hold numpy's arrays and numbers, with their names there."""


def load_torch_file(path: Path, *, map_location: Any, classes: Sequence[type], pickle: bool) -> Any:
    """Return the content of a torch.save file.

    Unless `pickle` is true, the file may name only `classes`, numpy's arrays and what torch itself allows; FormatError
    gives torch's account of any other class, or of damage. With `pickle` the file is unpickled, which runs code that it
    chooses.
    """
    if pickle:
        return torch.load(path, map_location=map_location, weights_only=False)
    try:
        with torch.serialization.safe_globals([*classes, *NUMPY]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickling.UnpicklingError as error:
        raise FormatError(
            f"{path}: neither one of our files nor a torch.save file of plain data: {error}\nIf you trust it, load it "
            "with capture.checkpoint_engine(engine, pickle=True)"
        ) from error
    except MALFORMED as error:
        raise FormatError(f"{path} can't be read as a file of torch.save, perhaps it is damaged: {error}") from error


def save_torch_file(state_dict: Any, path: Path) -> None:
    """Write `state_dict` with torch.save. The file appears under its name only when it is whole and durable."""
    tmp = temporary_path(path)
    try:
        torch.save(state_dict, tmp)
        publish(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def to_map_location(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """Move a host tensor as torch.load does for the same `map_location`, except that None keeps it in host memory."""
    if map_location is None:
        return tensor
    if isinstance(map_location, dict):
        return tensor.to(map_location.get("cpu", "cpu"))
    if not callable(map_location):
        return tensor.to(map_location)
    # As in torch.load, the function may return the storage itself, a moved copy, or None for no opinion.
    storage = map_location(tensor.untyped_storage(), "cpu")
    if storage is None or storage.device == tensor.device:
        return tensor
    return tensor.to(storage.device)


class _TorchWithLoad:
    """A stand-in for the torch module whose `load` is the newest of `loads`; every other attribute is torch's."""

    def __init__(self, loads: list[Callable[[Path], Any]]) -> None:
        self.loads = loads

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def load(self, path: Any, **_: Any) -> Any:
        return self.loads[-1](Path(path))


def redirect_torch_load(module: Any, load: Callable[[Path], Any]) -> Callable[[], None]:
    """Replace `torch.load` by `load` inside `module` alone, and return a function that undoes it.

    This is for library code that calls `torch.load` itself and offers no way to pass another reader. Several
    replacements of one module may be undone in any order.
    """
    if not isinstance(module.torch, _TorchWithLoad):
        module.torch = _TorchWithLoad([])
    loads = module.torch.loads
    loads.append(load)

    def undo() -> None:
        loads.remove(load)
        if not loads:
            module.torch = torch

    return undo
