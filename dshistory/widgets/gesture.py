"""A gesture as a call of the explorer: the widget runs the very call whose line of Python it shows."""

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshistory.registry import registered

if TYPE_CHECKING:
    from dshistory.explorer import Explorer

__all__ = ["Gesture"]

_ALWAYS_SHOWN = frozenset({"metric", "kind"})


@dataclass(frozen=True)
class Gesture:
    """A verb with its arguments and options; options that are None are left out."""

    verb: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, explorer: "Explorer") -> Any:
        """Call the verb, without a progress bar, and return its result."""
        method = getattr(explorer, self.verb)
        quiet = {"quiet": True} if "quiet" in inspect.signature(method).parameters else {}
        return method(*self.arguments, **self._given(), **quiet)

    @property
    def code(self) -> str:
        """The line of Python that makes this call on a history named h; options with their default value are left
        out."""
        parameters = registered()[self.verb].signature.parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        options = {
            name: value
            for name, value in self._given().items()
            if name in _ALWAYS_SHOWN or defaults.get(name, inspect.Parameter.empty) != value
        }
        words = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in options.items())]
        return f"h.{self.verb}({', '.join(words)})"

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if value is not None}
