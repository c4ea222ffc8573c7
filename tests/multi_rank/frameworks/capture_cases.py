"""Cases for a plain PyTorch loop captured by two ranks: agreement, refusals, shared folders, resume."""

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from capture_helpers import Net, assert_same, faulty_session, one_step, reference
from ranks import guards

import capture
import native
from capture.collectives import Ranks
from capture.loops.pytorch.loop import count_from
from capture.state.interface import Available, TensorItem
from catalog.disk.locks import free_lock, try_lock
from catalog.errors import (
    CorruptError,
    MismatchError,
    NotFoundError,
    RestoreError,
    SetupError,
    SnapshotError,
    UnsupportedError,
)
from catalog.format.lock_file import LockOwner, read_lock_owner
from catalog.history import History
from catalog.records import CheckpointRef, Placement
from catalog.statistics.compute import missing_parts
from catalog.verify import verify

REFUSALS = (
    OSError,
    SnapshotError,
    SetupError,
    UnsupportedError,
    MismatchError,
    CorruptError,
    RestoreError,
    NotFoundError,
    ValueError,
)


def make(*, seed: int = 5) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    inner = Net(64)
    model = torch.nn.parallel.DistributedDataParallel(inner, broadcast_buffers=False)
    torch.manual_seed(100 + dist.get_rank())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def refused(action) -> str:
    """Return the message of the refusal that `action` must raise."""
    try:
        action()
    except REFUSALS as error:
        return str(error)
    raise AssertionError("nothing was refused on this rank")


def case_a_round_trip_of_two_ranks(folder: Path) -> None:
    model, optimizer = make()
    expected = {}
    with capture.enable(model, optimizer=optimizer, every=1, history=folder / "one", backend="posix") as session:
        for _ in range(3):
            one_step(model, optimizer)
            expected[session.snapshot()] = (reference(model.module, optimizer), torch.get_rng_state())
        session.wait()
    other, its_optimizer = make(seed=6)
    for step, (state, rng) in expected.items():
        capture.restore(step, history=folder / "one", model=other, optimizer=its_optimizer)
        assert_same(reference(other.module, its_optimizer), state)
        assert torch.equal(torch.get_rng_state(), rng), "each rank its own generators"
    assert not torch.equal(*each_ranks(state["buffer"]["norm.running_mean"])), "the buffers were to differ"


def case_ranks_on_different_hosts_find_out_whether_they_see_each_others_locks(folder: Path) -> None:
    rank = dist.get_rank()
    ranks = Ranks(rank, dist.get_world_size())
    folder.mkdir(exist_ok=True)
    held = try_lock(folder / f"{rank}.lock")
    assert held is not None
    dist.barrier()
    assert ranks.see_locks(lambda peer: folder / f"{peer}.lock") is None, "all ranks are on one host"
    with two_hosts():
        assert ranks.see_locks(lambda peer: folder / f"{peer}.lock") is True
        dist.barrier()
        if rank == 1:
            # As on a file system whose locks are local to each host, nobody else sees this one any more.
            free_lock(held)
        dist.barrier()
        assert ranks.see_locks(lambda peer: folder / f"{peer}.lock") is False


def case_locks_that_are_shared_are_noted_where_other_sessions_look(folder: Path) -> None:
    model, optimizer = make()
    for name, hosts, shared in (("one", contextlib.nullcontext(), False), ("two", two_hosts(), True)):
        with hosts, capture.enable(model, optimizer=optimizer, history=folder / f"locks-{name}") as session:
            owner = read_lock_owner(History.open(session.history).paths.lock(session.run, dist.get_rank()))
            assert owner is not None
            assert owner.shared is shared


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Let every rank believe that it has a host of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("capture.collectives.lock_owner", lambda: LockOwner(f"node-{dist.get_rank()}", "a boot"))
        yield


