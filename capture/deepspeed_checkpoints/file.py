"""One checkpoint tree in one file, laid out like a data file of a history, with its checksums and its tree inside.

It is a safetensors file. The entries `state/...` are the tensors. The last entry, `object/tree`, is JSON: {"checksums":
the XXH3-128 of each tensor entry, "tree": the JSON tree}. The metadata hold two more checksums: that of `object/tree`,
and that of the header itself, computed with zeros in its own place. So every byte that matters is covered, and any
reader of safetensors can open the tensors. The file exists under its name only when it is whole and durable.
"""

import errno
import json
import math
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

import native
from capture.changes.change_detector import ChangeDetector, Comparison
from capture.data_file.data_file import PlacedObject, make_trailer
from capture.data_file.parts import HUGE
from capture.data_file.plan import Plan, make_plan
from capture.deepspeed_checkpoints.tree import CheckpointTree
from capture.devices.copies import CUDA, DeviceCopier
from capture.devices.feed import Copies, FeedTake, NoCopies
from capture.state.dtypes import torch_dtype
from capture.state.interface import TensorItem
from capture.state.objects import EncodedObject
from catalog.data_files.pieces import Piece
from catalog.data_files.stored_bytes import read_to
from catalog.disk.durable import publish, temporary_path
from catalog.errors import CorruptError, FormatError, SnapshotError
from catalog.format.header import Entry, Header, encode_header, entries_json, parse_header, read_header
from catalog.records import CHECKSUM_BYTES

__all__ = ["FileWrite", "is_tree_file", "map_tree", "read_tree"]

_FORMAT = "dshistory-state-1"
_TREE = "object/tree"
_NO_CHECKSUM = "0" * (2 * CHECKSUM_BYTES)


@dataclass(eq=False)
class FileWrite:
    """A file that is being written.

    Until it is finished or aborted, it keeps every storage alive that the writer may still read.
    """

    final: Path
    tree: Any
    plan: Plan
    tmp: Path
    job: native.WriteJob
    copies: Copies
    change_detector: ChangeDetector
    _checking: threading.Lock = field(default_factory=threading.Lock)
    _comparison: Comparison | None = None

    @classmethod
    def start(
        cls,
        state: CheckpointTree,
        final: Path,
        *,
        writer: native.Writer,
        lazy_storages: frozenset[int],
        align: int,
        copies: DeviceCopier = CUDA,
    ) -> Self:
        """Begin to write the current content of `state` to `final`.

        Tensors in `lazy_storages`, given by their data pointers, are read from their own memory until `release`; all
        others are copied before this returns. `align` is the placement alignment of the file system in bytes. OSError
        when the file can't be created; UnsupportedError names a tensor that can't be stored.
        """
        items = [
            TensorItem(
                name, "state", tuple(tensor.shape), tensor, placement="rank_local", when=_when(tensor, lazy_storages)
            )
            for name, tensor in state.tensors.items()
        ]
        # The tree is encoded only at the end, since it holds the checksums; the header reserves the longest possible
        # entry.
        reserve = [Entry(_TREE, "U8", (HUGE,), HUGE, HUGE)]
        plan = make_plan(items, rank=0, world_size=1, align=align, reserve=reserve, copies=copies)
        change_detector = ChangeDetector(plan.watched)
        # Before the job starts, and on this thread: the copies must be queued on the device before anything that could
        # overwrite the tensors.
        taken = None
        if plan.fed_parts:
            offsets, parts = zip(*plan.fed_parts, strict=True)
            taken = FeedTake(parts, offsets, end=plan.data_end, writer=writer, copies=copies)
        tmp = temporary_path(final)
        job = writer.start(plan.write, str(tmp))
        return cls(final, state.json, plan, tmp, job, NoCopies() if taken is None else taken.feed(job), change_detector)

    @property
    def live_bytes(self) -> int:
        """The bytes that are read from the training's own memory after `start`."""
        return sum(part.nbytes for part in self.plan.live_parts)

    def release(self) -> None:
        """Return once the training may write to all memory of the state again. This is the barrier.

        Never raises for an I/O failure, which `finish` reports.
        """
        self.copies.wait()
        self.job.release()
        self._compare(self.change_detector.compare)

    def finish(self) -> None:
        """Wait for the data, write the header and the tree, and publish the file.

        OSError for an I/O failure; SnapshotError names tensors that were written to before `release`. After either the
        file can only be aborted.
        """
        self._wait()
        checksums = self.job.checksums()
        self._require_unchanged()
        header, tail = self._ends(checksums)
        self.job.finish(header=header, trailer=tail)
        publish(self.tmp, self.final)

    def abort(self) -> None:
        """Stop writing and remove the file. When it returns, no memory of the state is read any more. Idempotent."""
        self.job.abort()
        self.copies.wait()
        self.tmp.unlink(missing_ok=True)

    def _wait(self) -> None:
        try:
            self.job.wait()
        except OSError as error:
            if error.errno == errno.EFAULT:
                # The writer knows only the address of memory that is gone; the check knows the name of the tensor.
                self._require_unchanged()
            if self.copies.failure is None:
                raise
            raise SnapshotError(f"{self.final}: its device tensors can't be copied: {self.copies.failure}") from error

    def _ends(self, checksums: bytes) -> tuple[bytes, bytes]:
        by_key = {
            part.key: checksums[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)].hex()
            for i, part in enumerate(self.plan.parts)
        }
        content = json.dumps({"checksums": by_key, "tree": self.tree}, separators=(",", ":"), allow_nan=False).encode()
        objects = [PlacedObject(EncodedObject("tree", content), "rank_local")]
        tail = make_trailer(objects, self.plan, file=self.final.name)
        fragments = [self.plan.header_json, entries_json(tail.entries)]
        metadata = {"format": _FORMAT, "tree": native.checksum(content).hex(), "header": _NO_CHECKSUM}
        # The header's checksum is computed while its own field is zeros. It then replaces them: the length stays the
        # same.
        blank = encode_header(fragments, metadata=metadata, data_start=self.plan.data_start)
        metadata["header"] = native.checksum(blank).hex()
        return encode_header(fragments, metadata=metadata, data_start=self.plan.data_start), tail.data

    def _compare(self, compare: Callable[[], Comparison]) -> Comparison:
        # Looked for once, and then remembered: either the barrier comes first, after which the training may write and a
        # second look would blame it, or the save thread has finished reading before the barrier.
        with self._checking:
            if self._comparison is None:
                self._comparison = compare()
            return self._comparison

    def _require_unchanged(self) -> None:
        changed = self._compare(self.change_detector.compare_beside).changed()
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise SnapshotError(
                f"{self.final}: {', '.join(changed[:3])}{more} was written to, or freed, after save_checkpoint and "
                "before the next update, while it was being read; edit after engine.checkpoint_engine.release(), or "
                "install with lazy=False"
            )


