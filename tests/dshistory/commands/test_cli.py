"""The command line runs as a process: outputs, exit codes, and one clean line for each known error."""

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from catalog_helpers import flip_bit
from explorer_helpers import Run, tiny_history, whole

from catalog.errors import HistoryError
from dshistory.commands.cli import main
from dshistory.commands.verbs import all_verbs, verb_named
from dshistory.commands.wording import in_options
from dshistory.explorer import Explorer

COMMAND = [sys.executable, "-m", "dshistory"]

pytestmark = pytest.mark.usefixtures("nothing_opened")


@dataclass
class Output:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    for run in tiny_history(tmp_path_factory.mktemp("cli") / "history"):
        yield run.root


def dshistory(*words: str) -> Output:
    """Run one command line in this process and return its output."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        returncode = main(words)
    return Output(returncode, stdout.getvalue(), stderr.getvalue())


def test_the_history_is_an_argument_an_option_or_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = [dshistory("log", str(root)), dshistory("log", "-C", str(root))]
    monkeypatch.chdir(root.parent)
    listings.append(dshistory("log"))
    monkeypatch.chdir("/")
    monkeypatch.setenv("DSHISTORY", str(root))
    listings.append(dshistory("log"))
    assert [listing.returncode for listing in listings] == [0] * 4
    assert len({listing.stdout for listing in listings}) == 1
    assert "3 checkpoints" in listings[0].stdout


def test_json_and_csv(root: Path) -> None:
    rows = json.loads(dshistory("log", str(root), "--json").stdout)
    assert [(row["run"], row["step"], row["loss"], row["tags"]) for row in rows] == [
        ("run-a", 0, 3.0, None),
        ("run-a", 10, 2.0, "good"),
        ("run-a", 20, 1.0, None),
    ]
    table = list(csv.DictReader(io.StringIO(dshistory("diff", str(root), "0", "20", "--csv").stdout)))
    assert table[0]["name"] == "head.weight"


def test_a_pipe_gets_every_row(root: Path) -> None:
    query = "SELECT range AS n FROM range(1000)"
    assert len(dshistory("sql", "-C", str(root), query).stdout.splitlines()) >= 1000
    assert "left out" not in dshistory("sql", "-C", str(root), query).stdout


def test_arguments_may_come_before_or_after_options(root: Path) -> None:
    one = dshistory("diff", str(root), "0", "20", "--names", "head.*", "--kinds", "exp_avg", "--json")
    two = dshistory("diff", "--names", "head.*", "0", "--json", "--kinds", "exp_avg", "latest", "-C", str(root))
    assert one.stdout == two.stdout
    assert [row["name"] for row in json.loads(one.stdout)] == ["head.weight"]
    minus = dshistory("diff", str(root), "-3", "-1", "--names", "head.*", "--kinds", "exp_avg", "--json")
    assert minus.stdout == one.stdout


def test_show_tensor_tags_and_sql(root: Path) -> None:
    shown = dshistory("show", str(root), "10")
    assert shown.returncode == 0
    assert "counters" in shown.stdout
    assert "rank-00000.safetensors" in shown.stdout
    assert json.loads(dshistory("tensor", str(root), "layers.1.norm", "10", "--json").stdout) == [1.0] * 8
    assert json.loads(dshistory("tags", str(root), "--json").stdout) == [{"tag": "good", "run": "run-a", "step": 10}]
    query = "SELECT step FROM checkpoints WHERE step > $low ORDER BY step"
    assert dshistory("sql", query, "--params", "low=5", "--csv", "-C", str(root)).stdout == "step\n10\n20\n"


def test_a_query_may_be_longer_than_a_file_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSHISTORY", str(root))
    for query in (f"SELECT 1 AS a {300 * ' '}", "/* one */ SELECT 1 AS a"):
        result = dshistory("sql", query)
        assert (result.returncode, result.stderr) == (0, "")


def test_a_known_error_is_one_line_and_exit_code_2(root: Path, tmp_path: Path) -> None:
    for words, message in [
        (("log", str(tmp_path / "nothing")), "no history at"),
        (("log", "-C", str(tmp_path)), "no history at"),
        (("verify", str(tmp_path / "nothing")), f"no history at {tmp_path / 'nothing'}"),
        (("diagnose", "./nothing"), "/nothing (no history.json there)"),
        (("show", str(root), "11"), "the nearest are 10 and 20"),
        (("diff", str(root), "0", "20", "--names", "head.wieght"), "head.weight"),
        (("sql", str(root), "SELEC 1"), "SELEC"),
        (("sql", str(root), "SELECT $a"), "a"),
        (("sql", str(root), "DROP TABLE runs"), "only be read"),
        (("lgo",), "log"),
        (("diff", str(root)), "dshistory diff needs A;"),
        (("log", str(root), "1", "2"), "too many"),
        (("log", str(root), "--nonsense"), "--nonsense"),
        (("diff", "0", "10", "20"), "'20' is one argument too many"),
        (("diff", str(root), "0", "10", "--kind", "model"), "no option --kind; the nearest are --kinds"),
        (("doctor", "--size-mib", "many"), "size_mib"),
        (("doctor", str(tmp_path / "nothing")), "no folder"),
    ]:
        result = dshistory(*words)
        assert result.returncode == 2, (words, result)
        assert result.stdout == ""
        assert result.stderr.startswith("dshistory")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr


def test_messages_name_options_on_the_command_line_and_arguments_in_python(root: Path, tmp_path: Path) -> None:
    explorer = Explorer.open(root)
    (tmp_path / "taken").mkdir()
    for words, call, option, argument in (
        (("export", "20", "taken"), lambda: explorer.export(20, "taken"), "pass --overwrite", "pass overwrite=True"),
        (
            ("export", "20", "x", "--format", "huggingface"),
            lambda: explorer.export(20, "x", format="huggingface"),
            "pass --config (a config.json",
            "pass config= (a config.json",
        ),
        (
            ("diff", "0", "20", "--tensor", "head.weight", "--by", "layer"),
            lambda: explorer.diff(0, 20, tensor="head.weight", by="layer"),
            "--by layer groups tensors, and --tensor head.weight is one",
            "by='layer' groups tensors, and tensor='head.weight' is one",
        ),
    ):
        done = dshistory(words[0], str(root), *words[1:])
        assert done.returncode == 2
        assert option in done.stderr
        with pytest.raises(HistoryError, match=re.escape(argument)):
            call()


def test_notes_name_options_too() -> None:
    verb = verb_named("trajectory", "command line")
    note = "estimated from sketches (exact=True reads the tensors), of 'a.exact=True', quiet=True, x == 2"
    assert in_options(note, verb) == (
        "estimated from sketches (--exact reads the tensors), of 'a.exact=True', --quiet, x == 2"
    )


def test_the_traceback_is_printed_on_request(root: Path) -> None:
    result = dshistory("show", str(root), "11", "--traceback")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_help_has_examples(root: Path) -> None:
    overview = dshistory()
    assert overview.returncode == 0
    assert "verify" in overview.stdout
    shown = dshistory("diff", "--help")
    assert shown.returncode == 0
    assert "examples:\n  dshistory diff 1200 1250" in shown.stdout
    assert "patterns of tensor names" in shown.stdout
    assert dshistory("help", "diff").stdout == shown.stdout
    for verb in all_verbs():
        if "command line" in verb.surfaces:
            explained = dshistory(verb.name, "--help")
            assert explained.stdout.startswith(f"usage: dshistory {verb.name} "), explained


def test_verify_names_file_and_field_and_exits_1(tmp_path: Path) -> None:
    for run in tiny_history(tmp_path / "history"):
        assert dshistory("verify", str(run.root)).returncode == 0
        flip_bit(run.root / "runs/run-a/steps/000000000010/rank-00000.safetensors", offset=4096)
        result = dshistory("verify", str(run.root), "--json")
        assert result.returncode == 1
        (problem,) = json.loads(result.stdout)
        assert problem["file"].endswith("runs/run-a/steps/000000000010/rank-00000.safetensors")
        assert "model/layers.0.mlp.weight" in problem["field"]


def test_verify_goes_on_where_a_marker_is_damaged(tmp_path: Path) -> None:
    for run in tiny_history(tmp_path / "history"):
        flip_bit(run.root / "runs/run-a/steps/000000000010/commit.json", offset=20)
        result = dshistory("verify", str(run.root), "--json")
        assert result.returncode == 1, result.stderr
        assert [problem["file"] for problem in json.loads(result.stdout)] == [
            "runs/run-a/steps/000000000010/commit.json"
        ]


def test_numbers_outside_json_are_strings_in_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    run.checkpoint(1, whole({"w": torch.tensor([1.0, math.nan, -math.inf])}))
    run.close()
    assert json.loads(dshistory("tensor", str(run.root), "w", "--json").stdout) == [1.0, "NaN", "-Infinity"]


def test_reindex_counts_the_checkpoints(root: Path) -> None:
    assert dshistory("reindex", str(root)).stdout == "3\n"


@pytest.mark.slow
def test_a_process_without_a_terminal_prints_no_bar(root: Path) -> None:
    result = subprocess.run([*COMMAND, "diff", str(root), "0", "20"], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert "head.weight" in result.stdout


def test_a_closed_pipe_is_quiet(root: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run([*COMMAND, "log", str(root)], stdout=write_end, stderr=subprocess.PIPE, timeout=120)
    os.close(write_end)
    assert result.returncode == 141
    assert result.stderr == b""


@pytest.mark.slow
def test_ctrl_c_is_quiet_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "doctor", str(tmp_path), "--size-mib", "2048"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not list(tmp_path.glob(".dshistory-doctor-*")) and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr == b""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_measures_and_cleans_up(tmp_path: Path) -> None:
    result = dshistory("doctor", str(tmp_path), "--size-mib", "8", "--json")
    report = json.loads(result.stdout)
    backends = report["writer backends"]
    posix = next(row for row in backends if row["backend"] == "posix")
    assert posix["works"]
    assert posix["write_bytes_s"] > 0
    assert posix["registered"] is False
    assert report["read rate (bytes/s)"] > 0
    assert report["placement modulus"] >= 512
    assert any(row["package"] == "torch" and row["version"][0].isdigit() for row in report["packages"])
    assert list(tmp_path.iterdir()) == []
    for row in backends:
        assert row["works"] or row["why_not"]


def test_an_empty_history_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    run.close()
    result = dshistory("log", str(run.root))
    assert result.returncode == 0
    assert "no checkpoint yet" in result.stdout
    assert "no committed checkpoint yet" in dshistory("show", str(run.root)).stderr
