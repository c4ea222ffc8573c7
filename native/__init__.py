"""Bytes and file descriptors: the asynchronous writer, the parallel reader, checksums, statistics and probes. Knows no torch.

Everything that can block releases the GIL; the core's own threads never take it. Failures of input and output are
`OSError` with errno and file name, and the operation and offset in the message.
"""

from native._core import (
    Engine,
    Faults,
    Feed,
    Statistics,
    WriteJob,
    WritePlan,
    checksum,
    checksum_memory,
    probe_file_system,
    probe_io_uring,
    read,
    statistics,
    statistics_kernels,
)

__all__ = [
    "Engine",
    "Faults",
    "Feed",
    "Statistics",
    "WriteJob",
    "WritePlan",
    "checksum",
    "checksum_memory",
    "probe_file_system",
    "probe_io_uring",
    "read",
    "statistics",
    "statistics_kernels",
]
