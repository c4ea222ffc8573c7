"""The parameters that each rank writes where ranks hold different ones: pipeline stages and experts.

Under plain data parallelism every rank holds every parameter, and the plan divides the writing among all ranks. Here a
parameter is on some ranks only, so each of them offers, as a partition, its own share of it, under a name that is
unique over all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from capture.state.interface import TensorItem
from catalog.errors import UnsupportedError

__all__ = ["Topology", "merge_groups"]


@dataclass(frozen=True, slots=True)
class Topology:
    """The names and shares of this rank's parameters among all ranks.

    `prefixes` maps the beginnings of local names to those over all ranks: local expert 0 may be expert 4 of 8. `shares`
    maps each logical name here to (i, n): this rank is the i-th of the n ranks that hold the parameter. n is 0 where
    another pipeline stage writes it, as with weights that are tied across stages.
    """

    prefixes: Mapping[str, str]
    shares: Mapping[str, tuple[int, int]]

    def logical(self, name: str) -> str:
        """Return the name over all ranks of the parameter with the local name `name`."""
        for local, everywhere in self.prefixes.items():
            if name.startswith(local):
                return everywhere + name[len(local) :]
        return name

    def own(self, items: Iterable[TensorItem]) -> Iterator[TensorItem]:
        """Yield this rank's share of `items`. The shares of all ranks are disjoint and cover everything."""
        for item in items:
            index, count = self.shares[item.name]
            # A partition of ZeRO is already on one rank only.
            if count and item.placement == "partitioned":
                yield item
            elif count:
                yield from _share(item, index, count)


def merge_groups(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the parameter names of each param group over all ranks. A collective.

    UnsupportedError when the ranks have different numbers of groups.
    """
    everyone: list[list[list[str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [list(names) for names in groups])
    counts = {len(groups) for groups in everyone}
    if len(counts) > 1:
        raise UnsupportedError(
            f"the ranks' optimizers have {sorted(counts)} param groups; give every pipeline stage parameters of each "
            "group"
        )
    return [list(dict.fromkeys(name for names in each for name in names)) for each in zip(*everyone, strict=True)]


def _share(item: TensorItem, index: int, count: int) -> Iterator[TensorItem]:
    numel = item.tensor.numel()
    begin, end = numel * index // count, numel * (index + 1) // count
    if not item.tensor.is_contiguous():
        # A range of its elements is no range of its memory, so it can't be cut; the first holder writes all of it.
        begin, end = (0, numel) if index == 0 else (0, 0)
    if begin < end or (numel == 0 and index == 0):
        part = item.tensor if end - begin == numel else item.tensor.view(-1).narrow(0, begin, end - begin)
        yield replace(item, tensor=part, start=item.start + begin, placement="partitioned", owner=None)
