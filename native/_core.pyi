"""The extension's types and functions: bytes, files and addresses. Imports no torch.

Everything that can block releases the GIL. A failed system call is an OSError with errno and file name, and its message
names the operation and the offset.
"""

from collections.abc import Sequence
from typing import Any

class Faults:
    """Deterministic faults on a writer's data writes, for tests.

    delay_us: microseconds to sleep before each write. fail_after: the number of writes that succeed before all further
    ones fail with `errno`; negative: none fails. short_write_every: each n-th write is cut in half; 0: none. reorder:
    completions are held back and reported last in, first out, within the queue depth.
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
    """Says which bytes of memory are written where in one file. Immutable; reusable as long as no address changes.

    Extent i is nbytes[i] bytes at address addresses[i], written at offsets[i]. Extents are sorted by offset and do not
    overlap; gaps between them and up to data_start and data_end are written as zeros. `align` is a power of two,
    data_start and data_end are multiples of it. The header fills [0, data_start); the trailer follows data_end.

    eager[i]: the bytes are copied inside `Writer.start`. The bytes of other extents are read at any time until
    `WriteJob.release` returns, and the caller keeps their memory mapped and unchanged until then. fed[i]: the bytes are
    not in memory yet and the address means nothing; a feeder supplies them through `WriteJob.feed_next`. Eager extents
    come first, fed ones last, on pages (of `align`) that they share with no others.

    offsets, addresses and nbytes are uint64 [n], eager and fed uint8 [n], all contiguous numpy arrays. ValueError names
    the extent that breaks a rule.
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
        """Bytes written straight from their memory, without a copy: the aligned interior of long runs of lazy extents
        whose address is congruent to their offset modulo align. O_DIRECT needs both aligned at once.
        """

class Feed:
    """A block of the file on loan to a feeder, who fills it with the bytes of the fed extents inside it.

    The memory is the feeder's alone until `WriteJob.fed` takes it back, also when the job fails or the writer is
    closed. A Feed that is dropped unfed fails the job. After `WriteJob.fed` every property raises RuntimeError.
    """
    @property
    def address(self) -> int:
        """Address of the memory to fill, a multiple of 4096."""
    @property
    def offset(self) -> int:
        """Offset of the block in the file, in bytes."""
    @property
    def nbytes(self) -> int: ...

class Appendix:
    """Extents that have no place in the plan: written behind the planned bytes, back to back, as their bytes are given.

    Takes 4 MiB of memory outside the budget. Their checksums are those of the very bytes written. A thread at a time.
    """
    @property
    def offset(self) -> int:
        """Offset of the first extent in the file, in bytes."""
    def add(self, *, address: int, nbytes: int) -> None:
        """Write the next bytes of the extents, in order, from memory that is read only inside the call; waits for the
        disk. ValueError when the extents have no room for them. OSError: EFAULT when the memory is not mapped,
        ECANCELED when the job was aborted.
        """
    def end(self) -> bytes:
        """Return the XXH3-128 (canonical, 16 bytes each) of every extent, once all bytes are given, else RuntimeError.
        The file's end is now the next multiple of the plan's align; zeros fill it up.
        """

