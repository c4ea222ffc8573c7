"""Writes weights as safetensors: one file, or a folder of shards with an index. Streamed, so memory stays bounded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from catalog.format.dtypes import DTYPES
from catalog.format.header import Entry, encode_header, entries_json, header_bytes_needed
from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.weights import T, Weights

__all__ = ["write_safetensors", "write_sharded"]

_ALIGN: Final = 64
_NAME: Final = "model.safetensors"


def write_safetensors(checkpoint: Weights[T], target: Path, options: Options) -> None:
    """Write one safetensors file; with `shard_bytes` a folder of files, and their index when there is more than one.

    Tied tensors have one entry; the metadata maps each further name to it, as `safetensors.torch.load_model` expects.
    """
    options.require_only("safetensors", "shard_bytes", "weights")
    tensors = checkpoint.state_dict(options.weights)
    metadata = {
        **checkpoint.aliases(),
        "format": "pt",
        "dshistory": str(checkpoint.ref),
        "weights": options.weights,
    }
    if options.shard_bytes is None:
        _write_file(checkpoint, target, tensors, metadata)
    else:
        target.mkdir()
        write_sharded(checkpoint, target, tensors, metadata, shard_bytes=options.shard_bytes)


def write_sharded(
    checkpoint: Weights[T],
    folder: Path,
    tensors: Mapping[str, T],
    metadata: Mapping[str, str],
    *,
    shard_bytes: int,
) -> None:
    """Write `model.safetensors`, or `model-0000i-of-0000n.safetensors` and their index, as Hugging Face names them."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        _write_file(checkpoint, folder / _NAME, tensors, metadata)
        return
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(checkpoint, folder / file, {name: tensors[name] for name in names}, metadata)
        places.update(dict.fromkeys(names, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / f"{_NAME}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Mapping[str, T], shard_bytes: int) -> list[list[str]]:
    """Return the names of each shard, in order, cut before the tensor that would make it larger than `shard_bytes`."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.nbytes
    return shards


def _write_file(checkpoint: Weights[T], path: Path, tensors: Mapping[str, T], metadata: Mapping[str, str]) -> None:
    # In order of falling item size, so that every tensor begins at a multiple of its own item size.
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPES[item[1].dtype], item[0]))
    entries, at = [], 0
    for name, tensor in ordered:
        entries.append(Entry(name, tensor.dtype, tensor.shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    needed = header_bytes_needed(entries, metadata=metadata)
    header = encode_header([entries_json(entries)], metadata=metadata, data_start=-(-needed // _ALIGN) * _ALIGN)
    with path.open("xb") as file:
        file.write(header)
        for _, tensor in ordered:
            for piece in checkpoint.pieces(tensor):
                file.write(piece.view(torch.uint8).numpy().data)
