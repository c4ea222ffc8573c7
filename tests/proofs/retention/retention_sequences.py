"""Random lives of a history, on the real code: commits that refer to earlier bytes, policies, tags, NaN, deaths of the
process between any two changes of files, compaction, readers, restores and garbage collection; and what must hold after
each step.

A life is cheap, so that there can be many. A checkpoint is restored when it may have changed since it was restored
last: when a file of it, or of an earlier one, which it may need, is another one or is gone. Manifests that have the
same bytes are decoded once, which is a pure function of them. One thread does it all.
"""

import functools
import math
import os
import random
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
from catalog_helpers import Run
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from retention_helpers import commit, contents, cut_off, model_extents

from catalog.access.pins import pinned
from catalog.compaction.compact import compact_run
from catalog.errors import SetupError
from catalog.format import marker
from catalog.format.manifest import Manifest
from catalog.gc import collect_garbage
from catalog.history import History
from catalog.read import checkpoint
from catalog.records import CheckpointRef
from catalog.retention.choice import choose
from catalog.retention.facts import CheckpointFacts
from catalog.retention.policy import Policy, policy_of
from catalog.retention.prune import Pruned, prune, remove

__all__ = ["POLICIES", "Sequences", "counts"]

POLICIES = (
    "last 1",
    "last 2, every 4",
    "every 3",
    "best 2 by loss",
    "best 1 by loss max, last 1",
    "one per 1h for 2d",
    "tagged, last 1",
    "60kB",
    "last 3, every 2, 80kB",
)

_NOISE = random.Random(0).randbytes(512)
"""What only another checkpoint makes smaller, so that packed ones need each other."""

counts: dict[str, int] = {}
"""How often each thing has happened in this process."""