class WriteJob:
    """One file being written. Every method may be called from any thread, and none holds the GIL while it blocks. The
    job keeps its writer and its plan alive.
    """
    def feed_next(self) -> Feed | None:
        """Return the next block of fed extents in file order. None when all have been lent, or when no slot is free
        while this job's feeder holds another: a holder that waited would hold up other jobs. Without a slot it waits
        for one, behind `Writer.start` and `release`. OSError when the job has failed (ECANCELED: the writer is closed).
        """
    def fed(self, feed: Feed) -> None:
        """Take a filled block back and set its gaps to zero; it is hashed and written in the background, and its memory
        is lent again after both. Does not wait for either. When the job has failed, only the memory goes back.
        RuntimeError when the block is fed already or an earlier one is not, ValueError when another job lent it.
        """
    def release(self) -> float:
        """The barrier: return once no live byte of the plan is needed any more, with the seconds waited.

        Afterwards the caller may overwrite or free the memory of every extent. The call copies what is not submitted
        yet into the staging budget (waiting for slots when it is used up), and waits until every write submitted from
        live memory has completed and every live byte is hashed. Fed extents have no live bytes. Never raises for a
        failed write: `wait` does. Idempotent. What a signal handler raises meanwhile, such as KeyboardInterrupt, is
        raised here in the main thread: then memory is still read, and the job goes on until the next call.
        """
    def released(self) -> bool:
        """Return True when no live byte of the plan is needed any more. Never blocks."""
    def wait(self, timeout_s: float = -1.0) -> bool:
        """Return True once all data bytes are written (implies released), False after `timeout_s` seconds; negative:
        wait for ever. OSError (errno, strerror, filename; operation and offset in the message) when the job failed;
        memory of the plan that is no longer mapped is EFAULT.
        """
    def checksums(self) -> bytes:
        """Return the XXH3-128 (canonical, 16 bytes each) of every extent in plan order. RuntimeError before all data is
        written.
        """
    def append(self, nbytes: Any) -> Appendix:
        """Begin extents of these sizes (uint64 [n]) at the file's end: behind the planned bytes and earlier
        appendices. One at a time, before `finish`.
        """
    def finish(self, *, header: bytes, trailer: bytes) -> int:
        """Complete the file and return its size in bytes: write the header at 0 and the trailer at the end, fdatasync,
        close. Only after `wait` returned True, and once: else RuntimeError. ValueError
        unless header has data_start bytes and trailer a multiple of the plan's align. After an OSError the file can
        only be aborted.
        """
    def abort(self) -> None:
        """Fail the job, wait for what is in flight, close and unlink the file. Idempotent; does nothing to a finished
        file. The destructor does the same, except in a forked child.
        """
    @property
    def stats(self) -> dict[str, float]:
        """Keys: bytes_direct (written from live memory), bytes_copied (written from slots), write_s (seconds from start
        to the last data byte), stall_s (in `release`), eager_s (in `Writer.start`), direct (1.0: O_DIRECT, 0.0:
        buffered).
        """

class Writer:
    """Writes files through one io_uring, or one pool of POSIX threads, with one staging budget shared by its jobs.

    The budget is the only memory taken beyond the sources; a job that needs more waits until writes give slots back.
    Jobs and feeds keep their writer alive. After fork every call in the child raises RuntimeError, the files stay the
    parent's, and the child has no staging memory. When a ring fails, its jobs fail, and later ones get a new ring.
    """
    def __init__(
        self, *, backend: str, budget_bytes: int, block_bytes: int = ..., depth: int = ..., faults: Faults | None = None
    ) -> None:
        """backend: "io_uring" or "posix", never substituted: OSError when the host forbids it. budget_bytes: ValueError
        names the least. block_bytes: a multiple of 4096 and of the plans' align, up to 1 GiB. depth: 1 to 1024 writes
        at once.
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
        """True when the staging memory is registered with the kernel (io_uring, where RLIMIT_MEMLOCK allows it)."""
    @property
    def staging(self) -> tuple[int, int]:
        """(address, nbytes) of the staging memory, page-aligned, which all slots are cut from. It stays mapped until
        the writer is closed and the last Feed is back; then the address is 0.
        """
    def budget_free_bytes(self) -> int:
        """Return the bytes of slots that are free now."""
    def start(self, plan: WritePlan, path: str) -> WriteJob:
        """Create `path` (O_EXCL), preallocate plan.data_end bytes, copy the eager extents, and begin to write the rest.

        Returns once the eager bytes are copied. OSError when the file can't be made, and then it leaves none;
        ValueError when block_bytes is no multiple of plan.align; RuntimeError when the writer is closed. Raises what a
        signal handler raises meanwhile, and then leaves no file.
        """
    def close(self) -> None:
        """Fail (ECANCELED) what is not prepared yet, wait for what is in flight, end the threads. A job whose data is
        all written can still be finished. Idempotent; the destructor does the same.
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
    checksums: bool = True,
) -> bytes:
    """Read extents straight into memory, in parallel, and return the XXH3-128 of each, in order (16 bytes each); no
    bytes when `checksums` is False.

    Request i reads nbytes[i] bytes at offsets[i] of paths[file_index[i]] to address addresses[i]; the caller keeps that
    memory. file_index is uint32 [n], the others uint64 [n], contiguous numpy arrays. Extents of a file may not overlap:
    ValueError. OSError names the path and offset; a file that ends early is EIO, a symbolic link ELOOP, and any other
    file that is not regular EINVAL, without waiting for it. After an error the targets hold a mixture. Takes at most
    depth * block_bytes of memory, and none for bytes that are read straight to their target.
    """

