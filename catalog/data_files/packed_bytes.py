"""Makes the bytes of data files again from their packed images, several blocks at a time.

A block is compared with its checksum before it is unpacked, and so are the bytes of its base. A base is a data file or
a packed image, and one that needs a base itself is refused by name: a chain has one link, so a circle ends there.
"""

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import native
from catalog.data_files.data_files import image_of
from catalog.disk.regular_file import check_folders, open_descriptor, read_range
from catalog.encoding.planes import unpacked
from catalog.errors import CorruptError, FormatError
from catalog.format.packed_file import Base, Block, PackedFile, read_packed_file
from catalog.paths import packed_file

__all__ = ["Wanted", "read_images", "unpack_image"]


class Wanted(NamedTuple):
    """A range of a data file, and where in memory its bytes go."""

    file: str
    offset: int
    nbytes: int
    address: int


class _Copy(NamedTuple):
    """The bytes `[skip, skip + nbytes)` of a block, which go to an address."""

    skip: int
    nbytes: int
    address: int


class _Task(NamedTuple):
    """A block of an open image, and what is wanted of it."""

    source: "_Image"
    block: Block
    copies: Sequence[_Copy]


def read_images(root: Path, wanted: Iterable[Wanted]) -> None:
    """Write ranges of data files that are packed to their addresses; the memory there holds them until this returns.

    CorruptError names the image, or the base, that is damaged or gone, and what needs it; OSError a range that is not
    in the file, or an image that can't be opened. After an error the memory holds a mixture.
    """
    with _opened(root) as sources:
        _run(_tasks(sources, wanted))


def unpack_image(root: Path, path: Path, wanted: Sequence[Wanted]) -> None:
    """Do the same for ranges of one data file, from a packed image at any path in the history, even where the data file
    itself is there as well."""
    with _opened(root) as sources:
        for file in {one.file for one in wanted}:
            sources.use(read_packed_file(path, file=file))
        _run(_tasks(sources, wanted))


def _tasks(sources: "_Sources", wanted: Iterable[Wanted]) -> list[_Task]:
    """Return each block that has wanted bytes, once, with its bases open."""
    tasks: dict[tuple[str, int], tuple[_Image, Block, list[_Copy]]] = {}
    for one in wanted:
        source = sources.image(one.file)
        for block in source.about.covering(one.offset, one.nbytes):
            task = tasks.setdefault((one.file, block.begin), (source, block, []))
            begin, end = max(block.begin, one.offset), min(block.begin + block.nbytes, one.offset + one.nbytes)
            task[2].append(_Copy(begin - block.begin, end - begin, one.address + begin - one.offset))
            if block.base is not None:
                sources.base(block.base, needed_by=source)
    return [_Task(*task) for task in tasks.values()]


def _run(tasks: list[_Task]) -> None:
    workers = min(len(tasks), len(os.sched_getaffinity(0)))
    if workers < 2:
        for task in tasks:
            _carry_out(task)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="dshistory-unpack") as pool:
        for _ in pool.map(_carry_out, tasks):
            pass


