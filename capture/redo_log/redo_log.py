"""Brings the redo log of a session to the disk: in the background what the training thread has copied is packed, or
what it has packed is written.

Gradients lie in memory that is used again and again. There are two of it: one is packed or written while the next step
fills the other. When both are still in use, the training waits, or the step is left out, as `on_full` says. What can't
be written is left out too: the journal says so, no snapshot fails, and the training goes on.
"""

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import native
from capture.background_thread import BackgroundThread
from capture.on_full import OnFull
from capture.redo_log.blocks import block_count, blocks_of, most_packed_bytes
from capture.redo_log.budget_room import RedoRoom
from capture.user_warning import warn_user
from catalog.format.redo_segment import RedoTensor, RedoWrites
from catalog.format.redo_writer import PackedBlock, RedoFileWriter
from catalog.retention.redo_segments import segment_bytes
from catalog.run_writer import RunWriter

__all__ = ["RedoLog", "StepInput"]

_COPIES: Final = 2
_MOST_THREADS: Final = 4
"""The threads that pack beside a training are as many as those of the training, but no more than this: each has memory
of its own. One alone would push a thread of the training from its processor for as long as all of the packing takes,
and the others would wait for that one."""
_MOST_THREADS_AT_ONCE: Final = 8
"""The threads that pack while the training stands still for it."""
_SEGMENT_BYTES: Final = 256 << 20
_SEGMENT_BLOCKS: Final = 200_000
_SEGMENT_S: Final = 2.0
"""A segment is published when so much has gathered, so many blocks, or so much time has passed since its first step: a
process that is killed loses the steps of that time."""
_NO_ROOM: Final = "the byte budget of keep= has no room for it beside what stays"


@dataclass(slots=True, eq=False)
class StepInput:
    """Holds the input of one update. `tensors` are in `memory`, which the log takes back, or small copies of their own.

    packed: the blocks that `memory` has from `packed_at` on, one behind the other, where gradients were packed at once
    writes: what the update writes
    applied: False where the update was skipped
    broken: why the state after the step is not what its update has made; then no tensor is needed
    counted_twice: whether this takes the place of what was recorded of the step before a load has counted back
    is_left_out: nothing was copied, because both copies were still to be packed
    """

    rule: Mapping[str, Any]
    writes: RedoWrites
    groups: Any
    memory: torch.Tensor | None = None
    packed: list[PackedBlock] = field(default_factory=list)
    packed_at: int = 0
    tensors: list[tuple[RedoTensor, torch.Tensor]] = field(default_factory=list)
    broken: str | None = None
    applied: bool = True
    is_left_out: bool = False
    counted_twice: bool = False
    step: int = -1


@dataclass(slots=True, eq=False)
class _AtOnce:
    """Steps for which a thread waits."""

    steps: Sequence[StepInput]
    is_done: bool = False
    error: Exception | None = None


