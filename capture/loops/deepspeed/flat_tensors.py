"""How each ZeRO stage cuts parameters into the flat tensors of an optimizer, and which fragments these hold.

This is address arithmetic only: it is duck-typed, imports no deepspeed and moves no bytes. A *flat* is one tensor that
the inner optimizer updates and keys its state by: a ZeRO partition, a flattened group, or the fp32 copy of one
parameter.

How DeepSpeed fills the flats:
  - ZeRO 1 and 2: the parameters of a group one after the other, at offsets that DeepSpeed records. It may reorder them
    (round_robin_gradients) and pad between them (to 16 bytes, on request), and pads the end of the group to a multiple
    of 2 x ranks elements. The group is then cut into equal partitions, so a cut may go through a parameter, and the
    last ranks may hold nothing but padding.
  - bf16 optimizer: the same cut, but always in order and without gaps between the parameters.
  - ZeRO 3: each parameter by itself is padded to a multiple of the number of ranks and cut into equal partitions. A
    flat is the concatenation of this rank's partitions, padding included, so padding lies in its middle too.
  - fp16 without ZeRO: the whole group on every rank, or one fp32 copy per parameter.
Padding belongs to no logical tensor. It is never captured, and a restore leaves it as it is: element-wise optimizers
never mix it with real elements.
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
    """One range of a flat, and the range of a logical tensor that it holds.

    Elements `[offset, offset + numel)` of the flat are `[start, start + numel)` of the flattened logical tensor `name`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """One tensor of the inner optimizer, which is the key of its state and holds the master weights unless `is_model`.

    With `is_model` its memory is that of the model's own weights (fp32 under ZeRO 3), so that there are no separate
    master weights. `group` is an index of the inner optimizer's `param_groups`.
    """

    tensor: torch.Tensor
    group: int
    placement: Placement
    fragments: tuple[Fragment, ...]
    is_model: bool = False

    def slices(self, value: torch.Tensor) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Yield each fragment as a view of `value`, which is the flat itself or a state tensor of the same shape."""
        dense = value.detach()
        for fragment in self.fragments:
            if fragment.numel == dense.numel():
                yield fragment, dense
            else:
                yield fragment, dense.view(-1).narrow(0, fragment.offset, fragment.numel)


def flats_of(optimizer: Any, names: Mapping[int, str]) -> tuple[Flat, ...]:
    """Return the flats of a DeepSpeed optimizer in the order in which it keeps them.

    `names` maps the id of each parameter to its logical name. UnsupportedError for a class whose flats are not known.
    """
    # By attribute and not by class: subclasses and wrappers keep the attributes. ZeRO 3 comes first, and each later
    # test is for an attribute that no optimizer before it has.
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
        f"the flat tensors of optimizer {type(optimizer).__qualname__} are not known, so its state can't be captured; "
        "use ZeRO stage 0-3 with a torch or DeepSpeed Adam-like optimizer"
    )


def flat_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors behind the flats of `flats_of`, without computing any fragments.

    This is cheap enough for every snapshot, where it tells whether DeepSpeed has replaced a flat.
    """
    found: list[torch.Tensor] = []
    for name in _FLAT_ATTRIBUTES:
        for one in getattr(optimizer, name, ()):
            found += one if isinstance(one, (list, tuple)) else [one]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def group_parameters(optimizer: Any) -> list[list[Any]]:
    """Return the trainable parameters of each param group of the inner optimizer, in order. Equal on every rank."""
    if hasattr(optimizer, "sub_group_to_group_id"):
        # ZeRO 3 divides each group into sub-groups of limited size, and `fp16_groups` is the list of sub-groups.
        groups: list[list[Any]] = [[] for _ in optimizer.optimizer.param_groups]
        for index, sub_group in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[index]].extend(sub_group)
        return groups
    attribute = next(name for name in ("bit16_groups", "bf16_groups", "fp16_groups") if hasattr(optimizer, name))
    return [list(group) for group in getattr(optimizer, attribute)]


def local_partition(optimizer: Any, parameter: Any) -> tuple[int, torch.Tensor]:
    """Return this rank's part of a ZeRO 3 parameter without padding.

    It is given by its start in the flattened logical tensor and a view of `ds_tensor`.
    """
    # `ds_tensor.ds_numel` is the size of a partition with padding, equal on all ranks; `ds_numel` that of the parameter
    # without. On the last ranks the partition may begin behind the end of the parameter, and then all of it is padding.
    size = int(parameter.ds_tensor.ds_numel)
    start = min(size * int(optimizer._get_param_partition_rank(parameter)), int(parameter.ds_numel))
    numel = min(size, int(parameter.ds_numel) - start)
    return start, parameter.ds_tensor.detach().view(-1).narrow(0, 0, numel)


def _stage12(optimizer: Any, names: Mapping[int, str]) -> Iterator[Flat]:
    # The recorded offsets include the padding between parameters. They belong to the reordered group; `_hp_mapping`
    # would not do, as it ignores the reordering of round_robin_gradients. Shapes come from the meta tensors, because
    # offloading the states replaces the parameters' storage with empty tensors.
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
            # Offsets count partitions with their padding, which is why they are read and not summed up here.
            _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            if part.numel():
                fragments.append(
                    Fragment(names[id(parameter)], tuple(parameter.ds_shape), start, part.numel(), int(offset))
                )
        # In an fp32 training the flat shares the memory of the partitions: there is no second copy of the weights.
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
    """Yield name, shape and offset of parameters that are flattened one after the other, without gaps."""
    offset = 0
    for parameter in parameters:
        yield names[id(parameter)], tuple(parameter.shape), offset
        offset += parameter.numel()


def _overlap(name: str, shape: tuple[int, ...], offset: int, begin: int, numel: int) -> Fragment | None:
    """Return the fragment that a tensor at `offset` of a group has in the group's range `[begin, begin + numel)`.

    None when they do not overlap. The fragment's own offset is relative to the partition.
    """
    low = max(offset, begin)
    high = min(offset + torch.Size(shape).numel(), begin + numel)
    return Fragment(name, shape, low - offset, high - low, low - begin) if low < high else None
