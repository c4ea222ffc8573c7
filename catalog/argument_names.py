"""The names of arguments: a function that people call refuses one that it does not have, with the nearest of those it
has, and one that has no name where it needs one."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from catalog.errors import SetupError
from catalog.nearest_names import close_names, nearest

__all__ = ["bound_arguments", "knows_its_arguments"]

F = TypeVar("F", bound=Callable[..., Any])


def knows_its_arguments(function: F) -> F:
    """Return the function, which now raises the SetupError of `bound_arguments` before it begins."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound_arguments(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return cast(F, called)


def bound_arguments(
    function: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> Mapping[str, object]:
    """Return the arguments of a call by name, `self` among them. SetupError, which names the function, for a name that
    no argument has, and for arguments that are missing or lack a name that they need."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise SetupError(f"{function}: {_why_not(error, signature, args, kwargs)}") from None


def _why_not(
    error: TypeError, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    parameters = {name: one for name, one in signature.parameters.items() if name != "self"}
    unknown = next((name for name in kwargs if name not in parameters), None)
    every = f"the arguments are {', '.join(parameters)}"
    if unknown is not None:
        is_close = close_names(unknown, list(parameters), count=1)
        return f"no argument {unknown!r}; {nearest(unknown, parameters, count=2) if is_close else every}"
    nameless = [name for name, one in parameters.items() if one.kind <= one.POSITIONAL_OR_KEYWORD]
    named = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    if named and len(args) > len(nameless) + len(signature.parameters) - len(parameters):
        which = f"only {', '.join(nameless)}" if nameless else "none"
        return (
            f"too many arguments without a name, where {which} may have none: write the others as name=value; they are "
            f"{', '.join(named)}"
        )
    return f"{error}; {every}"
