"""A run.json whose numbers no run can have is refused, although its checksum fits."""

import json
from pathlib import Path

import pytest
from catalog_helpers import Run

from catalog.disk import json_file
from catalog.errors import FormatError
from catalog.history import History


def test_a_parent_step_that_no_folder_can_have_is_refused(history: Path) -> None:
    with Run(history, parent=("run-0", 7)):
        pass
    path = history / "runs" / "run-a" / "run.json"
    content = json.loads(path.read_bytes())
    del content["checksum"]
    path.write_bytes(json_file.encode(content | {"parent_step": 2**70}))
    with pytest.raises(FormatError, match="field parent_run"):
        History.open(history).runs()
