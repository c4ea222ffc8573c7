"""Programs started by the demo: ended with it, whatever ends it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

GRACE_S = 10


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program with its own process group and wait for it; on Ctrl-C, or any other error here, end the whole group."""
    child = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        status = child.wait()
    except BaseException:
        _end(child)
        raise
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}")


def _end(child: subprocess.Popen[bytes]) -> None:
    # SIGINT first: Python then frees the lock of an extension it is compiling, for which later starts would wait for ever.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, request)
            child.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
