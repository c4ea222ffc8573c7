"""Which low-precision weights are expected to be their masters, rounded: a sample predicts it, and the comparison of
all bits decides.

A weight that has not been compared yet, or was found to differ, is sampled at the step; one whose sample differs gets a
place in the plan, and is not compared. One that differs again and again (weights that are rounded stochastically, or
masters in another layout) is left alone for a while, each time for longer: a single time may be an edit, or an
optimizer that fills its masters in its first update.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

import native
from capture.data_file.derivable import Derivable
from capture.devices.rounded_weights import samples_are_rounded

__all__ = ["RoundingExpectation"]

_MISSES_IN_A_ROW = 2
"""So many times a weight differs before it is left alone."""

_LONGEST_PAUSE = 256


class RoundingExpectation:
    """Learns from snapshots which weights are their masters, rounded. Thread-safe.

    `underived` are the keys of those that are not expected to be. It is replaced, never changed, and stays the same set
    as long as the expectation does: a plan is kept with it.
    """

    def __init__(self) -> None:
        self.underived: frozenset[str] = frozenset()
        self._changing = threading.Lock()
        self._snapshots = 0
        self._proved: set[str] = set()
        self._misses: Counter[str] = Counter()
        self._left_until: dict[str, int] = {}

    def look(self, paired: Sequence[Derivable]) -> bool:
        """Sample the weights of a snapshot that have not proved to be their masters, rounded. Return whether others are
        expected to be now: then the plan is to be made anew. To be called at the step: it waits for a device that has
        to sample, which happens until all of a weight was compared.
        """
        with self._changing:
            self._snapshots += 1
            asked = [one for one in paired if one.part.key not in self._proved and self._is_due(one.part.key)]
            found = dict(_samples(asked))
            differing = {key for key, is_rounded in found.items() if not is_rounded}
            for key in differing:
                self._missed(key)
            return self._expect((self.underived - found.keys()) | differing)

    def learn(self, *, equal: Iterable[str], differing: Iterable[str]) -> None:
        """Learn from a snapshot that was published which of its weights were their masters, rounded, bit for bit."""
        with self._changing:
            for key in equal:
                self._proved.add(key)
                self._misses.pop(key, None)
            for key in differing:
                self._proved.discard(key)
                self._missed(key)
            self._expect(self.underived | {key for key in differing if not self._is_due(key)})

    def _is_due(self, key: str) -> bool:
        return self._left_until.get(key, 0) <= self._snapshots

    def _missed(self, key: str) -> None:
        self._misses[key] += 1
        if self._misses[key] >= _MISSES_IN_A_ROW:
            self._left_until[key] = self._snapshots + min(_LONGEST_PAUSE, 2 ** self._misses[key])

    def _expect(self, underived: frozenset[str]) -> bool:
        if underived == self.underived:
            return False
        self.underived = underived
        return True


def _samples(pairs: Sequence[Derivable]) -> Iterator[tuple[str, bool]]:
    """Yield the key of every weight, and whether its sample is that of its master, rounded."""
    on_device = [one for one in pairs if one.part.device is not None]
    found = samples_are_rounded([one.elements() for one in on_device])
    yield from ((one.part.key, is_rounded) for one, is_rounded in zip(on_device, found, strict=True))
    in_host = [one for one in pairs if one.part.device is None]
    for dtype in {one.part.dtype for one in in_host}:
        alike = [one for one in in_host if one.part.dtype == dtype]
        same = native.samples_are_rounded(
            masters=np.array([one.master_address for one in alike], dtype=np.uint64),
            weights=np.array([one.part.address for one in alike], dtype=np.uint64),
            numel=np.array([one.part.numel for one in alike], dtype=np.uint64),
            dtype=dtype,
        )
        yield from ((one.part.key, bool(each)) for one, each in zip(alike, same, strict=True))
