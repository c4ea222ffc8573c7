"""What capturing has cost so far."""

from dataclasses import dataclass, field

__all__ = ["SessionStats"]


@dataclass(slots=True)
class SessionStats:
    """What capturing cost so far. Seconds of the training thread, all waits included; bytes of this rank's files, and those
    that were unchanged and are referred to in earlier files.
    """

    snapshots: int = 0
    skipped: int = 0
    failed: int = 0
    bytes: int = 0
    unchanged_bytes: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list, repr=False)

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the writer while it wrote."""
        return self.bytes / self.write_s if self.write_s else 0.0