def case_statistics_of_a_rank_that_is_ahead_of_the_others(folder: Path) -> None:
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1000, history=folder / "ahead") as session:
        one_step(model, optimizer)
        if dist.get_rank() == 0:
            session.snapshot()
            with pytest.raises(SnapshotError, match="the part of another rank is missing"):
                session.wait()
        dist.barrier()
        if dist.get_rank() == 1:
            session.snapshot()
            session.wait()
        dist.barrier()
        opened = History.open(folder / "ahead")
        deadline = time.monotonic() + 60
        while missing_parts(opened.paths, opened.resolve(1)):
            assert time.monotonic() < deadline, "a rank's part never got its statistics"
            threading.Event().wait(0.05)
        dist.barrier()


def each_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def case_replicated_state_is_on_disk_once(folder: Path) -> None:
    opened = History.open(folder / "one")
    kinds = ["model", "exp_avg", "exp_avg_sq"]
    extents = opened.extents(opened.resolve(2), kinds=kinds)
    ends: dict[tuple[str, str], int] = {}
    for extent in sorted(extents, key=lambda extent: extent.start):
        assert extent.start == ends.get((extent.kind, extent.name), 0)
        ends[extent.kind, extent.name] = extent.start + extent.numel
    shares = [sum(e.nbytes for e in extents if f"rank-0000{rank}" in e.file) for rank in range(2)]
    assert abs(shares[0] - shares[1]) <= 64, "each rank writes half"


def case_what_one_rank_refuses_all_refuse(folder: Path) -> None:
    model, optimizer = make()
    user = {"callback": print} if dist.get_rank() == 1 else {"callback": None}
    provider = capture.Stateful("user", user, placement="rank_local")
    said = refused(lambda: capture.enable(model, optimizer=optimizer, history=folder / "refused", providers=[provider]))
    assert "user['callback']" in said
    assert not optimizer._optimizer_step_pre_hooks
    one_step(model, optimizer)


class BreaksLater:
    """State that can be stored when `enable` first asks for it, but no longer on rank 1 after that."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict:
        self.asked += 1
        return {"value": print if self.asked > 1 and dist.get_rank() == 1 else 1}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing; no case restores this state."""


def case_a_first_step_that_one_rank_can_not_take(folder: Path) -> None:
    model, optimizer = make()
    provider = capture.Stateful("user", BreaksLater(), placement="rank_local")
    said = refused(lambda: capture.enable(model, optimizer=optimizer, history=folder / "first", providers=[provider]))
    assert "user['value']" in said
    assert not optimizer._optimizer_step_pre_hooks
    one_step(model, optimizer)
    assert not History.open(folder / "first").checkpoints()


class Average:
    """A provider of one tensor."""

    def __init__(self, placement: Placement) -> None:
        self.item = TensorItem("weight", "average", (100,), torch.ones(100), placement=placement)

    def tensors(self) -> list[TensorItem]:
        return [self.item]

    def objects(self) -> dict:
        return {}

    def prepare(self, available: Available) -> None:
        """There is nothing to make."""

    def finish(self, available: Available) -> None:
        """There is nothing else to put back."""


def case_what_one_rank_alone_replicates_all_refuse(folder: Path) -> None:
    """Its shares would be cut by a list that the other rank does not have, and leave a hole."""
    model, optimizer = make()
    root = folder / "alone"
    for placement in ("replicated", "rank_local"):
        providers = [Average(placement)] if dist.get_rank() == 1 else []
        options = {"optimizer": optimizer, "every": 1, "history": root, "providers": providers}
        if placement == "replicated":
            said = refused(lambda options=options: capture.enable(model, **options))
            assert "rank 0 lists nothing more where rank 1 lists average 'weight' (torch.float32, 100" in said, said
            assert 'placement="rank_local"' in said, said
            continue
        with capture.enable(model, **options):
            one_step(model, optimizer)
        dist.barrier()
        assert verify(History.open(root)) == []


def case_a_file_system_that_one_rank_can_not_look_at(folder: Path) -> None:
    model, optimizer = make()

    def refuse(path: str) -> None:
        raise OSError(30, "Read-only file system", path)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(native, "probe_file_system", refuse)
        said = refused(lambda: capture.enable(model, optimizer=optimizer, history=folder / "read-only"))
    assert "Read-only file system" in said, said


