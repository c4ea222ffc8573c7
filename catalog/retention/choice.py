"""Which checkpoints stay: decided from their facts alone, so that whoever asks first and removes then gets the same.

1. What must stay: the newest checkpoint; the newest that is healthy; tagged ones; what a reader has open; what a child
   run goes on from; and what is damaged, which only its owner may give up.
2. What a rule of the policy keeps.
3. What one of these needs, because it refers to its bytes.
4. Where these take more than the budget, those that only a rule keeps give way: those of the last rule first, and of a
   rule the least valuable one. What must stay never does: then the budget can't be met.

A redo log counts in a budget too. The steps that are made from one checkpoint stay or go together. Where the policy has
rules, they give way before any checkpoint that a rule keeps, the oldest first; where it keeps all that fits, the oldest
checkpoint goes with the steps that are made from it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from catalog.errors import SetupError
from catalog.records import CheckpointRef
from catalog.retention.facts import CheckpointFacts
from catalog.retention.policy import Policy
from catalog.retention.redo_segments import SegmentFacts, bases_of, together

__all__ = ["Choice", "beyond", "choose", "in_the_way"]

_SHOWN = 5
_IS_READ = "a reader has it open"


@dataclass(frozen=True, slots=True)
class Choice:
    """Every checkpoint with the reason why it stays, or goes. `unmet` are the rules that keep nothing at all, `redo`
    the segments of redo logs that the budget has no room for, or that no step can be made from."""

    kept: Mapping[CheckpointRef, str]
    removed: Mapping[CheckpointRef, str]
    unmet: tuple[str, ...] = ()
    redo: tuple[SegmentFacts, ...] = ()


def choose(
    lines: Sequence[Sequence[CheckpointFacts]],
    policy: Policy,
    *,
    more_bytes: int = 0,
    redo: Sequence[SegmentFacts] = (),
    coming_redo_bytes: int = 0,
) -> Choice:
    """Decide for the checkpoints of several trainings, each in the order in which they were made: the rules hold for
    each by itself, the budget for all together.

    more_bytes: what counts against the budget beside the checkpoints, such as one that is about to be written
    redo: the segments of the redo logs of these trainings
    coming_redo_bytes: what the redo log is going to take soon; where there is no room for all of it, it gets less, but
       steps made from older checkpoints than the newest give way first
    Raises SetupError when what must stay does not fit into the budget.
    """
    must: dict[CheckpointRef, str] = {}
    values: dict[CheckpointRef, tuple[int, int, float]] = {}
    reasons: dict[CheckpointRef, str] = {}
    met: set[str] = set()
    for line in lines:
        must |= _must_stay(line)
        whole = [one for one in line if not one.damage]
        for number, rule in enumerate(policy.rules):
            for place, one in enumerate(rule.keeps(whole)):
                met.add(str(rule))
                if one.ref not in values:
                    values[one.ref], reasons[one.ref] = (number, place, -one.created_s), str(rule)
        if not policy.rules:
            for place, one in enumerate(reversed(whole)):
                values[one.ref], reasons[one.ref] = (0, place, -one.created_s), "within the budget"
    facts = {one.ref: one for line in lines for one in line}
    kept = _Kept(facts, {*must, *values})
    log = _RedoLog(facts, kept.all(), redo)
    over: set[CheckpointRef] = set()
    if policy.budget_bytes is not None:
        room = policy.budget_bytes - more_bytes
        for ref, is_log in _least_first(values, must, log, comes_last=bool(policy.rules)):
            if kept.nbytes + log.nbytes + coming_redo_bytes <= room:
                break
            if ref is None:
                coming_redo_bytes = max(0, room - kept.nbytes - log.nbytes)
            elif is_log:
                log.give_up(ref)
            else:
                over.add(ref)
                kept.give_up(ref)
        if kept.nbytes + log.nbytes > room:
            raise SetupError(_too_little(policy, kept, must, more_bytes + log.nbytes))
    stays = {ref: must.get(ref) or (reasons[ref] if ref in kept.wanted else kept.needed_by(ref)) for ref in kept.all()}
    goes = {
        ref: beyond(policy) if ref in over else f"no rule of {str(policy)!r} keeps it"
        for ref in facts
        if ref not in stays
    }
    return Choice(stays, goes, tuple(str(rule) for rule in policy.rules if str(rule) not in met), tuple(log.over))


def beyond(policy: Policy) -> str:
    """Return the reason of what goes because the budget does not reach."""
    return f"beyond the budget of {policy.budget_bytes} bytes"


def in_the_way(
    lines: Iterable[Sequence[CheckpointFacts]], removed: Sequence[CheckpointRef], *, force: bool
) -> Mapping[CheckpointRef, str]:
    """Return those of `removed` that must stay, with the reason, when somebody asks for exactly these to go.

    force: whether also those go that have a tag, that a child run goes on from, or that are the last healthy ones
    """
    gone = set(removed)
    found: dict[CheckpointRef, str] = {}
    for line in lines:
        for one in line:
            if one.ref not in gone:
                for needed in sorted(one.needs & gone):
                    found.setdefault(needed, f"{one.ref} refers to its bytes: remove that one too")
            elif one.is_read:
                found.setdefault(one.ref, _IS_READ)
            elif not force and (one.child or one.tags):
                reason = one.child or f"tagged {', '.join(one.tags)}"
                found.setdefault(one.ref, f"{reason}: force=True removes it all the same")
        healthy = [one for one in line if not one.damage and one.healthy is not False]
        if healthy and not force and all(one.ref in gone for one in healthy):
            found.setdefault(healthy[-1].ref, "the newest healthy one of its run: force=True removes it all the same")
    return found


def _must_stay(line: Sequence[CheckpointFacts]) -> dict[CheckpointRef, str]:
    must: dict[CheckpointRef, str] = {}
    whole = [one for one in line if not one.damage]
    for one in line:
        if one.damage:
            must[one.ref] = f"damaged, and left to you: it {one.damage}"
        elif one.is_read or one.child:
            must[one.ref] = _IS_READ if one.is_read else one.child
        elif one.tags:
            must[one.ref] = f"tagged {', '.join(one.tags)}"
    for newest, reason in (
        (whole, "the newest"),
        ([one for one in whole if one.healthy is not False], "the newest healthy"),
        # Statistics come later than their checkpoints: the newest ones may yet turn out to be full of NaN.
        ([one for one in whole if one.healthy], "the newest known to be healthy"),
    ):
        if newest:
            must.setdefault(newest[-1].ref, reason)
    return must


def _least_first(
    values: Mapping[CheckpointRef, tuple[int, int, float]],
    must: Mapping[CheckpointRef, str],
    log: "_RedoLog",
    *,
    comes_last: bool,
) -> Iterator[tuple[CheckpointRef | None, bool]]:
    """Yield what gives way to a budget, the least valuable first: checkpoints, and, with True, the redo steps that are
    made from one; None stands for those that are coming.

    comes_last: whether the redo log is worth less than any checkpoint, as where rules say which ones are wanted
    """
    oldest_first = sorted(log.bases(), key=log.created_s)
    # What was recorded last is worth more than what may be recorded next.
    newest = oldest_first[-1:]
    checkpoints = sorted(values.keys() - must.keys(), key=lambda ref: values[ref], reverse=True)
    older = oldest_first[:-1]
    if comes_last:
        yield from ((ref, True) for ref in older)
        yield None, True
        yield from ((ref, True) for ref in newest)
        yield from ((ref, False) for ref in checkpoints)
        return
    older.reverse()
    while checkpoints and not (newest and log.created_s(checkpoints[0]) >= log.created_s(newest[0])):
        ref = checkpoints.pop(0)
        # What is made from older checkpoints, which must stay, is older too.
        while older and log.created_s(older[-1]) <= log.created_s(ref):
            yield older.pop(), True
        yield ref, False
    yield from ((ref, True) for ref in reversed(older))
    yield None, True
    yield from ((ref, True) for ref in newest)
    # No checkpoint goes before the steps that are made from it.
    yield from ((ref, False) for ref in checkpoints)


class _RedoLog:
    """The segments of redo logs that can be made use of, by the newest kept checkpoint that they need."""

    def __init__(
        self, facts: Mapping[CheckpointRef, CheckpointFacts], kept: set[CheckpointRef], segments: Sequence[SegmentFacts]
    ) -> None:
        self.over: list[SegmentFacts] = []
        self.nbytes = 0
        self._facts = facts
        self._by_base: dict[CheckpointRef, list[SegmentFacts]] = {}
        self._held: set[CheckpointRef] = set()
        steps: dict[str, list[int]] = {}
        for ref in sorted(kept):
            steps.setdefault(ref.run, []).append(ref.step)
        runs = {ref.run for ref in facts}
        for group in together(segments):
            run = group[0].run
            bases = [CheckpointRef(run, step) for step in bases_of(group, steps.get(run, ()))]
            if not bases and run in runs:
                self.over += group
                continue
            self.nbytes += sum(one.nbytes for one in group)
            if not bases:  # the first checkpoint of the run is still on its way
                continue
            self._by_base.setdefault(bases[-1], []).extend(group)
            if any(facts[base].is_read for base in bases):
                self._held.add(bases[-1])

    def bases(self) -> Iterable[CheckpointRef]:
        """Return the checkpoints from which steps are made that nobody reads now."""
        return self._by_base.keys() - self._held

    def created_s(self, base: CheckpointRef) -> float:
        return self._facts[base].created_s

    def give_up(self, base: CheckpointRef) -> None:
        """Let the steps go that are made from a checkpoint."""
        gone = self._by_base.pop(base)
        self.nbytes -= sum(one.nbytes for one in gone)
        self.over += gone


class _Kept:
    """The checkpoints that are wanted, and those that they need."""

    def __init__(self, facts: Mapping[CheckpointRef, CheckpointFacts], wanted: set[CheckpointRef]) -> None:
        self.nbytes = 0
        self.wanted = wanted
        self._facts = facts
        self._needed: Counter[CheckpointRef] = Counter()
        self._in: set[CheckpointRef] = set()
        for ref in wanted:
            self._add(ref)

    def all(self) -> set[CheckpointRef]:
        return self._in

    def needed_by(self, ref: CheckpointRef) -> str:
        """Return why a checkpoint stays that nobody wants for itself."""
        return f"{max(other for other in self._in if ref in self._facts[other].needs)} refers to its bytes"

    def give_up(self, ref: CheckpointRef) -> None:
        """Do not want a checkpoint any more: it goes, unless another one needs it, and with it what only it needed."""
        self.wanted.discard(ref)
        self._drop_unless_needed(ref)

    def _add(self, ref: CheckpointRef) -> None:
        waiting = [ref]
        while waiting:
            at = waiting.pop()
            if at in self._in or at not in self._facts:
                continue
            self._in.add(at)
            self.nbytes += self._facts[at].nbytes
            self._needed.update(self._facts[at].needs)
            waiting += self._facts[at].needs

    def _drop_unless_needed(self, ref: CheckpointRef) -> None:
        waiting = [ref]
        while waiting:
            at = waiting.pop()
            if at not in self._in or at in self.wanted or self._needed[at]:
                continue
            self._in.remove(at)
            self.nbytes -= self._facts[at].nbytes
            for needed in self._facts[at].needs:
                self._needed[needed] -= 1
                waiting.append(needed)


def _too_little(policy: Policy, kept: _Kept, must: Mapping[CheckpointRef, str], more_bytes: int) -> str:
    stay = [f"{ref} ({must.get(ref) or kept.needed_by(ref)})" for ref in sorted(kept.all())]
    shown = ", ".join(stay[:_SHOWN]) + (f" and {len(stay) - _SHOWN} more" if len(stay) > _SHOWN else "")
    more = f", and {more_bytes} bytes are needed beside them" if more_bytes else ""
    return (
        f"keep={str(policy)!r}: the budget of {policy.budget_bytes} bytes can't be met: what must stay takes "
        f"{kept.nbytes} bytes{more}: {shown}: give it more, or remove some of these yourself"
    )
