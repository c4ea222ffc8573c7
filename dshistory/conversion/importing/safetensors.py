"""Reads weights from safetensors: one file, or a folder of shards as Hugging Face writes them."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from capture.state.dtypes import torch_dtype
from catalog.errors import FormatError
from catalog.format.header import Entry, read_header
from dshistory.conversion.importing.foreign_checkpoint import ForeignCheckpoint, ForeignTensor, other_files

__all__ = ["read", "recognises"]

_SUFFIX = ".safetensors"
_INDEX = "*.safetensors.index.json"
_SHARD = "*-of-*.safetensors"
_WHOLE = ("model.safetensors", "adapter_model.safetensors", "diffusion_pytorch_model.safetensors")


def recognises(path: Path) -> bool:
    """True for a file *.safetensors, and for a folder with a file of a usual name, with shards, or with their index."""
    if path.is_dir():
        return any((path / name).is_file() for name in _WHOLE) or any([*path.glob(_INDEX), *path.glob(_SHARD)])
    return path.suffix == _SUFFIX and path.is_file()


def read(path: Path) -> ForeignCheckpoint:
    """Read every tensor as kind `model`. Names that the metadata maps to others, as `safetensors.torch.save_model`
    writes them, become aliases. Other files of a folder are left out. Raises FormatError with file and field."""
    tensors: dict[str, ForeignTensor] = {}
    files = [path] if path.is_file() else _files(path)
    for file in files:
        for tensor in _tensors(file):
            if tensor.name in tensors:
                raise FormatError(f"{file}: the tensor {tensor.name!r} is also in another file of {path}")
            tensors[tensor.name] = tensor
    left_out = [] if path.is_file() else other_files(path, [*files, *path.glob(_INDEX)])
    return ForeignCheckpoint(list(tensors.values()), left_out=left_out)


def _files(folder: Path) -> list[Path]:
    index = sorted(folder.glob(_INDEX))
    if not index:
        whole = [folder / name for name in _WHOLE if (folder / name).is_file()]
        return whole[:1] or sorted(folder.glob(_SHARD))
    try:
        files = json.loads(index[0].read_text())["weight_map"]
        names = sorted(set(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index[0]}: field weight_map cannot be read: {error}") from error
    for name in names:
        if name != Path(name).name or not (folder / name).is_file():
            raise FormatError(f"{index[0]}: field weight_map: {name!r} is not a file of {folder}")
    return [folder / name for name in names]


def _tensors(file: Path) -> Iterator[ForeignTensor]:
    header = read_header(file)
    keys = {entry.key for entry in header.entries}
    aliases: dict[str, list[str]] = {}
    for alias, name in header.metadata.items():
        if name in keys and alias not in keys:
            aliases.setdefault(name, []).append(alias)
    for entry in header.entries:
        names = tuple(sorted(aliases.get(entry.key, ())))
        data = partial(_read, file, header.data_start, entry)
        yield ForeignTensor("model", entry.key, entry.dtype, entry.shape, data, names)


def _read(file: Path, data_start: int, entry: Entry) -> torch.Tensor:
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
    data = np.fromfile(file, np.uint8, entry.end - entry.begin, offset=data_start + entry.begin)
    if data.nbytes != entry.end - entry.begin:
        raise FormatError(
            f"{file}: tensor {entry.key!r} has {data.nbytes} bytes where its header says {entry.end - entry.begin}"
        )
    return torch.from_numpy(data).view(torch_dtype(entry.dtype)).view(entry.shape)
