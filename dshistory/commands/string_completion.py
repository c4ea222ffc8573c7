"""Completion inside a string of Python code that is an argument of a verb: `dshistory.tensor("blo`, `h.diff("la`.

The code is not run and no attribute is looked up: the name before the verb must be this package, or an explorer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import dshistory
from dshistory import current
from dshistory.commands.completion import value_completions
from dshistory.commands.parameters import Parameter, parameters
from dshistory.commands.sql_completion import Completions, query_completions
from dshistory.commands.verbs import all_verbs
from dshistory.explorer import Explorer
from dshistory.registry import Verb

__all__ = ["string_completions"]

_CALLED: Final = re.compile(r"\s*(\w+)\.(\w+)(?![\w.])")
"""It matches what stands before the bracket of a call, read backwards, so that no more than that is looked at."""
_KEYWORD: Final = re.compile(r"\s*(\w+)\s*=(?!=)")
_NOT_PYTHON: Final = re.compile(r"(?m)^\s*[%!].*$")


@dataclass(slots=True)
class _Bracket:
    """An open bracket at `at`, the commas directly inside it, and where the text after the last of these begins."""

    at: int
    commas: int
    last: int


def string_completions(code: str, namespace: Mapping[str, Any]) -> Completions:
    """Return the words that can stand at the end of `code`, inside the string that is open there, and the text that
    they replace; no words where no string is open, or where it is no argument of a verb.
    """
    nothing = Completions("", [])
    code = _NOT_PYTHON.sub("", code)
    brackets, string = _open_at_the_end(code)
    if string is None:
        return nothing
    # A list of names, as in `h.trajectory(["a", "b`, is one argument of the call around it.
    backwards = code[::-1]
    while brackets and not _CALLED.match(backwards, len(code) - brackets[-1].at):
        brackets.pop()
    is_call = brackets and code[brackets[-1].at] == "("
    called = _CALLED.match(backwards, len(code) - brackets[-1].at) if is_call else None
    verb = None if called is None else {verb.attribute: verb for verb in all_verbs()}.get(called[1][::-1])
    owner = None if called is None else namespace.get(called[2][::-1])
    if verb is None or not (owner is dshistory or isinstance(owner, Explorer)):
        return nothing
    start = code[string:]
    parameter = _parameter(verb, code[brackets[-1].last : string], brackets[-1].commas)
    if verb.name == "sql" and parameter is not None and parameter.name == "query":
        return query_completions(start, start)
    return value_completions(parameter, start, lambda: owner if isinstance(owner, Explorer) else current.current())


def _parameter(verb: Verb, before: str, commas: int) -> Parameter | None:
    keyword = _KEYWORD.match(before)
    if keyword:
        return next((one for one in parameters(verb) if one.name == keyword[1]), None)
    places = [one for one in parameters(verb) if one.positional]
    return places[commas] if commas < len(places) else None


def _open_at_the_end(code: str) -> tuple[list[_Bracket], int | None]:
    """Return the brackets that are open at the end, from outside in, and where the string that is open there begins."""
    brackets: list[_Bracket] = []
    at, quote, string = 0, "", None
    while at < len(code):
        character = code[at]
        if quote:
            if character == "\\":
                at += 1
            elif code.startswith(quote, at):
                at += len(quote) - 1
                quote, string = "", None
        elif character in "'\"":
            quote = character * 3 if code.startswith(character * 3, at) else character
            at += len(quote) - 1
            string = at + 1
        elif character == "#":
            at = code.find("\n", at) if "\n" in code[at:] else len(code)
        elif character in "([{":
            brackets.append(_Bracket(at, 0, at + 1))
        elif character in ")]}" and brackets:
            brackets.pop()
        elif character == "," and brackets:
            brackets[-1].commas += 1
            brackets[-1].last = at + 1
        at += 1
    return brackets, string
