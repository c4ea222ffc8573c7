"""Runs and steps are listed from the folders, without manifests and without the index."""

import pytest
from catalog_helpers import Run, pieces_of

from catalog.errors import FormatError, NotFoundError
from catalog.paths import HistoryPaths
from catalog.read import runs
from catalog.run_writer import create_history


@pytest.fixture
def paths(tmp_path):
    create_history(tmp_path / "history")
    return HistoryPaths(tmp_path / "history")


def test_a_run_that_cannot_be_read_does_not_keep_a_new_one_from_being_made(paths):
    Run(paths.root, "a").close()
    paths.run_json("a").write_bytes(b"{")
    Run(paths.root, "b").close()
    assert runs.run_facts(paths, "b").facts == {"number": 1}


def test_other_folders_are_not_runs(paths):
    Run(paths.root, "a").close()
    (paths.runs / "never-begun").mkdir()
    (paths.runs / ".hidden").mkdir()
    (paths.runs / "file").touch()
    assert runs.run_names(paths) == ["a"]


def test_an_unknown_run_names_those_that_exist(paths):
    Run(paths.root, "a").close()
    with pytest.raises(NotFoundError, match=r"no run 'z' in .*: there are a$"):
        runs.run_facts(paths, "z")
    with pytest.raises(FormatError, match="run id"):
        runs.run_facts(paths, "../z")


def test_facts_come_back_as_written(paths):
    Run(paths.root, "a", facts={"every": 10}).close()
    facts = runs.run_facts(paths, "a")
    assert (facts.run, facts.layout_hash, facts.facts) == ("a", "layout-1", {"every": 10, "number": 1})


def test_a_step_has_a_folder_before_it_is_committed(paths):
    with Run(paths.root, "a") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}), register=False)
        run.part(7, 0, pieces_of({"w": b"b"}))
        (paths.steps_dir("a") / "notes").mkdir()
    assert runs.step_dirs(paths, "a") == [0, 7]
    assert runs.steps(paths, "a") == [0]
    assert runs.steps(paths, "unknown") == runs.step_dirs(paths, "unknown") == []


def test_a_run_is_held_while_its_writer_is_open(paths):
    with Run(paths.root, "a", world_size=2):
        assert runs.run_is_held(paths, "a")
    assert not runs.run_is_held(paths, "a")
    assert not runs.run_is_held(paths, "unknown")
