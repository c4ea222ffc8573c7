"""A packed block gives back every bit, whatever the numbers are, and a damaged one is refused by name."""

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import native
from catalog.encoding.planes import Transform, needs_base, packed, unpacked
from catalog.errors import FormatError

ZSTD, QUADS = 1, 3
PLANES = [transform for transform in Transform if transform is not Transform.INDEXED]

SPECIAL = {
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x3F80],
    4: [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x80000001, 0x3F800000, 0x7F800001],
    8: [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (1 << 64) - 1, 1, (1 << 63) + 1, 0x3FF << 52],
    1: list(range(256)),
}


def numbers(kind: str, itemsize: int, count: int) -> tuple[bytes, bytes]:
    """Return elements and a base, as bytes."""
    rng = np.random.default_rng(itemsize * 1000 + count)
    base = rng.integers(0, 256, count * itemsize, dtype=np.uint8).tobytes()
    words = np.dtype(f"u{itemsize}")
    if kind == "random":
        return rng.integers(0, 256, count * itemsize, dtype=np.uint8).tobytes(), base
    if kind == "equal":
        return base, base
    if kind == "near":
        steps = rng.integers(0, 3, count).astype(words) - words.type(1)
        return (np.frombuffer(base, words) + steps).tobytes(), base
    if kind == "constant":
        return bytes([7]) * (count * itemsize), base
    special = np.resize(np.array(SPECIAL[itemsize], words), count)
    return special.tobytes(), rng.permutation(special).tobytes()


def returned(block: bytes, nbytes: int, base: bytes | None = None) -> bytes:
    into = bytearray(nbytes)
    unpacked(block, base=None if base is None else memoryview(base), into=memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("kind", ["random", "equal", "near", "constant", "special"])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 1000, 1025, 30_000])
def test_every_bit_comes_back(kind, itemsize, count):
    raw, base = numbers(kind, itemsize, count)
    for other in (None, base):
        view = None if other is None else memoryview(other)
        block = packed(memoryview(raw), itemsize=itemsize, base=view)
        assert int.from_bytes(block[3:11], "little") == len(raw)
        assert returned(block, len(raw), other) == raw
        assert len(block) <= len(raw) + 100


@pytest.mark.parametrize("transform", PLANES)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_transform_has_an_inverse(transform, itemsize):
    for kind in ("random", "near", "special"):
        raw, base = numbers(kind, itemsize, 2500)
        block = native.pack_block(raw, itemsize=itemsize, transforms=[transform], base=base)
        assert block[1] == transform
        assert returned(block, len(raw), base) == raw


