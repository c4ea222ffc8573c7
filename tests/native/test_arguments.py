"""Wrong arguments are refused by value, before anything is written."""

from pathlib import Path

import numpy as np
import pytest
from native_helpers import (
    ALIGN,
    BLOCK,
    HEADER,
    LEAST_BUDGET,
    MIB,
    arena,
    check_file,
    each_backend,
    lazy_run,
    new_writer,
)

import native


def plan_of(**changes: object) -> native.WritePlan:
    """Return a plan of two extents of 100 bytes, with some columns changed."""
    memory = arena(ALIGN)
    columns: dict[str, object] = {
        "offsets": np.array([ALIGN, ALIGN + 100], dtype=np.uint64),
        "addresses": np.array([memory.ctypes.data, memory.ctypes.data + 100], dtype=np.uint64),
        "nbytes": np.array([100, 100], dtype=np.uint64),
        "eager": np.array([1, 0], dtype=np.uint8),
        "data_start": ALIGN,
        "data_end": 2 * ALIGN,
        "align": ALIGN,
    }
    return native.WritePlan(**(columns | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.array([ALIGN + 100, ALIGN], np.uint64)}, r"extent 1 covers \[4096, 4196\)"),
        ({"offsets": np.array([ALIGN, ALIGN + 99], np.uint64)}, r"extent 1 covers \[4195, 4295\).*\[4196, 8192\)"),
        ({"offsets": np.array([0, ALIGN], np.uint64)}, r"extent 0 covers \[0, 100\)"),
        ({"offsets": np.array([ALIGN, 2 * ALIGN - 1], np.uint64)}, r"extent 1 covers \[8191, 8291\)"),
        ({"nbytes": np.array([100, 2**64 - 1], np.uint64)}, r"extent 1 covers"),
        ({"addresses": np.array([4096, 0], np.uint64)}, r"extent 1 has 100 bytes at address 0"),
        ({"addresses": np.array([2**64 - 50, 1], np.uint64)}, r"extent 0 has 100 bytes at address"),
        ({"eager": np.array([0, 1], np.uint8)}, r"extent 1 is eager but follows a lazy one"),
        ({"eager": np.array([1], np.uint8)}, r"eager has 1 entries where offsets has 2"),
        ({"nbytes": np.array([1], np.uint64)}, r"nbytes has 1 entries where offsets has 2"),
        ({"data_start": 100}, r"data_start 100 and data_end 8192 must be multiples of 4096"),
        ({"data_end": ALIGN + 1}, r"data_end 4097"),
        ({"align": 3000}, r"power of two, not 3000"),
        ({"align": 0}, r"power of two, not 0"),
    ],
)
def test_a_wrong_plan_is_refused_by_value(changes: dict[str, object], message: str) -> None:
    assert plan_of().extents == 2
    with pytest.raises(ValueError, match=message):
        plan_of(**changes)


@each_backend
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "aio"}, '"io_uring" or "posix", not "aio"'),
        ({"block_bytes": 5000}, "multiple of 4096 up to 1073741824, not 5000"),
        ({"block_bytes": 0}, "not 0"),
        ({"block_bytes": 2 << 30}, "not 2147483648"),
        ({"depth": 0}, "depth must be between 1 and 1024, not 0"),
        ({"depth": 5000}, "not 5000"),
        ({"budget_bytes": LEAST_BUDGET - 1}, f"{LEAST_BUDGET - 1} bytes is too small.* give at least {LEAST_BUDGET}"),
        ({"budget_bytes": 0}, "0 bytes is too small"),
    ],
)
def test_a_wrong_writer_is_refused_by_value(backend, changes: dict[str, object], message: str) -> None:
    right = {"backend": backend, "budget_bytes": LEAST_BUDGET, "block_bytes": BLOCK, "depth": 2}
    native.Writer(**right).close()
    with pytest.raises(ValueError, match=message):
        native.Writer(**(right | changes))


@pytest.mark.parametrize("block_bytes", [4096, 4 * MIB, 64 * MIB])
def test_the_least_budget_that_the_error_names_suffices(block_bytes: int) -> None:
    for budget_bytes in (0, 2 * block_bytes):
        with pytest.raises(ValueError, match="at least") as failure:
            native.Writer(backend="posix", budget_bytes=budget_bytes, block_bytes=block_bytes, depth=1)
        least = int(str(failure.value).rsplit(" ", 1)[1])
        native.Writer(backend="posix", budget_bytes=least, block_bytes=block_bytes, depth=1).close()


@each_backend
def test_a_plan_coarser_than_the_blocks_is_refused(tmp_path: Path, backend) -> None:
    plan = plan_of(
        data_start=2 * BLOCK, data_end=4 * BLOCK, align=2 * BLOCK, offsets=np.array([2 * BLOCK] * 2) + [0, 100]
    )
    with pytest.raises(ValueError, match=f"blocks of {BLOCK} bytes can't hold a plan aligned to {2 * BLOCK}"):
        new_writer(backend).start(plan, str(tmp_path / "f"))
    assert not (tmp_path / "f").exists()


@each_backend
def test_wrong_ends_are_refused_by_value(tmp_path: Path, backend) -> None:
    data = lazy_run(MIB)
    job = new_writer(backend).start(data.plan(), str(tmp_path / "f"))
    assert job.wait()
    with pytest.raises(ValueError, match="header must have 4096 bytes, not 5"):
        job.finish(header=b"short", trailer=b"")
    with pytest.raises(ValueError, match="trailer a multiple of 4096, not 5"):
        job.finish(header=HEADER, trailer=b"short")
    job.finish(header=HEADER, trailer=b"")
    check_file(tmp_path / "f", data)
