"""Bytes and file descriptors: the asynchronous writer, the parallel reader, checksums and probes. Knows no torch.

Everything that can block releases the GIL; the core's own threads never take it. Failures of input and output are
`OSError` with errno and file name, and the operation and offset in the message.
"""

from native._core import (
    Engine,
    Faults,
    Feed,
    WriteJob,
    WritePlan,
    checksum,
    checksum_memory,
    probe_file_system,
    probe_io_uring,
    read,
)

__all__ = [
    "Engine",
    "Faults",
    "Feed",
    "WriteJob",
    "WritePlan",
    "checksum",
    "checksum_memory",
    "probe_file_system",
    "probe_io_uring",
    "read",
]
