"""A warning stands at the line of the user's script that it is about."""

import linecache
import warnings

import pytest
import torch
from capture_helpers import faulty_session, make, one_step

import capture
import native


def line_of(record: warnings.WarningMessage) -> str:
    return f"{record.filename}: {linecache.getline(record.filename, record.lineno).strip()}"


def test_a_forgotten_scheduler_is_named_where_the_session_is_opened(history):
    model, optimizer = make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="scheduler that is not captured") as found:
        session = capture.enable(model, optimizer=optimizer, history=history)
    session.close()
    assert line_of(found[0]) == f"{__file__}: session = capture.enable(model, optimizer=optimizer, history=history)"


def test_a_failed_snapshot_is_told_at_the_update_or_the_close_that_follows(history):
    model, optimizer = make()
    session = faulty_session(model, optimizer, history, faults=native.Faults(fail_after=0, errno=28))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        one_step(model, optimizer)
        one_step(model, optimizer)
        session.close()
    assert all("the snapshot of step" in str(record.message) for record in found)
    lines = {line_of(record).rpartition(": ")[2] for record in found}
    assert lines
    assert lines <= {"optimizer.step()", "session.close()"}


def test_a_new_provider_is_named_where_the_restore_is_called(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=history, every=1):
        one_step(model, optimizer)
    new = [capture.Stateful("new", {})]
    with pytest.warns(UserWarning, match="starts fresh") as found:
        capture.restore(1, history=history, model=model, optimizer=optimizer, providers=new)
    assert line_of(found[0]).endswith(
        "capture.restore(1, history=history, model=model, optimizer=optimizer, providers=new)"
    )


def test_the_log_has_the_run_once_and_no_failure_that_a_warning_tells(history, caplog):
    model, optimizer = make()
    caplog.set_level("INFO", logger="capture")
    session = faulty_session(model, optimizer, history, faults=native.Faults(fail_after=0, errno=28), stats_every=0)
    told = [record.getMessage() for record in caplog.records if record.name == "capture.enable"]
    assert len(told) == 1
    assert session.run in told[0]
    assert str(history) in told[0]
    with pytest.warns(UserWarning, match="the snapshot of step"):
        session.close()
    assert session.failures
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