class Sequences(RuleBasedStateMachine):
    """One history of one run, of which the machine knows every byte that was ever committed."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="dshistory-retention-"))
        self.paths_root = self.root / "h"
        self.known: dict[int, dict[str, bytes]] = {}
        self.losses: dict[int, float] = {}
        self.needs: dict[int, int] = {}
        self.tags: dict[str, int] = {}
        self.held: dict[int, ExitStack] = {}
        self.verified: dict[int, object] = {}
        self.step = 0
        count("sequences")

    @initialize(steps=st.integers(1, 6))
    def begin(self, steps: int) -> None:
        """Begin the run with a few checkpoints."""
        with Run(self.paths_root) as run:
            self.history = History.open(self.paths_root)
            for _ in range(steps):
                self._commit(run, None, 1.0)

    @rule(
        many=st.integers(1, 4),
        back=st.one_of(st.none(), st.integers(0, 3)),
        loss=st.sampled_from([0.5, 1.0, 2.0, math.nan]),
        died=st.booleans(),
    )
    def go_on(self, many: int, back: int | None, loss: float, died: bool) -> None:
        """Let the run commit on, and perhaps die in the middle of another part."""
        with self._writer() as writer:
            run = _Writing(writer)
            for _ in range(many):
                self._commit(run, back, loss)
            if died:
                writer.begin(self.step).write_bytes(b"half")
        count("commits", many)

    @rule(number=st.integers(0, 9), name=st.sampled_from(["a", "b"]))
    def tag(self, number: int, name: str) -> None:
        """Give one of the listed checkpoints a name."""
        step = self._one(number)
        with self._writer() as writer:
            writer.journal.tag(name, step)
        self.tags[name] = step

    @rule(keep=st.sampled_from(POLICIES), after=st.one_of(st.none(), st.integers(0, 12)))
    def prune(self, keep: str, after: int | None) -> None:
        """Apply a policy, and perhaps die after so many changes of files."""
        policy, before = policy_of(keep), self.history.steps("run-a")
        expected = self._expected(policy)
        done: Pruned | None = None
        with cut_off(10**9 if after is None else after) as cut:
            try:
                done = prune(self.history, policy, runs=["run-a"], dry_run=False)
            except SetupError:
                assert self.history.steps("run-a") == before
                count("policies refused")
                return
        left = set(self.history.steps("run-a"))
        assert left <= set(before)
        if expected is not None:
            assert {ref.step for ref in expected} <= left, "something kept is lost"
        count("removals cut off" if cut.happened else "prunes")
        if done is not None:
            assert left == set(before) - {ref.step for ref in done.removed}
            count("checkpoints removed", len(done.removed))
            if policy.budget_bytes is not None and not self.held:
                assert sum(done.facts[CheckpointRef("run-a", step)].nbytes for step in left) <= policy.budget_bytes

    @rule(numbers=st.sets(st.integers(0, 9), min_size=1, max_size=3), after=st.one_of(st.none(), st.integers(0, 12)))
    def remove(self, numbers: set[int], after: int | None) -> None:
        """Remove checkpoints by name; all go, or none, unless the process dies in between."""
        before = self.history.steps("run-a")
        wanted = {self._one(number) for number in numbers}
        stays = {
            step
            for step in wanted
            if step in self.held
            or step in self.tags.values()
            or any(self.needs.get(other) == step for other in before if other not in wanted)
        }
        with cut_off(10**9 if after is None else after) as cut:
            try:
                remove(
                    self.history, [CheckpointRef("run-a", step) for step in sorted(wanted)], force=False, dry_run=False
                )
            except SetupError:
                assert self.history.steps("run-a") == before
                count("removals refused")
                return
        assert not stays
        left = set(self.history.steps("run-a"))
        assert set(before) - wanted <= left
        if not cut.happened:
            assert left == set(before) - wanted
            count("removals by name")

    @rule(number=st.integers(0, 9))
    def begin_to_read(self, number: int) -> None:
        """Open a checkpoint, and go on having it open."""
        step = self._one(number)
        if step not in self.held:
            self.held[step] = ExitStack()
            self.held[step].enter_context(pinned(self.history.paths, CheckpointRef("run-a", step)))
            count("readers")

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 9))
    def end_to_read(self, number: int) -> None:
        """Read what was opened, which is still there bit for bit, and let it go."""
        step = sorted(self.held)[number % len(self.held)]
        assert contents(self.history, CheckpointRef("run-a", step)) == self.known[step]
        self.held.pop(step).close()

    @rule(key_every=st.integers(1, 3), newest=st.integers(0, 3), after=st.one_of(st.none(), st.integers(0, 30)))
    def compact(self, key_every: int, newest: int, after: int | None) -> None:
        """Pack all but the newest checkpoints, and perhaps die after so many changes of files."""
        steps = self.history.steps("run-a")
        with cut_off(10**9 if after is None else after) as cut:
            done = compact_run(self.history, "run-a", steps[: len(steps) - newest], key_every=key_every)
        assert self.history.steps("run-a") == steps
        count("compactions cut off" if cut.happened else "compactions")
        if not cut.happened:
            assert set(done.left) <= {CheckpointRef("run-a", step) for step in self.held}
            count("checkpoints packed", len(done.steps))

    @rule()
    def collect(self) -> None:
        """Collect garbage: nothing that is listed goes, and nothing hidden stays."""
        before = self.history.steps("run-a")
        assert collect_garbage(self.history.paths).kept == []
        assert self.history.steps("run-a") == before
        assert not [path for path in self.history.paths.steps_dir("run-a").iterdir() if path.name.startswith(".")]
        count("collections")

    @invariant()
    def every_listed_checkpoint_restores(self) -> None:
        """Every listed checkpoint has every bit, and what must stay is listed."""
        steps = self.history.steps("run-a") if self.known else []
        files = {step: _files(self.history.paths.step_dir("run-a", step)) for step in self.known}
        for step in steps:
            # It may need any earlier one: refer to its bytes, or be packed against them.
            found = [files[earlier] for earlier in self.known if earlier <= step]
            if self.verified.get(step) != found:
                assert contents(self.history, CheckpointRef("run-a", step)) == self.known[step]
                count("restores")
                self.verified[step] = found
        assert set(self.held) <= set(steps), "what somebody reads is lost"
        assert set(self.tags.values()) <= set(steps), "a tagged checkpoint is lost"
        if self.known and any(math.isfinite(loss) for loss in self.losses.values()):
            assert any(math.isfinite(self.losses[step]) for step in steps), "no healthy checkpoint is left"

    def teardown(self) -> None:
        for reader in self.held.values():
            reader.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _commit(self, run: Any, back: int | None, loss: float) -> None:
        listed = self.history.steps("run-a")
        refer: Mapping[str, Any] = {}
        own = {"w": b"%b%6d" % (_NOISE, self.step), "frozen": b"frozen since %6d" % self.step}
        if back is not None and back < len(listed):
            found = model_extents(self.history, CheckpointRef("run-a", listed[-1 - back]))["frozen"]
            at = int(found.file.split("/")[3])
            refer, self.needs[self.step] = {"frozen": found}, at
            own.pop("frozen")
        commit(run, self.step, own, refer=refer, loss=loss)
        frozen = b"frozen since %6d" % self.needs.get(self.step, self.step)
        self.known[self.step], self.losses[self.step] = {"w": own["w"], "frozen": frozen}, loss
        self.step += 1

    def _one(self, number: int) -> int:
        steps = self.history.steps("run-a")
        return steps[number % len(steps)]

    def _writer(self) -> Any:
        from catalog.run_writer import RunWriter

        return RunWriter(self.paths_root, run="run-a", rank=0, world_size=1, layout_hash="layout-1")

    def _expected(self, policy: Policy) -> set[CheckpointRef] | None:
        """Return what a policy keeps of what the machine itself knows; None with a budget, which needs sizes."""
        facts = [
            CheckpointFacts(
                CheckpointRef("run-a", step),
                created_s=float(step),
                needs=frozenset({CheckpointRef("run-a", self.needs[step])}) if step in self.needs else frozenset(),
                tags=tuple(name for name, at in self.tags.items() if at == step),
                metrics={"loss": self.losses[step]},
                healthy=False if not math.isfinite(self.losses[step]) else None,
                is_read=step in self.held,
            )
            for step in self.history.steps("run-a")
        ]
        # Times are of no use here, since the machine makes all checkpoints within a second.
        if policy.budget_bytes is not None or "per" in str(policy):
            return None
        return set(choose([facts], policy).kept)


class _Writing:
    """What `commit` needs of a run."""

    run = "run-a"

    def __init__(self, writer: Any) -> None:
        self.writers = [writer]


def _files(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    """Return what tells whether a file in a folder is another one now: published files never change."""
    found = set()
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            facts = entry.stat()
            found.add((entry.name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _decoded(data: bytes, path: Path) -> Manifest:
    return _decode_manifest(data, path=path)


_decode_manifest = checkpoint.decode_manifest
checkpoint.decode_manifest = marker.decode_manifest = lambda data, *, path: _decoded(data, path)
pa.set_cpu_count(1)


def count(what: str, number: int = 1) -> None:
    counts[what] = counts.get(what, 0) + number
