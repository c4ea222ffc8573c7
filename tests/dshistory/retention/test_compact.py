"""`compact` as a user meets it, and every reader on a compacted history: none can tell, but by the disk."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_helpers import assert_same, make, one_step, reference

import capture
from catalog.access.pins import pinned
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.commands.cli import main
from dshistory.explorer import Explorer

STEPS = 6
RESUMED_STEPS = 2

State = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, State]]:
    """Return the history of a real training whose every step is captured, and its state after each."""
    root = tmp_path_factory.mktemp("trained") / "h"
    model, optimizer = make(96)
    states = {}
    with capture.enable(model, optimizer=optimizer, every=1, history=root, stats_every=0):
        for step in range(1, STEPS + 1):
            one_step(model, optimizer)
            states[step] = reference(model, optimizer)
    return root, states


@pytest.fixture
def explorer(trained: tuple[Path, Any], tmp_path: Path) -> Explorer:
    shutil.copytree(trained[0], tmp_path / "h")
    return Explorer.open(tmp_path / "h")


def answers(explorer: Explorer, folder: Path) -> dict[str, object]:
    """Return what every kind of reader says of a history."""
    folder.mkdir()
    explorer.export(4, folder / "exported.safetensors", quiet=True)
    restored = explorer.restore(5)
    return {
        "diff": explorer.diff(2, 5, exact=True).to_json(),
        "diff of a tensor": explorer.diff(2, 5, tensor="inner.weight", quiet=True).to_json(),
        "trajectory": explorer.trajectory("inner.weight", exact=True, quiet=True).to_json(),
        "histogram": explorer.histogram("inner.weight", signs=True, quiet=True).to_json(),
        "tensor": explorer.tensor("outer.weight", 3).numpy().tobytes(),
        "restore": {kind: {name: t.numpy().tobytes() for name, t in part.items()} for kind, part in restored.items()},
        "export": (folder / "exported.safetensors").read_bytes(),
        "verify": explorer.verify(quiet=True).to_json(),
        "analyze": explorer.analyze(quiet=True).to_json(),
        "statistics": explorer.sql("SELECT * EXCLUDE (run) FROM statistics ORDER BY ALL").to_json(),
        "show": explorer.show(3)["bytes"],
    }


@pytest.mark.guards("A packed checkpoint is the checkpoint")
def test_no_reader_can_tell_that_a_history_is_compacted(explorer: Explorer, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(explorer.root, plain)
    table = explorer.compact(key_every=3, newest=0, quiet=True)
    assert table["base"].to_pylist() == [None, None, 1, 1, None, 4, 4]
    assert not list(explorer.root.rglob("*.safetensors"))
    assert answers(explorer, tmp_path / "a") == answers(Explorer.open(plain), tmp_path / "b")


@pytest.mark.guards("A packed checkpoint is the checkpoint")
def test_a_training_goes_on_from_a_packed_checkpoint_bit_for_bit(
    explorer: Explorer, trained: tuple[Path, dict[int, State]]
) -> None:
    explorer.compact(newest=0, quiet=True)
    for step, state in trained[1].items():
        model, optimizer = make(96, seed=step)
        capture.restore(step, history=explorer.root, model=model, optimizer=optimizer)
        assert_same(reference(model, optimizer), state)
    model, optimizer = make(96, seed=99)
    capture.restore(3, history=explorer.root, model=model, optimizer=optimizer)
    with capture.enable(model, optimizer=optimizer, every=1, history=explorer.root) as session:
        for step in (4, 5):
            one_step(model, optimizer)
            assert_same(reference(model, optimizer), trained[1][step])
    child = explorer.compact(run=session.run, newest=0, quiet=True)
    assert child["step"].to_pylist() == [3, 4, 5]
    assert explorer.verify(quiet=True).note == "10 checkpoints verified: no problem"


def test_the_newest_stay_as_they_are_and_the_table_says_what_was_won(explorer: Explorer) -> None:
    before = explorer.usage()["bytes"]
    table = explorer.compact(newest=2, quiet=True)
    assert table["step"].to_pylist() == [0, 1, 2, 3, 4]
    assert all(0 < ratio < 1 for ratio in table["ratio"].to_pylist())
    assert table.note.startswith("5 checkpoints packed: ")
    assert explorer.usage()["bytes"] < before
    assert len(list(explorer.root.rglob("*.safetensors"))) == 2
    assert explorer.compact(newest=2, quiet=True).note == "nothing to pack"
    taken = dict(zip(explorer.log()["step"].to_pylist(), explorer.log()["new_bytes"].to_pylist(), strict=True))
    for row in table:
        assert taken[row["step"]] == row["bytes"]


def test_chosen_steps_alone_are_packed(explorer: Explorer) -> None:
    assert explorer.compact([2, 4], quiet=True)["step"].to_pylist() == [2, 4]
    assert explorer.compact("last 1", quiet=True)["base"].to_pylist() == [2]
    with pytest.raises(NotFoundError, match="step 77 was not captured"):
        explorer.compact([77], quiet=True)
    with pytest.raises(SetupError, match="key_every=0"):
        explorer.compact(key_every=0, quiet=True)
    with pytest.raises(SetupError, match="newest=-1"):
        explorer.compact(newest=-1, quiet=True)


def test_what_is_left_is_told(explorer: Explorer) -> None:
    run = explorer.history.current_run()
    ref = CheckpointRef(run, 2)
    with pinned(explorer.history.paths, ref):
        assert f"{ref} was left: checkpoint {ref}: a reader has it open" in explorer.compact(quiet=True).note
    model, optimizer = make(96)
    with capture.enable(model, optimizer=optimizer, every=1, history=explorer.root) as session:
        one_step(model, optimizer)
        session.wait()
        assert f"run {session.run}: is being written" in explorer.compact(quiet=True).note
        with pytest.raises(SetupError, match="is being written"):
            explorer.compact(run=session.run, quiet=True)


def test_the_command_line_packs(explorer: Explorer) -> None:
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["compact", str(explorer.root), "--key-every", "3", "--newest", "0", "--json"]) == 0
    assert [row["step"] for row in json.loads(output.getvalue())] == [0, 1, 2, 3, 4, 5, 6]


def test_a_base_is_kept_as_long_as_others_need_it(explorer: Explorer) -> None:
    explorer.compact(key_every=3, newest=0, quiet=True)
    with pytest.raises(SetupError, match=r"nothing was removed: .*:4: .*:5 refers to its bytes"):
        explorer.remove([4])
    done = explorer.prune("last 2", dry_run=False)
    assert done["step"].to_pylist() == [0, 1, 2, 3]
    assert explorer.log()["step"].to_pylist() == [4, 5, 6]
    assert explorer.verify(quiet=True).note == "3 checkpoints verified: no problem"


@pytest.mark.guards("A packed checkpoint is the checkpoint")
def test_a_base_is_kept_while_nobody_can_read_what_needs_it(explorer: Explorer) -> None:
    """A damaged image may be put back, or a disk answer again."""
    explorer.compact(key_every=3, newest=1, quiet=True)
    run = explorer.history.current_run()
    image = explorer.root / f"runs/{run}/steps/000000000005/rank-00000.packed"
    whole = image.read_bytes()
    image.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    assert (
        "can't be read" in dict(zip(*(explorer.log()[name].to_pylist() for name in ("step", "health")), strict=True))[5]
    )
    explorer.prune("last 1", dry_run=False)
    image.write_bytes(whole)
    assert {4, 5, 6} <= set(explorer.log()["step"].to_pylist())
    assert explorer.verify(5, quiet=True).note == "1 checkpoint verified: no problem"


def test_a_base_that_was_deleted_by_hand_is_named_with_all_that_need_it(explorer: Explorer) -> None:
    explorer.compact(key_every=3, newest=0, quiet=True)
    run = explorer.history.current_run()
    base = explorer.root / f"runs/{run}/steps/000000000004/rank-00000.packed"
    base.unlink()
    health = dict(zip(explorer.log()["step"].to_pylist(), explorer.log()["health"].to_pylist(), strict=True))
    missing = f"damaged: needs runs/{run}/steps/000000000004/rank-00000.safetensors (step 4), which is gone"
    assert health[4] == missing
    for step in (5, 6):
        image = f"runs/{run}/steps/{step:012d}/rank-00000.packed"
        assert health[step] == f"{missing}: {image} was packed against it"
    assert health[1] is None
    problems = {(row["file"].split("/")[3], row["problem"]) for row in explorer.verify(quiet=True)}
    assert {step for step, _ in problems} == {"000000000004", "000000000005", "000000000006"}
    assert all(str(base) in problem for step, problem in problems if step != "000000000004")
    with pytest.raises(ValueError, match="was packed against it and can't be read without it"):
        explorer.restore(5)
    assert History.open(explorer.root).checkpoints()
