"""In a data file's plan every byte has one owner, shares meet, and any safetensors reader opens the file."""

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import native
from capture.data_file.data_file import PlacedObject, data_file_header, make_trailer, manifest_rows, object_entries
from capture.data_file.in_place import InPlace
from capture.data_file.plan import MIN_RUN_BYTES, Plan, make_plan, signature_of
from capture.state.interface import TensorItem
from capture.state.objects import encode_object
from catalog.errors import UnsupportedError
from catalog.format.extents import extent_records
from catalog.format.header import Entry, read_header

ALIGN = 4096
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def item_lists(draw) -> list[TensorItem]:
    """Draw items of every dtype, size, time and placement: some share one flat tensor, and some are not contiguous."""
    items = []
    for i in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        placement = draw(st.sampled_from(["replicated", "rank_local"]))
        when = draw(st.sampled_from(["lazy", "eager"]))
        sizes = draw(st.lists(st.sampled_from([0, 1, 3, 1000, 70_001, 300_000]), min_size=1, max_size=4))
        flat = torch.arange(sum(sizes)).to(dtype)
        at = 0
        for j, size in enumerate(sizes):
            piece = flat[at : at + size]
            shape = draw(st.sampled_from([(size,), (1, size)]))
            if size == 1 and draw(st.booleans()):
                shape = ()
            tensor = piece.view(shape)
            if draw(st.booleans()) and tensor.dim() == 2:
                tensor, shape = tensor.t(), (size, 1)
            items.append(TensorItem(f"t{i}.{j}", "model", tuple(shape), tensor, 0, placement, when))
            at += size
    return items


def check_plan(plan: Plan) -> None:
    spans = [(o, p.nbytes) for o, p in zip(plan.offsets, plan.parts, strict=True)] + list(plan.pads)
    at = plan.data_start
    for offset, nbytes in sorted(spans):
        assert offset == at, "a hole or an overlap"
        at += nbytes
    assert at == plan.data_end
    assert plan.data_start % ALIGN == plan.data_end % ALIGN == 0
    assert list(plan.offsets) == sorted(plan.offsets)
    eager = [part.item.when == "eager" for part in plan.parts if part.nbytes]
    assert eager == sorted(eager, reverse=True), "eager parts come first"
    for offset, part in zip(plan.offsets, plan.parts, strict=True):
        if part.nbytes:
            assert offset % part.itemsize == 0
        if part.item.when == "lazy" and part.nbytes >= MIN_RUN_BYTES:
            assert (offset - part.address) % ALIGN == 0


@settings(max_examples=60, deadline=None)
@given(item_lists(), st.integers(1, 3))
def test_every_byte_has_one_owner_on_every_rank(items, world_size):
    for rank in range(world_size):
        check_plan(make_plan(items, rank=rank, world_size=world_size, align=ALIGN, reserve=()))


def test_written_from_where_it_is_is_lazy_dense_memory_alone_and_a_change_is_known_by_its_checksum():
    first, second = torch.arange(3000.0), torch.arange(500.0)
    transposed = torch.zeros(3, 70).t()
    items = [
        TensorItem("eager", "model", (9,), torch.arange(9.0), 0, "replicated", "eager"),
        TensorItem("first", "model", (3000,), first, 0, "replicated", "lazy"),
        TensorItem("empty", "model", (0,), torch.zeros(0), 0, "replicated", "lazy"),
        TensorItem("transposed", "model", (70, 3), transposed, 0, "replicated", "lazy"),
        TensorItem("second", "model", (500,), second, 0, "replicated", "lazy"),
    ]
    plan = make_plan(items, rank=0, world_size=1, align=ALIGN, reserve=())
    names = [part.item.name for part in plan.parts]

    def in_place(**changed):
        return plan.in_place(b"".join(changed.get(name, bytes(16)) for name in names))

    memory = in_place()
    lengths = {first.data_ptr(): first.nbytes, second.data_ptr(): second.nbytes}
    assert dict(zip(memory.addresses.tolist(), memory.nbytes.tolist(), strict=True)) == lengths
    assert not in_place(eager=b"x" * 16, transposed=b"x" * 16).changed_since(memory).any()
    later = in_place(second=b"x" * 16)
    assert later.addresses[later.changed_since(memory)].tolist() == [second.data_ptr()]
    # Of regions that were not there before, nothing is known.
    fewer = InPlace(memory.addresses[:1], memory.nbytes[:1], memory.checksums[:1])
    known = fewer.addresses.tolist()
    changed = in_place(first=b"y" * 16, second=b"y" * 16)
    assert changed.addresses[changed.changed_since(fewer)].tolist() == known


