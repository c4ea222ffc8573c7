"""Puts a live engine or model back to a step bit for bit, or returns the step as a plain state dict.

    resolve the step  ->  prepare: check everything, list what is filled  ->  verify all bytes  ->  overwrite  ->
    finish

Nothing on this path unpickles, and no live value changes before every rank has passed everything before `overwrite`.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from capture.active_sessions import close_sessions, note_origin, sessions_of
from capture.collectives import Ranks, processes_here
from capture.defaults import history_path
from capture.load.assignments import Assignment, match
from capture.load.objects import read_objects
from capture.load.read_into import read_into
from capture.load.rebuilt import RebuiltStep
from capture.load.spare_memory import spare_bytes
from capture.load.state_dict import StateDict, state_dict_of
from capture.load.unclaimed import TrackedObjects, warn_of_unclaimed
from capture.load.whole_state import require_whole_state
from capture.loops.select import loop_for
from capture.redo.rebuild import rebuilt_step
from capture.redo.steps import RedoRef, find_step
from capture.session.session import Session, close_may_publish
from capture.state.interface import Available, StateProvider, TensorItem
from capture.state.providers import DataloaderPosition, ModuleParameters, RandomState
from catalog.access.pins import pinned
from catalog.argument_names import knows_its_arguments
from catalog.data_files.check_data import check_extents
from catalog.data_files.stored_bytes import Buffer
from catalog.errors import CorruptError, MismatchError, NotFoundError, RestoreError, SetupError, SnapshotError
from catalog.format.manifest import NOT_STATE
from catalog.history import History
from catalog.read.fragments import RankFragments, choose
from catalog.records import CheckpointRef, Extent

__all__ = ["all_providers", "made_again", "restore", "restore_live"]


@knows_its_arguments
def restore(
    ref: int | str | CheckpointRef = "latest",
    *,
    history: Path | str | None = None,
    engine: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    providers: Sequence[StateProvider] = (),
    names: str | Sequence[str] | None = None,
    kinds: str | Sequence[str] | None = None,
    verify: bool = True,
) -> CheckpointRef | StateDict:
    """Put a live engine or model back to a step, bit for bit; without either, return that step's tensors.

    With `engine` or `model`: parameters, buffers, optimizer, scheduler, scaler, counters, RNG and (when given)
       dataloader become what they were. Any world size and ZeRO stage may have written them. All ranks must call it. It
       is all or nothing: everything, including every byte, is checked before the first byte is overwritten.
       What is read for that is kept in half of the host memory that is free; what does not fit there, or for which no
       memory comes in time, is read a second time. `verify=False` keeps nothing and reads everything once: checksums
       are then compared while overwriting, and RestoreError says that the live state is mixed if they differ. A session
       of the target that is open is closed first, with a warning; the next `enable` begins a child run. Returns the
       checkpoint.

    Without both: `{kind: {name: tensor}}` in host memory, in their global shapes; `names` and `kinds` (glob patterns)
       choose, and only what is chosen is read.

    A step that was not captured but is in a redo log is made again, bit for bit, in host memory, and is then restored
    in the same way; without a target it has weights, buffers and optimizer state. UnsupportedError names an object that
    was too large for the log.

    Raises NotFoundError (names the nearest step), MismatchError (names what does not fit), CorruptError, RestoreError.
    """
    target = engine if engine is not None else model
    if target is None:
        opened = History.open(history_path(history))
        if any(value is not None for value in (optimizer, scheduler, scaler, dataloader)) or providers:
            raise SetupError(
                "restore: to put an optimizer, scheduler, scaler or dataloader back, pass engine= or model= too"
            )
        step = find_step(opened, ref)
        if isinstance(step, RedoRef):
            return state_dict_of(opened, step.ref, names=names, kinds=kinds, rebuilt=rebuilt_step(opened, step))
        return state_dict_of(opened, step, names=names, kinds=kinds)
    if engine is not None and model is not None:
        raise SetupError("restore: pass engine= or model=, not both")
    if names is not None or kinds is not None:
        raise SetupError("restore: names= and kinds= choose from a state dict; a live target is restored whole")
    if isinstance(engine, torch.nn.Module) and not hasattr(engine, "global_steps"):
        raise SetupError("restore: engine= is for a DeepSpeed engine; pass a plain module as model=")
    loop = loop_for(target, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    ranks = Ranks(*loop.ranks())
    sessions = sessions_of(loop.subjects())
    opened = ranks.agree("opening the history", lambda: History.open(history_path(history)))
    ranks.agree("resolving the step", lambda: _require_there(opened, ref, [one for one in sessions if one.is_open]))
    # The last step of a session is there once the last rank has ended: only then can one say which step is the latest.
    close_sessions(
        sessions,
        ranks=ranks,
        consequence="is closed, since its training is put back: call capture.enable again to capture what comes, as a "
        "child run",
    )
    text = ranks.agree("resolving the step", lambda: str(_named(opened, ref)) if ranks.rank == 0 else "")
    chosen = ranks.broadcast(text)
    step = ranks.agree("resolving the step", lambda: find_step(opened, chosen))
    found = step.ref if isinstance(step, RedoRef) else step
    rebuilt = made_again(opened, found, ranks)
    takers = ranks.agree("listing the state", lambda: all_providers(loop.providers(), dataloader, providers))
    # Restoring a model's weights alone is usual. Whoever passes an optimizer too goes on training and needs everything.
    whole = engine is not None or optimizer is not None
    restore_live(opened, found, ranks=ranks, providers=takers, whole=whole, verify=verify, rebuilt=rebuilt)
    note_origin(loop.subjects(), found)
    return found


def _require_there(history: History, ref: int | str | CheckpointRef, open_sessions: Sequence[Session]) -> None:
    """Raise NotFoundError, before a session is closed for it, for the number of a step that is not there and that its
    end would not publish."""
    if not isinstance(ref, int) or not open_sessions or any(close_may_publish(one, ref) for one in open_sessions):
        return
    try:
        _named(history, ref)
    except NotFoundError:
        for session in open_sessions:
            with contextlib.suppress(SnapshotError):
                session.wait()
        _named(history, ref)


def _named(history: History, ref: int | str | CheckpointRef) -> CheckpointRef:
    step = find_step(history, ref)
    return step.ref if isinstance(step, RedoRef) else step


def made_again(history: History, ref: CheckpointRef, ranks: Ranks) -> RebuiltStep | None:
    """Return a step that was not captured as the redo log makes it again; None for a checkpoint. All ranks call it, and
    each makes the whole step."""

    def make() -> RebuiltStep | None:
        step = find_step(history, ref)
        return rebuilt_step(history, step) if isinstance(step, RedoRef) else None

    return ranks.agree(f"looking for step {ref}", make)


def all_providers(
    of_loop: Sequence[StateProvider], dataloader: Any, of_user: Sequence[StateProvider]
) -> list[StateProvider]:
    """Return every provider of a run in the order in which state is put back.

    Random number generators come last, because putting other state back may draw from them. SetupError for a user's
    provider that is none.
    """
    if isinstance(of_user, str) or not isinstance(of_user, Sequence):
        raise SetupError(f"providers={of_user!r}: give a list of State Providers, () for none")
    for provider in of_user:
        if not isinstance(provider, StateProvider):
            raise SetupError(
                f"providers: {provider!r} is no State Provider: wrap an object that has state_dict() and "
                'load_state_dict() as capture.Stateful("its name", it)'
            )
    position = [] if dataloader is None else [DataloaderPosition(dataloader)]
    return [*of_loop, *position, *of_user, RandomState()]


def restore_live(
    history: History,
    ref: CheckpointRef,
    *,
    ranks: Ranks,
    providers: Sequence[StateProvider],
    whole: bool,
    verify: bool,
    rebuilt: RebuiltStep | None = None,
) -> None:
    """Put the state of `ref` into what the providers list; on error all ranks raise.

    All ranks call it. `whole`: a training is to go on, so warn of objects that no provider asks for. `verify`: read all
    bytes once before the first is overwritten. `rebuilt`: the step `ref`, which was made again.
    """
    opened = ref if rebuilt is None else rebuilt.base
    with contextlib.ExitStack() as pins:
        ranks.agree(f"opening checkpoint {opened}", lambda: pins.enter_context(pinned(history.paths, opened)))
        if whole:
            ranks.agree(f"looking at what checkpoint {opened} holds", lambda: require_whole_state(history, opened))
        available, objects, assignments = ranks.agree(
            f"checking checkpoint {ref}", lambda: _prepare(history, ref, ranks.rank, providers, rebuilt)
        )
        kept: dict[Extent, Buffer] = {} if rebuilt is None else rebuilt.kept()
        if verify:
            # A restore overwrites its targets in place. So damage must be found while the live state is still whole, on
            # every rank, or a training that asked for another step is left with a mixture of two.
            ranks.agree(f"verifying checkpoint {ref}", lambda: _verify(history, assignments, ranks, kept))
        # The ranks agree a second time, after overwriting: `finish` of a sharded engine is a collective. If one rank
        # failed to read and the others entered it, they would wait there forever.
        ranks.agree(f"reading checkpoint {ref}", lambda: _overwrite(history, ref, assignments, kept))
        kept.clear()
        ranks.agree(f"finishing the restore of checkpoint {ref}", lambda: _finish(providers, available))
        if whole and ranks.rank == 0:
            warn_of_unclaimed(ref, objects)


def _verify(history: History, assignments: Sequence[Assignment], ranks: Ranks, kept: dict[Extent, Buffer]) -> None:
    """Compare every checksum, and keep as many bytes as there is room for: a copy of all may not fit in memory."""
    extents = {assignment.extent for assignment in assignments} - kept.keys()
    room = spare_bytes(processes_here(ranks.world_size))
    for damage in check_extents(history.root, extents, kept=kept, most_kept_bytes=room):
        raise CorruptError(
            f"{history.root / damage.file}: {damage.field}: {damage.message}: nothing was changed; restore another step"
        )


def _overwrite(
    history: History, ref: CheckpointRef, assignments: Sequence[Assignment], kept: dict[Extent, Buffer]
) -> None:
    try:
        read_into(history.root, assignments, kept)
    except CorruptError as error:
        raise RestoreError(
            f"restoring {ref} stopped half-way, the live state is a mixture now: restore another step before going on: "
            f"{error}"
        ) from error


def _finish(providers: Sequence[StateProvider], available: Available) -> None:
    """Finish all providers, whatever ails one of them: what another does may be a collective, which the other ranks
    have entered. Then raise the first error."""
    failures = []
    for provider in providers:
        try:
            provider.finish(available)
        except Exception as error:  # noqa: BLE001 - a user's provider may raise anything
            failures.append(error)
    if failures:
        raise failures[0]


def _prepare(
    history: History,
    ref: CheckpointRef,
    rank: int,
    providers: Sequence[StateProvider],
    rebuilt: RebuiltStep | None,
) -> tuple[Available, TrackedObjects, list[Assignment]]:
    """Check everything but the bytes, and let providers create state they lack; no value that training produced
    changes.
    """
    extents = history.extents(ref) if rebuilt is None else rebuilt.extents
    chosen = choose(extents, rank=rank)
    tensors = {
        key: (tuple(members[0].shape), members[0].dtype)
        for key, members in chosen.by_key.items()
        if key[0] not in NOT_STATE
    }
    objects = TrackedObjects(read_objects(history.root, chosen) if rebuilt is None else rebuilt.objects(rank))
    available = Available(tensors, objects)
    _check_all_wanted(ref, chosen, providers)
    for provider in providers:
        provider.prepare(available)
    items = [item for provider in providers for item in provider.tensors()]
    return available, objects, match(items, chosen, ref)


def _check_all_wanted(ref: CheckpointRef, chosen: RankFragments, providers: Sequence[StateProvider]) -> None:
    """Raise MismatchError when the checkpoint has parameters that no provider lists: it belongs to another model."""
    items, partial = [], False
    for provider in providers:
        found = [item for item in provider.tensors() if item.kind == "model"]
        items += found
        # A ZeRO-3 rank lists only the parameters that it holds a part of.
        partial |= any(item.placement != "replicated" for item in found) and not isinstance(provider, ModuleParameters)
    if not items or partial:
        return
    here = {name for item in items for name in (item.name, *item.aliases)}
    stored = {name for kind, name in chosen.by_key if kind == "model"}
    extra = sorted(stored - here)
    _check_ties(ref, chosen, items)
    if extra:
        missing = sorted(here - stored - {name for _, name in chosen.aliases})
        raise MismatchError(
            f"checkpoint {ref} is of another model: {len(extra)} parameters only in the checkpoint "
            f"({', '.join(extra[:3])}), {len(missing)} only here ({', '.join(missing[:3]) or 'none'}): "
            "nothing was changed"
        )


def _check_ties(ref: CheckpointRef, chosen: RankFragments, items: Sequence[TensorItem]) -> None:
    """Raise MismatchError when parameters that are tied here have different contents in the checkpoint."""
    for item in items:
        stored = [name for name in (item.name, *item.aliases) if ("model", name) in chosen.by_key]
        contents = {tuple(extent.checksum for extent in chosen.by_key["model", name]) for name in stored}
        if len(contents) > 1:
            raise MismatchError(
                f"checkpoint {ref}: parameters {' and '.join(map(repr, stored))} are tied here, but differ in the "
                "checkpoint: untie them, or build the model as it was: nothing was changed"
            )
