"""Reads and decodes the objects of a checkpoint; their tensors are extents beside them. Nothing is ever unpickled."""

from pathlib import Path
from typing import Any

import torch

from capture.load.read_into import read_extents
from capture.state.objects import decode_object
from catalog.read.fragments import RankFragments

__all__ = ["read_objects"]

_KINDS = ("object", "object_tensor")


def read_objects(root: Path, chosen: RankFragments) -> dict[str, Any]:
    """Return the objects by name, as the rank of `chosen` stored them.

    CorruptError when bytes differ from their checksum, FormatError when an object is malformed.
    """
    # An object and each of its tensors are stored as one extent, never split over ranks.
    rows = [members[0] for (kind, _), members in chosen.by_key.items() if kind in _KINDS]
    flat = {(row.kind, row.name): tensor for row, tensor in zip(rows, read_extents(root, rows), strict=True)}
    shapes = {row.name: row.shape for row in rows}

    def tensor(name: str) -> torch.Tensor:
        return flat["object_tensor", name].view(shapes[name])

    return {
        name: decode_object(name, data.numpy().tobytes(), tensor=tensor)
        for (kind, name), data in flat.items()
        if kind == "object"
    }
