"""Blocks, byte planes and quads are what the format says, and arguments that do not fit are refused by value."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence

import numpy as np
import pytest

import native

PLAIN, ROTATED, XOR, ROTATED_XOR, DIFFERENCE = range(5)
ITEMSIZES = pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
TRANSFORMS = pytest.mark.parametrize("transform", range(5))


def by_definition(data: np.ndarray, transform: int, base: np.ndarray) -> np.ndarray:
    """Return the planes as rows, as docs/format.md defines them."""
    words, other = data.astype(object), base.astype(object)
    bits = 8 * data.itemsize
    if transform in (XOR, ROTATED_XOR):
        words = words ^ other
    if transform in (ROTATED, ROTATED_XOR):
        words = (words << 1 | words >> bits - 1) % (1 << bits)
    if transform == DIFFERENCE:
        signed = (words - other + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        words = np.where(signed >= 0, 2 * signed, -2 * signed - 1)
    return np.array([(words >> 8 * plane) % 256 for plane in range(data.itemsize)], np.uint8)


def noise(count: int, dtype: type[np.unsignedinteger]) -> tuple[np.ndarray, np.ndarray]:
    """Return elements that nothing makes smaller, and a base."""
    rng = np.random.default_rng(count)
    memory = rng.integers(0, 256, (2, count * np.dtype(dtype).itemsize), dtype=np.uint8)
    return memory[0].view(dtype), memory[1].view(dtype)


def test_planes_are_those_of_the_transformed_elements_the_least_significant_first():
    words = np.array([0x80112233, 0x00000001], np.uint32)
    base = np.array([0x80112230, 0x00000002], np.uint32)
    planes = {
        PLAIN: [[0x33, 1], [0x22, 0], [0x11, 0], [0x80, 0]],
        ROTATED: [[0x67, 2], [0x44, 0], [0x22, 0], [0x00, 0]],
        XOR: [[3, 3], [0, 0], [0, 0], [0, 0]],
        ROTATED_XOR: [[6, 6], [0, 0], [0, 0], [0, 0]],
        DIFFERENCE: [[6, 1], [0, 0], [0, 0], [0, 0]],
    }
    for transform, rows in planes.items():
        assert by_definition(words, transform, base).tolist() == rows
        found = np.empty_like(words)
        native.join_planes(list(map(bytes, rows)), into=found, transform=transform, base=base)
        assert np.array_equal(found, words)


@ITEMSIZES
@TRANSFORMS
@pytest.mark.parametrize("count", [1, 15, 33, 1100])
def test_a_block_of_noise_has_the_planes_of_the_definition_at_any_address(dtype, transform, count):
    data, base = noise(count, dtype)
    odd = np.empty((2, data.nbytes + 1), np.uint8)
    odd[:, 1:] = data.view(np.uint8), base.view(np.uint8)
    for content, other in ((data, base), (odd[0, 1:], odd[1, 1:])):
        block = native.pack_block(content, itemsize=data.itemsize, transforms=[transform], base=other)
        assert block[:3] == bytes([1, transform, data.itemsize])
        assert block[11 + 9 * data.itemsize :] == by_definition(data, transform, base).tobytes()


@ITEMSIZES
@TRANSFORMS
@pytest.mark.parametrize("count", [0, 1, 15, 1023, 1024, 1025, 3000])
def test_joined_planes_are_the_elements_again_at_any_address(dtype, transform, count):
    data, base = noise(count, dtype)
    planes = by_definition(data, transform, base)
    memory = np.empty(data.nbytes + 1, np.uint8)
    native.join_planes(list(planes), into=memory[1:], transform=transform, base=base)
    assert memory[1:].tobytes() == data.tobytes()


def test_a_plane_of_one_byte_stands_for_all_of_them():
    high = bytes([7]) * 1500
    low = np.random.default_rng(1).integers(0, 256, 1500, np.uint8)
    whole, short = np.empty(3000, np.uint8), np.empty(3000, np.uint8)
    native.join_planes([low, high], into=whole, transform=ROTATED)
    native.join_planes([low, high[:1]], into=short, transform=ROTATED)
    assert np.array_equal(short, whole)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 8, 63, 64, 65, 1001])
@pytest.mark.parametrize("most", [2, 3, 255])
def test_quads_are_two_bits_a_byte_and_the_others_follow(count, most):
    plane = np.random.default_rng(count).integers(0, most + 1, count, dtype=np.uint8)
    padded = np.minimum(np.append(plane, np.zeros(-count % 4, np.uint8)), 3).reshape(-1, 4)
    quads = (padded << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1).astype(np.uint8)
    others = plane[plane > 2]
    again = np.empty(count, np.uint8)
    assert native.spread_quads(quads, others=others, into=again) == len(others)
    assert np.array_equal(again, plane)
    if len(others):
        assert native.spread_quads(quads, others=others[1:], into=again) == len(others)


def test_what_does_not_fit_is_refused():
    data, into = bytes(12), bytearray(12)
    with pytest.raises(ValueError, match="itemsize is 3"):
        native.pack_block(data, itemsize=3, transforms=[PLAIN])
    with pytest.raises(ValueError, match="itemsize is 0"):
        native.pack_block(data, itemsize=0, transforms=[PLAIN])
    with pytest.raises(ValueError, match="transforms is empty"):
        native.pack_block(data, itemsize=4, transforms=[])
    with pytest.raises(ValueError, match="transform 5"):
        native.pack_block(data, itemsize=4, transforms=[PLAIN, 5])
    with pytest.raises(ValueError, match="transform 4 needs a base"):
        native.pack_block(data, itemsize=4, transforms=[PLAIN, DIFFERENCE])
    with pytest.raises(ValueError, match="base has 8 entries where the data has 12"):
        native.pack_block(data, itemsize=4, transforms=[PLAIN, XOR], base=bytes(8))
    with pytest.raises(ValueError, match="transform 5"):
        native.join_planes([bytes(3)] * 4, into=into, transform=5)
    with pytest.raises(ValueError, match="transform 2 needs a base"):
        native.join_planes([bytes(3)] * 4, into=into, transform=XOR)
    with pytest.raises(ValueError, match="base has 8 entries where the data has 12"):
        native.join_planes([bytes(3)] * 4, into=into, transform=XOR, base=bytes(8))
    with pytest.raises(ValueError, match="a plane"):
        native.join_planes([bytes(3)] * 3 + [bytes(2)], into=into, transform=PLAIN)
    with pytest.raises(ValueError, match="a plane"):
        native.join_planes([bytes(1)] * 4, into=bytearray(13), transform=PLAIN)
    with pytest.raises(ValueError, match="itemsize is 3"):
        native.join_planes([bytes(4)] * 3, into=into, transform=PLAIN)
    with pytest.raises(ValueError, match="itemsize is 0"):
        native.join_planes([], into=into, transform=PLAIN)
    with pytest.raises(BufferError):
        native.join_planes([bytes(3)] * 4, into=data, transform=PLAIN)
    with pytest.raises(ValueError, match="quads has 2 entries where into, a fourth of it, has 3"):
        native.spread_quads(bytes(2), others=b"", into=into)
    with pytest.raises(BufferError):
        native.spread_quads(bytes(3), others=b"", into=data)


def some_blocks() -> list[tuple[np.ndarray, int]]:
    """Return buffers of floats, of any size, with the bytes of an element of each."""
    rng = np.random.default_rng(21)
    blocks = [(rng.standard_normal(count).astype(np.float32) * 1e-3, 4) for count in (0, 1, 5000, 70_000, 9, 262_144)]
    return [*blocks, (np.zeros(3000, np.uint16), 2), (rng.integers(0, 256, 1001, np.uint8), 8)]


def room_for(blocks: list[tuple[np.ndarray, int]]) -> np.ndarray:
    return np.zeros(sum(data.nbytes + 11 + 9 * itemsize for data, itemsize in blocks), np.uint8)


def packed_alone(blocks: list[tuple[np.ndarray, int]]) -> list[bytes]:
    return [native.pack_block(data, itemsize=itemsize, transforms=[PLAIN, ROTATED]) for data, itemsize in blocks]


@pytest.mark.parametrize(("threads", "team"), [(1, 0), (2, 0), (5, 0), (2, 2), (2, 4), (4, 2)])
def test_blocks_that_threads_pack_are_those_that_one_packs_alone(threads, team):
    blocks = some_blocks()
    room = room_for(blocks)
    packer = native.ParallelPacker(threads=threads)
    for given in (blocks, blocks[::-1], []):
        found = packer.pack(given, into=room, team=team)
        expected = packed_alone(given)
        assert room[: sum(size for size, _ in found)].tobytes() == b"".join(expected)
        assert found == [(len(block), native.checksum(block)) for block in expected]


def test_threads_that_pack_at_once_with_one_packer_wait_for_each_other():
    blocks = some_blocks()
    packer = native.ParallelPacker(threads=2)
    expected = [(len(block), native.checksum(block)) for block in packed_alone(blocks)]
    found = []

    def work() -> None:
        room = room_for(blocks)
        for _ in range(10):
            sizes = packer.pack(blocks, into=room)
            found.append((sizes, native.checksum(room[: sum(size for size, _ in sizes)])))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(expected, native.checksum(b"".join(packed_alone(blocks))))] * 40


def printed_by(script: str, *, under: Sequence[str] = ()) -> str:
    command = [*under, sys.executable, "-P", "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_blocks_are_packed_also_where_the_host_gives_no_more_threads():
    script = """
        import resource, native
        packer = native.ParallelPacker(threads=4)
        blocks = [(bytes(range(256)) * 400, 4)] * 8
        room = bytearray(8 * 110_000)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        # Less than the stack of a thread.
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        try:
            native.Writer(backend="posix", budget_bytes=8 << 20, block_bytes=1 << 20, depth=1)
        except OSError:
            print("no threads,", len(packer.pack(blocks, into=room)), "blocks")
        """
    assert printed_by(script, under=["prlimit", "--stack=536870912"]) == "no threads, 8 blocks\n"


def test_the_threads_of_a_team_pack_instead_of_waiting_actively():
    printed = printed_by("""
        import pathlib, threading, time
        import torch, native

        def is_asleep(task):
            return (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"

        def run_times():
            # A thread's time is up to date only once it has left its processor.
            while not all(map(is_asleep, others)):
                time.sleep(0.01)
            return [int((task / "schedstat").read_text().split()[0]) for task in others]

        torch.set_num_threads(2)
        torch.ones(4_000_000).add_(1)
        tasks = pathlib.Path("/proc/self/task")
        others = [task for task in tasks.iterdir() if int(task.name) != threading.get_native_id()]
        blocks = [(torch.randn(200_000).numpy(), 4) for _ in range(8)]
        packer, room = native.ParallelPacker(threads=2), bytearray(8 * 800_047)
        for team in (0, 2):
            before = run_times()
            packer.pack(blocks, into=room, team=team)
            print(sum(run > was for run, was in zip(run_times(), before)))
        """)
    assert printed == "0\n1\n"


def test_without_openmp_a_packer_of_a_team_starts_threads_and_loads_nothing():
    printed = printed_by("""
        import native
        blocks = [(bytes(range(256)) * 400, 4)] * 8
        room = bytearray(8 * 110_000)
        packer = native.ParallelPacker(threads=2)
        found = [packer.pack(blocks, into=room, team=team) for team in (0, 2)]
        print(found[0] == found[1], "libgomp" in open("/proc/self/maps").read())
        """)
    assert printed == "True False\n"


def test_blocks_for_which_there_may_be_no_room_are_refused():
    data = np.zeros(1000, np.uint8)
    packer = native.ParallelPacker(threads=2)
    with pytest.raises(ValueError, match="into has 1046 bytes where the blocks may take 1047"):
        packer.pack([(data, 4)], into=bytearray(1046))
    assert packer.pack([(data, 4)], into=bytearray(1047))
    with pytest.raises(ValueError, match="itemsize is 3"):
        packer.pack([(data, 3)] * 9, into=bytearray(20_000))
    with pytest.raises(BufferError):
        packer.pack([(data, 4)], into=bytes(1047))
    with pytest.raises(ValueError, match="threads is 0"):
        native.ParallelPacker(threads=0)
