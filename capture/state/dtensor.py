"""DTensors and FSDP2: the range of each logical tensor that this rank holds, and the tensor that holds it permanently.

FSDP2 puts the gathered weights into the module for a forward pass and frees them when it reshards. The local shard is
permanent, and the optimizer updates it in place, so capture always refers to the shard. Nothing here imports torch's
DTensor or FSDP unless the training already has: `sys.modules` answers whether any can exist.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from catalog.errors import UnsupportedError
from catalog.records import Placement

__all__ = [
    "LocalPart",
    "drop_gathered",
    "local_of_dtensors",
    "local_part",
    "local_tensor",
    "local_tensors",
    "refuse_flat_parameters",
    "sharded_of",
]


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """Elements `[start, start + tensor.numel())` of a logical tensor of `shape`, in this rank's memory.

    `through` is the DTensor around `tensor`; writes through it change the same memory.
    """

    shape: tuple[int, ...]
    tensor: torch.Tensor
    start: int
    placement: Placement
    through: torch.Tensor | None = None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local memory of a DTensor; any other tensor is returned as it is."""
    return tensor._local_tensor if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Apply `local_tensor` to each tensor. Costs nothing in a training without DTensors."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return tensors
    kind = dtensor.DTensor
    return [tensor._local_tensor if isinstance(tensor, kind) else tensor for tensor in tensors]


def local_of_dtensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local memory of those of the `tensors` that are DTensors. Costs 10 ns for each other tensor."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None or not any(issubclass(kind, dtensor.DTensor) for kind in set(map(type, tensors))):
        return []
    return [tensor._local_tensor for tensor in tensors if isinstance(tensor, dtensor.DTensor)]


def local_part(tensor: torch.Tensor, *, what: str) -> LocalPart:
    """Return this rank's part of `tensor`, detached.

    UnsupportedError, which names `what`, unless the part is one range of the flattened logical tensor, and is either
    the same on all ranks or different on each.
    """
    shape = tuple(tensor.shape)
    local = local_tensor(tensor).detach()
    if not _is_dtensor(tensor):
        return LocalPart(shape, local, 0, "replicated")
    return LocalPart(shape, local, *_range(tensor, shape, what=what), through=tensor)


def sharded_of(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Map the id of each FSDP2 parameter that is currently an attribute of a module to its sharded parameter.

    Between a forward and the reshard that attribute is the gathered weight; at other times it is the sharded parameter.
    """
    found = {}
    for state in _states(module):
        for held in _held(state):
            info = held._module_info
            found[id(getattr(info.module, info.param_name))] = held.sharded_param
    return found


def drop_gathered(module: torch.nn.Module) -> None:
    """Free gathered weights and partial gradients, so that the next forward gathers what the shards hold by then."""
    for state in _states(module):
        for group in state._fsdp_param_groups:
            group.reshard()
        for held in _held(state):
            held.unsharded_accumulated_grad = None
            held.sharded_param.grad = None


def refuse_flat_parameters(module: torch.nn.Module) -> None:
    """Raise UnsupportedError for FSDP1: its flat parameters leave the logical ones without tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, part in module.named_modules():
        if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            raise UnsupportedError(
                f"module {name or type(part).__name__!r} is wrapped in FullyShardedDataParallel, which flattens its "
                "parameters: use torch.distributed.fsdp.fully_shard"
            )


def _is_dtensor(tensor: torch.Tensor) -> bool:
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def _range(tensor: Any, shape: tuple[int, ...], *, what: str) -> tuple[int, Placement]:
    """Return the first element of a DTensor's local part, and whether other ranks hold the same part or other ones."""
    if not prod(shape):
        return 0, "replicated"
    mesh, placements = tensor.device_mesh, tensor.placements
    # The plan divides replicated items over all ranks, and expects partitioned ones of all ranks to cover the tensor
    # exactly once. A mesh of some of the ranks, or shards with replicas, fits neither.
    if mesh.size() != dist.get_world_size() or mesh.get_coordinate() is None:
        raise UnsupportedError(
            f"{what} is a DTensor on a mesh of {mesh.size()} of {dist.get_world_size()} ranks: capture needs a mesh "
            "of all ranks"
        )
    wide = [placement for size, placement in zip(mesh.shape, placements, strict=True) if size > 1]
    if any(type(placement).__name__ not in ("Shard", "Replicate") for placement in wide):
        raise UnsupportedError(f"{what} is a DTensor placed as {placements}: only Shard and Replicate can be captured")
    if wide and all(placement.is_replicate() for placement in wide):
        return 0, "replicated"
    if any(placement.is_replicate() for placement in wide):
        raise UnsupportedError(
            f"{what} is a DTensor placed as {placements}, shards with replicas (HSDP): use a mesh of one dimension"
        )
    return _start(shape, tensor, what=what), "partitioned"


def _start(shape: tuple[int, ...], tensor: Any, *, what: str) -> int:
    """Return the first element of this rank's block in the flattened logical tensor.

    A block is one contiguous range exactly when it has length 1 in every dimension before the last one that is cut.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mine, at = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    cut = max((i for i, size in enumerate(mine) if size != shape[i]), default=0)
    if prod(mine) and any(size != 1 for size in mine[:cut]):
        raise UnsupportedError(
            f"{what} of shape {tuple(shape)} is a DTensor placed as {tensor.placements}: a rank's block is no single "
            "range of it; shard dimension 0"
        )
    # An empty block has no first element, so its empty range is placed at the end of the tensor.
    return sum(first * prod(shape[i + 1 :]) for i, first in enumerate(at)) if prod(mine) else prod(shape)


def _states(module: torch.nn.Module) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                yield part._get_fsdp_state()


def _held(state: Any) -> Iterator[Any]:
    for group in state._fsdp_param_groups:
        yield from group.fsdp_params