@given(data=st.data(), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_any_bytes_come_back(data, itemsize):
    raw = data.draw(st.binary(max_size=300))
    base = data.draw(st.none() | st.binary(min_size=len(raw), max_size=len(raw)))
    view = None if base is None else memoryview(base)
    assert returned(packed(memoryview(raw), itemsize=itemsize, base=view), len(raw), base) == raw


def test_what_is_equal_to_its_base_takes_next_to_nothing():
    raw, base = numbers("equal", 4, 100_000)
    block = packed(memoryview(raw), itemsize=4, base=memoryview(base))
    assert needs_base(block)
    assert len(block) < 60


def test_what_has_no_order_is_stored_as_it_is():
    raw, _ = numbers("random", 4, 100_000)
    block = packed(memoryview(raw), itemsize=4)
    assert not needs_base(block)
    assert len(block) < len(raw) + 60


def test_a_base_of_another_size_is_refused():
    with pytest.raises(ValueError, match="base has 4 entries where the data has 8"):
        packed(memoryview(bytes(8)), itemsize=4, base=memoryview(bytes(4)))
    raw, base = numbers("equal", 4, 1000)
    block = packed(memoryview(raw), itemsize=4, base=memoryview(base))
    with pytest.raises(FormatError, match="needs a base of 4000 bytes, there is none"):
        returned(block, len(raw))
    with pytest.raises(FormatError, match="there is one of 40 bytes"):
        returned(block, len(raw), base[:40])


def test_elements_of_another_size_are_refused():
    with pytest.raises(ValueError, match="itemsize is 3"):
        packed(memoryview(bytes(6)), itemsize=3)


@pytest.mark.parametrize("size", [0, 1, 10, 20, -1])
def test_a_block_that_was_cut_off_is_refused(size):
    raw, base = numbers("near", 4, 1000)
    block = packed(memoryview(raw), itemsize=4, base=memoryview(base))
    with pytest.raises(FormatError, match="packed block"):
        returned(block[:size], len(raw), base)


def test_every_changed_byte_of_the_head_is_refused_or_gives_other_bytes_only():
    raw, base = numbers("near", 4, 500)
    block = packed(memoryview(raw), itemsize=4, base=memoryview(base))
    for at in range(47):
        for change in (1, 0x80, 0xFF):
            damaged = bytearray(block)
            damaged[at] ^= change
            try:
                returned(bytes(damaged), len(raw), base)
            except FormatError:
                continue
            assert at == 1, f"byte {at} means nothing"


def test_more_bytes_than_there_is_room_for_are_refused():
    block = packed(memoryview(bytes(100)), itemsize=4)
    with pytest.raises(FormatError, match="100 raw bytes where 96 belong"):
        returned(block, 96)


def few_changes(count: int, *, largest: int, share: float = 0.1) -> tuple[bytes, bytes]:
    """Return numbers of 2 bytes of which few differ from their base, by at most so much."""
    rng = np.random.default_rng(3)
    base = rng.integers(0, 60_000, count, dtype=np.uint16)
    change = np.where(rng.random(count) < share, rng.integers(1, largest + 1, count), 0)
    return (base + change.astype(np.uint16)).tobytes(), base.tobytes()


@pytest.mark.parametrize("count", [4001, 4002, 4003, 60_000])
@pytest.mark.parametrize(("largest", "bits"), [(1, 0.6), (3, 1.0), (200, 2.5)])
def test_few_changes_take_few_bits_for_each_element(count, largest, bits):
    raw, base = few_changes(count, largest=largest)
    block = packed(memoryview(raw), itemsize=2, base=memoryview(base))
    assert block[11] == QUADS
    assert returned(block, len(raw), base) == raw
    assert len(block) < count * bits / 8 + 150
    everywhere, base = few_changes(count, largest=4, share=1.0)
    assert packed(memoryview(everywhere), itemsize=2, base=memoryview(base))[11] != QUADS


def test_every_changed_byte_of_quads_is_refused_or_gives_other_bytes_only():
    raw, base = few_changes(4001, largest=200)
    block = packed(memoryview(raw), itemsize=2, base=memoryview(base))
    assert block[11] == QUADS
    for at in range(29, len(block)):
        for change in (1, 0x80, 0xFF):
            damaged = bytearray(block)
            damaged[at] ^= change
            with contextlib.suppress(FormatError):
                assert len(returned(bytes(damaged), len(raw), base)) == len(raw)
                # The codes of zstd have no checksum, and the table of a packed file has.
                assert at >= 29 + 26


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, 3, "a part of coding 3"),
        (0, 9, "a part of coding 9"),
        (1, 1 << 40, "bytes"),
        (18, 1 << 40, "large bytes in a plane of"),
        (18, 1, "packed block"),
    ],
)
def test_hostile_quads_are_refused(at, value, said):
    raw, base = few_changes(4001, largest=200)
    block = bytearray(packed(memoryview(raw), itemsize=2, base=memoryview(base)))
    size = 1 if at == 0 else 8
    block[29 + at : 29 + at + size] = value.to_bytes(size, "little")
    with pytest.raises(FormatError, match=said):
        returned(bytes(block), len(raw), base)


def scaled(factor: float, count: int = 40_000) -> np.ndarray:
    """Return gradients as clipping leaves them: bfloat16 numbers times a factor, zeros of both signs among
    them."""
    halves = (np.random.default_rng(7).normal(0.0, 1e-3, count).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint32
    )
    numbers = (halves << 16).view(np.float32) * np.float32(factor)
    numbers[::97], numbers[1::97] = 0.0, -0.0
    return numbers


