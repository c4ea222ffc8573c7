"""Fixtures of all tests of the explorer."""

from pathlib import Path

import pytest

from dshistory import current


@pytest.fixture
def nothing_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make this process look as if no history had been opened, in an empty folder, without `$DSHISTORY`."""
    monkeypatch.setattr(current, "_opened", [])
    monkeypatch.delenv("DSHISTORY", raising=False)
    monkeypatch.chdir(tmp_path)
