"""Decompresses the frames of Zstandard that the native code makes of byte planes.

Each thread keeps its decompressor: to make one anew for each plane takes longer than to decode many a plane.
"""

import threading

import zstandard

from catalog.errors import FormatError

__all__ = ["decompressed"]


class _Decompressor(threading.local):
    """Holds the decompressor of each thread."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor()


_decompressor = _Decompressor()


def decompressed(content: memoryview, *, nbytes: int) -> bytes:
    """Return the bytes of a frame. FormatError, before memory is taken for them, unless it says that it stands for so
    many; and when it is damaged."""
    try:
        found = zstandard.frame_content_size(content)
        if found != nbytes:
            raise FormatError(f"packed block: a plane of {nbytes} bytes is a frame of {found}")
        return _decompressor.zstd.decompress(content, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"packed block: a plane can't be decompressed: {error}") from error
