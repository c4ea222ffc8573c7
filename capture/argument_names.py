"""The names of arguments: a door of `capture` refuses one that it does not have, with the nearest of those it has, and
one that has no name where it needs one."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from catalog.errors import SetupError

__all__ = ["knows_its_arguments"]

F = TypeVar("F", bound=Callable[..., Any])


def knows_its_arguments(function: F) -> F:
    """Return the function, which now raises SetupError, before it begins, for a name that no argument of it has, and
    for arguments that are missing or given without their names.
    """
    signature = inspect.signature(function)
    names = list(signature.parameters)
    places = [name for name, one in signature.parameters.items() if one.kind is not one.KEYWORD_ONLY]

    def why_not(error: TypeError, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        unknown = next((name for name in kwargs if name not in names), None)
        if unknown is not None:
            close = difflib.get_close_matches(unknown, names, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else f"the arguments are {', '.join(names)}"
            return f"no argument {unknown!r}; {hint}"
        if len(args) > len(places):
            return (
                f"{len(args)} arguments were given without a name, where only {', '.join(places)} needs none: "
                f"write the others as name=value; they are {', '.join(names[len(places) :])}"
            )
        return f"{error}; the arguments are {', '.join(names)}"

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise SetupError(f"{function.__name__}: {why_not(error, args, kwargs)}") from None
        return function(*args, **kwargs)

    return cast(F, called)
