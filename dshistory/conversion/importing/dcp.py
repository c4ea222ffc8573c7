"""Reads folders of torch.distributed.checkpoint: tensors are joined from their chunks, the metadata is read as data."""

import collections
import io
import pathlib
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata

from capture.state.dtypes import dtype_name
from catalog.errors import FormatError, UnsupportedError
from dshistory.conversion.importing.foreign_checkpoint import ForeignCheckpoint, ForeignTensor
from dshistory.conversion.importing.safe_unpickle import load_pickle

__all__ = ["read", "recognises"]

_METADATA: Final = ".metadata"
_MODEL: Final = ("model", "module", "state_dict")
_OPTIMIZER: Final = ("optim", "optimizer")
_WRAPPERS: Final = ("app", "state")
_KNOWN: Final[Mapping[str, Any]] = {
    **{
        f"{one.__module__}.{one.__qualname__}": one
        for one in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            collections.OrderedDict,
            torch.Size,
        )
    },
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    "torch.serialization._get_layout": torch.serialization._get_layout,
    # The path where the checkpoint was saved: a name that opens nothing.
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,
}


def recognises(path: Path) -> bool:
    """True for a folder with a file `.metadata`."""
    return (path / _METADATA).is_file()


def read(path: Path) -> ForeignCheckpoint:
    """Read the model's tensors as kind `model`, and optimizer state in a state dict nested as
    `optim.state.<name>.<key>` as kind `<key>`. Values other than tensors are left out."""
    described = _metadata(path / _METADATA)
    paths = described.planner_data or {}
    tensors, left_out = [], []
    for key, stored in described.state_dict_metadata.items():
        logical = _logical(tuple(map(str, paths.get(key) or (key,))))
        if logical is None or not isinstance(stored, metadata.TensorStorageMetadata):
            left_out.append(key)
            continue
        dtype = dtype_name(stored.properties.dtype, what=key)
        data = partial(_read, path, key, stored, described.storage_data)
        tensors.append(ForeignTensor(*logical, dtype, tuple(stored.size), data))
    return ForeignCheckpoint(tensors, left_out=left_out)


def _metadata(path: Path) -> Any:
    found = load_pickle(path, known=_KNOWN)
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, Mapping):
        raise FormatError(f"{path} is not the metadata of a DCP checkpoint on files")
    return found


def _logical(path: Sequence[str]) -> tuple[str, str] | None:
    """Return (kind, name) for a path of keys; None for values outside the model and its optimizer's state."""
    if path[0] in _WRAPPERS and len(path) > 1:
        path = path[1:]
    if len(path) == 1:
        return "model", path[0]
    if path[0] in _MODEL:
        return "model", ".".join(path[1:])
    if path[0] in _OPTIMIZER:
        return (path[-1], ".".join(path[2:-1])) if path[1] == "state" and len(path) > 3 else None
    return "model", ".".join(path)


def _read(folder: Path, key: str, stored: Any, storage: Mapping[Any, Any]) -> torch.Tensor:
    made = torch.empty(stored.size, dtype=stored.properties.dtype)
    filled = 0
    for chunk in stored.chunks:
        piece = _chunk(folder, key, storage.get(metadata.MetadataIndex(key, chunk.offsets)))
        if piece.shape != chunk.sizes or piece.dtype != made.dtype:
            raise FormatError(
                f"{folder}: {key!r}: a chunk is {piece.dtype} {list(piece.shape)}, "
                f"the metadata says {list(chunk.sizes)}"
            )
        ranges = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        made[ranges] = piece
        filled += piece.numel()
    if filled != made.numel():
        raise FormatError(
            f"{folder}: {key!r}: its chunks hold {filled} elements, its size {list(stored.size)} needs {made.numel()}"
        )
    return made


def _chunk(folder: Path, key: str, stored_at: Any) -> torch.Tensor:
    if (
        stored_at is None
        or stored_at.transform_descriptors
        or Path(stored_at.relative_path).name != stored_at.relative_path
    ):
        raise UnsupportedError(
            f"{folder}: {key!r} is stored at {stored_at!r}: only plain chunks in files of the folder itself can be read"
        )
    with (folder / stored_at.relative_path).open("rb") as file:
        file.seek(stored_at.offset)
        data = io.BytesIO(file.read(stored_at.length))
    try:
        loaded = torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            f"{folder / stored_at.relative_path} holds more than data where the chunk of {key!r} is; it is not imported"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise FormatError(
            f"{folder / stored_at.relative_path}: the chunk of {key!r} at {stored_at.offset} can't be read: {error}"
        ) from error
    if not isinstance(loaded, torch.Tensor):
        raise FormatError(f"{folder / stored_at.relative_path}: {key!r} is a {type(loaded).__name__}, not a tensor")
    return loaded
