"""The cost of a new process: importing each package, and listing a small history from the command line.

Every figure is of a whole process, from its start to its end, so the interpreter's own start and end are in each: the
row `python -c pass` shows them alone. `import torch` is the row to compare `import capture` and `import dshistory`
with, which do not bring it. *first use* is `capture.enable` looked up, which brings torch and all that a training
needs. The history has 20 checkpoints of 12 tensors. *processor* is user and system time of the process, all its threads
together. One process of each kind runs unmeasured first, so that no row pays for reading files from the disk.
"""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.made_up import MadeUp
from benchmarks.measure import Rows, Series, clock, rotations

COLUMNS = {"process": "ms", "processor": "ms"}

_PROGRAMS = {
    "python -c pass": "pass",
    "import native": "import native",
    "import capture": "import capture",
    "import dshistory": "import dshistory",
    "import torch": "import torch",
    "capture.enable, first use": "import capture; capture.enable",
}
_TENSORS = 12


def run(scratch: Path, *, checkpoints: int, times: int) -> tuple[Rows, dict[str, object]]:
    """Every process once per rotation, in an order that rotates."""
    root = scratch / "history"
    history = MadeUp(root, tensors=_TENSORS)
    for _ in range(checkpoints):
        history.publish()
    history.close()
    commands = {name: [sys.executable, "-c", program] for name, program in _PROGRAMS.items()}
    commands["dshistory log HISTORY"] = [sys.executable, "-m", "dshistory", "log", str(root)]
    rows: Rows = {name: defaultdict(Series) for name in commands}
    for command in commands.values():
        measure(command, defaultdict(Series))
    for name in rotations(tuple(commands), times=times):
        measure(commands[name], rows[name])
    return rows, {"checkpoints": checkpoints, "tensors": _TENSORS, "rotations": times}


def measure(command: list[str], row: dict[str, Series]) -> None:
    """Run one process and add its figures; it must succeed."""
    with clock() as took:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
    # Popen did not see the end of its child, which wait4 has taken.
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise ChildProcessError(f"{command} ended with {child.returncode}")
    row["process"].add(took.seconds)
    row["processor"].add(usage.ru_utime + usage.ru_stime)
