"""An appendix is written behind the planned bytes, and its checksums are those of the bytes in the file."""

import errno
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from native_helpers import ALIGN, HEADER, MIB, Extents, lazy_run, new_writer

import native


def started(folder: Path, **faults: int) -> tuple[native.Writer, native.WriteJob, Extents]:
    data = lazy_run(3 * MIB)
    writer = new_writer("posix", **faults)
    return writer, writer.start(data.plan(), str(folder / "file")), data


def sizes(*nbytes: int) -> np.ndarray:
    return np.array(nbytes, np.uint64)


def test_extents_lie_behind_the_planned_bytes_and_before_the_trailer(tmp_path):
    """Whatever the pieces in which they come."""
    _, job, data = started(tmp_path)
    source = np.random.default_rng(1).integers(0, 256, 9 * MIB + 77, np.uint8)
    first = job.append(sizes(5 * MIB + 3, 0, 4 * MIB + 74))
    for at in range(0, len(source), 700_001):
        piece = source[at : at + 700_001]
        first.add(address=piece.ctypes.data, nbytes=len(piece))
    digests = first.end()
    second = job.append(sizes(5))
    second.add(address=source.ctypes.data, nbytes=5)
    second.end()
    job.wait()
    trailer = b"t" * ALIGN
    nbytes = job.finish(header=HEADER, trailer=trailer)
    content = (tmp_path / "file").read_bytes()
    cuts = [0, 5 * MIB + 3, 5 * MIB + 3, len(source)]
    wanted = [source[begin:end].tobytes() for begin, end in pairwise(cuts)]
    assert digests == b"".join(native.checksum(part) for part in wanted)
    assert first.offset == data.data_end
    assert content[first.offset :][: len(source)] == source.tobytes()
    assert second.offset == first.offset + -(-len(source) // ALIGN) * ALIGN
    assert content[first.offset + len(source) : second.offset].count(0) == second.offset - first.offset - len(source)
    assert content[second.offset :] == source[:5].tobytes() + bytes(ALIGN - 5) + trailer
    assert nbytes == len(content)


def test_too_many_and_too_few_bytes_are_refused(tmp_path):
    """The checksums would be those of other extents."""
    _, job, _ = started(tmp_path)
    source = np.zeros(100, np.uint8)
    appendix = job.append(sizes(60, 30))
    with pytest.raises(RuntimeError, match="not all their bytes"):
        appendix.end()
    with pytest.raises(ValueError, match="10 bytes more"):
        appendix.add(address=source.ctypes.data, nbytes=100)
    appendix.end()
    with pytest.raises(RuntimeError, match="it has ended"):
        appendix.end()


def test_memory_that_is_not_mapped_is_an_error(tmp_path):
    """A tensor that is freed too early fails its snapshot."""
    _, job, _ = started(tmp_path)
    with pytest.raises(OSError, match="no longer mapped") as error:
        job.append(sizes(4096)).add(address=4096, nbytes=4096)
    assert error.value.errno == errno.EFAULT


def test_an_aborted_file_takes_no_more_bytes(tmp_path):
    """An appendix does not outlive its file, and a full disk is named."""
    _, job, _ = started(tmp_path)
    appendix = job.append(sizes(9 * MIB))
    job.abort()
    source = np.zeros(9 * MIB, np.uint8)
    with pytest.raises(OSError) as error:
        appendix.add(address=source.ctypes.data, nbytes=len(source))
    assert error.value.errno == errno.ECANCELED


def test_a_full_disk_is_named(tmp_path):
    """The writes of an appendix fail as all others do."""
    _, job, _ = started(tmp_path, fail_after=0, errno=errno.ENOSPC)
    source = np.zeros(9 * MIB, np.uint8)
    with pytest.raises(OSError) as error:
        job.append(sizes(9 * MIB)).add(address=source.ctypes.data, nbytes=len(source))
    assert error.value.errno == errno.ENOSPC
