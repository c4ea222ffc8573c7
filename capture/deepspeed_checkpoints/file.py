"""One state in one file: laid out and written like a data file of a history, but with its checksums and its tree inside.

A safetensors file whose entries `state/...` are the tensors and whose last entry, `object/tree`, is JSON: {"checksums": the XXH3-128 of each
tensor entry, "tree": the state}. The metadata carry the tree's checksum and, over the header with zeros in its place, the header's own.
It exists under its name only whole and durable.
"""

import errno
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

import native
from capture.deepspeed_checkpoints.tree import StateTree
from capture.snapshot.change_detector import Witness
from capture.snapshot.data_file import PlacedObject, make_tail
from capture.snapshot.device_copies import CUDA, CopyEngine
from capture.snapshot.device_feed import Copies, DeviceTake, NoCopies
from capture.snapshot.plan import Plan, make_plan
from capture.state.dtypes import torch_dtype
from capture.state.interface import TensorItem
from capture.state.objects import EncodedObject
from catalog.disk.durable import publish, temporary_path
from catalog.errors import CorruptError, FormatError, SnapshotError
from catalog.format.header import Entry, Header, encode_header, entries_json, parse_header, read_header
from catalog.records import CHECKSUM_BYTES

__all__ = ["StateWrite", "is_state_file", "read_tree"]

_FORMAT = "dshistory-state-1"
_TREE = "object/tree"
_NO_DIGEST = "0" * (2 * CHECKSUM_BYTES)
_HUGE = 1 << 50


@dataclass(eq=False)
class StateWrite:
    """A file being written. It holds every storage that the writer may still read until it is finished."""

    final: Path
    tree: Any
    plan: Plan
    tmp: Path
    job: native.WriteJob
    copies: Copies
    witness: Witness
    _judging: threading.Lock = field(default_factory=threading.Lock)
    _touched: list[str] | None = None

    @classmethod
    def start(
        cls,
        state: StateTree,
        final: Path,
        *,
        writer: native.Writer,
        steady: frozenset[int],
        align: int,
        copies: CopyEngine = CUDA,
    ) -> Self:
        """Begin to write `state` as it is now. Tensors in the storages `steady` (their addresses) are read until `release`,
        all others are copied before this returns. OSError when the file can't be made, UnsupportedError by name.
        """
        items = [
            TensorItem(name, "state", tuple(tensor.shape), tensor, placement="rank_local", when=_when(tensor, steady))
            for name, tensor in state.tensors.items()
        ]
        reserve = [Entry(_TREE, "U8", (_HUGE,), _HUGE, _HUGE)]
        plan = make_plan(items, rank=0, world_size=1, align=align, reserve=reserve, copies=copies)
        witness = Witness(plan.live_items)
        taken = None
        if plan.device_parts:
            offsets, parts = zip(*plan.device_parts, strict=True)
            taken = DeviceTake(parts, offsets, end=plan.data_end, writer=writer, copies=copies)
        tmp = temporary_path(final)
        job = writer.start(plan.write, str(tmp))
        return cls(final, state.tree, plan, tmp, job, NoCopies() if taken is None else taken.feed(job), witness)

    @property
    def live_bytes(self) -> int:
        """Bytes that are read from the training's own memory after `start`."""
        return sum(part.nbytes for part in self.plan.live_parts)

    def release(self) -> None:
        """The barrier: return once no live byte is needed any more. Never raises for an I/O failure: `finish` does."""
        self.copies.wait()
        self.job.release()
        self._judge()

    def finish(self) -> None:
        """Wait for the data, write the ends, publish. OSError, or SnapshotError that names tensors which were written to
        too early; then the file can only be aborted.
        """
        self._wait()
        checksums = self.job.checksums()
        self._require_intact()
        header, tail = self._ends(checksums)
        self.job.finish(header=header, trailer=tail)
        publish(self.tmp, self.final)

    def abort(self) -> None:
        """Stop, and remove the file; nothing is read any more. Idempotent."""
        self.job.abort()
        self.copies.wait()
        self.tmp.unlink(missing_ok=True)

    def _wait(self) -> None:
        try:
            self.job.wait()
        except OSError as error:
            if error.errno == errno.EFAULT:
                # The writer knows an address; whose memory it was stands in the plan.
                self._require_intact()
            if self.copies.failure is None:
                raise
            raise SnapshotError(f"{self.final}: its device tensors can't be copied: {self.copies.failure}") from error

    def _ends(self, checksums: bytes) -> tuple[bytes, bytes]:
        digests = {
            part.key: checksums[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)].hex()
            for i, part in enumerate(self.plan.parts)
        }
        content = json.dumps({"checksums": digests, "tree": self.tree}, separators=(",", ":"), allow_nan=False).encode()
        objects = [PlacedObject(EncodedObject("tree", content), "rank_local")]
        tail = make_tail(objects, self.plan, file=self.final.name)
        fragments = [self.plan.header_json, entries_json(tail.entries)]
        metadata = {"format": _FORMAT, "tree": native.checksum(content).hex(), "header": _NO_DIGEST}
        unsealed = encode_header(fragments, metadata=metadata, data_start=self.plan.data_start)
        metadata["header"] = native.checksum(unsealed).hex()
        return encode_header(fragments, metadata=metadata, data_start=self.plan.data_start), tail.data

    def _judge(self) -> list[str]:
        # At the barrier the training thread has looked, and afterwards the next update may write.
        with self._judging:
            if self._touched is None:
                self._touched = self.witness.moved()
            return self._touched

    def _require_intact(self) -> None:
        touched = self._judge()
        if touched:
            more = f" and {len(touched) - 3} more" if len(touched) > 3 else ""
            raise SnapshotError(
                f"{self.final}: {', '.join(touched[:3])}{more} was written to, or freed, after save_checkpoint and before the next "
                "update, while it was being read; edit after engine.checkpoint_engine.release(), or install with lazy=False"
            )


