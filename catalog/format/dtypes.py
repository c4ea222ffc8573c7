"""The element types that a history stores, with their sizes, and the largest number of dimensions of a tensor."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["DTYPES", "MAX_DIMENSIONS", "ROUNDED_DTYPES", "ROUNDED_FROM"]

DTYPES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
        "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
        "U32": 4, "I32": 4, "F32": 4,
        "U64": 8, "I64": 8, "F64": 8,
    }
)  # fmt: skip
"""The name of each dtype, as safetensors spells it, and the bytes that one element takes."""

ROUNDED_FROM = "F32"
"""The dtype of numbers of which those of a codec `rounded` are made."""

ROUNDED_DTYPES = ("BF16", "F16")
"""The dtypes that they are rounded to."""

MAX_DIMENSIONS = 64
"""A header or manifest with a longer shape is refused, so a hostile file can't make the product of a shape
expensive."""
