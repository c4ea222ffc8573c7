"""Rows of a provider's tensors become a kind of their own; rows of older manifests stay as they are."""

import pyarrow as pa

from catalog.format.extents import extent_records, extent_table
from catalog.read.provider_tensors import state_only, with_provider_tensors
from catalog.records import Extent

FILE = "runs/r/steps/000000000001/rank-00000.safetensors"


def row(kind: str, name: str, *aliases: str) -> Extent:
    return Extent(name, kind, "F32", (1,), 0, 1, FILE, 0, 4, bytes(16), "replicated", aliases)


def rows_of(*extents: Extent) -> pa.Table:
    return extent_table(extents)


def found(rows: pa.Table) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(extent.kind, extent.name, extent.aliases) for extent in extent_records(rows)]


def test_a_tensor_with_a_place_has_the_kind_of_its_object():
    rows = rows_of(
        row("model", "a", "tied"),
        row("object", "my/ema"),
        row("object_tensor", "my/ema/0", "module.a"),
        row("object_tensor", "my/ema/12", "module.b"),
        row("object_tensor", "rng/0"),
        row("header", "__header__"),
    )
    shown = with_provider_tensors(rows)
    assert found(shown) == [
        ("model", "a", ("tied",)),
        ("object", "my/ema", ()),
        ("my/ema", "module.a", ()),
        ("my/ema", "module.b", ()),
        ("object_tensor", "rng/0", ()),
        ("header", "__header__", ()),
    ]
    assert shown.schema == rows.schema
    assert [kind for kind, _, _ in found(state_only(rows))] == ["model", "my/ema", "my/ema"]


def test_a_kind_that_others_have_stays_theirs():
    rows = rows_of(row("model", "a"), row("object_tensor", "model/0", "b"))
    assert found(with_provider_tensors(rows)) == [("model", "a", ()), ("object_tensor", "model/0", ("b",))]
    assert found(state_only(rows)) == [("model", "a", ())]


def test_rows_of_older_manifests_and_no_rows():
    rows = rows_of(row("model", "a"), row("object_tensor", "ema/0"))
    assert with_provider_tensors(rows) is rows
    assert found(state_only(rows)) == [("model", "a", ())]
    assert state_only(rows_of()).num_rows == 0
