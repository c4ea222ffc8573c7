"""The diff of two checkpoints equals plain references, over world sizes, one-sided tensors and equal ones."""

import math
from pathlib import Path

import pytest
import torch
from catalog_helpers import flip_bit
from explorer_helpers import Piece, history_of, shares, whole

from catalog.errors import CorruptError, NotFoundError, SetupError
from dshistory.tensors import stream

GENERATOR = torch.Generator().manual_seed(0)
BEFORE = {
    "a.weight": torch.randn(7, 11, generator=GENERATOR),
    "b.weight": torch.randn(13, generator=GENERATOR).bfloat16(),
    "c.count": torch.arange(5),
    "d.same": torch.ones(3),
    "e.empty": torch.empty(0, 4),
    "f.scalar": torch.tensor(2.0),
}
AFTER = {
    "a.weight": BEFORE["a.weight"] * 1.5,
    "b.weight": BEFORE["b.weight"] + 0.25,
    "c.count": BEFORE["c.count"] + 1,
    "d.same": torch.ones(3),
    "e.empty": torch.empty(0, 4),
    "f.scalar": torch.tensor(-2.0),
}


def check_numbers(rows: dict[str, dict[str, object]]) -> None:
    for name in ("a.weight", "b.weight", "c.count", "f.scalar"):
        a, b = BEFORE[name].double().flatten(), AFTER[name].double().flatten()
        row = rows[name]
        assert row["status"] == "changed"
        assert row["shape"] == list(BEFORE[name].shape)
        assert row["update_norm"] == pytest.approx(float((b - a).norm()), rel=1e-12)
        assert row["relative_update"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-12)
        assert row["cosine"] == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-12)
        assert row["max_change"] == float((b - a).abs().max())
        assert row["changed_share"] == float((a != b).double().mean())
        assert row["norm_after"] == pytest.approx(float(b.norm()), rel=1e-12)
    assert rows["f.scalar"]["sign_flips"] == 1
    for name in ("d.same", "e.empty"):
        assert rows[name]["status"] == "same"
        assert (rows[name]["update_norm"], rows[name]["relative_update"], rows[name]["sign_flips"]) == (0.0, 0.0, 0)
        assert rows[name]["norm_before"] is None


@pytest.mark.parametrize("world_sizes", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_every_number_whatever_world_size_wrote_it(tmp_path: Path, world_sizes: tuple[int, int]) -> None:
    explorer = history_of(
        tmp_path, shares(BEFORE, world_sizes[0]), shares(AFTER, world_sizes[1]), world_sizes=world_sizes
    )
    table = explorer.diff(10, 20)
    rows = {row["name"]: row for row in table}
    if world_sizes[0] == world_sizes[1]:
        check_numbers(rows)
    moved = [row["relative_update"] for row in table if row["relative_update"] is not None]
    assert moved == sorted(moved, reverse=True)
    assert {name: rows[name]["update_norm"] for name in ("d.same", "e.empty")} == {"d.same": 0.0, "e.empty": 0.0}
    for name in ("a.weight", "b.weight", "c.count", "f.scalar"):
        reference = float((AFTER[name].double() - BEFORE[name].double()).norm())
        assert rows[name]["update_norm"] == pytest.approx(reference, rel=1e-12)


def test_pieces_larger_than_the_limit_give_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 30)
    explorer = history_of(tmp_path, [whole(BEFORE)], [whole(AFTER)])
    check_numbers({row["name"]: row for row in explorer.diff(10, 20)})


def test_equal_bytes_are_not_read(tmp_path: Path) -> None:
    explorer = history_of(tmp_path, [whole({"same": torch.ones(3)})], [whole({"same": torch.ones(3)})])
    for data in tmp_path.rglob("*.safetensors"):
        flip_bit(data, offset=4096)
    (row,) = explorer.diff(10, 20)
    assert (row["status"], row["update_norm"]) == ("same", 0.0)


def test_damage_is_named_not_diffed(tmp_path: Path) -> None:
    explorer = history_of(tmp_path, [whole({"w": torch.zeros(3)})], [whole({"w": torch.ones(3)})])
    flip_bit(tmp_path / "runs/run-1/steps/000000000020/rank-00000.safetensors", offset=4096)
    with pytest.raises(CorruptError, match=r"run-1/steps/000000000020/rank-00000.safetensors.*model 'w'.*4096"):
        explorer.diff(10, 20)
    with pytest.raises(CorruptError, match="model 'w'"):
        explorer.tensor("w", 20)


def test_tensors_of_one_side_and_of_another_shape(tmp_path: Path) -> None:
    before = {"gone": torch.ones(2), "both": torch.zeros(2), "grown": torch.ones(2)}
    after = {"new": torch.ones(2), "both": torch.ones(2), "grown": torch.ones(3)}
    table = history_of(tmp_path, [whole(before)], [whole(after)]).diff(10, 20)
    assert {row["name"]: row["status"] for row in table} == {
        "both": "changed",
        "gone": "removed",
        "new": "added",
        "grown": "reshaped",
    }
    assert table[0]["relative_update"] == math.inf
    assert [row["relative_update"] for row in table][1:] == [None, None, None]
    for part in ("1 only in run-0:10", "1 only in run-1:20", "1 of another shape"):
        assert part in table.note


