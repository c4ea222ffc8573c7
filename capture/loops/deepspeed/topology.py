"""Which rank answers for which parameter where ranks hold different ones: pipeline stages and experts.

Under plain data parallelism every rank holds every parameter, and the plan shares the writing. Here it can't: so each
rank offers, as a partition, its own share of what it and its replicas hold, under a name that is unique over all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from capture.state.interface import TensorItem
from catalog.errors import UnsupportedError

__all__ = ["Topology", "merge_groups"]


@dataclass(frozen=True, slots=True)
class Topology:
    """`prefixes`: the beginnings of local names that stand for others over all ranks (local expert 0 may be expert 4 of
    8). `shares`: for each logical name here, (i, n): this is the i-th of n ranks that hold it, or n = 0 where another
    pipeline stage answers for it.
    """

    prefixes: Mapping[str, str]
    shares: Mapping[str, tuple[int, int]]

    def logical(self, name: str) -> str:
        """The name of a parameter over all ranks."""
        for local, everywhere in self.prefixes.items():
            if name.startswith(local):
                return everywhere + name[len(local) :]
        return name

    def own(self, items: Iterable[TensorItem]) -> Iterator[TensorItem]:
        """What this rank writes of `items`: all fragments disjoint over all ranks."""
        for item in items:
            index, count = self.shares[item.name]
            if count and item.placement == "partitioned":
                yield item
            elif count:
                yield from _share(item, index, count)


def merge_groups(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """The parameter names of each param group, put together over all ranks. A collective; UnsupportedError where the
    groups do not agree.
    """
    everyone: list[list[list[str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [list(names) for names in groups])
    counts = {len(groups) for groups in everyone}
    if len(counts) > 1:
        raise UnsupportedError(
            f"the ranks' optimizers have {sorted(counts)} param groups; give every pipeline stage parameters of each group"
        )
    return [list(dict.fromkeys(name for names in each for name in names)) for each in zip(*everyone, strict=True)]


def _share(item: TensorItem, index: int, count: int) -> Iterator[TensorItem]:
    numel = item.tensor.numel()
    begin, end = numel * index // count, numel * (index + 1) // count
    if not item.tensor.is_contiguous():
        # It can't be cut; the first holder writes all of it.
        begin, end = (0, numel) if index == 0 else (0, 0)
    if begin < end or (numel == 0 and index == 0):
        part = item.tensor if end - begin == numel else item.tensor.view(-1).narrow(0, begin, end - begin)
        yield replace(item, tensor=part, start=item.start + begin, placement="partitioned")
