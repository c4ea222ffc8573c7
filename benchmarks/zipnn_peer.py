"""ZipNN among the codecs of `packing`, from the folder that `make bench-zipnn` fills."""

import sys
from pathlib import Path

from benchmarks.peers import UnavailableError

__all__ = ["ZipNN"]

FOLDER = Path(__file__).parent.parent / ".zipnn"


class ZipNN:
    """Packs alone, in the dtype that the bytes of an element suggest."""

    name = "ZipNN"

    def __init__(self) -> None:
        if not FOLDER.exists():
            raise UnavailableError("not installed: make bench-zipnn")
        sys.path.append(str(FOLDER))
        try:
            import zipnn
        except ImportError as error:
            raise UnavailableError(f"does not import: {error}") from error
        finally:
            sys.path.remove(str(FOLDER))
        dtypes = {2: "bfloat16", 4: "float32"}
        self._by_size = {
            size: zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte", threads=1) for size, dtype in dtypes.items()
        }

    def encode(self, raw: bytes, base: bytes | None, itemsize: int) -> bytes:
        # It changes what it is given.
        return bytes([itemsize]) + self._by_size[itemsize].compress(bytearray(raw))

    def decode(self, content: bytes, base: bytes | None, nbytes: int) -> bytes:
        return bytes(self._by_size[content[0]].decompress(content[1:]))
