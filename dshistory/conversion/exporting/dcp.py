"""Writes weights as a folder of torch.distributed.checkpoint, in one process, with one tensor in memory at a time."""

from pathlib import Path
from typing import Any, Generic

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from capture.state.dtypes import torch_dtype
from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.weights import T, Weights

__all__ = ["write_dcp"]


def write_dcp(checkpoint: Weights[T], target: Path, options: Options) -> None:
    """Write a folder that `dcp.load` loads into a state dict of the same names.

    A tied tensor is written under each of its names.
    """
    options.require_only("dcp", "weights")
    tensors = checkpoint.state_dict(options.weights)
    tensors.update({alias: tensors[name] for alias, name in checkpoint.aliases().items()})
    shapes = {
        name: torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta")
        for name, tensor in tensors.items()
    }
    writer = FileSystemWriter(target, single_file_per_rank=True, sync_files=False, thread_count=1)
    save(shapes, storage_writer=writer, planner=_LazyPlanner(checkpoint, tensors), no_dist=True)


class _LazyPlanner(DefaultSavePlanner, Generic[T]):
    """Plans with tensors on the meta device, and reads each one when the writer asks for it."""

    def __init__(self, checkpoint: Weights[T], tensors: dict[str, T]) -> None:
        super().__init__(flatten_state_dict=False)
        self._source = checkpoint
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Any:
        index: MetadataIndex = write_item.index
        return self._source.whole(self._tensors[index.fqn])