class RedoLog:
    """Takes the steps of one rank from the training thread, and writes them until `close` or `give_up`.

    room: what may be written, where there is a byte budget. A step that may not fit is left out, and those after it up
       to the next grant, since they could not be made again either.
    packs_at_once: whether the training thread packs the gradients itself, with `packer`, instead of copying them
    """

    def __init__(
        self, run: RunWriter, *, on_full: OnFull, room: RedoRoom | None = None, packs_at_once: bool = False
    ) -> None:
        self.packs_at_once = packs_at_once
        most = _MOST_THREADS_AT_ONCE if packs_at_once else _MOST_THREADS
        self.packer = native.ParallelPacker(threads=max(1, min(torch.get_num_threads(), most)))
        self._run = run
        self._on_full = on_full
        self._room = room
        self._without_room: set[int] = set()
        self._first_without_room = -1
        self._warnings: dict[str, str] = {}
        self._warned = 0
        self._changed = threading.Condition()
        self._waiting: collections.deque[StepInput | _AtOnce] = collections.deque()
        self._free: list[torch.Tensor] = []
        self._copies = 0
        self._closing = False
        self._given_up = False
        self._segment: RedoFileWriter | None = None
        self._begun = 0.0
        self._thread = BackgroundThread(self._write_steps, name="dshistory-redo")

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """Return memory of at least `nbytes` bytes, once some is free; None when the step is to be left out."""
        if self._room is not None and self._room.is_out:
            self._room.missed(nbytes)
            return None
        with self._changed:
            while not self._free and self._copies == _COPIES:
                if self._on_full == "skip":
                    return None
                self._changed.wait()
            if not self._free:
                self._copies += 1
                self._free.append(torch.empty(0, dtype=torch.uint8))
            found = self._free.pop()
        try:
            return found if found.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)
        except BaseException:
            self.release(found)
            raise

    def release(self, memory: torch.Tensor | None) -> None:
        """Take back memory."""
        if memory is not None:
            with self._changed:
                self._free.append(memory)
                self._changed.notify_all()

    def position(self) -> int:
        """Return how many bytes the file has to which the next step is written, as far as can be told by now."""
        segment = self._segment
        return 0 if segment is None else segment.nbytes

    def add(self, step: StepInput) -> None:
        """Write a step, the one after those that were added before."""
        with self._changed:
            self._waiting.append(step)
            self._changed.notify_all()

    def write_now(self, steps: Sequence[StepInput]) -> None:
        """Write all steps that were added before, then these, which have no tensors, into a segment of their own, and
        return once that is durable. What keeps it from the disk is raised; of the steps before the journal tells."""
        ordered = _AtOnce(steps)
        with self._changed:
            self._waiting.append(ordered)
            self._changed.notify_all()
            self._changed.wait_for(lambda: ordered.is_done or self._given_up)
        if ordered.error is not None:
            raise ordered.error

    def left_out(self, steps: Sequence[int], reason: str) -> None:
        """Tell the journal of steps that the log does not have."""
        if steps:
            named = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
            self._run.journal.event("redo_left_out", steps[0], reason=f"{named}: {reason}", last=steps[-1])

    def warn(self) -> None:
        """Warn the user of the first step that is not in the log, once for each reason; call it on the training
        thread."""
        with self._changed:
            texts = list(self._warnings.values())[self._warned :]
            self._warned += len(texts)
        for text in texts:
            warn_user(text)

    def has_no_room_for(self, step: int) -> bool:
        """Return whether a step is left out because the budget has no room; then the user is warned, once, and the
        journal told."""
        if self._room is None or not self._room.is_out:
            return False
        self._leave_without_room(step)
        self.warn()
        return True

    def close(self) -> None:
        """Write what was added, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.wait()
        self.warn()
        self._tell_without_room()

    def give_up(self) -> None:
        """End without writing what waits; the blocks that are being packed are not waited for."""
        with self._changed:
            self._given_up = self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._room is not None:  # the thread may wait for a grant that does not come any more
            self._room.grant(0)

    def _write_steps(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._closing:
                    self._changed.wait(self._until_published_s())
                step = self._waiting.popleft() if self._waiting else None
                ends = self._closing and step is None
            if isinstance(step, _AtOnce):
                self._write_alone(step)
            elif step is not None:
                self._write(step)
            if self._given_up:
                self._abort()
            elif ends or self._is_due():
                self._publish()
            if ends:
                return

    def _write(self, step: StepInput) -> None:
        try:
            segment = self._segment_for(step)
            if not self._holds_room(segment, step):
                return
            if step.broken is None:
                if step.packed:
                    segment.add(step.packed, _packed_bytes(step))
                blocks = blocks_of(step.tensors)
                while blocks:
                    if self._given_up:
                        return
                    del blocks[: segment.pack(blocks, self.packer)]
            _end_step(segment, step)
            if self._room is not None:
                self._room.hold(segment_bytes(segment.most_bytes))
        except Exception as error:  # noqa: BLE001 - whatever fails here must not end the thread that the training waits for
            self._fail([step.step], error)
        finally:
            step.tensors.clear()
            step.packed.clear()
            self.release(step.memory)

    def _write_alone(self, ordered: _AtOnce) -> None:
        # A segment of the same steps that is published later would take the place of this one.
        self._publish()
        try:
            if ordered.steps:
                self._publish_alone(ordered.steps)
        except Exception as error:  # noqa: BLE001 - as above; whoever waits raises it
            self._abort()
            ordered.error = error
        self._segment = None
        with self._changed:
            ordered.is_done = True
            self._changed.notify_all()

    def _publish_alone(self, steps: Sequence[StepInput]) -> None:
        segment = self._begun_segment(steps[0])
        for step in steps:
            _end_step(segment, step)
        replaced = _bytes_there(segment.path)
        nbytes = segment.publish()
        if self._room is not None:  # some hundred bytes, which no budget may keep from the disk
            self._room.published(segment_bytes(nbytes) - replaced)

    def _segment_for(self, step: StepInput) -> RedoFileWriter:
        """Return the segment for a step: another one where what updates write, or what they depend on, differs, or
        where the footer has no room for it."""
        if self._segment is not None and (self._segment.writes, self._segment.rule) != (step.writes, step.rule):
            self._publish()
        if self._segment is not None and not _has_room(self._segment, step):
            self._publish()
        return self._begun_segment(step) if self._segment is None else self._segment

    def _begun_segment(self, step: StepInput) -> RedoFileWriter:
        run = self._run
        self._segment = RedoFileWriter(run.paths, run.run, run.rank, step.rule, step.writes)
        self._begun = time.monotonic()
        return self._segment

    def _is_due(self) -> bool:
        segment = self._segment
        full = segment is not None and (segment.nbytes >= _SEGMENT_BYTES or segment.blocks >= _SEGMENT_BLOCKS)
        return full or self._until_published_s() == 0.0

    def _until_published_s(self) -> float | None:
        return None if self._segment is None else max(0.0, self._begun + _SEGMENT_S - time.monotonic())

    def _publish(self) -> None:
        if self._segment is None:
            return
        try:
            nbytes = self._segment.publish()
            if self._room is not None:
                self._room.published(segment_bytes(nbytes) if nbytes else 0)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail([], error)
        self._segment = None

    def _fail(self, steps: list[int], error: Exception) -> None:
        """Leave out the steps of the segment that is being written, and `steps`."""
        lost = [*(self._segment.steps if self._segment is not None else ()), *steps]
        self._abort()
        if lost:
            self._will_warn("disk", lost[0], str(error), until="it can be written")
        with contextlib.suppress(OSError):
            self.left_out(lost, str(error))

    def _abort(self) -> None:
        if self._segment is not None:
            self._segment.abort()
            if self._room is not None:
                self._room.published(0)
        self._segment = None

    # The room of a budget.

    def _holds_room(self, segment: RedoFileWriter, step: StepInput) -> bool:
        """Return whether a step may be written; else it is left out by name, and what came before it stays."""
        if self._room is None:
            return True
        nbytes = _stored_bytes(step)
        if self._room.hold(segment_bytes(segment.most_bytes_with(*_described(step), stored_bytes=nbytes))):
            self._tell_without_room()
            return True
        self._room.missed(nbytes)
        self._leave_without_room(step.step)
        return False

    def _leave_without_room(self, step: int) -> None:
        with self._changed:
            is_first = not self._without_room
            self._without_room.add(step)
            if is_first:
                self._first_without_room = step
        if is_first:
            until = "there is room; give keep= a larger budget, or fewer checkpoints that it must keep"
            self._will_warn("room", step, _NO_ROOM, until=until)
            # The others are told together.
            self.left_out([step], f"{_NO_ROOM}; so are those after it, up to one that finds room")

    def _tell_without_room(self) -> None:
        """Tell the journal of the steps behind the first that was left out, once there is room again."""
        with self._changed:
            steps = sorted(self._without_room - {self._first_without_room})
            self._without_room = set()
        begins = [place for place, step in enumerate(steps) if not place or step > steps[place - 1] + 1]
        for begin, end in itertools.pairwise([*begins, len(steps)]):
            self.left_out(steps[begin:end], _NO_ROOM)

    def _will_warn(self, kind: str, step: int, reason: str, *, until: str) -> None:
        """Let the next `warn` tell of a step, unless one of this kind was told already."""
        text = (
            f"run {self._run.run}: step {step} is not in the redo log: {reason}. The training, and its checkpoints, go "
            f"on as before, and so does the log once {until}. The table `events` names all steps that are left out"
        )
        with self._changed:
            self._warnings.setdefault(kind, text)


def _bytes_there(path: Path) -> int:
    """Return what a segment counts for that a new one of the same steps takes the place of."""
    try:
        return segment_bytes(path.lstat().st_size)
    except FileNotFoundError:
        return 0


def _has_room(segment: RedoFileWriter, step: StepInput) -> bool:
    return segment.has_room_for(*_described(step))


def _described(step: StepInput) -> tuple[list[RedoTensor], int, Any, str | None]:
    """Return what a footer says of a step: its tensors, the number of their blocks, the groups, why it is broken."""
    if step.broken is not None:
        return [], 0, step.groups, step.broken
    tensors = [*dict.fromkeys(block.tensor for block in step.packed), *(tensor for tensor, _ in step.tensors)]
    blocks = len(step.packed) + sum(block_count(content) for _, content in step.tensors)
    return tensors, blocks, step.groups, None


def _stored_bytes(step: StepInput) -> int:
    """Return what the blocks of a step take at most."""
    if step.broken is not None:
        return 0
    return sum(block.stored for block in step.packed) + sum(most_packed_bytes(content) for _, content in step.tensors)


def _packed_bytes(step: StepInput) -> memoryview:
    assert step.memory is not None
    return step.memory.numpy().data[step.packed_at :][: sum(block.stored for block in step.packed)]


def _end_step(segment: RedoFileWriter, step: StepInput) -> None:
    segment.end_step(
        step.step, groups=step.groups, broken=step.broken, applied=step.applied, counted_twice=step.counted_twice
    )