def indexed(raw: bytes) -> bytes:
    return native.pack_block(raw, itemsize=4, transforms=[0, 1], may_index=True)


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 0.7, 3.3e-5, 7e8])
@pytest.mark.parametrize("count", [3000, 4096, 4097, 40_000])
def test_bfloat16_numbers_times_a_factor_take_little_more_than_bfloat16_numbers(factor, count):
    raw = scaled(factor, count).tobytes() + b"end"
    block = indexed(raw)
    assert block[1] == Transform.INDEXED
    assert not needs_base(block)
    assert returned(block, len(raw)) == raw
    alone = packed(memoryview(scaled(1.0, count).tobytes()), itemsize=4)
    assert len(block) < 1.05 * len(alone) + 4 * 128


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("odd", [1e-40, np.nan, np.inf, 0.123456, None])
def test_numbers_of_other_mantissas_are_not_indexed_and_come_back(odd, late):
    """Where they are late, the sample of the block has none of them."""
    numbers = scaled(0.1)
    if odd is None:
        numbers[20_000:] *= np.float32(1.1)
    numbers[30_001 if late else 3] = 0.5 if odd is None else odd
    raw = numbers.tobytes()
    block = indexed(raw)
    assert block[1] != Transform.INDEXED or not np.isfinite(odd)
    assert returned(block, len(raw)) == raw


def test_bfloat16_numbers_are_indexed_where_their_table_takes_next_to_nothing():
    raw = scaled(1.0).tobytes() + b"end"
    block, planes = indexed(raw), packed(memoryview(raw), itemsize=4)
    assert block[1] == Transform.INDEXED
    assert returned(block, len(raw)) == raw
    assert len(block) < 1.02 * len(planes)
    few = scaled(1.0, 4096).tobytes()
    assert indexed(few) == packed(memoryview(few), itemsize=4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("odd", [1e-40, np.nan, -np.inf, 0.123456])
def test_an_odd_number_among_bfloat16_numbers_comes_back(odd, late):
    numbers = scaled(1.0)
    numbers[30_001 if late else 3] = odd
    raw = numbers.tobytes()
    assert returned(indexed(raw), len(raw)) == raw


def test_the_table_of_a_small_block_takes_more_than_indexing_spares():
    few = scaled(0.1, 1024).tobytes()
    assert indexed(few) == packed(memoryview(few), itemsize=4)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (2, 2, "elements of 2 bytes are indexed"),
        (11, 0, "packed block"),
        (47, 0, "packed block"),
        (47, 100, "packed block"),
        (None, None, "no table"),
    ],
)
def test_a_hostile_table_of_mantissas_is_refused(at, value, said):
    raw = scaled(0.1).tobytes()
    block = bytearray(indexed(raw))
    assert block[1] == Transform.INDEXED
    assert block[47] <= 128
    if at is None:
        del block[47:]
    else:
        block[at] = value
    with pytest.raises(FormatError, match=said):
        returned(bytes(block), len(raw))


def test_an_index_behind_the_table_and_lower_planes_that_are_not_zero_are_refused():
    table = struct.pack("<BBBQ", 1, Transform.INDEXED, 4, 8)
    rows = b"".join(struct.pack("<BQ", *row) for row in ((2, 1), (2, 1), (0, 2), (2, 1)))
    mantissas = bytes([1]) + (5).to_bytes(4, "little")
    good = table + rows + mantissas + bytes([0, 0, 0, 128, 127])
    one = np.frombuffer(returned(good, 8), np.uint32)
    assert one.tolist() == [127 << 23 | 5, 1 << 31 | 127 << 23 | 5]
    with pytest.raises(FormatError, match="index 1 of a mantissa, where there are 1"):
        returned(table + rows + mantissas + bytes([0, 0, 1, 128, 127]), 8)
    with pytest.raises(FormatError, match="lower planes are not zero"):
        returned(table + rows + mantissas + bytes([0, 3, 0, 128, 127]), 8)


