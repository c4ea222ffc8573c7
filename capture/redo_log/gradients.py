"""Takes the gradients that an update is about to consume into memory of the redo log, on the training thread.

They are copied, and packed beside the training; or packed right here, where the training itself computes on all the
cores that it has (decision 0060).
"""

import mmap
from collections.abc import Sequence
from typing import Final

import torch

from capture.collectives import processes_here
from capture.redo_log.blocks import blocks_of, most_packed_bytes
from capture.redo_log.redo_log import RedoLog, StepInput
from capture.redo_log.updated_tensors import UpdatedTensors
from capture.state.dtypes import dtype_name
from catalog.disk.direct_file import place_for
from catalog.format.dtypes import DTYPES
from catalog.format.redo_segment import RedoTensor
from catalog.format.redo_writer import PackedBlock

__all__ = ["Gradients", "trains_on_all_cores"]

_ALIGN: Final = 16


def trains_on_all_cores(module: torch.nn.Module, *, world_size: int, cores: int) -> bool:
    """Return whether nothing can be computed beside a training but at its own cost: its forward and backward run on the
    host, in as many threads as the host has cores for all the ranks that it has.
    """
    on_host = all(parameter.device.type == "cpu" for parameter in module.parameters())
    return on_host and torch.get_num_threads() * processes_here(world_size) >= cores


class Gradients:
    """The gradients of what the updates of one rank write, on their way into its log."""

    def __init__(self, log: RedoLog, updated: UpdatedTensors) -> None:
        self._log = log
        self._updated = updated

    def take(self, into: StepInput, updates: Sequence[torch.Tensor]) -> None:
        """Take the gradients of a call of the optimizer, behind those of earlier calls of the same update. They may be
        overwritten once this returns."""
        found = [
            (self._described(one, one.grad), one.grad.detach())
            for one in updates
            if one.grad is not None and self._updated.is_recorded(one)
        ]
        if into.memory is None and not into.is_left_out:
            into.memory = self._log.memory(self._most_bytes())
            into.is_left_out = into.memory is None
            if into.memory is not None and self._log.packs_at_once:
                into.packed_at = place_for(self._log.position(), into.memory.numpy().data)
        if into.memory is None:
            return
        if self._log.packs_at_once:
            self._pack(into, found)
        else:
            self._copy(into, found)

    def _described(self, updated: torch.Tensor, gradient: torch.Tensor) -> RedoTensor:
        name = self._updated.known_name(updated)
        dtype = dtype_name(gradient.dtype, what=f"the gradient of {name!r}")
        return RedoTensor("gradient", name, dtype, tuple(gradient.shape))

    def _copy(self, into: StepInput, gradients: Sequence[tuple[RedoTensor, torch.Tensor]]) -> None:
        assert into.memory is not None
        at = sum(_aligned(copy.nbytes) for _, copy in into.tensors)
        for tensor, gradient in gradients:
            copy = into.memory[at : at + gradient.nbytes].view(gradient.dtype).view(gradient.shape)
            copy.copy_(gradient)
            into.tensors.append((tensor, copy))
            at += _aligned(gradient.nbytes)

    def _pack(self, into: StepInput, gradients: Sequence[tuple[RedoTensor, torch.Tensor]]) -> None:
        assert into.memory is not None
        blocks = blocks_of(gradients)
        room = into.memory.numpy().data[into.packed_at + sum(block.stored for block in into.packed) :]
        given = [(content, DTYPES[tensor.dtype]) for tensor, content in blocks]
        packed = self._log.packer.pack(given, into=room, team=torch.get_num_threads())
        into.packed += [
            PackedBlock(tensor, content.nbytes, stored, checksum)
            for (tensor, content), (stored, checksum) in zip(blocks, packed, strict=True)
        ]

    def _most_bytes(self) -> int:
        """Return how much memory the gradients of one update take; those of a flat tensor are as large as it is."""
        recorded = [one for one in self._updated.all if self._updated.is_recorded(one)]
        if not self._updated.are_flat:
            recorded = [one.grad for one in recorded if one.grad is not None]
        if self._log.packs_at_once:
            return mmap.PAGESIZE + sum(map(most_packed_bytes, recorded))
        return sum(map(_aligned_bytes, recorded))


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return _aligned(tensor.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