def checksum(data: Any) -> bytes:
    """Return the XXH3-128 of a contiguous buffer, seed 0, in canonical (big-endian) form: 16 bytes."""

def checksum_memory(*, addresses: Any, nbytes: Any) -> bytes:
    """Return the XXH3-128 of regions of this process's memory, 16 bytes each, in order.

    addresses and nbytes are uint64 [n] numpy arrays; the caller keeps the memory. OSError (EFAULT) names the first
    region that is not mapped.
    """

class RunningChecksum:
    """The XXH3-128 of bytes that come in pieces, in order. For one thread at a time."""
    def __init__(self) -> None: ...
    def add(self, data: Any) -> None:
        """Add the bytes of a contiguous buffer."""
    def end(self) -> bytes:
        """Return what `checksum` returns for all bytes so far: 16 bytes."""

def copy_memory(*, address: int, into: Any) -> None:
    """Fill a contiguous writable buffer with this process's memory from `address` on. OSError (EFAULT) when it is not
    mapped, or not any more; the buffer's content is then undefined.
    """

HUGE_PAGE_BYTES: int
"""The size of the huge pages that are meant here."""

def move_to_huge_pages(*, address: int, nbytes: int) -> None:
    """Have the kernel (from Linux 6.1 on) copy memory of this process that is in use into huge pages, which take the
    place of small ones at the same addresses. Content stays, and other threads may read and write it meanwhile.

    OSError when some of it is not in huge pages afterwards: EINVAL unless both arguments are multiples of
    HUGE_PAGE_BYTES, and for memory of another kind; EAGAIN when a device has pinned a page, or a thread is using it in
    the kernel; ENOMEM when it is not all mapped or no huge page is to be had; EBUSY when a limit of the control group
    allows none. What comes after the first that failed may not have been tried.
    """

def round_memory(*, address: int, target: int, numel: int, dtype: str) -> None:
    """Round float32 numbers at `address` to `dtype` (BF16 or F16: ValueError for another), to `target`, as
    docs/format.md defines it. The caller keeps both, which may not overlap and need not be aligned.
    """

class RoundedComparison:
    """Compares elements of `dtype` (BF16 or F16: ValueError for another) with float32 numbers, rounded, bit for bit, as
    they come in pieces, in order. For one thread at a time."""
    def __init__(self, dtype: str) -> None: ...
    def add(self, *, masters: int, weights: int, numel: int) -> bool:
        """Return whether the next `numel` elements, at address `weights`, are the numbers at `masters`, rounded; after
        the first that are not, no others may come. OSError (EFAULT) when memory is not mapped, or not any more.
        """
    def end(self) -> tuple[bytes, bytes]:
        """Return what `checksum` returns for all elements so far, and for all numbers: 16 bytes each."""

