"""Values for people: bytes, seconds, shares and numbers, in as few characters as tell them apart.

Nothing here is parsed again: exact values stay in the Arrow table behind what is shown.
"""

import datetime
import math
from typing import Literal

__all__ = ["Format", "counted", "text_of"]

Format = Literal["auto", "bytes", "seconds", "share", "number", "cosine", "shape", "known"]

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def text_of(value: object, form: Format = "auto") -> str:
    """One value as one line of printable text; unknown (None) is the empty string, or a question mark where people look
    for a word.

    Control characters become escapes, so that a name from a history can neither break a table nor steer a terminal.
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
    """A number of things."""
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
    """Percent; a share that is neither none nor all never reads as 0 % or 100 %."""
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
