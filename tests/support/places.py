"""Where the project's own files are, for tests that read or run them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
"""Programs that tests start, and modules that such programs import."""

MULTI_RANK = ROOT / "tests" / "multi_rank"
GOLDEN = ROOT / "tests" / "golden" / "format-1"
