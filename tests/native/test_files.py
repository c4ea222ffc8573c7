"""The writer meets files that cannot be made and real limits: full disks, size limits, missing O_DIRECT."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_helpers import (
    ALIGN,
    HEADER,
    MIB,
    Piece,
    check_file,
    each_backend,
    extents,
    lazy_run,
    new_writer,
)

import native


@each_backend
def test_an_existing_file_is_refused_and_kept(tmp_path: Path, backend) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="open") as failure:
        new_writer(backend).start(lazy_run(MIB).plan(), str(path))
    assert failure.value.filename == str(path)
    assert path.read_bytes() == b"mine"


@each_backend
@pytest.mark.parametrize("target", ["a file", "nothing", "a FIFO"])
def test_a_name_that_is_taken_by_a_link_or_a_fifo_is_refused(tmp_path: Path, backend, target) -> None:
    path, other = tmp_path / "f", tmp_path / "other"
    if target == "a file":
        other.write_bytes(b"mine")
    if target == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(other)
    with pytest.raises(FileExistsError, match="open"):
        new_writer(backend).start(lazy_run(MIB).plan(), str(path))
    assert os.path.lexists(path)
    assert other.read_bytes() == b"mine" if target == "a file" else not other.exists()


@each_backend
def test_a_missing_folder_is_named(tmp_path: Path, backend) -> None:
    path = tmp_path / "none" / "f"
    with pytest.raises(FileNotFoundError, match="open") as failure:
        new_writer(backend).start(lazy_run(MIB).plan(), str(path))
    assert failure.value.filename == str(path)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Mount ext2 of 4 MiB in a loop, without O_DIRECT and fallocate (ramfs has no size limit), or skip the test."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(4 * MIB)
    made = (
        subprocess.run(["mkfs.ext2", "-q", "-F", "-m", "0", image], check=False).returncode if os.geteuid() == 0 else 1
    )
    if made or subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True).returncode:
        pytest.skip("needs root, mkfs.ext2 and a loop device")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def tiny_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@each_backend
def test_a_full_disk_is_found_by_start_where_space_can_be_reserved(tiny_tmpfs: Path, backend) -> None:
    with pytest.raises(OSError, match="fallocate of") as failure:
        new_writer(backend).start(lazy_run(3 * MIB).plan(), str(tiny_tmpfs / "f"))
    assert failure.value.errno == errno.ENOSPC
    assert list(tiny_tmpfs.iterdir()) == []


@pytest.mark.guards("A full or failing disk costs that snapshot only")
@each_backend
def test_a_disk_that_is_full_for_the_trailer_fails_finish(tiny_tmpfs: Path, backend) -> None:
    data = lazy_run(MIB)
    path = tiny_tmpfs / "f"
    job = new_writer(backend).start(data.plan(), str(path))
    assert job.wait()
    with pytest.raises(OSError, match="write of") as failure:
        job.finish(header=HEADER, trailer=b"t" * 2 * MIB)
    assert failure.value.errno == errno.ENOSPC
    assert failure.value.filename == str(path)
    job.abort()
    assert not path.exists()


@each_backend
@pytest.mark.parametrize("place", ["congruent", "odd"])
def test_a_full_disk_is_found_by_a_write_where_space_cannot_be_reserved(mounted: Path, backend, place) -> None:
    data = lazy_run(6 * MIB, place=place)
    path = mounted / "f"
    writer = new_writer(backend)
    job = writer.start(data.plan(), str(path))
    job.release()
    with pytest.raises(OSError, match="write of") as failure:
        job.wait()
    assert failure.value.errno == errno.ENOSPC
    job.abort()
    assert not path.exists()
    small = lazy_run(MIB, place=place)
    job = writer.start(small.plan(), str(path))
    assert job.wait()
    job.finish(header=HEADER, trailer=b"")
    check_file(path, small)


@each_backend
def test_a_file_system_without_o_direct_is_written_buffered(tmp_path: Path, backend) -> None:
    folder = tmp_path / "ramfs"
    folder.mkdir()
    mount = ["mount", "-t", "ramfs", "ramfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root to mount a ramfs")
    try:
        facts = native.probe_file_system(str(folder))
        data = extents([Piece(2 * MIB, 0, "congruent", False), Piece(5000, 3, "odd", False)])
        job = new_writer(backend, short_write_every=2).start(data.plan(), str(folder / "f"))
        job.release()
        assert job.wait()
        assert job.stats["direct"] == float(facts["direct"])
        job.finish(header=HEADER, trailer=b"t" * ALIGN)
        check_file(folder / "f", data, trailer=b"t" * ALIGN)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@each_backend
def test_a_file_size_limit_is_an_error(tmp_path: Path, backend) -> None:
    """Python ignores SIGXFSZ; the test restores the soft limit afterwards."""
    data = lazy_run(MIB)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = new_writer(backend)
    job = writer.start(data.plan(), str(tmp_path / "trailer"))
    assert job.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (data.data_end, before[1]))
    try:
        with pytest.raises(OSError, match="write of") as failure:
            job.finish(header=HEADER, trailer=b"t" * ALIGN)
        assert failure.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="fallocate") as failure:
            writer.start(lazy_run(2 * MIB).plan(), str(tmp_path / "f"))
        assert failure.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "f").exists()
