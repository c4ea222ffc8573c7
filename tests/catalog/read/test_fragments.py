"""Fragments of a tensor: one choice for a rank, one check for completeness, one cut to a range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.errors import CorruptError, FormatError
from catalog.read.fragments import choose, elements_held, parts_of, rank_of, stored_tensors
from catalog.records import Extent


def fragment(start: int, numel: int, *, rank: int = 0, name: str = "w", whole: int = 12, **changed) -> Extent:
    fields = {
        "name": name,
        "kind": "model",
        "dtype": "U8",
        "shape": (whole,),
        "start": start,
        "numel": numel,
        "file": f"runs/r/steps/000000000000/rank-{rank:05d}.safetensors",
        "offset": 0,
        "nbytes": numel,
        "checksum": bytes(16),
        "placement": "partitioned",
    }
    return Extent(**(fields | changed))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_parts_hold_the_elements_of_the_range_in_order(sizes, data):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    fragments = [fragment(start, size, whole=sum(sizes)) for start, size in zip(starts, sizes, strict=True)]
    start = data.draw(st.integers(0, sum(sizes)))
    numel = data.draw(st.integers(0, sum(sizes) - start))
    parts = parts_of(fragments, start=start, numel=numel)
    elements = [part.extent.start + part.skip + i for part in parts for i in range(part.numel)]
    assert elements == list(range(start, start + numel))
    places = [part.at + i for part in parts for i in range(part.numel)]
    assert places == list(range(numel))


def test_parts_of_a_range_that_is_not_stored_are_fewer_elements():
    parts = parts_of([fragment(0, 3), fragment(6, 6)], start=2, numel=6)
    assert [(part.skip, part.numel, part.at) for part in parts] == [(2, 1, 0), (0, 2, 4)]


def test_a_hole_is_seen_by_the_count():
    assert elements_held([fragment(0, 3), fragment(6, 6)], where="x") == 9
    with pytest.raises(CorruptError, match=r"model/w: the fragments hold 9 of 12 elements"):
        stored_tensors([fragment(0, 3), fragment(6, 6)])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (fragment(5, 7), "overlaps"),
        (fragment(6, 6, dtype="I8"), "disagree"),
        (fragment(6, 6, shape=(3, 4)), "disagree"),
        (fragment(6, 6, placement="replicated"), "disagree"),
    ],
)
def test_fragments_that_do_not_fit_together_are_refused(second, message):
    with pytest.raises(FormatError, match=f"^somewhere: .*{message}"):
        elements_held([fragment(0, 6), second], where="somewhere")


def test_a_rank_reads_its_own_local_fragments_and_all_others():
    local = [fragment(0, 12, rank=rank, name="rng", placement="rank_local") for rank in (1, 2)]
    shared = [fragment(6, 6, rank=1), fragment(0, 6, rank=0)]
    for rank, owner in ((2, 2), (1, 1), (0, 1), (7, 1)):
        chosen = choose([*local, *shared], rank=rank)
        assert [rank_of(extent) for extent in chosen.get("model", "rng")] == [owner]
        assert [extent.start for extent in chosen.get("model", "w")] == [0, 6]


def test_a_tensor_is_found_under_each_of_its_names():
    chosen = choose([fragment(0, 12, aliases=("tied",))], rank=0)
    assert chosen.get("model", "tied") == chosen.get("model", "w") != ()
    assert chosen.get("model", "other") == ()
    assert chosen.get("exp_avg", "tied") == ()


def test_a_stored_tensor_counts_the_copies_of_its_ranks():
    copies = [fragment(0, 12, rank=rank, placement="rank_local") for rank in range(3)]
    ((key, tensor),) = stored_tensors(copies).items()
    assert key == ("model", "w")
    assert (tensor.copies, tensor.numel, tensor.nbytes) == (3, 12, 12)
    assert rank_of(tensor.fragments[0]) == 0


def test_objects_headers_and_padding_are_not_tensors():
    assert not stored_tensors([fragment(0, 12, kind=kind) for kind in ("header", "pad", "object", "object_tensor")])
