"""The explorer as a notebook widget; the only package that imports ipywidgets, which the [notebook] extra installs."""

from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, WeakKeyDictionary, ref

from catalog.errors import SetupError
from dshistory.patterns import Patterns

if TYPE_CHECKING:
    from dshistory.explorer import Explorer
    from dshistory.widgets.exploration import Exploration

__all__ = ["Exploration", "explore", "watch"]

_watching: "Final[WeakKeyDictionary[Explorer, ReferenceType[Exploration]]]" = WeakKeyDictionary()
"""Explorer -> its live widget, so that a cell that is run again replaces the watcher of its last run."""


def explore(explorer: "Explorer", names: Patterns, *, kinds: Patterns, run: str | None) -> "Exploration":
    """See `Explorer.explore`."""
    return _exploration()(explorer, names=names, kinds=kinds, run=run, seconds=None)


def watch(explorer: "Explorer", names: Patterns, *, kinds: Patterns, run: str | None, seconds: float) -> "Exploration":
    """See `Explorer.watch`."""
    made = _exploration()(explorer, names=names, kinds=kinds, run=run, seconds=seconds)
    previous = _watching.get(explorer)
    _watching[explorer] = ref(made)
    if previous is not None and (live := previous()) is not None:
        live.close()
    return made


def _exploration() -> "type[Exploration]":
    try:
        import anywidget  # noqa: F401 - plotly's FigureWidget needs it
        import ipywidgets  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"the explorer needs {error.name}; install it with: pip install 'dshistory[notebook]'"
        ) from error
    from dshistory.widgets.exploration import Exploration

    return Exploration


def __getattr__(name: str) -> Any:
    if name == "Exploration":
        return _exploration()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
