"""The elements of a tensor in the order of its dimensions, as they are stored, whatever the order of its memory."""

import torch

__all__ = ["dense_bytes", "row_major"]


def row_major(tensor: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
    """Return views whose elements, one view after the other, are elements `[begin, end)` of the flattened tensor.

    Of a contiguous tensor it is one view; of another one, such as one in channels-last order, at most two for each
    dimension, so that a part of it can be copied without a copy of the whole.
    """
    if begin == end:
        return []
    if begin == 0 and end == tensor.numel():
        return [tensor]
    if tensor.is_contiguous():
        return [tensor.view(-1)[begin:end]]
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-begin // row), end // row
    if first > last:
        return row_major(tensor[last], begin - last * row, end - last * row)
    views = row_major(tensor[first - 1], begin - (first - 1) * row, row) if begin < first * row else []
    if first < last:
        views.append(tensor[first:last])
    return views + (row_major(tensor[last], 0, end - last * row) if last * row < end else [])


def dense_bytes(tensor: torch.Tensor) -> int:
    """Return the length of the tensor's memory in bytes; 0 when there is foreign memory between its elements."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.nbytes if span == tensor.numel() else 0
