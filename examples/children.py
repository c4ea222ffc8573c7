"""Child programs of the demo, which end when the demo ends for any reason."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

GRACE_S = 10


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program in its own process group and wait for it; an error here, such as Ctrl-C, ends the whole group."""
    child = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        status = child.wait()
    except BaseException:
        _end(child)
        raise
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}")


def _end(child: subprocess.Popen[bytes]) -> None:
    # SIGINT comes first, so that Python frees the lock of an extension that it is compiling. Later starts would wait
    # for that lock forever.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, request)
            child.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
