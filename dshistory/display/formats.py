"""Values as short text for people: bytes, seconds, shares and numbers.

No text is parsed again: the Arrow table behind a displayed one keeps the exact values.
"""

import datetime
import math
from typing import Literal

__all__ = ["Format", "counted", "text_of"]

Format = Literal["auto", "bytes", "seconds", "share", "number", "cosine", "shape", "known"]

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def text_of(value: object, form: Format = "auto") -> str:
    """Return one value as one line of printable text; unknown (None) is empty, or a question mark with the form
    "known".

    Control characters become escapes, so that a name from a history can neither break a table nor control a terminal.
    """
    if value is None:
        return "?" if form == "known" else ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _number_as(value, form)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, (list, tuple)):
        return "x".join(map(str, value)) or "scalar" if form == "shape" else ", ".join(map(text_of, value))
    return _printable(str(value))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the right number: "1 tensor", "2 tensors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _number_as(value: int | float, form: Format) -> str:
    if not math.isfinite(value):
        return str(value)
    match form:
        case "bytes":
            return _bytes(value)
        case "seconds":
            return _seconds(value)
        case "share":
            return _share(value)
        case "number":
            return f"{value:.4g}"
        case "cosine":
            return f"{value:.6f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bytes(value: int | float) -> str:
    scaled = float(value)
    for unit in _BYTE_UNITS:
        if abs(scaled) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.1f} {unit}"


def _seconds(value: int | float) -> str:
    if value != 0 and abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 600 else f"{value / 60:.1f} min"


def _share(value: int | float) -> str:
    """Return a percentage; only exactly 0 and 1 read as 0 % and 100 %."""
    percent = f"{100 * value:.1f}"
    if value > 0 and percent == "0.0":
        return "<0.1%"
    if value < 1 and percent == "100.0":
        return ">99.9%"
    return f"{percent}%"


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
