"""The registry of verbs: a method of the explorer, or a function, becomes a verb by the decorator `verb` alone.

The functions of the package, its `__all__`, the command line, the magics and their completion all derive from here.
`dshistory.commands.verbs` lists every verb, because it imports the modules that register them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast

from catalog.argument_names import bound_arguments
from dshistory.argument_checks import check_arguments

__all__ = ["Surface", "Verb", "registered", "verb"]

Surface = Literal["command line", "magic"]
"""A place where text becomes a call of a verb. In Python every verb is available, as a function of the package."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Verb:
    """One thing that the explorer does; `function` takes the explorer first unless `needs_history` is False."""

    name: str
    function: Callable[..., Any]
    examples: tuple[str, ...]
    surfaces: tuple[Surface, ...]
    needs_history: bool

    @property
    def attribute(self) -> str:
        """The name of the verb's function in the package."""
        return self.function.__name__

    @property
    def docstring(self) -> str:
        """The docstring, with its indentation removed."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring as one line."""
        return self.docstring.split("\n\n")[0].replace("\n", " ")

    @property
    def signature(self) -> inspect.Signature:
        """The signature of the verb's function in the package: without the explorer."""
        signature = inspect.signature(self.function)
        return signature.replace(parameters=list(signature.parameters.values())[int(self.needs_history) :])


_verbs: Final[dict[str, Verb]] = {}


def verb(
    *examples: str,
    name: str | None = None,
    surfaces: tuple[Surface, ...] = ("command line", "magic"),
    needs_history: bool = True,
) -> Callable[[F], F]:
    """Register the decorated function as a verb and return it. It then refuses, by name, arguments that it does not
    have, and those of a wrong type.

    Its positional parameters become arguments, its keyword-only ones options, `**params` becomes
    `--params NAME=VALUE`. The first paragraph of its docstring is its summary, the `Args:` section explains its
    arguments.

    Args:
        examples: command lines without the program's name; a test binds each of them
        name: the name on the command line and in magics; default: the function's own
        surfaces: where text can call the verb; a verb that returns a widget makes no sense on a command line
        needs_history: whether the first parameter is the explorer
    """

    def register(function: F) -> F:
        checked = _checked(name or function.__name__, function)
        made = Verb(name or function.__name__, checked, examples, surfaces, needs_history)
        taken = _verbs.get(made.name)
        # A module that is loaded again (autoreload in a notebook) registers its own verbs anew.
        if taken is not None and _origin(taken) != _origin(made):
            raise ValueError(f"the verb {made.name!r} is registered by {_origin(taken)} already")
        _verbs[made.name] = made
        return checked

    return register


def _checked(name: str, function: F) -> F:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_arguments(name, signature, bound_arguments(name, signature, args, kwargs))
        return function(*args, **kwargs)

    return cast(F, checked)


def registered() -> Mapping[str, Verb]:
    """Return the verbs registered so far, by name, in the order of their registration."""
    return MappingProxyType(_verbs)


def _origin(verb: Verb) -> str:
    return f"{verb.function.__module__}.{verb.function.__qualname__}"