def _carry_out(task: _Task) -> None:
    block = task.block
    first = task.copies[0]
    if len(task.copies) == 1 and first.nbytes == block.nbytes:
        task.source.unpack(block, into=_memory(first.address, first.nbytes))
        return
    whole = memoryview(bytearray(block.nbytes))
    task.source.unpack(block, into=whole)
    for copy in task.copies:
        _memory(copy.address, copy.nbytes)[:] = whole[copy.skip : copy.skip + copy.nbytes]


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class _Raw:
    """An open data file, as the base of others."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def base_bytes(self, offset: int, nbytes: int) -> bytes:
        return _read(self._path, self._descriptor, offset, nbytes)


class _Image:
    """An open packed image."""

    def __init__(self, sources: "_Sources", about: PackedFile, descriptor: int) -> None:
        self.about = about
        self._sources = sources
        self._descriptor = descriptor

    def unpack(self, block: Block, *, into: memoryview) -> None:
        """Write the bytes of a block's whole range to `into`."""
        content = _read(self.about.path, self._descriptor, block.offset, block.stored)
        actual = native.checksum(content)
        if actual != block.checksum:
            raise CorruptError(
                f"{self._place(block)}: the table's checksum is {block.checksum.hex()}, the bytes give {actual.hex()}: "
                "the file is damaged; use another step"
            )
        base = None if block.base is None else self._base_bytes(block.base, block)
        try:
            unpacked(content, base=None if base is None else memoryview(base), into=into)
        except FormatError as error:
            raise FormatError(f"{self._place(block)}: {error}") from error

    def base_bytes(self, offset: int, nbytes: int) -> bytearray:
        """Return a range that is the base of a block of another image. FormatError when it needs a base itself."""
        found = bytearray(nbytes)
        memory = memoryview(found)
        for block in self.about.covering(offset, nbytes):
            if block.base is not None:
                raise FormatError(
                    f"{self._place(block)}: needs {block.base.file}, where a base of others must need none: the file "
                    "was not made by this program"
                )
            begin, end = max(block.begin, offset), min(block.begin + block.nbytes, offset + nbytes)
            place = memory[begin - offset : end - offset]
            if len(place) == block.nbytes:
                self.unpack(block, into=place)
                continue
            whole = memoryview(bytearray(block.nbytes))
            self.unpack(block, into=whole)
            place[:] = whole[begin - block.begin : end - block.begin]
        return found

    def _base_bytes(self, base: Base, block: Block) -> bytes | bytearray:
        try:
            found = self._sources.base(base, needed_by=self).base_bytes(base.offset, block.nbytes)
        except OSError as error:
            if error.errno == errno.ESTALE:
                # It is not gone: whoever asked for these bytes opens it once more.
                raise
            raise CorruptError(f"{self._needs(base, block)}: {error.strerror}") from error
        except CorruptError as error:
            raise CorruptError(f"{self._needs(base, block)}: {error}") from error
        except FormatError as error:
            raise FormatError(f"{self._needs(base, block)}: {error}") from error
        actual = native.checksum(found)
        if actual != base.checksum:
            raise CorruptError(
                f"{self._needs(base, block)}: its checksum was {base.checksum.hex()}, now it is {actual.hex()}: "
                "the base is damaged"
            )
        return found

    def _place(self, block: Block) -> str:
        return f"{self.about.path}: bytes {block.begin} to {block.begin + block.nbytes} of the data file"

    def _needs(self, base: Base, block: Block) -> str:
        return f"{self._place(block)} need bytes {base.offset} to {base.offset + block.nbytes} of {base.file}"


class _Sources:
    """The data files and images that are open during one call, each opened once and by one thread."""

    def __init__(self, root: Path, held: ExitStack) -> None:
        self._root = root
        self._held = held
        self._images: dict[str, _Image] = {}
        self._bases: dict[str, _Raw | _Image] = {}

    def use(self, about: PackedFile) -> None:
        """Take the bytes of a data file from this image."""
        self._images[about.file] = _Image(self, about, self._open(about.path))

    def image(self, file: str) -> _Image:
        if file not in self._images:
            self.use(image_of(self._root, file))
        return self._images[file]

    def base(self, base: Base, *, needed_by: _Image) -> _Raw | _Image:
        if base.file not in self._bases:
            self._bases[base.file] = self._opened_base(base.file, needed_by)
        return self._bases[base.file]

    def _opened_base(self, file: str, needed_by: _Image) -> _Raw | _Image:
        # A data file gives way to its image, and never the other way round: in this order one of them is found.
        path = self._root / file
        check_folders(path.parent, root=self._root)
        try:
            return _Raw(path, self._open(path))
        except FileNotFoundError:
            pass
        try:
            return self.image(file)
        except FileNotFoundError as error:
            raise CorruptError(
                f"{path}: the file is gone, and so is {self._root / packed_file(file)}: {needed_by.about.path} was "
                "packed against it and can't be read without it; bring it back from a copy of the history"
            ) from error

    def _open(self, path: Path) -> int:
        descriptor = open_descriptor(path, os.O_RDONLY)
        self._held.callback(os.close, descriptor)
        return descriptor


@contextmanager
def _opened(root: Path) -> Iterator[_Sources]:
    with ExitStack() as held:
        yield _Sources(root, held)


def _read(path: Path, descriptor: int, offset: int, nbytes: int) -> bytes:
    """Return a range of a file. OSError when the file ends before it does."""
    found = read_range(descriptor, offset, nbytes)
    if len(found) < nbytes:
        missing = nbytes - len(found)
        raise OSError(5, f"ends at byte {offset + len(found)}, {missing} bytes too early", str(path))
    return found
