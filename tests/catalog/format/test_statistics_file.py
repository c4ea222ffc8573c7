"""Statistics whose lists have lengths that the format does not know are refused, before anything adds them up."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from catalog.disk.checked_parquet import encode_checked
from catalog.errors import FormatError
from catalog.format.statistics_file import SCHEMA, SKETCH_SEED, merged_statistics, read_statistics

METADATA = {
    "dshistory.statistics": "1",
    "run": "run-a",
    "step": "5",
    "rank": "0",
    "world_size": "1",
    "sketch_seed": SKETCH_SEED,
}


def row(**change: Any) -> dict[str, Any]:
    numbers = {"start": 0, "numel": 2, "nan": 0, "inf": 0, "zeros": 0, "min": 0.0, "max": 1.0}
    return {
        **{"name": "w", "kind": "model", "placement": "partitioned", "checksum": bytes(16)},
        **numbers,
        **{"sum": 1.0, "sum_of_squares": 1.0, "exponents": [0] * 64, "sketch": [0.0] * 16, **change},
    }


def stored(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "000000000005-00000-of-00001.parquet"
    path.write_bytes(encode_checked(pa.Table.from_pylist(list(rows), schema=SCHEMA), metadata=METADATA))
    return path


def test_the_lengths_of_the_format_are_read(tmp_path: Path) -> None:
    for length in (0, 16, 256):
        assert read_statistics(stored(tmp_path, row(sketch=[0.0] * length)), run="run-a").num_rows == 1


@pytest.mark.parametrize("change", [{"exponents": [0] * 63}, {"exponents": []}, {"sketch": [0.0] * 17}])
def test_a_list_of_another_length_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=f"column {next(iter(change))}: a list of"):
        read_statistics(stored(tmp_path, row(), row(**change)), run="run-a")


def test_fragments_of_one_tensor_with_different_sketches_are_refused(tmp_path: Path) -> None:
    table = read_statistics(stored(tmp_path, row(), row(start=2, sketch=[0.0] * 32)), run="run-a")
    with pytest.raises(FormatError, match=r"model/w.*\[16, 32\]"):
        merged_statistics([table])


def test_counts_that_add_up_to_no_count_are_refused(tmp_path: Path) -> None:
    table = read_statistics(stored(tmp_path, row(zeros=2**63 - 1), row(start=2, zeros=2**63 - 1)), run="run-a")
    with pytest.raises(FormatError, match="add up to no count"):
        merged_statistics([table])
