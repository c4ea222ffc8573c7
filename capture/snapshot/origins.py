"""Where the bytes of a tensor are to be read: from its own host memory, from a host mirror, or fed by a device."""

import torch

from capture.snapshot.device_copies import DeviceCopier, Mirror
from capture.snapshot.device_feed import DevicePart
from capture.state.interface import TensorItem

__all__ = ["Origins"]


class Origins:
    """Where the bytes of items are to be read; makes the mirrors of host tensors that are not dense."""

    def __init__(self, copies: DeviceCopier) -> None:
        self.mirrors: list[Mirror] = []
        self._copies = copies

    def place(self, item: TensorItem, begin: int, end: int) -> tuple[int, bool, DevicePart | None]:
        """For elements [begin, end) of the item's tensor: the address of host memory, whether the training's own memory is
        read after the step, and what a device has to feed.
        """
        tensor, eager = item.tensor, item.when == "eager"
        dense, itemsize = tensor.is_contiguous(), tensor.element_size()
        if self._copies.owns(tensor):
            if begin == end:
                return 0, False, None
            keep = eager or not dense
            return 0, not keep, DevicePart(tensor, begin * itemsize, (end - begin) * itemsize, keep)
        if dense:
            return tensor.data_ptr() + begin * itemsize, not eager, None
        mirror = Mirror(torch.empty(tensor.shape, dtype=tensor.dtype), tensor)
        self.mirrors.append(mirror)
        return mirror.host.data_ptr() + begin * itemsize, False, None