def test_a_tensor_that_became_nan_is_on_top(tmp_path: Path) -> None:
    before = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.tensor([math.nan, 1.0])}
    after = {"a": torch.ones(4) * 9, "b": torch.tensor([1.0, math.nan, 1.5, 1.0]), "c": torch.tensor([math.nan, 2.0])}
    table = history_of(tmp_path, [whole(before)], [whole(after)]).diff(10, 20)
    assert table["name"].to_pylist() == ["b", "a", "c"]
    assert (table[0]["nonfinite_before"], table[0]["nonfinite_after"], table[0]["update_norm"]) == (0, 1, 0.5)
    assert "finite on both sides" in table.note


def test_kinds_and_patterns(tmp_path: Path) -> None:
    before = [*whole(BEFORE), *whole({"a.weight": torch.ones(2)}, kind="exp_avg")]
    after = [*whole(AFTER), *whole({"a.weight": torch.zeros(2)}, kind="exp_avg")]
    explorer = history_of(tmp_path, [before], [after])
    assert set(explorer.diff(10, 20)["kind"].to_pylist()) == {"model"}
    assert set(explorer.diff(10, 20, kinds="*")["kind"].to_pylist()) == {"model", "exp_avg"}
    assert explorer.diff(10, 20, names="*.weight")["name"].to_pylist() == ["a.weight", "b.weight"]
    assert explorer.diff(10, 20, names=["a.*", "c.count"], kinds=["model"])["name"].to_pylist()[0] in AFTER
    with pytest.raises(NotFoundError, match=r"no tensor fits 'a.wieght'.*a\.weight"):
        explorer.diff(10, 20, names="a.wieght")
    with pytest.raises(NotFoundError, match=r"no kind fits 'exp_avg_sq'.*the nearest is exp_avg"):
        explorer.diff(10, 20, kinds="exp_avg_sq")
    with pytest.raises(NotFoundError, match="20"):
        explorer.diff(10, 21)


def test_one_rank_of_rank_local_state(tmp_path: Path) -> None:
    def ranks(values: list[float]) -> list[list[Piece]]:
        return [[Piece("running_mean", torch.tensor([v]), "buffer", placement="rank_local")] for v in values]

    explorer = history_of(tmp_path, ranks([1.0, 7.0]), ranks([3.0, 7.0]), world_sizes=(2, 2))
    table = explorer.diff(10, 20, kinds="buffer")
    assert table["update_norm"].to_pylist() == [2.0]
    assert "rank 0's" in table.note
    assert explorer.tensor("running_mean", 20, state="buffer").tolist() == [3.0]


def test_one_tensor_from_the_fragments_of_three_ranks(tmp_path: Path) -> None:
    explorer = history_of(tmp_path, [whole(BEFORE)], shares(AFTER, 3), world_sizes=(1, 3))
    for name, expected in AFTER.items():
        got = explorer.tensor(name, 20)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    with pytest.raises(NotFoundError, match=r"a\.weight"):
        explorer.tensor("a.weigth", 20)


def test_a_tied_tensor_by_its_alias(tmp_path: Path) -> None:
    tied = [Piece("wte.weight", torch.ones(2), aliases=("lm_head.weight",))]
    moved = [Piece("wte.weight", torch.zeros(2), aliases=("lm_head.weight",))]
    explorer = history_of(tmp_path, [tied], [moved])
    assert explorer.tensor("lm_head.weight", 20).tolist() == [0.0, 0.0]
    assert explorer.diff(10, 20, names="lm_head.*")["name"].to_pylist() == ["wte.weight"]


def test_names_are_not_patterns_where_one_tensor_is_meant(tmp_path: Path) -> None:
    before = whole({"w[0]": torch.ones(1), "w0": torch.ones(1) * 5})
    explorer = history_of(tmp_path, [before], [whole({"w[0]": torch.zeros(1), "w0": torch.zeros(1)})])
    assert explorer.tensor("w[0]", 10).tolist() == [1.0]
    assert set(explorer.diff(10, 20, names="w[0]")["name"].to_pylist()) == {"w[0]", "w0"}


def test_only_requested_metrics_in_the_order_of_the_first(tmp_path: Path) -> None:
    explorer = history_of(tmp_path, shares(BEFORE, 1), shares(AFTER, 1))
    everything = {row["name"]: row for row in explorer.diff(10, 20)}
    table = explorer.diff(10, 20, metrics=["max_change", "norm_*"])
    assert table.columns == ("name", "kind", "shape", "status", "max_change", "norm_before", "norm_after", "bound")
    assert [row["max_change"] for row in table] == sorted((r["max_change"] for r in everything.values()), reverse=True)
    assert all(row.items() <= everything[row["name"]].items() for row in table)
    assert list(table.plot(top=2).data[0].x) == table["max_change"].to_pylist()[:2]
    cosines = explorer.diff(10, 20, metrics="cosine")["cosine"].to_pylist()
    known = [cosine for cosine in cosines if cosine is not None]
    assert cosines == sorted(known) + [None] * (len(cosines) - len(known)), "the smallest first, the unknown last"
    (first, *_) = explorer.diff(10, 20, tensor="a.weight", metrics="update_norm")
    assert first["update_norm"] == max(explorer.diff(10, 20, tensor="a.weight")["update_norm"].to_pylist())
    with pytest.raises(NotFoundError, match=r"no metric fits 'cosin' in a diff; the nearest are cosine"):
        explorer.diff(10, 20, metrics=["cosin"])
    with pytest.raises(SetupError, match="leaves nothing to show"):
        explorer.diff(10, 20, metrics=[])
