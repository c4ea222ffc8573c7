"""Two ranks over gloo, started once for all cases of capture_rank.py."""

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("capture_rank.py")
CASES = [
    node.name
    for node in ast.parse(RANK.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[str | None]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **group, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        log = (folder / f"log-{rank}").open("w")
        processes.append(subprocess.Popen([sys.executable, RANK, folder], env=environment, stdout=log, stderr=log))
    try:
        for process in processes:
            process.wait(timeout=240)
    finally:
        for process in processes:
            process.kill()
    said: dict[str, list[str | None]] = {name: [] for name in CASES}
    for rank in range(2):
        report = folder / f"report-{rank}.jsonl"
        heard = dict(map(json.loads, report.read_text().splitlines())) if report.exists() else {}
        for name in CASES:
            end = (folder / f"log-{rank}").read_text()[-2000:]
            said[name].append(heard.get(name, f"rank {rank} did not get here; its log ends:\n{end}"))
    return said


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(reports, case):
    for rank, trouble in enumerate(reports[case]):
        assert trouble is None, f"rank {rank}:\n{trouble}"
