"""One step on its way to the disk: started on the training thread, released at the barrier, finished in the background."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import native
from capture.datafile import PlacedObject, data_file_extents, data_file_header, make_tail, object_entries
from capture.items import StateProvider, TensorItem
from capture.objects import encode_object
from capture.plan import Plan, make_plan, signature_of
from capture.staging import CUDA, Arrived, Copies, CopyEngine
from catalog.errors import SnapshotError, UnsupportedError
from catalog.run import RunWriter

__all__ = ["Snapshot", "Source"]


class Source:
    """The providers of one rank, and the plan for what they list; the plan is made anew only when something has moved."""

    def __init__(
        self,
        providers: Sequence[StateProvider],
        *,
        rank: int,
        world_size: int,
        align: int,
        copies: CopyEngine = CUDA,
    ) -> None:
        self.providers = tuple(providers)
        self._rank = rank
        self._world_size = world_size
        self._align = align
        self._copies = copies
        self._plan: Plan | None = None

    def objects(self) -> list[PlacedObject]:
        """This rank's objects as they are now. UnsupportedError names what can't be stored."""
        placed: dict[str, PlacedObject] = {}
        for provider in self.providers:
            for name, (value, placement) in provider.objects().items():
                if name in placed:
                    raise UnsupportedError(
                        f"two State Providers offer an object {name!r}: give one of them another name"
                    )
                placed[name] = PlacedObject(encode_object(name, value), placement)
        return [item for item in placed.values() if item.placement == "rank_local" or self._rank == 0]

    def plan(self, objects: Sequence[PlacedObject]) -> Plan:
        """The layout of this rank's file for the state as it is now."""
        items: list[TensorItem] = [item for provider in self.providers for item in provider.tensors()]
        signature = signature_of(items)
        reserve = object_entries(objects)
        if self._plan is None or self._plan.signature != signature or not self._plan.has_room_for(reserve):
            self._plan = make_plan(
                items,
                rank=self._rank,
                world_size=self._world_size,
                align=self._align,
                reserve=reserve,
                copies=self._copies,
            )
        return self._plan

    def copy_mirrors(self, plan: Plan) -> Copies:
        """Copy what the writer can't read where it is: host tensors now, device tensors beside the training."""
        for mirror in plan.mirrors:
            mirror.host.copy_(mirror.source)
        return self._copies.copy(plan.device_mirrors) if plan.device_mirrors else Arrived()


@dataclass(eq=False)
class Snapshot:
    """A pending snapshot. It holds the plan, and with it every storage that the writer may still read, until it is
    finished.
    """

    step: int
    plan: Plan
    objects: list[PlacedObject]
    data_tmp: Path
    engine: native.Engine
    copies: Copies
    moved: list[str] = field(default_factory=list)
    settled: threading.Event = field(default_factory=threading.Event)
    _beginning: threading.Lock = field(default_factory=threading.Lock)
    _job: native.WriteJob | None = None
    _failure: OSError | None = None

    @classmethod
    def start(cls, source: Source, engine: native.Engine, run: RunWriter, step: int) -> "Snapshot":
        """Begin to write the state as it is now. OSError when the file can't be made, UnsupportedError by name."""
        objects = source.objects()
        plan = source.plan(objects)
        data_tmp = run.begin(step)
        data_tmp.unlink(missing_ok=True)
        snapshot = cls(step, plan, objects, data_tmp, engine, source.copy_mirrors(plan))
        if not plan.device_mirrors:
            snapshot.job()
        return snapshot

    def job(self) -> native.WriteJob:
        """The file being written; begun here when the copies of device tensors had to arrive first. From any thread.
        OSError, for every caller, when the file can't be made.
        """
        self.copies.wait()
        with self._beginning:
            if self._failure is not None:
                raise self._failure
            if self._job is None:
                try:
                    self._job = self.engine.start(self.plan.write, str(self.data_tmp))
                except OSError as error:
                    self._failure = error
                    raise
            return self._job

    def abort(self) -> None:
        """Stop, and remove the file. Idempotent."""
        if self._job is not None:
            self._job.abort()

    def release(self) -> None:
        """The barrier: return once no live byte is needed any more. A file that can't be made, or memory that has moved
        since the step, fails the snapshot in the background.
        """
        with contextlib.suppress(OSError):
            self.job().release()
        self.moved = [
            f"{part.item.kind} {part.item.name!r}"
            for part in self.plan.parts
            if part.item.when == "lazy" and part.item.tensor.untyped_storage().nbytes() == 0 and part.nbytes
        ]

    def settle(self, moved: Sequence[PlacedObject]) -> None:
        """Take the final form of objects that moved after the step, and let the file be finished."""
        latest = {placed.encoded.name: placed for placed in moved}
        self.objects = [latest.get(placed.encoded.name, placed) for placed in self.objects]
        self.settled.set()

    def finish(self, run: RunWriter) -> dict[str, Any]:
        """Write the file's ends and publish this rank's part; the job's data must be written. Returns its figures."""
        if self.moved:
            raise SnapshotError(
                f"step {self.step}: the memory of {', '.join(self.moved[:3])} was freed between the step and the next update; wrap such "
                "edits in `with session.modify():`"
            )
        job = self.job()
        file = run.paths.relative(run.paths.data(run.run, self.step, run.rank))
        checksums = job.checksums()
        tail = make_tail(self.objects, self.plan, file=file)
        header = data_file_header(self.plan, tail, run=run.run, step=self.step, rank=run.rank)
        nbytes = job.finish(header=header, tail=tail.data)
        extents = data_file_extents(self.plan, tail, checksums, header, file=file)
        run.publish_part(self.step, data_tmp=self.data_tmp, extents=extents)
        return {"file_bytes": nbytes, **job.stats}