@settings(max_examples=60, deadline=None)
@given(item_lists(), st.integers(1, 5))
def test_the_shares_of_all_ranks_cover_every_replicated_element_once(items, world_size):
    shares: dict[str, list[tuple[int, int]]] = {item.name: [] for item in items}
    for rank in range(world_size):
        for part in make_plan(items, rank=rank, world_size=world_size, align=ALIGN, reserve=()).parts:
            shares[part.item.name].append((part.start, part.start + part.numel))
    for item in items:
        found = sorted(shares[item.name])
        if item.placement == "rank_local":
            assert found == [(0, prod(item.shape))] * world_size
        else:
            edges = [0, *(end for _, end in found)]
            assert [begin for begin, _ in found] == edges[:-1], "shares that don't meet"
            assert edges[-1] == prod(item.shape)
            assert found, "zero-size tensors have an entry too"


def written(plan: Plan, folder: Path, objects: list[PlacedObject]) -> Path:
    for mirror in plan.mirrors:
        mirror.host.copy_(mirror.source)
    path = folder / "rank-00000.safetensors"
    path.unlink(missing_ok=True)
    writer = native.Writer(backend="posix", budget_bytes=32 << 20)
    job = writer.start(plan.write, str(path))
    job.release()
    assert job.wait()
    tail = make_trailer(objects, plan, file=path.name)
    header = data_file_header(plan, tail, run="r", step=7, rank=0)
    size = job.finish(header=header, trailer=tail.data)
    assert size == path.stat().st_size
    rows = manifest_rows(plan, tail, job.checksums(), header, file=path.name)
    writer.close()
    check_rows(extent_records(rows), path.read_bytes())
    return path


def check_rows(rows, data: bytes) -> None:
    at = 0
    for row in rows:
        assert row.offset == at, "a byte without an owner"
        assert native.checksum(data[at : at + row.nbytes]) == row.checksum, row.name
        at += row.nbytes
    assert at == len(data)


@settings(max_examples=15, deadline=None)
@given(items=item_lists())
def test_any_safetensors_reader_opens_the_file(tmp_path_factory, items):
    objects = [
        PlacedObject(encode_object("user", {"x": torch.arange(5), "y": torch.ones(3).bool(), "z": [1]}), "replicated")
    ]
    plan = make_plan(items, rank=0, world_size=1, align=ALIGN, reserve=object_entries(objects))
    path = written(plan, tmp_path_factory.mktemp("file"), objects)
    with safe_open(path, framework="pt") as file:
        for item in items:
            stored = file.get_tensor(f"model/{item.name}")
            assert stored.dtype == item.tensor.dtype
            assert tuple(stored.shape) == item.shape
            assert torch.equal(stored, item.tensor)
        assert torch.equal(file.get_tensor("object_tensor/user/0"), torch.arange(5))
        assert file.metadata()["step"] == "7"
    assert read_header(path).data_start == plan.data_start


def test_neighbours_in_memory_are_neighbours_in_the_file():
    flat = torch.zeros(1 << 20)
    pieces = flat.split([300_000, 1, 700_000, (1 << 20) - 1_000_001])
    items = [TensorItem(f"p{i}", "master", (p.numel(),), p) for i, p in enumerate(pieces)]
    plan = make_plan(list(reversed(items)), rank=0, world_size=1, align=ALIGN, reserve=())
    assert [part.item.name for part in plan.parts] == ["p0", "p1", "p2", "p3"]
    assert len({offset - part.address for offset, part in zip(plan.offsets, plan.parts, strict=True)}) == 1
    assert plan.write.direct_bytes >= flat.nbytes - 2 * ALIGN


