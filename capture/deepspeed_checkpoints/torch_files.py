"""Files that torch.save wrote, as the checkpoint engine reads them: without running code of theirs unless that is allowed."""

import pickle as pickling
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct, scalar

from catalog.disk.durable import publish, temporary_path
from catalog.errors import FormatError

__all__ = ["load_torch_file", "moved", "redirect_torch_load", "save_torch_file"]

_ARRAY_MAKERS = [(one, f"numpy.core.multiarray.{one.__name__}") for one in (_reconstruct, scalar)]
_NUMPY = (
    _reconstruct,
    scalar,
    *_ARRAY_MAKERS,
    np.ndarray,
    np.dtype,
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
)


def load_torch_file(path: Path, *, map_location: Any, classes: Sequence[type], pickle: bool) -> Any:
    """The content of a torch.save file that names no classes but `classes` and numpy's arrays; any at all with `pickle`.
    FormatError names the one in the way.
    """
    if pickle:
        return torch.load(path, map_location=map_location, weights_only=False)
    try:
        with torch.serialization.safe_globals([*classes, *_NUMPY]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickling.UnpicklingError as error:
        raise FormatError(
            f"{path}: neither one of our files nor a torch.save file of plain data: {error}\nIf you trust it, load it with "
            "capture.checkpoint_engine(engine, pickle=True)"
        ) from error


def save_torch_file(state_dict: Any, path: Path) -> None:
    """torch.save, but whole and durable under its name or not there."""
    tmp = temporary_path(path)
    try:
        torch.save(state_dict, tmp)
        publish(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def moved(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """A host tensor to where `map_location`, torch.load's argument, says. None: it stays in host memory."""
    if map_location is None:
        return tensor
    if isinstance(map_location, dict):
        return tensor.to(map_location.get("cpu", "cpu"))
    if not callable(map_location):
        return tensor.to(map_location)
    storage = map_location(tensor.untyped_storage(), "cpu")
    if storage is None or storage.device == tensor.device:
        return tensor
    return tensor.to(storage.device)


class _Torch:
    """torch, but for `load`, which is that of the newest of `loads`."""

    def __init__(self, loads: list[Callable[[Path], Any]]) -> None:
        self.loads = loads

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def load(self, path: Any, **_: Any) -> Any:
        return self.loads[-1](Path(path))


def redirect_torch_load(module: Any, load: Callable[[Path], Any]) -> Callable[[], None]:
    """Let `torch.load` in `module` alone be `load`: for code that has no other way to be told of our files. Returns what undoes
    it, in whatever order.
    """
    if not isinstance(module.torch, _Torch):
        module.torch = _Torch([])
    loads = module.torch.loads
    loads.append(load)

    def undo() -> None:
        loads.remove(load)
        if not loads:
            module.torch = torch

    return undo
