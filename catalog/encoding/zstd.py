"""Zstandard for byte planes: settings under which Huffman's code does nearly all of the work, and what each thread
keeps for it. Making a compressor anew for each plane takes longer than to code many a plane.
"""

import threading
from typing import Final, TypeAlias

import zstandard

from catalog.errors import FormatError

__all__ = ["FEW_MATCHES", "MATCHES", "Matching", "compressed", "decompressed"]

Matching: TypeAlias = int
"""How zstd looks for repetitions: the logarithm of the number of earlier places that it remembers."""

FEW_MATCHES: Final[Matching] = 6
"""Exponents repeat by chance. To say where costs more than to code them one by one, which is all that is left to do."""
MATCHES: Final[Matching] = 14
"""Runs, as of zeros, are worth finding."""


class _Compressors(threading.local):
    """What each thread has for itself to compress with."""

    def __init__(self) -> None:
        self.by_matching = {matching: _compressor(matching) for matching in (FEW_MATCHES, MATCHES)}


class _Decompressor(threading.local):
    """What each thread has for itself to decompress with."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor()


def _compressor(matching: Matching) -> zstandard.ZstdCompressor:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=matching, window_log=20)
    return zstandard.ZstdCompressor(compression_params=parameters)


_compressors = _Compressors()
_decompressor = _Decompressor()


def compressed(plane: memoryview | bytes, matching: Matching) -> bytes:
    """Return one frame, which says how many bytes it stands for."""
    return _compressors.by_matching[matching].compress(plane)


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