def samples_are_rounded(*, masters: Any, weights: Any, numel: Any, dtype: str) -> bytes:
    """Return for each pair 1 when a sample of its elements of `dtype` (BF16 or F16: ValueError for another) at the
    address weights[i] is that of the float32 numbers at masters[i], rounded, else 0: one byte each, in order.

    masters, weights and numel are uint64 [n] numpy arrays; the caller keeps the memory. Up to 2048 elements are
    compared all; of more the last 32, and 32 at the beginning of each of 32 equal stretches. Memory that is not mapped
    gives 1: the comparison of all elements says so.
    """

SAMPLED_WHOLE_BYTES: int
"""Regions of at most so many bytes are read whole by `sampled_digests`."""

def sampled_digests(*, addresses: Any, nbytes: Any, seed: int = 0) -> bytes:
    """Return a digest of a sample of each region of this process's memory, 8 bytes each, in order, to be compared with
    another one of as many bytes and the same `seed`.

    Regions of at most SAMPLED_WHOLE_BYTES are read whole; of larger ones 64 bytes in each of 16 equal stretches, or in
    one stretch for each 8 KiB, at places that `seed` decides, besides the first and the last 64. A change of two whole
    stretches is always found. A region that is not mapped any more has the digest 0. Equal bytes have equal digests for
    the same `seed`, wherever they are in memory, in every process and on every host: docs/format.md has the definition.

    addresses and nbytes are uint64 [n] numpy arrays; the caller keeps the memory.
    """

def probe_io_uring() -> str:
    """Return an empty string when an io_uring can be made here, else the reason why not, as one sentence."""

def pack_block(
    data: Any, *, itemsize: int, transforms: Sequence[int], base: object | None = None, may_index: bool = False
) -> bytes:
    """Return a packed block (docs/format.md) of a buffer of elements of `itemsize` (1, 2, 4 or 8) bytes; the last one
    may be cut off.

    transforms: what each element may become before it is cut into planes: 0 itself; 1 rotated left by a bit; 2 XOR with
    the base's element; 3 the same, rotated; 4 the zigzag difference of both as integers. Of those given the one is
    taken that makes a sample smallest, about. base: for 2 to 4, a buffer of the same size. may_index: float32 numbers
    of few mantissas are indexed where that makes them smaller (5). ValueError names what does not fit.
    """

class ParallelPacker:
    """Packs many blocks in several threads at once: the calling one, and others that end with the call.

    Any thread may use it: a call waits for those of other threads to end. A forked child needs one of its own.
    """
    def __init__(self, *, threads: int) -> None:
        """ValueError for 0 threads. There are fewer where the host gives no more."""

    def pack(self, blocks: Sequence[tuple[Any, int]], *, into: Any, team: int = 0) -> list[tuple[int, bytes]]:
        """Write the packed blocks of buffers, each given with the bytes of its elements, to a writable buffer, one
        behind the other; return the size and the checksum of each. They are those that `pack_block` makes without a
        base, of the transforms 0 and 1, where it may index. ValueError for other elements, and unless there is room for
        all bytes of the buffers, and for each for 11 and 9 times the bytes of an element.

        team: of how many threads the parallel regions of OpenMP are that the calling thread has had. Then its threads
        pack, which would wait actively for the next region, and no other ones are started; where GNU's OpenMP is not
        loaded, as PyTorch loads it, and for 0, other ones do. A thread that has had none must leave it out: a second
        team makes OpenMP put the threads of the first one to sleep between its regions.
        """

def join_planes(planes: Sequence[Any], *, into: Any, transform: int, base: object | None = None) -> None:
    """Write to `into` the elements of which these are the planes (1, 2, 4 or 8 buffers, the least significant first),
    and undo the transform of `pack_block`, bit for bit. A plane of a single byte stands for one all of whose bytes are
    this one. ValueError names what does not fit.
    """

