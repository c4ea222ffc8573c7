"""Keeps what a State Provider has listed from one step to the next, and tells whether it would list the same now."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from capture.changes.change_detector import addresses_of
from capture.changes.kept_items import all_alive, keep_weakly
from capture.state.interface import Fingerprinted, Rooted

__all__ = ["Listed"]


class Listed:
    """The tensors that a provider has listed, kept weakly, with their fingerprint."""

    def __init__(self, provider: Fingerprinted) -> None:
        # Tensors before the fingerprint: state that can't be listed is refused by name there.
        self.items = keep_weakly(provider.tensors())
        self.fingerprint = provider.fingerprint()
        self._rooted = provider if isinstance(provider, Rooted) else None
        self._roots = self._read_roots()

    def is_rooted_as_before(self) -> bool:
        """Return whether the provider finds its tensors through the same objects, among others the same tensor objects,
        so that only these are to be looked at for what has moved. False for one that is not asked after every step.
        """
        return self._rooted is not None and self._roots == self._read_roots()

    def is_current(self, provider: Fingerprinted) -> bool:
        """Return whether `provider` would list the same memory in the same form. If so, the objects through which it
        finds it now are those that `is_rooted_as_before` compares with from now on.
        """
        if self.fingerprint != provider.fingerprint() or not all_alive(self.items):
            return False
        self._roots = self._read_roots()
        return True

    def _read_roots(self) -> tuple[bytes, bytes]:
        if self._rooted is None:
            return b"", b""
        holders, behind = self._rooted.roots()
        return _pointers(holders), addresses_of(behind).tobytes()


def _pointers(objects: Iterable[Any]) -> bytes:
    """Return the identities of the `objects`, three times as fast as `id` does."""
    # The elements of an array of objects are pointers.
    return np.fromiter(objects, object).tobytes()
