"""What a fuzzed reader is: inputs that are made by chance, and the function that reads them."""

from collections.abc import Callable
from dataclasses import dataclass

from damage import Chance

__all__ = ["Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """One reader: `read` takes a damaged input, `make` makes one by chance."""

    name: str
    weight: int
    make: Callable[[Chance], bytes]
    read: Callable[[bytes], object]
