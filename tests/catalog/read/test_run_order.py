"""The newest run is found by the runs' own numbers; bytes of a run.json that are known are not decoded again."""

import dataclasses

import pytest
from catalog_helpers import Run, pieces_of

from catalog.errors import CorruptError, FormatError, NotFoundError
from catalog.format.json_facts import decode_run_facts, encode_run_facts
from catalog.paths import HistoryPaths
from catalog.read import run_order, runs
from catalog.records import CheckpointRef
from catalog.references import resolve
from catalog.run_writer import create_history


@pytest.fixture
def paths(tmp_path):
    create_history(tmp_path / "history")
    return HistoryPaths(tmp_path / "history")


def test_runs_are_sorted_by_their_creation(paths):
    for name, created in (("b", "2026-11-21T10:00:00+00:00"), ("a", "2026-11-21T11:00:00+00:00")):
        Run(paths.root, name, created=created).close()
    assert runs.run_names(paths) == ["a", "b"]
    assert [facts.run for facts in run_order.runs(paths)] == ["b", "a"]
    assert run_order.current_run(paths) == "a"


def test_a_clock_that_goes_backwards_does_not_make_an_older_run_current(paths):
    for name, created in (("b", "2026-11-21T11:00:00+00:00"), ("a", "2026-11-21T10:00:00+00:00")):
        with Run(paths.root, name, created=created) as run:
            run.checkpoint(3, pieces_of({"w": b"a"}), register=False)
    assert [facts.run for facts in run_order.runs(paths)] == ["b", "a"]
    assert run_order.current_run(paths) == "a"
    assert resolve(paths, 3) == CheckpointRef("a", 3)


def test_runs_without_a_number_are_ordered_by_time_and_come_first(paths):
    for name, created in (("b", "2026-11-21T10:00:00+00:00"), ("c", "2026-11-21T12:00:00+00:00")):
        Run(paths.root, name, created=created).close()
        old = dataclasses.replace(runs.run_facts(paths, name), facts={})
        paths.run_json(name).write_bytes(encode_run_facts(old))
    Run(paths.root, "a", created="2026-11-21T11:00:00+00:00").close()
    assert [facts.run for facts in run_order.runs(paths)] == ["b", "c", "a"]


def test_a_replay_never_becomes_the_current_run(paths):
    Run(paths.root, "a", created="2026-11-21T10:00:00+00:00").close()
    Run(paths.root, "b", created="2026-11-21T11:00:00+00:00", facts={"replay": True}).close()
    assert run_order.current_run(paths) == "a"


def test_a_history_without_runs_has_no_current_one(paths):
    assert runs.run_names(paths) == []
    with pytest.raises(NotFoundError, match="has no run yet"):
        run_order.current_run(paths)


def test_a_run_goes_on_from_its_fork(paths):
    Run(paths.root, "a").close()
    Run(paths.root, "b", parent=("a", 20)).close()
    assert run_order.fork_of(paths, "a") is None
    assert run_order.fork_of(paths, "b") == CheckpointRef("a", 20)
    with pytest.raises(NotFoundError, match="no run 'z'"):
        run_order.fork_of(paths, "z")


def test_a_known_run_is_read_and_not_decoded_again(paths, monkeypatch):
    for name in ("a", "b"):
        Run(paths.root, name).close()
    monkeypatch.setattr(run_order, "_known", {})
    run_order.current_run(paths)
    decoded = []
    monkeypatch.setattr(
        run_order,
        "decode_run_facts",
        lambda data, *, path, run: decoded.append(run) or decode_run_facts(data, path=path, run=run),
    )
    Run(paths.root, "c").close()
    assert [run_order.current_run(paths) for _ in range(3)] == ["c"] * 3
    assert decoded == ["c"]
    other = dataclasses.replace(runs.run_facts(paths, "c"), parent_run="a", parent_step=7)
    paths.run_json("c").write_bytes(encode_run_facts(other))
    assert run_order.fork_of(paths, "c") == CheckpointRef("a", 7)
    damaged = bytearray(paths.run_json("b").read_bytes())
    damaged[30] ^= 1
    paths.run_json("b").write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"runs/b/run\.json"):
        run_order.current_run(paths)


def test_a_copy_of_a_known_run_is_not_taken_for_another(paths):
    for name in ("a", "b"):
        Run(paths.root, name).close()
    run_order.current_run(paths)
    paths.run_json("b").write_bytes(paths.run_json("a").read_bytes())
    with pytest.raises(FormatError, match="field run: 'a' in the folder of 'b'"):
        run_order.current_run(paths)


def test_few_of_the_known_are_kept(paths, monkeypatch):
    monkeypatch.setattr(run_order, "_MAX_KNOWN", 2)
    monkeypatch.setattr(run_order, "_known", {})
    for name in ("a", "b", "c", "d", "e"):
        Run(paths.root, name).close()
    assert run_order.current_run(paths) == "e"
    assert len(run_order._known) <= 2
