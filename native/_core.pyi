"""The typed face of the extension: bytes, files and addresses. Knows no torch."""

from collections.abc import Sequence
from typing import Any

class Faults:
    """Deterministic faults on the writer's system calls, for tests of its users.

    delay_us: sleep before each data write; fail_after: data writes that succeed before every further one fails
    with `errno`; short_write_every: every n-th data write is cut in half (0: never); reorder: hold back
    completions and deliver them last-in first-out within the queue depth.
    """
    def __init__(
        self,
        *,
        delay_us: int = 0,
        fail_after: int = -1,
        errno: int = 5,
        short_write_every: int = 0,
        reorder: bool = False,
    ) -> None: ...

class WritePlan:
    """Where the bytes of one file come from; immutable, reusable while no address moves.

    Extent i is nbytes[i] bytes at address addresses[i], written at offsets[i]. Extents are sorted by offset, do not
    overlap, eager ones come first; what lies between them and in [data_start, data_end) is written as zeros. data_start
    and data_end are multiples of `align`. [0, data_start) is left to the header, what follows data_end to the tail.
    eager[i]: the bytes are copied inside `Writer.start`; otherwise they are read, or copied, at any time until
    `WriteJob.release` returns. fed[i]: the bytes are no live memory, their address means nothing; whoever holds the job
    hands them over, by `WriteJob.feed_next`. Fed extents come last, and begin on a page (of `align`) of their own. The
    columns are one-dimensional numpy arrays: uint64, uint64, uint64, uint8, uint8.
    """
    def __init__(
        self,
        *,
        offsets: Any,
        addresses: Any,
        nbytes: Any,
        eager: Any,
        data_start: int,
        data_end: int,
        align: int,
        fed: Any = None,
    ) -> None: ...
    @property
    def extents(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def direct_bytes(self) -> int:
        """Bytes that can go to the device straight from their source (address congruent to offset modulo align)."""

class Feed:
    """A block of the file on loan to its feeder, to be filled with the bytes of the fed extents that lie in it.

    The memory is the feeder's alone until `WriteJob.fed`, also when the job fails or the writer closes. A Feed that is
    let go of unfed fails the job. RuntimeError once it is fed.
    """
    @property
    def address(self) -> int:
        """Of the slot, a multiple of 4096."""
    @property
    def offset(self) -> int:
        """Of the block in the file."""
    @property
    def nbytes(self) -> int: ...

class WriteJob:
    """One file being written. Every call may be made from any thread; none holds the GIL while it blocks."""
    def feed_next(self) -> Feed | None:
        """The next block of fed extents in file order. None: all have been handed out, or those that are out hold the
        slots that could be had. Waits for a slot only while none is out, for a holder that waits would hold up others, and
        goes behind `Writer.start` and `release`. OSError when the job has failed (ECANCELED: the writer is closed).
        """
    def fed(self, feed: Feed) -> None:
        """The block is filled, but for gaps, which become zeros: hash it and queue its write. The slot of a failed job
        just goes back. RuntimeError when it is fed already or before one that was handed out earlier, ValueError when it
        is another job's.
        """
    def release(self) -> float:
        """The barrier: returns, in seconds waited, once no source byte of the plan is needed any more.

        Stops submitting from live memory, copies what was not submitted into the staging budget (as the budget allows,
        else waits for writes to make room), waits for every submitted write from live memory to complete and for every
        checksum over live bytes. Fed extents have no source byte. Never raises for an I/O failure: that is `wait`'s to say. Idempotent.
        """
    def released(self) -> bool: ...
    def wait(self, timeout_s: float = -1.0) -> bool:
        """True once all data bytes are written (implies released); False on timeout; raises OSError (errno, strerror,
        filename; the message also has operation and offset) when the job failed. Memory of the plan that is no longer
        mapped is EFAULT.
        """
    def checksums(self) -> bytes:
        """XXH3-128 (canonical, 16 bytes each) of every extent in plan order; only after `wait` returned True."""
    def finish(self, *, header: bytes, tail: bytes) -> int:
        """Write header at 0 and tail at data_end, cut the file to its end, fdatasync, close; returns the file's size in
        bytes. header must be data_start bytes, tail a multiple of the plan's align. Only after `wait` returned True, and
        once. After an OSError the file can only be aborted.
        """
    def abort(self) -> None:
        """Stop, wait for what is in flight, close and unlink the file. Idempotent, nothing to a finished file; the
        destructor does the same.
        """
    @property
    def stats(self) -> dict[str, float]:
        """Keys: bytes_direct, bytes_copied, write_s, stall_s, eager_s, direct (1.0: O_DIRECT, 0.0: buffered)."""

class Writer:
    """Writes files through one io_uring, or one pool of POSIX threads, with one staging budget shared by its jobs.

    The budget is the only memory taken beyond the sources; a job that needs more waits for its own writes to make room.
    After fork every call in the child is a RuntimeError, and the files stay the parent's.
    """
    def __init__(
        self, *, backend: str, budget_bytes: int, block_bytes: int = ..., depth: int = ..., faults: Faults | None = None
    ) -> None:
        """backend: "io_uring" or "posix", never substituted: OSError when the host forbids it. block_bytes: a multiple of
        4096 and of the plans' align, up to 1 GiB; depth: up to 1024 writes at once. ValueError names the least budget.
        """
    @property
    def backend(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def registered(self) -> bool:
        """Whether the staging memory is registered with the kernel (io_uring, where RLIMIT_MEMLOCK allows)."""
    @property
    def staging(self) -> tuple[int, int]:
        """(address, nbytes) of the staging memory, page-aligned: where all slots lie. Mapped until the writer is closed and
        the last Feed is back; then the address is 0.
        """
    def budget_free_bytes(self) -> int: ...
    def start(self, plan: WritePlan, path: str) -> WriteJob:
        """Create `path` (O_EXCL), preallocate plan.data_end bytes, copy the eager extents, begin writing."""
    def close(self) -> None:
        """Fail (ECANCELED) what is not prepared yet, wait for what is in flight, end the threads. What is written can
        still be finished. Idempotent; the destructor does the same.
        """

def read(
    paths: Sequence[str],
    *,
    file_index: Any,
    offsets: Any,
    addresses: Any,
    nbytes: Any,
    block_bytes: int = ...,
    depth: int = ...,
) -> bytes:
    """Read extents straight into memory, in parallel, and return the XXH3-128 of each, in order (16 bytes each).

    file_index: uint32, offsets, addresses, nbytes: uint64 numpy arrays. OSError names the path and offset (a file that
    ends early is EIO); ValueError when two extents of a file overlap. After an error the targets hold a mixture. Takes at
    most depth * block_bytes of memory, and none for what goes straight to its target.
    """

def checksum(data: Any) -> bytes:
    """XXH3-128 of a contiguous buffer, seed 0, canonical (big-endian) representation: 16 bytes."""

def checksum_memory(*, addresses: Any, nbytes: Any) -> bytes:
    """XXH3-128 of regions of this process's memory, 16 bytes each, in order; uint64 numpy arrays. OSError (EFAULT) names
    the first region that is not mapped; whoever calls holds on to the memory.
    """

def probe_io_uring() -> str:
    """Empty when an io_uring can be made here, else why not, as one sentence."""

def probe_file_system(directory: str) -> dict[str, Any]:
    """Keys: type (str), direct (bool), memory_align, offset_align, block_bytes (st_blksize), place_align (the modulus
    for congruent placement: the largest of page size, st_blksize and both O_DIRECT alignments), reason (str, why not
    direct).
    """

class Statistics:
    """What a run of elements is like. Runs of one tensor, cut apart anywhere, merge exactly: counts and `exponents` add, the
    least of the minima and the largest of the maxima count, and sums and sketches add up to float64 rounding. `checksum`
    alone is of this run only. docs/sketches.md has every definition.
    """
    @property
    def count(self) -> int:
        """Of elements: nan + inf + zeros + exponents.sum()."""
    @property
    def nan(self) -> int: ...
    @property
    def inf(self) -> int:
        """Of either sign."""
    @property
    def zeros(self) -> int:
        """Of either sign."""
    @property
    def min(self) -> float | None:
        """Of every element but NaN, Inf included; None where there is none. Zero has no sign."""
    @property
    def max(self) -> float | None: ...
    @property
    def sum(self) -> float:
        """Of the finite elements, added in float64; Inf or NaN where F64 exceeds its range."""
    @property
    def sum_of_squares(self) -> float:
        """Of the finite elements, added in float64: the square of the norm. Inf where F64 exceeds its range."""
    @property
    def exponents(self) -> Any:
        """uint64 [64]: bin i counts finite elements with 2**(i-52) <= |x| < 2**(i-51), and not 0; the first has all below,
        the last all above. The array is a view that keeps these statistics alive.
        """
    @property
    def sketch(self) -> Any:
        """float64 [buckets]: linear in the elements; a NaN or Inf counts as 0. A view as well."""
    @property
    def checksum(self) -> bytes:
        """XXH3-128 of the run's bytes, as `checksum` gives it, made of the very bytes that were counted."""

def statistics(
    data: Any, dtype: str, *, start: int = 0, key: int = 0, buckets: int = 256, kernel: str = ""
) -> Statistics:
    """Statistics, sketch and checksum of a contiguous buffer in one pass, at any address.

    data: its bytes are elements of `dtype`, named as in the format (F32, BF16, I64, BOOL, ...), little-endian; integers and
    BOOL (1 where the byte is not 0) count as their value in float64. start: index of the first element in the flattened
    logical tensor; key: 64 bits that stand for the tensor's name and kind. Only sketches of equal key and buckets compare.
    buckets: a power of two from 16 to 2**20, or 0 for no sketch. kernel: one of `statistics_kernels`; "": the fastest.
    ValueError names what does not fit. The caller keeps the bytes from changing.
    """

def statistics_kernels() -> list[str]:
    """The kernels that this processor runs, of "avx512", "avx2" and "portable": the fastest first, "portable" last. All
    count the same; their sums differ by rounding alone.
    """
