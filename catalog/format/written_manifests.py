"""The manifests that this process has written last, so that their rows need not be decoded again.

Whoever reads a manifest reads the file and its checksum all the same. When that is the checksum of bytes that were
encoded here, the rows are those that were encoded: decoding and checking them took most of the time of a registration.
"""

import os
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from catalog.format.manifest import Manifest

__all__ = ["written_manifests"]

_LIMIT_BYTES: Final = 4 << 20
_OVERHEAD_BYTES: Final = 16 << 10
"""A table takes so much beside the bytes of its columns, each of which has several allocations and objects of its
own."""


class _WrittenManifests:
    """Manifests by the checksum (16 bytes) of their file's bytes. Those written last are kept, within the limit.
    Thread-safe."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.forget()

    def forget(self) -> None:
        """Keep none of them any longer. For a forked child: a thread of its parent may hold the lock."""
        self._manifests: OrderedDict[bytes, Manifest] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, checksum: bytes, manifest: Manifest) -> None:
        """Keep a manifest, whose rows must have passed the checks of `encode_manifest`."""
        manifest = replace(manifest, table=manifest.table.combine_chunks())
        with self._lock:
            if checksum in self._manifests:
                return
            self._manifests[checksum] = manifest
            self._bytes += _taken(manifest)
            while self._bytes > self._limit_bytes:
                self._bytes -= _taken(self._manifests.popitem(last=False)[1])

    def get(self, checksum: bytes) -> Manifest | None:
        """Return the manifest whose file has this checksum; None when it is not kept."""
        with self._lock:
            return self._manifests.get(checksum)


def _taken(manifest: Manifest) -> int:
    return int(manifest.table.nbytes) + _OVERHEAD_BYTES


written_manifests: Final = _WrittenManifests(limit_bytes=_LIMIT_BYTES)


os.register_at_fork(after_in_child=written_manifests.forget)