def test_repetitions_are_found_where_all_values_are_as_frequent():
    counting = bytes(range(256)) * 400
    assert len(packed(memoryview(counting), itemsize=1)) < len(counting) / 50


def test_the_form_is_chosen_that_takes_least():
    rng = np.random.default_rng(5)
    base = rng.integers(0, 1 << 32, 60_000, dtype=np.uint32)
    near = base + rng.integers(0, 4, base.size, dtype=np.uint32)
    flipped = base ^ rng.integers(0, 2, base.size, dtype=np.uint32) << np.uint32(31)
    exponents = np.abs(rng.standard_normal(base.size)).astype(np.float32)
    chosen = []
    for data in (near, flipped, exponents):
        raw, other = memoryview(data.tobytes()), memoryview(base.tobytes())
        block = packed(raw, itemsize=4, base=other)
        sizes = [len(native.pack_block(raw, itemsize=4, transforms=[one], base=other)) for one in PLANES]
        assert len(block) <= 1.01 * min(sizes)
        chosen.append(block[1])
    assert len(set(chosen)) == 3


def test_the_head_of_quads_counts_in_a_sample_for_no_more_than_in_the_block():
    raw, base = few_changes(400_000, largest=20, share=0.05)
    block = packed(memoryview(raw), itemsize=2, base=memoryview(base))
    assert block[11] == QUADS
    assert returned(block, len(raw), base) == raw
    # Huffman's code takes a bit for each at least: 50,000 bytes and those for the changes.
    assert len(block) < 35_000


def compressed(plane: memoryview, *, places: int) -> bytes:
    """Return a frame for which zstd has remembered 2 to the power of so many earlier places."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=places, window_log=20)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(plane)


def test_repetitions_by_chance_are_not_looked_for():
    rng = np.random.default_rng(8)
    exponents = np.abs(rng.standard_normal(200_000)).astype(np.float32).view(np.uint32) & np.uint32(0x7F800000)
    plane = memoryview((exponents >> np.uint32(23)).astype(np.uint8).tobytes())
    block = native.pack_block(plane, itemsize=1, transforms=[Transform.PLAIN])
    few, many = (len(compressed(plane, places=places)) for places in (6, 14))
    assert few < 0.98 * many
    assert len(block) < few + 30


@pytest.mark.parametrize("others", [b"", b"\x09", b"\x09\x08\x07"])
def test_quads_with_more_others_or_fewer_than_they_say_are_refused(others):
    quads = bytes([0b00001101, 0b00000011])
    content = b"".join([struct.pack("<BQBQQ", 0, len(quads), 0, len(others), len(others)), quads, others])
    block = struct.pack("<BBBQBQ", 1, Transform.PLAIN, 1, 8, QUADS, len(content)) + content
    with pytest.raises(FormatError, match=f"{len(others)} large bytes where the quads have 2"):
        returned(block, 8)


@pytest.mark.parametrize("frame", [b"\x50\x2a\x4d\x18\x04\x00\x00\x00junk", zstandard.compress(b"") + b"!"])
def test_a_frame_that_stands_for_no_byte_is_refused(frame):
    """zstd itself looks no further than its head, and takes what comes behind that."""
    quads = bytes(2)
    content = b"".join([struct.pack("<BQBQQ", 0, len(quads), ZSTD, len(frame), 0), quads, frame])
    block = struct.pack("<BBBQBQ", 1, Transform.PLAIN, 1, 8, QUADS, len(content)) + content
    with pytest.raises(FormatError, match="stands for no byte"):
        returned(block, 8)


def test_a_sample_of_one_value_makes_no_quads_of_other_bytes():
    plane = bytearray(bytes([127]) * 400_000)
    plane[100_000:100_040] = range(40)
    block = native.pack_block(plane, itemsize=1, transforms=[Transform.PLAIN])
    assert block[11] == ZSTD
    assert returned(block, len(plane)) == plane


def test_the_head_of_quads_counts_where_the_sample_is_the_block():
    raw, base = few_changes(400, largest=3)
    block = packed(memoryview(raw), itemsize=2, base=memoryview(base))
    assert block[11] == ZSTD
