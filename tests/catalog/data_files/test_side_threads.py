"""Work beside the caller is done by the caller itself where no thread can be started."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from catalog.data_files.side_threads import begun


def test_work_is_done_while_the_interpreter_exits() -> None:
    script = """
import atexit
from concurrent.futures import ThreadPoolExecutor
from catalog.data_files.side_threads import begun

pool = ThreadPoolExecutor(1)
atexit.register(lambda: print(begun(pool, divmod, 7, 2).result()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("(3, 1)", "")


def test_an_error_is_the_work_s_own() -> None:
    pool = ThreadPoolExecutor(1)
    with pytest.raises(ZeroDivisionError):
        begun(pool, divmod, 1, 0).result()
    pool.shutdown()
    with pytest.raises(ZeroDivisionError):
        begun(pool, divmod, 1, 0)
    assert begun(pool, divmod, 7, 2).result() == (3, 1)