def case_a_history_that_one_rank_does_not_see(folder: Path) -> None:
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=folder / "seen", backend="posix"):
        one_step(model, optimizer)
    dist.barrier()
    root = folder / ("seen" if dist.get_rank() == 0 else "unseen")
    said = refused(lambda: capture.restore(1, history=root, model=model, optimizer=optimizer))
    assert "unseen" in said, said


class FailsToLoad:
    def load_state_dict(self, state: dict) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such worker")

    def state_dict(self) -> dict:
        return {"worker": 3}


def case_a_provider_that_fails_to_load_on_one_rank(folder: Path) -> None:
    """The providers after it are put back all the same, so that no rank misses a collective of theirs."""
    model, optimizer = make()
    providers = [capture.Stateful("loader", FailsToLoad(), placement="rank_local")]
    options = {"optimizer": optimizer, "history": folder / "loader", "providers": providers}
    with capture.enable(model, every=1, backend="posix", **options) as session:
        one_step(model, optimizer)
        session.wait()
        generator = torch.get_rng_state()
    dist.barrier()
    torch.manual_seed(1)
    said = refused(lambda: capture.restore(1, model=model, **options))
    assert "no such worker" in said, said
    assert torch.equal(torch.get_rng_state(), generator), "the generators come last"


def case_a_folder_that_is_not_shared(folder: Path) -> None:
    model, optimizer = make()
    own = folder / f"own-{dist.get_rank()}"
    said = refused(lambda: capture.enable(model, optimizer=optimizer, history=own))
    assert "rank 1" in said


def case_a_budget_too_small_on_one_rank(folder: Path) -> None:
    model, optimizer = make()
    budget_bytes = 4096 if dist.get_rank() == 0 else 32 << 20
    assert "budget" in refused(
        lambda: capture.enable(model, optimizer=optimizer, history=folder / "budget", budget_bytes=budget_bytes)
    )


def case_a_damaged_file_of_one_rank(folder: Path) -> None:
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=folder / "damaged", backend="posix") as session:
        one_step(model, optimizer)
        session.wait()
    opened = History.open(folder / "damaged")
    victim = next(
        e for e in opened.extents(opened.resolve(1), kinds=["buffer"]) if "rank-00001" in e.file and e.nbytes > 8
    )
    if dist.get_rank() == 1:
        with (folder / "damaged" / victim.file).open("r+b") as file:
            file.seek(victim.offset)
            file.write(b"\xff\xff")
    dist.barrier()
    other, its_optimizer = make(seed=6)
    said = refused(lambda: capture.restore(1, history=folder / "damaged", model=other, optimizer=its_optimizer))
    assert victim.name in said
    resumed = capture.enable(other, optimizer=its_optimizer, history=folder / "damaged", resume="auto", backend="posix")
    facts = History.open(folder / "damaged").run_facts(resumed.run)
    assert facts.parent_step == 0, "the damaged one is passed over on all ranks"
    resumed.close()


def case_a_rank_whose_disk_fails_leaves_the_step_incomplete(folder: Path) -> None:
    model, optimizer = make()
    faults = native.Faults(fail_after=3) if dist.get_rank() == 1 else None
    session = faulty_session(model, optimizer, folder / "half", faults=faults)
    try:
        for _ in range(3):
            one_step(model, optimizer)
        session.wait(timeout_s=0.2)
    except SnapshotError:
        pass
    else:
        raise AssertionError("a missing part was not reported")
    # The failures of rank 1 are in its journal before rank 0 closes.
    if dist.get_rank() == 1:
        session.close()
    dist.barrier()
    session.close()
    assert bool(session.failures) == (dist.get_rank() == 1)
    dist.barrier()
    opened = History.open(folder / "half")
    committed = [ref.step for ref in opened.checkpoints(session.run)]
    assert committed in ([], [0], [0, 1])
    assert opened.state(session.run, 3) in ("incomplete", "failed")
    assert opened.step_dirs(session.run) == committed, "no rank leaves a part of a step that another has failed"