def _when(tensor: torch.Tensor, lazy_storages: frozenset[int]) -> Any:
    return "lazy" if tensor.numel() and tensor.untyped_storage().data_ptr() in lazy_storages else "eager"


def is_tree_file(path: Path) -> bool:
    """Return whether the first bytes of the file show this module's format. OSError when it can't be read."""
    with path.open("rb") as file:
        head = file.read(4096)
    return f'"format":"{_FORMAT}"'.encode() in head


def read_tree(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON tree of a file, and its tensors in host memory, for `decode_tree`.

    Everything is verified: CorruptError when a checksum does not match, FormatError when the file is malformed.
    """
    header = _checked_header(path)
    content = _content(path, header)
    entries = [entry for entry in header.entries if entry.key.startswith("state/")]
    tensors = {entry.key: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype)) for entry in entries}
    full = [entry for entry in entries if entry.end > entry.begin]
    pieces = [Piece(path.name, header.data_start + entry.begin, entry.end - entry.begin) for entry in full]
    digests = read_to(path.parent, pieces, [tensors[entry.key].data_ptr() for entry in full])
    for i, entry in enumerate(full):
        _require_checksum(
            path,
            entry.key,
            content["checksums"].get(entry.key),
            digests[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)].hex(),
        )
    return content["tree"], {key.removeprefix("state/"): tensor for key, tensor in tensors.items()}


def map_tree(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what `read_tree` returns, with tensors in the file's own pages, which take no memory of the process.

    Every byte is verified at the call, and read again where a tensor is used. Writing to a tensor changes only this
    process's copy of its pages. Raises what `read_tree` raises.
    """
    header = _checked_header(path)
    content = _content(path, header)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {}
    for entry in header.entries:
        if not entry.key.startswith("state/"):
            continue
        dtype, begin = torch_dtype(entry.dtype), header.data_start + entry.begin
        if entry.end == entry.begin:
            made = torch.empty(entry.shape, dtype=dtype)
        else:
            data = memoryview(pages)[begin : header.data_start + entry.end]
            _require_checksum(path, entry.key, content["checksums"].get(entry.key), native.checksum(data).hex())
            made = torch.frombuffer(pages, dtype=dtype, count=math.prod(entry.shape), offset=begin).view(entry.shape)
        tensors[entry.key.removeprefix("state/")] = made
    return content["tree"], tensors


def _checked_header(path: Path) -> Header:
    header = read_header(path)
    with path.open("rb") as file:
        raw = file.read(header.data_start)
    expected = str(header.metadata.get("header"))
    blank = raw.replace(f'"header":"{expected}"'.encode(), f'"header":"{_NO_CHECKSUM}"'.encode(), 1)
    _require_checksum(path, "the header", expected, native.checksum(blank).hex())
    # Parsed again from the bytes that were verified: the file may have changed since the first read.
    return parse_header(raw[8:], file_bytes=path.stat().st_size, path=path)


def _content(path: Path, header: Header) -> dict[str, Any]:
    entry = next((entry for entry in header.entries if entry.key == _TREE), None)
    if header.metadata.get("format") != _FORMAT or entry is None:
        raise FormatError(f"{path}: field format: {header.metadata.get('format')!r} with no tree; expected {_FORMAT!r}")
    with path.open("rb") as file:
        file.seek(header.data_start + entry.begin)
        data = file.read(entry.end - entry.begin)
    _require_checksum(path, _TREE, header.metadata.get("tree"), native.checksum(data).hex())
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: field tree: not readable as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("checksums"), dict) or "tree" not in content:
        raise FormatError(f"{path}: field tree: must be an object with checksums and tree")
    return content


def _require_checksum(path: Path, what: str, expected: str | None, found: str) -> None:
    if expected != found:
        raise CorruptError(f"{path}: {what}: the file's checksum is {expected}, the bytes give {found}: it is damaged")
