"""Cuts recorded tensors into the blocks of a redo log: each is packed by itself, in the processor's cache."""

from collections.abc import Iterable
from typing import Final

import torch

from catalog.encoding.planes import MAX_HEAD_BYTES
from catalog.format.redo_segment import RedoTensor

__all__ = ["block_count", "blocks_of", "most_packed_bytes"]

_BLOCK_BYTES: Final = 1 << 20
"""A block stands for at most so many bytes: while it is packed it stays in the processor's cache."""


def blocks_of(tensors: Iterable[tuple[RedoTensor, torch.Tensor]]) -> list[tuple[RedoTensor, memoryview]]:
    """Return the blocks of dense tensors in host memory, in order, each with its bytes; an empty tensor has one."""
    found = []
    for tensor, content in tensors:
        data = _bytes_of(content)
        found += [(tensor, data[at : at + _BLOCK_BYTES]) for at in range(0, max(1, len(data)), _BLOCK_BYTES)]
    return found


def block_count(content: torch.Tensor) -> int:
    """Return how many blocks a tensor has."""
    return max(1, -(-content.nbytes // _BLOCK_BYTES))


def most_packed_bytes(content: torch.Tensor) -> int:
    """Return how many bytes the blocks of a tensor take at most when they are packed."""
    return content.nbytes + block_count(content) * MAX_HEAD_BYTES


def _bytes_of(content: torch.Tensor) -> memoryview:
    return content.reshape(-1).view(torch.uint8).numpy().data if content.numel() else memoryview(b"")