def join_indexed(indices: Any, exponents: Any, *, mantissas: Any, into: Any) -> None:
    """Write to `into` the float32 numbers of an indexed block (docs/format.md): `mantissas` are uint32, and the planes
    are a fourth of it each, or a single byte that stands for one all of whose bytes are this one. ValueError names what
    does not fit, and an index behind the last mantissa; then `into` holds anything.
    """

def spread_quads(quads: Any, *, others: Any, into: Any) -> int:
    """Write to `into` the bytes of which four are a quad each (docs/format.md), and take those that are 3 or more from
    `others`, in order. Return how many others the quads ask for: where there are not as many, `into` holds anything.
    ValueError when the quads are not a fourth of it, rounded up.
    """

def probe_file_system(directory: str) -> dict[str, Any]:
    """Return what the file system of a folder supports, probed with a temporary file that is removed again.

    Keys: type (str), direct (bool: O_DIRECT is accepted), memory_align, offset_align (of O_DIRECT, in bytes; 0:
    unknown), block_bytes (st_blksize), place_align (the modulus for congruent placement: a power of two, no less than
    the page size, both alignments, and st_blksize up to 64 KiB), reason (str, why not direct; empty when direct).
    OSError when no file can be made there.
    """

class Statistics:
    """Statistics of a run of elements. Runs of one tensor, cut apart anywhere, merge exactly: counts and `exponents`
    add, the least of the minima and the largest of the maxima hold, and sums and sketches add up to float64 rounding.
    `checksum` alone is of this run only. docs/sketches.md has every definition.
    """
    @property
    def count(self) -> int:
        """Number of elements: nan + inf + zeros + exponents.sum()."""
    @property
    def nan(self) -> int:
        """Number of NaN elements."""
    @property
    def inf(self) -> int:
        """Number of infinite elements of either sign."""
    @property
    def zeros(self) -> int:
        """Number of zeros of either sign."""
    @property
    def min(self) -> float | None:
        """Least element, Inf included; None when there is none but NaN. Zero has no sign."""
    @property
    def max(self) -> float | None:
        """Largest element, Inf included; None when there is none but NaN. Zero has no sign."""
    @property
    def sum(self) -> float:
        """Sum of the finite elements, added in float64; Inf or NaN where F64 exceeds its range."""
    @property
    def sum_of_squares(self) -> float:
        """Squares of the finite elements, added in float64: the square of the norm. Inf where F64 exceeds its range."""
    @property
    def exponents(self) -> Any:
        """uint64 [64]: bin i counts finite non-zero elements with 2**(i-52) <= |x| < 2**(i-51); the first bin has all
        below, the last all above. The array is a view that keeps these statistics alive.
        """
    @property
    def sketch(self) -> Any:
        """float64 [buckets]: linear in the elements; a NaN or Inf counts as 0. A view as well."""
    @property
    def checksum(self) -> bytes:
        """XXH3-128 of the run's bytes, as the function `checksum` returns it, computed from the very bytes that were
        counted.
        """

def statistics(
    data: Any, dtype: str, *, start: int = 0, key: int = 0, buckets: int = 256, kernel: str = ""
) -> Statistics:
    """Return statistics, sketch and checksum of a contiguous buffer at any address, in one pass.

    data: its bytes are elements of `dtype`, named as in the format (F32, BF16, I64, BOOL, ...), little-endian; integers
    and BOOL (1 where the byte is not 0) count as their value in float64. The caller keeps the bytes from changing.
    start: index of the first element in the flattened logical tensor. key: 64 bits that stand for the tensor's name and
    kind; only sketches of equal key and buckets compare. buckets: a power of two from 16 to 2**20, or 0 for no sketch.
    kernel: one of `statistics_kernels`, or "" for the fastest. ValueError names the argument that does not fit.
    """

def statistics_kernels() -> list[str]:
    """Return the kernels that this processor runs, of "avx512", "avx2" and "portable", the fastest first and "portable"
    last. All give the same counts; their sums differ only by rounding.
    """
