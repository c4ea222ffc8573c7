"""The catalog's base is cheap: paths, records and errors load no pyarrow and no DuckDB, and reading no DuckDB."""

import json
import subprocess
import sys

import pytest

PROGRAM = (
    "import json, sys, {module}\nprint(json.dumps([n for n in ('duckdb', 'pyarrow', 'torch') if n in sys.modules]))"
)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("catalog", []),
        ("catalog.errors", []),
        ("catalog.records", []),
        ("catalog.paths", []),
        ("catalog.format.dtypes", []),
        ("catalog.disk.locks", []),
        ("catalog.read.run_order", []),
        ("catalog.read.runs", []),
        ("catalog.history", ["pyarrow"]),
        ("catalog.references", ["pyarrow"]),
        ("catalog.run_writer", ["pyarrow"]),
        ("catalog.gc", ["pyarrow"]),
        ("catalog.verify", ["pyarrow"]),
    ],
)
def test_a_module_loads_no_more_than_it_needs(module, heavy):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == heavy
