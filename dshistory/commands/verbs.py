"""Every verb: importing this module imports the modules that register them."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from catalog.nearest_names import nearest
from dshistory import current
from dshistory.commands import doctor
from dshistory.commands.parameters import UsageError
from dshistory.conversion import convert, importing
from dshistory.explorer import causes, comparison, conversion, explorer, hindsight, replays, reports, retention, trends
from dshistory.registry import Surface, Verb, registered

__all__ = ["all_verbs", "functions", "verb_named"]

_EXPLORER: Final = (reports, retention, comparison, trends, causes, hindsight, explorer, replays, conversion)
_MODULES: Final = tuple(module.__name__ for module in (current, *_EXPLORER, importing, convert, doctor))
"""The modules that register verbs, in the order in which help lists them."""


def all_verbs() -> tuple[Verb, ...]:
    """Return every verb: those of a module in the order of its file, those of modules that are not ours last."""
    places = {name: place for place, name in enumerate(_MODULES)}
    return tuple(sorted(registered().values(), key=lambda verb: places.get(verb.function.__module__, len(places))))


def verb_named(name: str, surface: Surface) -> Verb:
    """Return the verb of that name. Raises UsageError, with the nearest names, when the surface has no such verb."""
    known = {verb.name: verb for verb in all_verbs() if surface in verb.surfaces}
    if name not in known:
        if any(verb.name == name for verb in all_verbs()):
            raise UsageError(f"{name!r} is not for the {surface}: use dshistory.{name}(...) in Python or a notebook")
        raise UsageError(f"there is no {name!r}; {nearest(name, known)}")
    return known[name]


def functions() -> Mapping[str, Callable[..., Any]]:
    """Return the verbs as functions on the current history, by their name in the package."""
    return {verb.attribute: current.on_current(verb) for verb in all_verbs()}