def case_ranks_skip_a_step_together(folder: Path) -> None:
    """Only the disk of rank 1 is slow, and yet no rank captures a step that another skips."""
    model, optimizer = make()
    faults = native.Faults(delay_us=500_000) if dist.get_rank() == 1 else None
    session = faulty_session(model, optimizer, folder / "skipping", faults=faults, on_full="skip")
    for _ in range(12):
        one_step(model, optimizer)
    session.wait()
    skipped = session.stats.skipped
    session.close()
    dist.barrier()
    opened = History.open(folder / "skipping")
    assert skipped
    committed = [ref.step for ref in opened.checkpoints(session.run)]
    # `close` captures the last step, whether it was skipped or not.
    assert len(committed) in (13 - skipped, 14 - skipped)
    assert opened.step_dirs(session.run) == committed


def case_latest_is_the_step_that_the_last_rank_has_ended(folder: Path) -> None:
    """Rank 0 has closed the session of the restore, while the disk of rank 1 still takes its part of the last step."""
    model, optimizer = make()
    faults = native.Faults(delay_us=300_000) if dist.get_rank() == 1 else None
    session = faulty_session(model, optimizer, folder / "latest", faults=faults)
    for _ in range(2):
        one_step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = capture.restore("latest", history=folder / "latest", model=model, optimizer=optimizer)
    assert (found, session.is_open) == (CheckpointRef(session.run, 2), False)


def case_a_session_that_can_not_be_closed_ends_the_next_enable_and_a_restore_on_all_ranks(folder: Path) -> None:
    """Its failure is that of rank 1 alone."""
    for closes in ("enable", "restore"):
        said = refused(lambda root=folder / f"strict-{closes}", closes=closes: _ends_a_failing_session(root, closes))
        if dist.get_rank() == 0:
            assert "closing the session" in said, said
            assert "failed on rank 1" in said, said


