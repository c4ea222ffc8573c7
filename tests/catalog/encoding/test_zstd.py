"""A frame gives its bytes again in any thread, and one that says something else is refused before memory is taken."""

import threading

import numpy as np
import pytest
import zstandard

import native
from catalog.encoding.planes import Transform
from catalog.encoding.zstd import decompressed
from catalog.errors import FormatError

PLANE = np.random.default_rng(3).integers(0, 40, 50_000, dtype=np.uint8).tobytes()


def compressed(plane: bytes) -> bytes:
    """Return a frame as any release of zstd makes it."""
    return zstandard.ZstdCompressor(level=1).compress(plane)


def frame_of(plane: bytes) -> bytes:
    """Return the frame in the block of a plane, which is the only one."""
    block = native.pack_block(plane, itemsize=1, transforms=[Transform.PLAIN])
    assert block[11] == 1
    return block[20:]


@pytest.mark.parametrize("nbytes", [0, 1, 300, 50_000])
def test_a_frame_gives_its_bytes_again(nbytes):
    assert decompressed(memoryview(compressed(PLANE[:nbytes])), nbytes=nbytes) == PLANE[:nbytes]


@pytest.mark.parametrize(
    "plane", [PLANE, PLANE[:300], bytes(range(256)) * 400], ids=["exponents", "few", "repetitions"]
)
def test_native_frames_are_those_of_the_format(plane):
    frame = frame_of(plane)
    assert decompressed(memoryview(frame), nbytes=len(plane)) == plane
    with pytest.raises(FormatError, match=f"is a frame of {len(plane)}"):
        decompressed(memoryview(frame), nbytes=len(plane) + 1)


def test_threads_have_what_they_need_of_their_own():
    found = {}

    def work(number: int) -> None:
        plane = bytes([number]) * 100 + PLANE[number:]
        frames = [frame_of(plane) for _ in range(20)]
        found[number] = all(decompressed(memoryview(frame), nbytes=len(plane)) == plane for frame in frames)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


@pytest.mark.parametrize("said", [0, 49_999, 50_001, 1 << 50])
def test_a_frame_of_another_size_is_refused(said):
    frame = compressed(PLANE)
    with pytest.raises(FormatError, match=f"a plane of {said} bytes is a frame of 50000"):
        decompressed(memoryview(frame), nbytes=said)


def test_a_frame_that_says_no_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(PLANE)
    with pytest.raises(FormatError, match="a frame of -1"):
        decompressed(memoryview(frame), nbytes=len(PLANE))


def test_a_frame_that_says_more_than_it_has_is_refused():
    frame = bytearray(compressed(PLANE[:300]))
    # One byte of flags follows the magic number, then two bytes have the size, less 256.
    assert frame[5:7] == (300 - 256).to_bytes(2, "little")
    frame[5:7] = (50_000 - 256).to_bytes(2, "little")
    with pytest.raises(FormatError, match="can't be decompressed"):
        decompressed(memoryview(frame), nbytes=50_000)


@pytest.mark.parametrize("damage", [lambda frame: frame[:-1], lambda frame: frame + b"!", lambda frame: b"!" + frame])
def test_a_frame_that_was_cut_off_or_has_more_behind_it_is_refused(damage):
    with pytest.raises(FormatError, match="can't be decompressed"):
        decompressed(memoryview(damage(compressed(PLANE))), nbytes=len(PLANE))
