"""Which fragment of which logical tensor lies where in the flat tensors of a DeepSpeed optimizer.

Address arithmetic only: duck-typed, imports no deepspeed, moves no bytes. A *flat* is one tensor that the inner
optimizer updates and keys its state by: a ZeRO partition, a flattened group, or a single fp32 copy of a parameter.
Padding at the tails of flats belongs to no logical tensor: it is never captured, and a restore leaves it as it is
(element-wise optimizers never mix it with real elements).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from catalog.errors import UnsupportedError
from catalog.records import Placement

__all__ = ["Flat", "Fragment", "flat_tensors", "flats_of", "group_parameters", "local_partition"]


_FLAT_ATTRIBUTES = (
    "fp32_partitioned_groups_flat",
    "fp16_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements `[offset, offset + numel)` of a flat are `[start, start + numel)` of the flattened logical tensor
    `name`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """One tensor of the inner optimizer: the key of its state, and itself the master weights unless `is_model`.

    `is_model`: its memory is the model's own weights (fp32 under ZeRO-3), so there is no separate master. `group`
    indexes the inner optimizer's `param_groups`.
    """

    tensor: torch.Tensor
    group: int
    placement: Placement
    fragments: tuple[Fragment, ...]
    is_model: bool = False

    def slices(self, value: torch.Tensor) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """The fragments as views of `value`, a tensor laid out like this flat: the flat itself or a state tensor of it."""
        dense = value.detach()
        for fragment in self.fragments:
            if fragment.numel == dense.numel():
                yield fragment, dense
            else:
                yield fragment, dense.view(-1).narrow(0, fragment.offset, fragment.numel)


def flats_of(optimizer: Any, names: Mapping[int, str]) -> tuple[Flat, ...]:
    """The flats of any DeepSpeed optimizer that has them, in its own order.

    `names` maps `id(parameter)` to its logical name. UnsupportedError for a class whose layout is not known.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return tuple(_stage3(optimizer, names))
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return tuple(_stage12(optimizer, names))
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return tuple(_bf16(optimizer, names))
    if hasattr(optimizer, "fp32_groups_flat"):
        return tuple(_fused(optimizer, names))
    if hasattr(optimizer, "fp32_groups"):
        return tuple(_unfused(optimizer, names))
    raise UnsupportedError(
        f"the layout of optimizer {type(optimizer).__qualname__} is not known, so its state can't be captured; "
        "use ZeRO stage 0-3 with a torch or DeepSpeed Adam-like optimizer"
    )


def flat_tensors(optimizer: Any) -> list[torch.Tensor]:
    """The tensors that the flats of `flats_of` lie in, as they are now."""
    found: list[torch.Tensor] = []
    for name in _FLAT_ATTRIBUTES:
        for one in getattr(optimizer, name, ()):
            found += one if isinstance(one, (list, tuple)) else [one]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def group_parameters(optimizer: Any) -> list[list[Any]]:
    """The trainable parameters of each param group of the inner optimizer, in order; the same on every rank."""
    if hasattr(optimizer, "sub_group_to_group_id"):
        groups: list[list[Any]] = [[] for _ in optimizer.optimizer.param_groups]
        for index, sub_group in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[index]].extend(sub_group)
        return groups
    attribute = next(name for name in ("bit16_groups", "bf16_groups", "fp16_groups") if hasattr(optimizer, name))
    return [list(group) for group in getattr(optimizer, attribute)]


def local_partition(optimizer: Any, parameter: Any) -> tuple[int, torch.Tensor]:
    """This rank's part of a ZeRO-3 parameter, without padding: its start in the flattened logical tensor, and a view of
    `ds_tensor`.
    """
    size = int(parameter.ds_tensor.ds_numel)
    start = min(size * int(optimizer._get_param_partition_rank(parameter)), int(parameter.ds_numel))
    numel = min(size, int(parameter.ds_numel) - start)
    return start, parameter.ds_tensor.detach().view(-1).narrow(0, 0, numel)


def _stage12(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    # Not `_hp_mapping`: under round_robin_gradients it ignores the reordering of the group, these offsets do not.
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        begin = dist.get_rank(optimizer.real_dp_process_group[index]) * int(optimizer.partition_size[index])
        tensors = zip(
            optimizer.round_robin_bit16_groups[index],
            optimizer.round_robin_bit16_meta[index],
            optimizer.round_robin_bit16_offsets[index],
            strict=True,
        )
        fragments = (
            _overlap(names[id(p)], tuple(meta.shape), offset, begin, flat.numel()) for p, meta, offset in tensors
        )
        yield Flat(flat, index, "partitioned", tuple(f for f in fragments if f is not None))


def _bf16(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    for index, flat in enumerate(optimizer.fp32_groups_flat_partition):
        begin = dist.get_rank(optimizer.real_dp_process_group[index]) * flat.numel()
        found = (_overlap(n, s, o, begin, flat.numel()) for n, s, o in _sequence(optimizer.bf16_groups[index], names))
        yield Flat(flat, index, "partitioned", tuple(f for f in found if f is not None))


def _stage3(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        fragments = []
        for parameter in optimizer.fp16_groups[index]:
            start, part = local_partition(optimizer, parameter)
            _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            if part.numel():
                fragments.append(
                    Fragment(names[id(parameter)], tuple(parameter.ds_shape), start, part.numel(), int(offset))
                )
        low_precision = optimizer.fp16_partitioned_groups_flat[index]
        is_model = flat.numel() > 0 and low_precision.data_ptr() == flat.data_ptr()
        yield Flat(flat, optimizer.sub_group_to_group_id[index], "partitioned", tuple(fragments), is_model)


def _fused(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    for index, flat in enumerate(optimizer.fp32_groups_flat):
        found = (_overlap(n, s, o, 0, flat.numel()) for n, s, o in _sequence(optimizer.fp16_groups[index], names))
        yield Flat(flat, index, "replicated", tuple(f for f in found if f is not None))


def _unfused(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    for index, (masters, parameters) in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)):
        for master, parameter in zip(masters, parameters, strict=True):
            whole = Fragment(names[id(parameter)], tuple(parameter.shape), 0, parameter.numel(), 0)
            yield Flat(master, index, "replicated", (whole,))


def _sequence(parameters: list[Any], names: Mapping[int, str]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and offset of parameters that were flattened one after the other, without gaps."""
    offset = 0
    for parameter in parameters:
        yield names[id(parameter)], tuple(parameter.shape), offset
        offset += parameter.numel()


def _overlap(name: str, shape: tuple[int, ...], offset: int, begin: int, numel: int) -> Fragment | None:
    """What of a tensor at `offset` of a group lies inside the partition `[begin, begin + numel)` of that group."""
    low = max(offset, begin)
    high = min(offset + torch.Size(shape).numel(), begin + numel)
    return Fragment(name, shape, low - offset, high - low, low - begin) if low < high else None
