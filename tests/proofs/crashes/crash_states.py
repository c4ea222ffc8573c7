"""Every state in which a file system may find itself after a power cut, built from recorded calls.

POSIX promises little. The bytes of a file are durable after fsync of the file, and the names in a folder after fsync
of the folder. Of what was done since, any part may be there after a power cut, in any combination: a name without its
bytes, the last of three writes without the first, half of a write, a size whose bytes are zeros. Only the names that
one rename changes in a folder stay together.

After every prefix of the calls, `crash_states` yields each combination of what is pending then. Where there are more
than `MAX_PRODUCT`, it yields those that differ in at most two places from "everything is there" and from "nothing is
there". The files of the index and the locks are left out of the combinations: the index may be lost altogether, and the
content of a lock decides only when the garbage of a dead run is collected. Their states are combined with the two
extremes of all other files.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePosixPath

from file_calls import Call, Op

__all__ = ["CrashState", "Disk", "Tree", "crash_states"]

MAX_PRODUCT = 4096

Tree = Mapping[str, bytes | None]
"""The content of every file, by path relative to the root; None for a folder."""

_Names = tuple[tuple[str, int | None], ...]
"""Changes of names in one folder that happen together: each name's new file, or None where it is removed."""


@dataclass(slots=True)
class _Inode:
    """A file or a folder: what is durable of it, and what is pending."""

    folder: bool
    derived: bool = False
    content: bytes = b""
    writes: list[Call] = field(default_factory=list)
    entries: dict[str, int] = field(default_factory=dict)
    changes: list[_Names] = field(default_factory=list)
    torn: dict[str, bytes] = field(default_factory=dict)
    """What a power cut may leave of the content now, by choice, so that it is built once."""


@dataclass(frozen=True, slots=True)
class CrashState:
    """One state after a power cut: how many calls had been made, and the files. `left` says what the power cut left of
    the calls; it may be asked for until the next state is taken."""

    calls: int
    left: Callable[[], str]
    tree: Tree


@dataclass(frozen=True, slots=True)
class _Atom:
    """Something pending that a power cut leaves or loses as one: the writes of a file, or one change of names. The
    first choice is that it is there, the second that it is lost."""

    inode: int
    change: int | None
    choices: tuple[str, ...]


class Disk:
    """A file system below one folder to which calls are applied."""

    def __init__(self, root: str, *, is_derived: Callable[[str], bool] = lambda path: False) -> None:
        self._root = PurePosixPath(root)
        self._is_derived = is_derived
        self._inodes: list[_Inode] = [_Inode(folder=True)]
        self._numbers: dict[int, int] = {}
        """The kernel gives a number again once its file is gone: only the newest file with a number is written."""

    def apply(self, call: Call) -> None:
        """Apply one call to what is pending, or make durable what it syncs."""
        if call.op in (Op.CREATE, Op.MKDIR):
            name = PurePosixPath(call.path)
            derived = self._is_derived(str(name.relative_to(self._root)))
            self._inodes.append(_Inode(folder=call.op == Op.MKDIR, derived=derived))
            self._numbers[call.inode] = len(self._inodes) - 1
            self._change(name.parent, (name.name, self._numbers[call.inode]))
        elif call.op in (Op.WRITE, Op.RESIZE):
            inode = self._inodes[self._numbers[call.inode]]
            inode.writes.append(call)
            inode.torn.clear()
        elif call.op == Op.SYNC:
            self._sync(call)
        elif call.op in (Op.RENAME, Op.LINK):
            old, new = PurePosixPath(call.path), PurePosixPath(call.other)
            assert old.parent == new.parent, f"{call}: from one folder to another, which is not one change"
            target = (new.name, self._find(old))
            self._change(new.parent, *([(old.name, None), target] if call.op == Op.RENAME else [target]))
        elif call.op in (Op.UNLINK, Op.RMDIR):
            name = PurePosixPath(call.path)
            self._change(name.parent, (name.name, None))

    def now(self) -> Tree:
        """Return the files as the programs see them."""
        return self._tree({})

    def pending_states(self) -> Iterator[tuple[Callable[[], str], Tree]]:
        """Yield what a power cut may leave now, each with a function that describes it."""
        atoms, derived = self._atoms(derived=False), self._atoms(derived=True)
        there = [0] * len(derived)
        for combination in _combinations(atoms):
            yield self._state([*atoms, *derived], [*combination, *there])
        for combination in _combinations(derived):
            for others in ([0] * len(atoms), [1] * len(atoms)):
                yield self._state([*atoms, *derived], [*others, *combination])

    def _change(self, folder: PurePosixPath, *names: tuple[str, int | None]) -> None:
        self._inodes[self._find(folder)].changes.append(names)

    def _sync(self, call: Call) -> None:
        number = self._numbers.get(call.inode)
        inode = self._inodes[self._find(PurePosixPath(call.path)) if number is None else number]
        if inode.folder:
            inode.entries = _renamed(inode.entries, inode.changes)
            inode.changes = []
        else:
            inode.content = _torn(inode, "there")
            inode.writes = []
            inode.torn.clear()

    def _find(self, path: PurePosixPath) -> int:
        number = 0
        for name in path.relative_to(self._root).parts:
            inode = self._inodes[number]
            number = _renamed(inode.entries, inode.changes)[name]
        return number

    def _atoms(self, *, derived: bool) -> list[_Atom]:
        """Return all that is pending, of the index and the locks when `derived`, otherwise of all other files."""
        atoms = []
        for number in self._reachable():
            inode = self._inodes[number]
            for index, names in enumerate(inode.changes):
                targets = [self._inodes[target] for _, target in names if target is not None]
                if (bool(targets) and all(target.derived for target in targets)) == derived:
                    atoms.append(_Atom(number, index, ("there", "lost")))
            if inode.writes and inode.derived == derived:
                each = len(inode.writes) if len(inode.writes) > 1 and not derived else 0
                without = [f"without write {index}" for index in range(each)]
                atoms.append(_Atom(number, None, ("there", "lost", "half", "zeros", *without)))
        return atoms

    def _reachable(self) -> list[int]:
        """Return the files and folders that have a name, or may still have one."""
        found, todo = [], [0]
        while todo:
            number = todo.pop()
            if number not in found:
                found.append(number)
                inode = self._inodes[number]
                pending = (target for names in inode.changes for _, target in names if target is not None)
                todo.extend([*inode.entries.values(), *pending])
        return sorted(found)

    def _state(self, atoms: Sequence[_Atom], chosen: Sequence[int]) -> tuple[Callable[[], str], Tree]:
        left = {
            (atom.inode, atom.change): atom.choices[choice]
            for atom, choice in zip(atoms, chosen, strict=True)
            if choice
        }
        return lambda: self._words(left), self._tree(left)

    def _words(self, left: Mapping[tuple[int, int | None], str]) -> str:
        parts = []
        for (number, change), word in left.items():
            names = () if change is None else self._inodes[number].changes[change]
            what = " and ".join(f"{'no ' if target is None else ''}name {name}" for name, target in names)
            parts.append(f"{self._path(number)}: {what or 'content'} {word}")
        return "; ".join(parts) or "everything there"

    def _path(self, number: int) -> str:
        """Return a path of an inode, for descriptions."""
        for parent, inode in enumerate(self._inodes):
            for name, target in [*inode.entries.items(), *itertools.chain.from_iterable(inode.changes)]:
                if target == number:
                    return str(PurePosixPath(self._path(parent), name))
        return "."

    def _tree(self, left: Mapping[tuple[int, int | None], str]) -> dict[str, bytes | None]:
        """Return the files, with what `left` says of the pending changes; the others are there."""
        tree: dict[str, bytes | None] = {}
        todo = [("", 0)]
        while todo:
            path, folder = todo.pop()
            inode = self._inodes[folder]
            kept = [names for index, names in enumerate(inode.changes) if (folder, index) not in left]
            for name, number in _renamed(inode.entries, kept).items():
                child = self._inodes[number]
                tree[path + name] = None if child.folder else _torn(child, left.get((number, None), "there"))
                if child.folder:
                    todo.append((f"{path}{name}/", number))
        return tree


