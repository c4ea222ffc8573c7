"""Hostile files are refused with a HistoryError: a sample of `make fuzz`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import Report, execute, fuzz
from structures import STRUCTURES, read_structures
from target import Target

from catalog.errors import FormatError

EXECUTIONS = 3000


@pytest.mark.guards("Nothing is unpickled")
@pytest.mark.slow
def test_damaged_files_of_every_kind(tmp_path: Path, figure: Callable[[str, float], None]) -> None:
    reports = fuzz(tmp_path, executions=EXECUTIONS, seed=7)
    assert {report.name: report.wrong for report in reports if report.wrong} == {}
    assert sum(report.outcomes.total() for report in reports) > 0.9 * EXECUTIONS
    for report in reports:
        assert report.outcomes["accepted"], f"{report.name}: no input gets through, so that little of it is tried"
        assert report.outcomes["refused"], report.name
    figure("hostile inputs", sum(report.outcomes.total() for report in reports))


@pytest.mark.guards("Nothing is unpickled")
@pytest.mark.parametrize("name", STRUCTURES)
def test_senseless_structures(tmp_path: Path, name: str, figure: Callable[[str, float], None]) -> None:
    read = read_structures(name, tmp_path, examples=60)
    assert read >= 30
    figure("structures read", read)


def test_any_other_error_is_told_with_its_place_and_input() -> None:
    def read(data: bytes) -> None:
        if data == b"hostile":
            raise ZeroDivisionError("by zero")
        raise FormatError("refused")

    report = Report.empty("x")
    for number, data in enumerate((b"", b"hostile")):
        execute(Target("x", 1, lambda chance: b"", read), data, report, number=number)
    assert report.outcomes == {"refused": 1, "wrong": 1}
    ((what, example),) = report.wrong.items()
    assert "ZeroDivisionError in read" in what
    assert example == "1: by zero"
