"""Bytes and file descriptors: the asynchronous writer, the parallel reader, checksums, rounding, byte planes,
statistics, probes.

Imports no torch. Everything that can block releases the GIL, and the core's own threads never take it. A failed system
call raises `OSError` with errno and file name, and with the operation and offset in the message.
"""

from native._core import (
    SAMPLED_WHOLE_BYTES,
    Appendix,
    Faults,
    Feed,
    RoundedComparison,
    RunningChecksum,
    Statistics,
    WriteJob,
    WritePlan,
    Writer,
    checksum,
    checksum_memory,
    copy_memory,
    join_planes,
    probe_file_system,
    probe_io_uring,
    read,
    round_memory,
    sampled_digests,
    samples_are_rounded,
    split_planes,
    statistics,
    statistics_kernels,
)

__all__ = [
    "SAMPLED_WHOLE_BYTES",
    "Appendix",
    "Faults",
    "Feed",
    "RoundedComparison",
    "RunningChecksum",
    "Statistics",
    "WriteJob",
    "WritePlan",
    "Writer",
    "checksum",
    "checksum_memory",
    "copy_memory",
    "join_planes",
    "probe_file_system",
    "probe_io_uring",
    "read",
    "round_memory",
    "sampled_digests",
    "samples_are_rounded",
    "split_planes",
    "statistics",
    "statistics_kernels",
]
