"""With a damaged, deleted or inherited index the answers are right, or the error says what to do."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from catalog_helpers import Run, pieces_of
from places import SUPPORT

from catalog.errors import FormatError
from catalog.history import History

QUERIES = [f"SELECT * FROM {table} ORDER BY ALL" for table in ("checkpoints", "tensors", "fragments", "metrics")]


def _checkpoints(run: Run, steps: range) -> None:
    for step in steps:
        run.checkpoint(step, pieces_of({f"layer.{i}": bytes([step * (i % 2)]) for i in range(200)}), loss=float(step))


@pytest.mark.guards("A checkpoint exists whole or not at all")
@pytest.mark.filterwarnings("ignore:.*DuckDB can't use the index")
def test_a_flipped_bit_in_the_index_changes_no_answer(history: Path, figure: Callable[[str, float], None]) -> None:
    with Run(history) as run:
        _checkpoints(run, range(4))
        opened = History.open(history)
        expected = [opened.query(sql) for sql in QUERIES]
        index = history / "catalog.duckdb"
        whole = index.read_bytes()
        found = 0
        draw = random.Random(0)
        for _ in range(30):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            index.write_bytes(damaged)
            for sql, answer in zip(QUERIES, expected, strict=True):
                assert opened.query(sql).equals(answer)
            found += run.register() == 4
        assert found > 5, "damage that was read makes the next registration build the index anew"
        assert [opened.query(sql) for sql in QUERIES] == expected
        figure("flipped bits, of which registrations repaired what they or a query had read", 30)


@pytest.mark.guards("A checkpoint exists whole or not at all")
@pytest.mark.parametrize("left", [0, 4096, 100_000])
def test_a_torn_index_is_built_anew_by_the_next_registration(history: Path, left: int) -> None:
    with Run(history) as run:
        _checkpoints(run, range(3))
        opened = History.open(history)
        expected = [opened.query(sql) for sql in QUERIES]
        index = history / "catalog.duckdb"
        index.write_bytes(index.read_bytes()[:left])
        with pytest.warns(UserWarning, match=r"catalog\.duckdb.*answers are read from the files"):
            assert [opened.query(sql) for sql in QUERIES] == expected
        assert run.register() == 3
        assert index.stat().st_size > left
        assert [opened.query(sql) for sql in QUERIES] == expected


def test_an_index_that_is_deleted_is_rebuilt_by_the_next_registration(history: Path) -> None:
    with Run(history) as run:
        _checkpoints(run, range(3))
        opened = History.open(history)
        expected = [opened.query(sql) for sql in QUERIES]
        (history / "catalog.duckdb").unlink()
        assert [opened.query(sql) for sql in QUERIES] == expected
        assert run.register(patience_s=10.0) == 3
        assert [opened.query(sql) for sql in QUERIES] == expected


def test_the_index_of_another_history_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Run(tmp_path / name) as run:
            _checkpoints(run, range(1))
    (tmp_path / "a" / "catalog.duckdb").replace(tmp_path / "b" / "catalog.duckdb")
    with pytest.raises(FormatError, match=r"another history.*reindex"):
        History.open(tmp_path / "b").query("FROM checkpoints")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_history_is_read(history: Path) -> None:
    with Run(history) as run:
        _checkpoints(run, range(2))
    folders = [history, *(path for path in history.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert History.open(history).query("FROM checkpoints").num_rows == 2
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_forked_child_with_a_normal_exit_ends_cleanly(history: Path) -> None:
    """DuckDB's threads do not exist in the child: freeing what it inherited would abort it."""
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from catalog_helpers import Run, pieces_of\nfrom catalog.history import History\n"
        "with Run(Path(sys.argv[1])) as run:\n"
        "    run.checkpoint(0, pieces_of({'w': b'a'}))\n"
        "history = History.open(run.root)\n"
        "history.query('FROM runs')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0 if history.query('FROM checkpoints').num_rows == 1 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    here = SUPPORT
    done = subprocess.run([sys.executable, "-c", program, str(history)], cwd=here, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
