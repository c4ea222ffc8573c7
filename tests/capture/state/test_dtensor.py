"""The range of a DTensor that this rank holds is found, with a process group that only pretends to have more ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from capture.state.dtensor import local_part
from catalog.errors import UnsupportedError


@pytest.fixture
def last_of_four() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def held(
    local: tuple[int, ...], whole: tuple[int, ...], placements: list, mesh: tuple[int, ...] = (4,)
) -> torch.Tensor:
    """Return a DTensor of which this rank holds a part of shape `local`."""
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        torch.zeros(local),
        init_device_mesh("cpu", mesh),
        placements,
        run_check=False,
        shape=torch.Size(whole),
        stride=stride,
    )


@pytest.mark.usefixtures("last_of_four")
@pytest.mark.parametrize(
    ("local", "whole", "placements", "mesh", "start", "placement"),
    [
        ((2, 3), (8, 3), [Shard(0)], (4,), 18, "partitioned"),
        ((1, 3), (7, 3), [Shard(0)], (4,), 18, "partitioned"),
        ((0, 3), (2, 3), [Shard(0)], (4,), 6, "partitioned"),
        ((1, 2), (1, 8), [Shard(1)], (4,), 6, "partitioned"),
        ((1, 2), (2, 4), [Shard(0), Shard(1)], (2, 2), 6, "partitioned"),
        ((2, 3), (2, 3), [Replicate()], (4,), 0, "replicated"),
        ((0, 3), (0, 3), [Shard(0)], (4,), 0, "replicated"),
    ],
)
def test_a_part_is_one_range_of_the_flattened_tensor(local, whole, placements, mesh, start, placement):
    part = local_part(held(local, whole, placements, mesh), what="it")
    assert (part.shape, tuple(part.tensor.shape), part.start, part.placement) == (whole, local, start, placement)


@pytest.mark.usefixtures("last_of_four")
@pytest.mark.parametrize(
    ("local", "whole", "placements", "mesh", "said"),
    [
        ((2, 2), (2, 8), [Shard(1)], (4,), "no single range"),
        ((4, 3), (8, 3), [Replicate(), Shard(0)], (2, 2), "HSDP"),
        ((8, 3), (8, 3), [Partial()], (4,), "only Shard and Replicate"),
        ((8, 3), (8, 3), [Shard(0)], (1,), "a mesh of all ranks"),
    ],
)
def test_a_part_that_is_not_one_range_is_refused_by_name(local, whole, placements, mesh, said):
    with pytest.raises(UnsupportedError, match=f"weight 'w'.*{said}"):
        local_part(held(local, whole, placements, mesh), what="weight 'w'")