def _renamed(entries: Mapping[str, int], changes: Sequence[_Names]) -> dict[str, int]:
    found = dict(entries)
    for names in changes:
        for name, target in names:
            if target is None:
                found.pop(name, None)
            else:
                found[name] = target
    return found


def _written(content: bytes, writes: Sequence[Call]) -> bytes:
    if not writes:
        return content
    out = bytearray(content)
    for call in writes:
        end = call.at if call.op == Op.RESIZE else call.at + len(call.data)
        if len(out) < end:
            out.extend(bytes(end - len(out)))
        if call.op == Op.RESIZE:
            del out[call.at :]
        else:
            out[call.at : end] = call.data
    return bytes(out)


def _torn(file: _Inode, choice: str) -> bytes:
    """Return the bytes of a file after a power cut."""
    if choice not in file.torn:
        file.torn[choice] = _tear(file, choice)
    return file.torn[choice]


def _tear(file: _Inode, choice: str) -> bytes:
    if choice == "lost":
        return file.content
    if choice.startswith("without"):
        omitted = int(choice.rpartition(" ")[2])
        return _written(file.content, [call for index, call in enumerate(file.writes) if index != omitted])
    whole = _written(file.content, file.writes)
    # The size may be durable without the bytes: where the file has grown there are zeros.
    without_bytes = (file.content + bytes(len(whole)))[: len(whole)]
    half = {"there": len(whole), "half": len(whole) // 2, "zeros": 0}[choice]
    return whole[:half] + without_bytes[half:]


def _combinations(atoms: Sequence[_Atom]) -> Iterator[Sequence[int]]:
    """Yield one choice for each atom: every combination, or those near the two extremes when they are too many."""
    options = [range(len(atom.choices)) for atom in atoms]
    if prod(map(len, options)) <= MAX_PRODUCT:
        yield from itertools.product(*options)
        return
    for extreme in (0, 1):
        for places in itertools.combinations(range(len(options)), 2):
            for choice in itertools.product(*(options[place] for place in places)):
                chosen = [extreme] * len(options)
                for place, value in zip(places, choice, strict=True):
                    chosen[place] = value
                yield chosen


def crash_states(calls: Sequence[Call], *, root: str, is_derived: Callable[[str], bool]) -> Iterator[CrashState]:
    """Yield every state after every prefix of `calls`, each content once; `is_derived` says which files, by their path
    below `root`, are the index or locks."""
    disk = Disk(root, is_derived=is_derived)
    seen: set[frozenset[tuple[str, int | None]]] = set()
    for count in range(len(calls) + 1):
        if count:
            if calls[count - 1].op == Op.NOTE:
                # What is known to be committed has changed: the same files have to satisfy more than before.
                seen.clear()
            else:
                disk.apply(calls[count - 1])
        for left, tree in disk.pending_states():
            key = frozenset((path, None if data is None else hash(data)) for path, data in tree.items())
            if key not in seen:
                seen.add(key)
                yield CrashState(count, left, tree)
