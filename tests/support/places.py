"""Paths of the project's own files, for tests that read or run them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
"""The folder with programs that tests start and with modules that such programs import."""

GOLDEN = ROOT / "tests" / "golden" / "format-1"
GOLDEN_PACKED_REDO = ROOT / "tests" / "golden" / "packed-and-redo"
GOLDEN_COUNTED_TWICE = ROOT / "tests" / "golden" / "redo-counted-twice"
GOLDEN_INDEXED = ROOT / "tests" / "golden" / "redo-indexed"
