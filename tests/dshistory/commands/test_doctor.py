"""The report on the machine advises where memory is in small pages although it need not be."""

import os
import subprocess
import sys

import pytest

from capture.publishing.movable_memory import huge_page_setting
from dshistory.commands.doctor import _huge_pages


@pytest.mark.parametrize(
    ("setting", "torch_asks", "movable", "told"),
    [
        ("madvise", None, True, "a session moves those there"),
        ("madvise", None, False, "start the training with THP_MEM_ALLOC_ENABLE=1"),
        ("madvise", "0", False, "start the training with THP_MEM_ALLOC_ENABLE=1"),
        ("madvise", "1", False, "yes, for tensors too"),
        ("always", None, False, "yes, for all memory"),
        ("never", "1", True, "no: this host has none"),
    ],
)
def test_huge_pages_are_advised_where_they_are_to_be_had(setting, torch_asks, movable, told):
    assert told in _huge_pages(setting, torch_asks, movable=movable)


@pytest.mark.slow
def test_the_advice_puts_tensors_in_huge_pages():
    if huge_page_setting() != "madvise":
        pytest.skip("needs huge pages on request (transparent_hugepage/enabled: madvise)")
    script = (
        "import torch; memory = torch.zeros(16 << 20);"
        "lines = open('/proc/self/smaps_rollup').read().splitlines();"
        "print(next(line.split()[1] for line in lines if line.startswith('AnonHuge')))"
    )
    environment = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    assert int(run.stdout) > 32 << 10
