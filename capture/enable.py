"""`capture.enable`: decides, checks and refuses everything that can be before the first snapshot."""

import contextlib
import dataclasses
import logging
import mmap
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import native
from capture.active_sessions import close_sessions, origin_of, register_session, sessions_of
from capture.changes.change_detector import Check
from capture.collectives import Ranks
from capture.defaults import DEFAULT_BUDGET_BYTES, history_path
from capture.environment import environment
from capture.loops.interface import Loop
from capture.loops.select import loop_for
from capture.maintenance.compaction import refuse_without_python
from capture.on_full import OnFull
from capture.redo_log.budget_room import RedoRoom
from capture.redo_log.recorder import RedoRecorder
from capture.redo_log.refusals import refuse_unrecordable
from capture.replays.batches import UnusedPosition
from capture.replays.course import ReplayCourse
from capture.replays.request import ReplayRequest, asked_replay
from capture.restore import all_providers, made_again, restore_live
from capture.resume import resume_newest
from capture.session.new_run import begin_run
from capture.session.options import SessionOptions
from capture.session.session import Session, close_at_exit
from capture.snapshot.shared_row import require_same_row
from capture.snapshot.state_listing import StateListing
from capture.snapshot.writer_choice import Backend, ChosenWriter, WriterOptions, agree_on_writer
from capture.state.averages import uncaptured_averages
from capture.state.interface import StateProvider, read_at
from capture.state.unwrap import unwrapped
from capture.state.weights_only import Rounded, What, facts_of, weights_of
from capture.user_warning import warn_user
from catalog.argument_names import knows_its_arguments
from catalog.errors import HistoryError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.retention.policy import Keep, Policy, policy_of
from catalog.retention.upkeep import FACT
from catalog.run_writer import create_history

__all__ = ["enable"]

_log = logging.getLogger(__name__)


