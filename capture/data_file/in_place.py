"""The memory that a snapshot is written from where it is, and what of it has changed between two snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["InPlace"]


@dataclass(frozen=True, slots=True, eq=False)
class InPlace:
    """Regions of memory that are written from where they are: nbytes[i] at addresses[i], both uint64 [n], and the
    checksum of each as V16 [n].
    """

    addresses: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.void]

    def changed_since(self, before: "InPlace") -> npt.NDArray[np.bool_]:
        """Return for each region whether it was there `before`, with another content."""
        if np.array_equal(self.addresses, before.addresses) and np.array_equal(self.nbytes, before.nbytes):
            changed: npt.NDArray[np.bool_] = self.checksums != before.checksums
            return changed
        then = dict(before._contents())
        return np.array([then.get(place, content) != content for place, content in self._contents()], np.bool_)

    def _contents(self) -> Iterator[tuple[tuple[int, int], bytes]]:
        places = zip(self.addresses.tolist(), self.nbytes.tolist(), strict=True)
        return zip(places, self.checksums.tolist(), strict=True)
