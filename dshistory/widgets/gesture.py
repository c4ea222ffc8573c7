"""A gesture as a call of the explorer: the widget runs the very call whose line of Python it shows."""

import inspect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dshistory.registry import registered

if TYPE_CHECKING:
    from dshistory.explorer import Explorer

__all__ = ["Gesture"]

_ALWAYS_SHOWN = frozenset({"metric", "kind"})


@dataclass(frozen=True)
class Gesture:
    """A verb with its arguments and options; options that are None are left out. `steps` are methods that are called
    on the result, one after the other, each with its arguments."""

    verb: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def then(self, method: str, *arguments: Any) -> "Gesture":
        """Return the gesture that calls this method on the result as well."""
        return replace(self, steps=(*self.steps, (method, arguments)))

    def run(self, explorer: "Explorer") -> Any:
        """Call the verb, without a progress bar, and return its result."""
        method = getattr(explorer, self.verb)
        quiet = {"quiet": True} if "quiet" in inspect.signature(method).parameters else {}
        return self.finish(method(*self.arguments, **self._given(), **quiet))

    def finish(self, result: Any) -> Any:
        """Call the further methods on a result of the verb."""
        for method, arguments in self.steps:
            result = getattr(result, method)(*arguments)
        return result

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
        further = (f".{method}({', '.join(map(repr, arguments))})" for method, arguments in self.steps)
        return f"h.{self.verb}({', '.join(words)}){''.join(further)}"

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if value is not None}