def _ends_a_failing_session(root: Path, closes: str) -> None:
    model, optimizer = make()
    faults = native.Faults(fail_after=3) if dist.get_rank() == 1 else None
    session = faulty_session(model, optimizer, root, faults=faults, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_step(model, optimizer)
        try:
            if closes == "enable":
                capture.enable(model, optimizer=optimizer, every=1, history=root)
            else:
                capture.restore("latest", history=root, model=model, optimizer=optimizer)
        finally:
            assert not session.is_open


def case_a_part_that_a_commit_has_overtaken_is_removed(folder: Path) -> None:
    """Rank 1 can't take step 1; once a later step is committed, rank 0 removes its part while the session is open."""
    model, optimizer = make()
    state = {"value": 1}
    provider = capture.Stateful("user", state, placement="rank_local", read_at="step")
    session = capture.enable(
        model, optimizer=optimizer, every=1, history=folder / "overtaken", providers=[provider], backend="posix"
    )
    opened = History.open(folder / "overtaken")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (1, 2, 3):
            state["value"] = print if step == 1 and dist.get_rank() == 1 else 1
            one_step(model, optimizer)
            if step == 1 and dist.get_rank() == 1:
                state["value"] = 1
                assert "failed on this rank already" in refused(session.snapshot)
            with contextlib.suppress(SnapshotError):
                session.wait(timeout_s=None if step > 1 else 0.0)
            dist.barrier()
    assert opened.step_dirs(session.run) == [0, 2, 3]
    session.close()
    dist.barrier()
    assert [ref.step for ref in opened.checkpoints(session.run)] == [0, 2, 3]
    assert opened.state(session.run, 1) == "failed"


@guards("A byte budget holds")
@guards("The training goes on")
def case_a_step_of_which_one_rank_has_a_part_is_refused_by_all_before_they_ask_for_room(folder: Path) -> None:
    """Steps are counted back to one that rank 1 could not take. Rank 0 refuses it, and would not be there when rank 1
    asks whether all have room."""
    model, optimizer = make()
    root, state = folder / "half-captured", {"value": 1}
    provider = capture.Stateful("user", state, placement="rank_local", read_at="step")
    options = {"every": 2, "history": root, "providers": [provider], "backend": "posix", "stats_every": 0}
    with capture.enable(model, optimizer=optimizer, keep="1GB", **options) as session:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one_step(model, optimizer)
            state["value"] = print if dist.get_rank() == 1 else 1
            one_step(model, optimizer)
            state["value"] = 1
            count_from(optimizer, 1)
            one_step(model, optimizer)
        told = str(session.failures[-1])
        assert f"captured already by {'another rank' if dist.get_rank() else 'rank 0'}" in told, told
        for _ in range(2):
            one_step(model, optimizer)
        with pytest.raises(SnapshotError):
            session.wait()
        # The last part of every rank is there before the first one looks for the last time.
        dist.barrier()
    dist.barrier()
    opened = History.open(root)
    assert [ref.step for ref in opened.checkpoints(session.run)] == [0, 4]
    assert verify(opened) == []


def case_errors_travel_and_nothing_hangs(folder: Path) -> None:
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    assert ranks.broadcast(["of", "rank", ranks.rank]) == ["of", "rank", 0]

    def fails() -> None:
        if ranks.rank == 1:
            raise OSError(5, "on rank 1 only")

    assert "on rank 1 only" in refused(lambda: ranks.agree("trying", fails))


def case_two_ranks_written_one_rank_restored(folder: Path) -> None:
    """One process restores the whole of replicated state, and the rank-local state of rank 0."""
    opened = History.open(folder / "one")
    state = capture.restore(2, history=folder / "one")
    kinds = {extent.kind for extent in opened.extents(opened.resolve(2))} - {"header", "pad", "object", "object_tensor"}
    assert set(state) == kinds
    assert state["model"]["inner.weight"].shape == (64, 64)


def half_frozen(*, seed: int = 5) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model whose first layer, of 256 KiB, is frozen."""
    torch.manual_seed(seed)
    inner = Net(256)
    inner.inner.requires_grad_(False)
    torch.manual_seed(100 + dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(inner, broadcast_buffers=False)
    return model, torch.optim.AdamW([p for p in inner.parameters() if p.requires_grad], lr=0.01)


@guards("A removed checkpoint is removed whole")
def case_a_policy_removes_the_parts_of_all_ranks_while_they_go_on_writing(folder: Path) -> None:
    """The first rank removes; what is left verifies and restores on both, with the frozen layer that it refers to."""
    root = folder / "kept"
    model, optimizer = half_frozen()
    expected = {}
    with capture.enable(
        model, optimizer=optimizer, every=1, history=root, stats_every=0, backend="posix", keep="last 3"
    ) as session:
        expected[0] = reference(model.module, optimizer), torch.get_rng_state()
        for _ in range(12):
            one_step(model, optimizer)
            expected[session.step] = reference(model.module, optimizer), torch.get_rng_state()
            if session.step == 6:
                session.wait()
        session.wait()
        # The last part of every rank is there before the first one looks for the last time.
        dist.barrier()
    assert session.failures == []
    # The frozen layer is in the share of the first rank.
    assert session.stats.unchanged_bytes > 0 or dist.get_rank() == 1
    dist.barrier()

    opened = History.open(root)
    left = opened.steps(session.run)
    assert left[-3:] == [10, 11, 12], left
    needed = {
        int(Path(extent.file).parent.name)
        for step in left[-3:]
        for extent in opened.extents(CheckpointRef(session.run, step))
    }
    assert set(left) == needed, f"{left} stay, and the last three refer to {needed}"
    gone = opened.query("SELECT DISTINCT step FROM events WHERE name = 'removed' ORDER BY step")["step"].to_pylist()
    assert sorted([*gone, *left]) == list(range(13))
    assert sorted(path.name for path in opened.paths.steps_dir(session.run).iterdir()) == [f"{n:012}" for n in left]
    assert verify(opened) == []
    with pytest.raises(NotFoundError, match=r"step 5 of run .* was removed on"):
        capture.restore(5, history=root)
    other, its_optimizer = half_frozen(seed=6)
    for step in left:
        capture.restore(step, history=root, model=other, optimizer=its_optimizer)
        state, rng = expected[step]
        assert_same(reference(other.module, its_optimizer), state)
        assert torch.equal(torch.get_rng_state(), rng)
