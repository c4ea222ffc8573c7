"""A step may have several audits, each against another step before it; a file is what its name says."""

import pyarrow as pa
import pytest

from catalog.errors import FormatError
from catalog.format.audit_file import SCHEMA, audited_step, publish_audit, read_audit
from catalog.paths import HistoryPaths


@pytest.fixture
def folder(tmp_path):
    paths = HistoryPaths(tmp_path)
    paths.run_dir("run-a").mkdir(parents=True)
    for since, cause in ((0, None), (3, "an edit"), (3, "another")):
        row = dict.fromkeys(SCHEMA.names) | {"name": "weight", "since": since, "cause": cause}
        publish_audit(paths, "run-a", 4, pa.Table.from_pylist([row], schema=SCHEMA))
    return paths.audits_dir("run-a")


def test_audits_of_a_step_stand_beside_each_other_and_none_is_replaced(folder):
    found = {path.name: read_audit(path, run="run-a").to_pylist()[0]["cause"] for path in folder.iterdir()}
    assert found == {
        "000000000004-since-000000000000.parquet": None,
        "000000000004-since-000000000003.parquet": "an edit",
    }
    assert {audited_step(name) for name in found} == {4}


def test_a_file_of_an_earlier_release_does_not_name_the_step_before(folder):
    named = folder / "000000000004-since-000000000003.parquet"
    earlier = named.rename(folder / "000000000004.parquet")
    assert audited_step(earlier.name) == 4
    assert read_audit(earlier, run="run-a")["since"].to_pylist() == [3]


@pytest.mark.parametrize("name", ["000000000005-since-000000000003.parquet", "000000000004-since-000000000002.parquet"])
def test_a_file_in_the_place_of_another_is_refused(folder, name):
    moved = (folder / "000000000004-since-000000000003.parquet").rename(folder / name)
    with pytest.raises(FormatError, match=r"field (step|since): "):
        read_audit(moved, run="run-a")
