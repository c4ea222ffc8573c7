"""Back to a step: into a live engine or model bit for bit, or as a plain state dict. Nothing on this path unpickles."""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from capture.active_sessions import note_origin, sessions_of
from capture.collectives import Ranks
from capture.defaults import history_path
from capture.load.assignments import Assignment, Chosen, choose, match
from capture.load.read_into import read_extents, read_into
from capture.load.unclaimed import Asked, warn_of_untaken
from capture.loops.select import loop_for
from capture.state.dtypes import torch_dtype
from capture.state.interface import Available, StateProvider, TensorItem
from capture.state.objects import decode_object
from capture.state.providers import DataloaderPosition, ModuleParameters, RandomState
from catalog.errors import CorruptError, MismatchError, NotFoundError, RestoreError, SetupError
from catalog.format.manifest import NOT_STATE
from catalog.history import History
from catalog.read.check_data import check_extents
from catalog.records import CheckpointRef, Extent

__all__ = ["all_providers", "restore", "restore_live", "state_dict_of"]

StateDict = dict[str, dict[str, torch.Tensor]]


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

    Live: parameters, buffers, optimizer, scheduler, scaler, counters, RNG and (when given) dataloader become what they
       were; any world size and ZeRO stage may have written them. All ranks must call it. It is all or nothing: everything,
       all bytes too, is checked before the first one is overwritten. `verify=False` reads the bytes once only, half the
       time: checksums are compared on the way, and RestoreError says that the live state is mixed if they differ. A session
       of the target is closed first; the next `enable` begins a child run. Returns the checkpoint.

    Without `engine` and `model`: `{kind: {name: tensor}}` in host memory, in their global shapes; `names` and `kinds`
    (glob patterns) choose, and only what is chosen is read.

    Raises NotFoundError (names the nearest step), MismatchError (what does not fit), CorruptError, RestoreError.
    """
    opened = History.open(history_path(history))
    target = engine if engine is not None else model
    if target is None:
        if any(value is not None for value in (optimizer, scheduler, scaler, dataloader)) or providers:
            raise SetupError(
                "restore: to put an optimizer, scheduler, scaler or dataloader back, pass engine= or model= too"
            )
        return state_dict_of(opened, opened.resolve(ref), names=names, kinds=kinds)
    if engine is not None and model is not None:
        raise SetupError("restore: pass engine= or model=, not both")
    if names is not None or kinds is not None:
        raise SetupError("restore: names= and kinds= choose from a state dict; a live target is restored whole")
    if isinstance(engine, torch.nn.Module) and not hasattr(engine, "global_steps"):
        raise SetupError("restore: engine= is for a DeepSpeed engine; pass a plain module as model=")
    loop = loop_for(target, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    for session in sessions_of(loop.subjects()):
        session.close()
    ranks = Ranks(*loop.ranks())
    text = ranks.agree("resolving the step", lambda: str(opened.resolve(ref)) if ranks.rank == 0 else "")
    found = opened.resolve(ranks.broadcast(text))
    takers = all_providers(loop.providers(), dataloader, providers)
    # Only the weights are a usual thing to want; a training that goes on wants all.
    whole = engine is not None or optimizer is not None
    restore_live(opened, found, ranks=ranks, providers=takers, whole=whole, verify=verify)
    note_origin(loop.subjects(), found)
    return found


def all_providers(
    of_loop: Sequence[StateProvider], dataloader: Any, of_user: Sequence[StateProvider]
) -> list[StateProvider]:
    """Every provider of a run in the order in which state is put back; the generators last, for the others may draw."""
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
) -> None:
    """Put the state of `ref` into what the providers list. All ranks call it; all raise when one can't. `whole`: warn of
    objects that none of the providers asks for. `verify`: read all bytes once before, in case they are damaged.
    """
    available, objects, assignments = ranks.agree(
        f"checking checkpoint {ref}", lambda: _prepare(history, ref, ranks.rank, providers)
    )

    def look() -> None:
        for damage in check_extents(history.root, {assignment.extent for assignment in assignments}):
            raise CorruptError(
                f"{history.root / damage.file}: {damage.field}: {damage.message}: nothing was changed; restore another step"
            )

    if verify:
        ranks.agree(f"verifying checkpoint {ref}", look)

    def overwrite() -> None:
        try:
            read_into(history.root, assignments)
        except CorruptError as error:
            raise RestoreError(
                f"restoring {ref} stopped half-way, the live state is a mixture now: restore another step before going on: {error}"
            ) from error

    # Two rounds: `finish` of a sharded engine is a collective, which no rank may enter unless all do.
    ranks.agree(f"reading checkpoint {ref}", overwrite)
    for provider in providers:
        provider.finish(available)
    if whole and ranks.rank == 0:
        warn_of_untaken(ref, objects)


def state_dict_of(
    history: History,
    ref: CheckpointRef,
    *,
    names: str | Sequence[str] | None = None,
    kinds: str | Sequence[str] | None = None,
) -> StateDict:
    """The tensors of a checkpoint, `{kind: {name: tensor}}`; tied names share one tensor. NotFoundError, with
    the nearest, for a pattern that fits nothing.
    """
    names, kinds = _patterns(names), _patterns(kinds)
    extents = [extent for extent in history.extents(ref) if extent.kind not in NOT_STATE]
    chosen = choose(extents, rank=0)
    _check_patterns(ref, chosen, names, kinds)
    wanted = {
        key: members
        for key, members in chosen.by_key.items()
        if _selected(key[0], kinds) and any(_selected(name, names) for name in (key[1], *members[0].aliases))
    }
    state: StateDict = {}
    assignments: list[Assignment] = []
    for (kind, name), members in sorted(wanted.items()):
        tensor = torch.empty(members[0].shape, dtype=torch_dtype(members[0].dtype))
        _check_cover(ref, members, tensor.numel())
        assignments += [Assignment(extent, tensor, extent.start, 0, extent.numel) for extent in members]
        for alias in (name, *members[0].aliases):
            state.setdefault(kind, {})[alias] = tensor
    read_into(history.root, assignments)
    return state


def _prepare(
    history: History, ref: CheckpointRef, rank: int, providers: Sequence[StateProvider]
) -> tuple[Available, Asked, list[Assignment]]:
    """Check everything, and make what is missing, without changing a value."""
    extents = history.extents(ref)
    chosen = choose(extents, rank=rank)
    tensors = {
        key: (tuple(members[0].shape), members[0].dtype)
        for key, members in chosen.by_key.items()
        if key[0] not in NOT_STATE
    }
    objects = Asked(_objects(history.root, chosen))
    available = Available(tensors, objects)
    _check_all_wanted(ref, chosen, providers)
    for provider in providers:
        provider.prepare(available)
    items = [item for provider in providers for item in provider.tensors()]
    return available, objects, match(items, chosen, ref)


def _objects(root: Path, chosen: Chosen) -> Mapping[str, Any]:
    rows = [members[0] for (kind, _), members in chosen.by_key.items() if kind in ("object", "object_tensor")]
    data = dict(zip(((row.kind, row.name) for row in rows), read_extents(root, rows), strict=True))
    shapes = {row.name: row.shape for row in rows}

    def tensor(name: str) -> torch.Tensor:
        return data["object_tensor", name].view(shapes[name])

    return {
        name: decode_object(name, flat.numpy().tobytes(), tensor=tensor)
        for (kind, name), flat in data.items()
        if kind == "object"
    }


def _check_all_wanted(ref: CheckpointRef, chosen: Chosen, providers: Sequence[StateProvider]) -> None:
    """MismatchError when the checkpoint has parameters that nobody here takes: it is of another model."""
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
            f"checkpoint {ref} is of another model: {len(extra)} parameters only in the checkpoint ({', '.join(extra[:3])}), "
            f"{len(missing)} only here ({', '.join(missing[:3]) or 'none'}): nothing was changed"
        )


def _check_ties(ref: CheckpointRef, chosen: Chosen, items: Sequence[TensorItem]) -> None:
    """MismatchError when parameters that are one here are several, of different content, in the checkpoint."""
    for item in items:
        stored = [name for name in (item.name, *item.aliases) if ("model", name) in chosen.by_key]
        contents = {tuple(extent.checksum for extent in chosen.by_key["model", name]) for name in stored}
        if len(contents) > 1:
            raise MismatchError(
                f"checkpoint {ref}: parameters {' and '.join(map(repr, stored))} are tied here, but differ in the checkpoint: "
                "untie them, or build the model as it was: nothing was changed"
            )


def _check_cover(ref: CheckpointRef, members: Sequence[Extent], numel: int) -> None:
    at = 0
    for extent in members:
        if extent.start != at:
            raise CorruptError(f"checkpoint {ref}: {extent.kind} {extent.name!r}: no fragment begins at element {at}")
        at += extent.numel
    if at != numel:
        raise CorruptError(
            f"checkpoint {ref}: {members[0].kind} {members[0].name!r}: {at} of {numel} elements are stored"
        )


def _patterns(given: str | Sequence[str] | None) -> Sequence[str] | None:
    return [given] if isinstance(given, str) else given


def _check_patterns(
    ref: CheckpointRef, chosen: Chosen, names: Sequence[str] | None, kinds: Sequence[str] | None
) -> None:
    """NotFoundError, with the nearest, for a pattern that fits nothing."""
    known_kinds = {kind for kind, _ in chosen.by_key}
    known = {
        name
        for (kind, own), members in chosen.by_key.items()
        if _selected(kind, kinds)
        for name in (own, *members[0].aliases)
    }
    for what, patterns, there in (("kind", kinds, known_kinds), ("tensor", names, known)):
        for pattern in patterns or ():
            if not any(fnmatchcase(value, pattern) for value in there):
                near = (
                    difflib.get_close_matches(pattern.strip("*?."), sorted(there), n=5, cutoff=0.4) or sorted(there)[:5]
                )
                hint = f"the nearest {'are' if len(near) > 1 else 'is'} {', '.join(near)}" if near else "there are none"
                raise NotFoundError(f"no {what} fits {pattern!r} in checkpoint {ref}; {hint}")


def _selected(value: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(value, pattern) for pattern in patterns)