def test_a_fragment_keeps_its_range_in_its_key():
    item = TensorItem("w", "master", (100, 10), torch.zeros(250), 500, "partitioned")
    plan = make_plan([item], rank=1, world_size=2, align=ALIGN, reserve=())
    assert [part.key for part in plan.parts] == ["master/w[500:750]"]


def test_two_tensors_of_one_name_are_refused():
    items = [TensorItem("w", "model", (2,), torch.zeros(2)), TensorItem("w", "model", (2,), torch.zeros(2))]
    with pytest.raises(UnsupportedError, match="model 'w'"):
        make_plan(items, rank=0, world_size=1, align=ALIGN, reserve=())


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex64), torch.zeros(3, 3).to_sparse(), torch.zeros(1).expand(5)],
    ids=["complex", "sparse", "expanded"],
)
def test_a_tensor_without_its_own_bytes_is_refused_by_name(tensor):
    item = TensorItem("odd", "model", tuple(tensor.shape), tensor)
    with pytest.raises(UnsupportedError, match="model 'odd'"):
        make_plan([item], rank=0, world_size=1, align=ALIGN, reserve=())


def test_the_signature_follows_address_size_and_dtype():
    def of(tensor: torch.Tensor) -> tuple:
        return signature_of([TensorItem("w", "model", tuple(tensor.shape), tensor)])

    tensor = torch.zeros(8)
    assert of(tensor) == of(tensor.view(8))
    assert of(tensor) != of(tensor.clone())
    assert of(tensor) != of(tensor[:4])
    assert of(tensor) != of(tensor.view(torch.int32))
    assert of(torch.zeros(4, 4).as_strided((4, 4), (4, 1))) != of(torch.zeros(4, 4).t())
    square = torch.zeros(4, 4)
    assert of(square) != of(square.t()), "the same memory in another order is another plan"


def test_the_header_has_space_for_the_objects():
    objects = [PlacedObject(encode_object("o" * 500, [torch.zeros(1)] * 200), "replicated")]
    plan = make_plan([], rank=0, world_size=1, align=ALIGN, reserve=object_entries(objects))
    tail = make_trailer(objects, plan, file="f")
    header = data_file_header(plan, tail, run="r" * 128, step=10**12, rank=99999)
    assert len(header) == plan.data_start
    assert all(isinstance(entry, Entry) for entry in tail.entries)


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 3, 1000, 70_001]), min_size=1, max_size=4),
    world=st.integers(1, 4),
    partitioned=st.booleans(),
)
def test_the_shares_of_weights_meet_and_each_lies_in_the_share_of_its_master(sizes, world, partitioned):
    """Whoever writes a range of a master writes the same range of its weight, and what has no master is shared too."""
    written: dict[str, list[tuple[int, int]]] = {}
    for rank in range(world):
        items = [TensorItem("frozen", "model", (5, 100), torch.zeros(5, 100, dtype=torch.bfloat16))]
        for i, size in enumerate(sizes):
            begin, end = size * rank // world, size * (rank + 1) // world
            weight, master = torch.zeros(1, size, dtype=torch.bfloat16), torch.zeros(size)
            mine = (begin, end) if partitioned else None
            items.append(TensorItem(f"w{i}", "model", (1, size), weight, written=mine))
            if not partitioned:
                items.append(TensorItem(f"w{i}", "master", (1, size), master))
            elif begin < end:
                items.append(TensorItem(f"w{i}", "master", (1, size), master[begin:end], begin, "partitioned"))
        plan = make_plan(items, rank=rank, world_size=world, align=ALIGN, reserve=[])
        assert {part.item.name for part in plan.parts if part.item.kind == "model"} <= {"frozen"}
        for part in (*plan.parts, *plan.unplaced_parts):
            key = f"{part.item.kind} {part.item.name}"
            written.setdefault(key, []).append((part.start, part.start + part.numel))
    for key, ranges in written.items():
        size = 500 if "frozen" in key else sizes[int(key[-1])]
        assert [0, *(end for _, end in sorted(ranges))] == [*(begin for begin, _ in sorted(ranges)), size], key