@knows_its_arguments
def enable(
    target: Any,
    *,
    every: int = 50,
    history: Path | str | None = None,
    dataloader: Any = None,
    providers: Sequence[StateProvider] = (),
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    on_full: OnFull = "wait",
    check: Check = "sampled",
    stats_every: int = 1,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    resume: Literal["auto"] | None = None,
    backend: Backend | None = None,
    strict: bool = False,
    sigterm_limit_s: float | None = None,
    keep: Keep | None = None,
    compact: bool = False,
    fingerprints: bool = True,
    redo: bool = False,
    what: What = "state",
    dtype: Rounded | None = None,
) -> Session:
    """Capture every `every`-th optimizer step of a DeepSpeed engine, or of a module with its optimizer, from now on.

    Guarantees that a checkpoint is the state right after its step, bit for bit, whatever the training does next, and
    that the training waits only for the bytes that are not yet safe when the next update begins. All ranks must call
    it; a refusal on one is raised on all.

    target: a DeepSpeed engine, or a torch module together with `optimizer` (and `scheduler`, `scaler`): bare, compiled,
       in DistributedDataParallel, sharded by `fully_shard`, or as Accelerate has prepared it all. Several optimizers
       are given in the order in which the loop calls them; the last one ends a step. Of optimizers around each other,
       such as Lookahead or SAM, the outermost is given: the state of all is captured, and a step ends with its call.
    history: the folder; default `$DSHISTORY`, else `./history`. Every rank must see the same.
    dataloader: anything with state_dict() and load_state_dict(), to resume at the very next batch.
    providers: further State Providers, such as `capture.Stateful("ema", ema)`. A provider may declare with its
       `read_at` when its objects are read; by default, when the next forward, or update, begins: an object that the
       loop updates after the optimizer, such as an average of the weights, belongs to the step. With
       `read_at = "step"` they are read right after the optimizer.
    budget_bytes: the staging memory. Beyond the training's own, a capture takes this, 128 MiB, and 12 KiB for each
       tensor.
    on_full: with too many snapshots still being written, "wait" for one or "skip" the step (which is recorded). Ranks
       skip a step together: "skip" costs them one small all_reduce at each step that is due.
    check: the way in which edits of the state between a step and the barrier, or the late capture of the last step, are
       found, which fail that snapshot by name: "versions" compares torch's version counters, which do not see writes
       through `.data`; "sampled" also compares a sample of every tensor in host memory, which finds every swap or clamp
       of whole tensors; "hash" also compares all their bytes, and the training waits for two passes over them, with the
       first one after every step. Edits inside `with session.modify():` are part of the step.
    stats_every: compute statistics of the checkpoints whose steps are multiples of this; 0: of none. They are computed
       from the disk at the lowest priority, the newest first, and at `close` for a second at most; `dshistory analyze`
       computes those that are left.
    resume: "auto" goes on from the newest complete checkpoint of the history that verifies, or starts fresh; refused
       while that run is still being written. Each rank verifies its share of the bytes.
    backend: the writer's; by default io_uring where the host allows it, else POSIX threads.
    strict: whether `close` raises SnapshotError when a snapshot has failed. By default that is a warning: a full disk
       must not end a script that is about to save its model. `session.failures` has every failure either way.
    sigterm_limit_s: on SIGTERM, capture the step that has just ended and wait for it, at most so many seconds; then
       what SIGTERM would have done without a session happens: the handler that was there before, or the end of the
       process. An update that is under way is ended first. For trainings of one process, in the main thread.
    keep: which checkpoints stay, as "last 20, every 1000, best 3 by loss, 50GB", or as rules of
       `catalog.retention.rules`; None keeps all. The others are removed in the background after a commit, or a little
       later where nothing needs their room, and before `close` has returned. Room is left for the next one: a snapshot
       that does not fit into the budget is not written, which is a failure by name. SetupError for a budget without
       room for one. The newest checkpoint always stays, the newest healthy one, tagged ones, what a reader has open or
       another run goes on from, and what these refer to. The budget is for this run and the dead ones that it goes on
       from, as far as they have the same policy. It counts the redo log too: where there are rules, its oldest steps go
       before any checkpoint that a rule keeps, and else with the checkpoint from which they are made.
    compact: whether checkpoints that are not among the two newest are packed without loss beside the training, as
       `dshistory compact` does, in a process of its own that takes only what the cores and the disk have left over; the
       first rank packs the parts of all. Takes some 300 MB of host memory there, and room on the disk, and in a budget,
       for one more checkpoint: without it nothing is packed. At `close` it ends at once, and the rest stays as it is.
       What a reader has open is left until it is not.
    fingerprints: whether 8 bytes for each weight, buffer and tensor of the optimizer are kept of every step, captured
       or not: a digest of what `check` reads, or of a sample where that is nothing. By them a replay is compared
       between two checkpoints, and ranks with each other. They are written each minute, and at `close`. With
       them 8 bytes for what the training forwards of each step were given: they name a batch.
    redo: whether what every update consumes is recorded: gradients, hyperparameters, the buffers that forward changes,
       and objects. Then `restore`, `h.tensor` and `h.diff` take every step, captured or not: it is made again from the
       checkpoint before it, bit for bit, by the same updates. Takes two copies of the gradients in host memory, beside
       `budget_bytes`; with `on_full="skip"` a step whose predecessors are still being written is left out, and those
       after it up to the next checkpoint can't be made again; so is one for which the budget of `keep` has no room,
       with one warning. For weights in host memory, with one of torch's Adam, AdamW or SGD: plain, in
       DistributedDataParallel, or in a DeepSpeed engine (ZeRO 0-3, also with its CPU Adam).
    what: "state" is all that the training needs to go on; "weights" only the parameters and buffers, for a history to
       look at. Nothing restores a training from that, so `dataloader` and `providers` are refused.
    dtype: with what="weights", "bf16" or "fp16" rounds the copies of parameters with 32 bits or more, to nearest as
       `parameter.to(torch.bfloat16)` does (in fp16, what is larger than 65504 becomes infinite). The live parameters
       stay as they are.

    In a script that `dshistory replay` has started, this puts the training back to the step asked for, whatever
    `resume`, `history` and `what` say, changes it as asked, and captures it as a child of the run that is replayed.

    The logger `capture` tells the run, its folder and where it goes on from once (INFO). A failed snapshot is a
    warning, which `logging.captureWarnings(True)` brings into the log.

    The first step is captured at once, the last at `close`. A step is published when the next training forward begins,
    or at `session.wait()`. Enabling the same module or optimizer again closes its session first. A module that is
    compiled with `fullgraph=True` is passed compiled: the hooks on a bare one would be traced into its graph.
    Raises SetupError, UnsupportedError (state that can't be stored, by name), MismatchError.
    """
    options = SessionOptions(
        every=every,
        on_full=on_full,
        check=check,
        stats_every=stats_every,
        strict=strict,
        sigterm_limit_s=sigterm_limit_s,
        keep=None if keep is None else policy_of(keep),
        compact=compact,
        fingerprints=fingerprints,
        redo=redo,
        what=what,
        dtype=dtype,
    )
    if compact:
        refuse_without_python()
    if what == "weights":
        _refuse_further_state(dataloader, providers)
    writing = WriterOptions(backend=backend, budget_bytes=budget_bytes)
    if resume not in (None, "auto"):
        raise SetupError(f'resume={resume!r}: give "auto" or None; for a certain step call capture.restore first')
    replay = asked_replay()
    if replay is not None:
        options = dataclasses.replace(options, also_at=replay.capture_at, what="state", dtype=None)
    root = history_path(history) if replay is None else replay.history
    loop = loop_for(target, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    ranks = Ranks(*loop.ranks())
    every_provider = ranks.agree(
        "looking at the training", lambda: _providers(loop, dataloader, providers, whole=options.what == "state")
    )
    subjects = loop.subjects()
    if redo:
        ranks.agree("looking at the optimizer", lambda: refuse_unrecordable(loop))
    if options.what == "state":
        _warn_of_averages(subjects, every_provider)
    captured = every_provider if options.what == "state" else weights_of(every_provider, options.dtype)
    _close_sessions_before(subjects, captured, ranks, keep=options.keep)
    if sigterm_limit_s is not None:
        _refuse_sigterm_for(ranks)
    with _naming(root):
        ranks.agree(f"making the history {root}", lambda: _make_history(root, ranks.rank))
        ranks.prove_shared(root)
        parent, course = origin_of(subjects), None
        if replay is not None:
            parent = replay.ref
            course = _put_back(replay, root, ranks, loop, dataloader, every_provider)
        elif resume == "auto":
            parent = resume_newest(History.open(root), ranks, every_provider) or parent
        session = _begin(root, ranks, loop, captured, parent=parent, options=options, writing=writing, course=course)
    register_session(subjects, session)
    close_at_exit(session)
    if ranks.rank == 0:
        _log.info("%r", session)
    return session


def _put_back(
    replay: ReplayRequest, root: Path, ranks: Ranks, loop: Loop, dataloader: Any, providers: Sequence[StateProvider]
) -> ReplayCourse:
    """Put the training back to the step that is replayed, and change it as asked."""
    takers = providers if replay.leaves_out else [*providers, UnusedPosition()]
    opened = History.open(root)
    rebuilt = made_again(opened, replay.ref, ranks)
    restore_live(opened, replay.ref, ranks=ranks, providers=takers, whole=True, verify=True, rebuilt=rebuilt)
    return ranks.agree("changing the training", lambda: ReplayCourse(replay, loop, dataloader, rank=ranks.rank))


def _begin(
    root: Path,
    ranks: Ranks,
    loop: Loop,
    providers: Sequence[StateProvider],
    *,
    parent: CheckpointRef | None,
    options: SessionOptions,
    writing: WriterOptions,
    course: ReplayCourse | None,
) -> Session:
    """Choose the writer, begin the run and capture the first step; leave nothing open when one of these fails."""
    file_system = ranks.agree(f"looking at the file system of {root}", lambda: native.probe_file_system(str(root)))
    listing = StateListing(
        providers, rank=ranks.rank, world_size=ranks.world_size, align=int(file_system["place_align"])
    )
    layout_hash = _looked_at(listing, ranks, keep=options.keep)
    with contextlib.ExitStack() as undo:
        writer = agree_on_writer(root, ranks, options=writing, file_system=file_system)
        undo.callback(writer.writer.close)
        facts = _facts(loop, writer, options)
        if course is not None:
            facts["replay"] = course.request.facts()
        needs_locks = options.keep is not None
        room = RedoRoom() if options.keep is not None and options.keep.budget_bytes is not None else None
        run = undo.enter_context(
            begin_run(root, ranks, layout_hash=layout_hash, parent=parent, facts=facts, needs_locks=needs_locks)
        )
        session = ranks.agree(
            "capturing the first step",
            lambda: undo.enter_context(
                Session(
                    loop,
                    listing,
                    run=run,
                    writer=writer.writer,
                    options=options,
                    observer=course,
                    redo=RedoRecorder(loop, run=run, on_full=options.on_full, room=room) if options.redo else None,
                    resumed_from=parent,
                )
            ),
        )
        undo.pop_all()
    return session


def _providers(
    loop: Loop, dataloader: Any, providers: Sequence[StateProvider], *, whole: bool
) -> Sequence[StateProvider]:
    loop.check_capturable(whole=whole)
    found = all_providers(loop.providers(), dataloader, providers)
    for provider in found:
        # A declaration that is misspelt is refused here, not at the first step.
        read_at(provider)
    return found


def _refuse_further_state(dataloader: Any, providers: Sequence[StateProvider]) -> None:
    further = {"dataloader": dataloader, "providers": providers or None}
    given = [f"{name}=" for name, value in further.items() if value is not None]
    if given:
        raise SetupError(
            f'what="weights": {" and ".join(given)} can\'t be captured in a history of weights '
            'alone: leave it out, or capture all with what="state"'
        )


def _warn_of_averages(subjects: Sequence[Any], providers: Sequence[StateProvider]) -> None:
    module = next(subject for subject in subjects if isinstance(subject, torch.nn.Module))
    for average in uncaptured_averages(unwrapped(module), providers):
        warn_user(
            f"{type(average).__qualname__} looks like an average of the captured weights and is not captured: a restore"
            ' will not bring it back; pass capture.enable(..., providers=[capture.Stateful("average", average)])'
        )


def _close_sessions_before(
    subjects: Sequence[Any], providers: Sequence[StateProvider], ranks: Ranks, *, keep: Policy | None
) -> None:
    """Close the sessions that capture one of these objects. Where one of them is still open, warn, and refuse before
    that what can't be captured by the next."""
    before = sessions_of(subjects)
    if ranks.any(any(previous.is_open for previous in before)):
        listing = StateListing(providers, rank=ranks.rank, world_size=ranks.world_size, align=mmap.PAGESIZE)
        _looked_at(listing, ranks, keep=keep)
    close_sessions(
        before,
        ranks=ranks,
        consequence="captures these objects already: it is closed, and a new run begins; call session.close() first if "
        "that is meant",
    )


def _looked_at(listing: StateListing, ranks: Ranks, *, keep: Policy | None) -> str:
    """Return the hash of the state's layout, the same on all ranks. Refuse state that can't be stored, and a budget in
    which not even what there is of it now has room."""
    layout_hash: str = ranks.broadcast(ranks.agree("looking at the state", listing.layout_hash))
    if ranks.world_size > 1:
        require_same_row(listing.shared_row(), ranks)
    if keep is not None and keep.budget_bytes is not None:
        needed_bytes = sum(ranks.gather(listing.planned_bytes({})))
        if needed_bytes > keep.budget_bytes:
            raise SetupError(
                f"keep={str(keep)!r}: one checkpoint takes at least {needed_bytes} bytes, more than the budget of "
                f"{keep.budget_bytes}, and there are two while the next one is written: give a larger budget, or none"
            )
    return layout_hash


def _refuse_sigterm_for(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        raise SetupError(
            f"sigterm_limit_s: {ranks.world_size} ranks are told of SIGTERM at different steps: let the ranks agree on "
            "a step in the training itself, and call session.snapshot() and session.wait() there"
        )


def _make_history(root: Path, rank: int) -> None:
    if rank == 0:
        try:
            create_history(root)
        except OSError as error:
            raise SetupError(f"the history {root} can't be made: {error}") from error


def _facts(loop: Loop, writer: ChosenWriter, options: SessionOptions) -> dict[str, Any]:
    return {
        **loop.facts(),
        **writer.facts,
        "every": options.every,
        "on_full": options.on_full,
        "check": options.check,
        "fingerprints": options.fingerprints,
        "redo": options.redo,
        "compact": options.compact,
        **facts_of(options.what, options.dtype),
        "host": socket.gethostname(),
        "environment": environment(),
        **({} if options.keep is None else {FACT: str(options.keep)}),
    }


@contextlib.contextmanager
def _naming(root: Path) -> Iterator[None]:
    """Turn what the file system refuses into a SetupError that names the history."""
    try:
        yield
    except HistoryError:
        raise
    except OSError as error:
        raise SetupError(
            f"the history {root} can't be read or written: {error}; see to its file system, or name another folder"
        ) from error
