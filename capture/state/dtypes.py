"""Conversion between torch dtypes and the names that they have in the file format, which are those of safetensors."""

import torch

from catalog.errors import FormatError, UnsupportedError

__all__ = ["dtype_name", "torch_dtype"]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, *, what: str) -> str:
    """Return the format's name of `dtype`. UnsupportedError, which names `what`, when the format has none."""
    try:
        return _NAMES[dtype]
    except KeyError as error:
        raise UnsupportedError(
            f"{what} has dtype {dtype}, which the format can't hold; store it as {', '.join(_DTYPES)}"
        ) from error


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a name of the format. FormatError for a name that the format does not define."""
    try:
        return _DTYPES[name]
    except KeyError as error:
        raise FormatError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}") from error