def _when(tensor: torch.Tensor, steady: frozenset[int]) -> Any:
    return "lazy" if tensor.numel() and tensor.untyped_storage().data_ptr() in steady else "eager"


def is_state_file(path: Path) -> bool:
    """Whether the file is one of ours, by its first bytes. OSError when it can't be read."""
    with path.open("rb") as file:
        head = file.read(4096)
    return f'"format":"{_FORMAT}"'.encode() in head


def read_tree(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The JSON tree of a file and its tensors, in host memory, everything verified. FormatError, CorruptError."""
    header = _checked_header(path)
    content = _content(path, header)
    entries = [entry for entry in header.entries if entry.key.startswith("state/")]
    tensors = {entry.key: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype)) for entry in entries}
    full = [entry for entry in entries if entry.end > entry.begin]
    digests = native.read(
        [str(path)],
        file_index=np.zeros(len(full), dtype=np.uint32),
        offsets=np.array([header.data_start + entry.begin for entry in full], dtype=np.uint64),
        addresses=np.array([tensors[entry.key].data_ptr() for entry in full], dtype=np.uint64),
        nbytes=np.array([entry.end - entry.begin for entry in full], dtype=np.uint64),
    )
    for i, entry in enumerate(full):
        _require(
            path,
            entry.key,
            content["checksums"].get(entry.key),
            digests[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)].hex(),
        )
    return content["tree"], {key.removeprefix("state/"): tensor for key, tensor in tensors.items()}


def _checked_header(path: Path) -> Header:
    header = read_header(path)
    with path.open("rb") as file:
        raw = file.read(header.data_start)
    expected = str(header.metadata.get("header"))
    unsealed = raw.replace(f'"header":"{expected}"'.encode(), f'"header":"{_NO_DIGEST}"'.encode(), 1)
    _require(path, "the header", expected, native.checksum(unsealed).hex())
    # What was read for the check is what counts.
    return parse_header(raw[8:], file_bytes=path.stat().st_size, path=path)


def _content(path: Path, header: Header) -> dict[str, Any]:
    entry = next((entry for entry in header.entries if entry.key == _TREE), None)
    if header.metadata.get("format") != _FORMAT or entry is None:
        raise FormatError(f"{path}: field format: {header.metadata.get('format')!r} with no tree; expected {_FORMAT!r}")
    with path.open("rb") as file:
        file.seek(header.data_start + entry.begin)
        data = file.read(entry.end - entry.begin)
    _require(path, _TREE, header.metadata.get("tree"), native.checksum(data).hex())
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: field tree: not readable as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("checksums"), dict) or "tree" not in content:
        raise FormatError(f"{path}: field tree: must be an object with checksums and tree")
    return content


def _require(path: Path, what: str, expected: str | None, found: str) -> None:
    if expected != found:
        raise CorruptError(f"{path}: {what}: the file's checksum is {expected}, the bytes give {found}: it is damaged")
