"""The magics of IPython, `%dshistory VERB ...` and `%%dshistory sql [NAME <<]`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError as ShellUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand

import dshistory
from catalog.errors import HistoryError
from dshistory.commands import sql_cell
from dshistory.commands.arguments import help_text, overview, parse, split
from dshistory.commands.completion import line_completions
from dshistory.commands.parameters import UsageError
from dshistory.commands.sql_cell import SavedQueries
from dshistory.commands.sql_completion import Completions, query_completions
from dshistory.commands.string_completion import string_completions
from dshistory.commands.verbs import verb_named
from dshistory.display.formats import text_of

__all__ = ["DSHistoryMagics", "Help", "load", "unload"]

_NAME: Final = "dshistory"
_VARIABLE: Final = re.compile(r"\$(\w+)|\{(\w+)\}")
_LINE: Final = re.compile(rf"(?:^|.*=)\s*%{_NAME}\s(.*)", re.DOTALL)
_HEAD: Final = re.compile(rf"\s*%%{_NAME}\s(s?q?l?|sql\s.*)")
_CELL: Final = re.compile(rf"\s*%%{_NAME}\s+sql\b[^\n]*\n(.*)", re.DOTALL)


class Help(str):
    """Text that a notebook displays verbatim, not as a string literal."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@magics_class
class DSHistoryMagics(Magics):  # type: ignore[misc]
    """The magic `dshistory`: the verbs, on the history opened last."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._saved = SavedQueries()

    @no_var_expand  # type: ignore[untyped-decorator]
    @needs_local_scope  # type: ignore[untyped-decorator]
    @line_cell_magic  # type: ignore[untyped-decorator]
    def dshistory(self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None) -> Any:
        """Run a verb: `%dshistory` alone lists them, `%dshistory VERB --help` explains one.

        `$name` and `{name}` stand for the values of variables. `%%dshistory sql [NAME <<]` runs the cell as a query and
        shows its rows, or assigns them to NAME.
        """
        namespace = _variables(self.shell, {**self.shell.user_ns, **(local_ns or {})})
        try:
            return self._run(line, namespace) if cell is None else self._run_cell(line, cell, namespace)
        except HistoryError as error:
            # The shell shows its own usage errors as one line, without a traceback; the cell still counts as failed.
            raise ShellUsageError(text_of(" ".join(str(error).split()))) from error

    def _run(self, line: str, namespace: Mapping[str, Any]) -> Any:
        name, _, rest = line.strip().partition(" ")
        if name == "help" and rest:
            name, rest = rest, "--help"
        if not name or name in ("-h", "--help", "help"):
            return Help(overview("%dshistory", "magic"))
        if name != "sql" and line.rstrip().endswith(";"):
            # As everywhere in a notebook, a semicolon hides the result.
            self._run(line.rstrip().rstrip(";"), namespace)
            return None
        verb = verb_named(name, "magic")
        if verb.name == "sql":
            return self._run_query_line(rest, namespace)
        prog = f"%dshistory {verb.name}"
        call = parse(verb, [_expanded(word, namespace) for word in split(rest)], prog=prog, forms=False)
        return Help(help_text(verb, prog=prog, forms=False)) if call.help else call.make()

    def _run_query_line(self, rest: str, namespace: Mapping[str, Any]) -> Any:
        bare = sql_cell.unquoted(rest)
        if bare is not None:
            return self._run_cell(f"sql {bare[0]}", bare[1], namespace)
        words = split(rest)
        query = next((word for word in words if len(word.split()) > 1), None)
        head = sql_cell.parse_head([_expanded(word, namespace) for word in words if word is not query])
        return self._query(head, query, namespace)

    def _run_cell(self, line: str, cell: str, namespace: Mapping[str, Any]) -> Any:
        verb, _, rest = line.strip().partition(" ")
        if verb != "sql":
            raise UsageError("a cell holds a query: %%dshistory sql [NAME <<]")
        rest, target, shows = sql_cell.take_target(rest)
        head = sql_cell.parse_head([_expanded(word, namespace) for word in split(rest)])
        result = self._query(head, cell, namespace)
        if target is None or not head.execute:
            return result
        self.shell.push({target: result})
        return result if shows else None

    def _query(self, head: sql_cell.Head, query: str | None, namespace: Mapping[str, Any]) -> Any:
        if head.file is not None:
            query = sql_cell.read(head.file)
        prog, words = "%dshistory sql", [*head.words, *(["SELECT"] if query is not None else [])]
        call = parse(verb_named("sql", "magic"), words, prog=prog, forms=False)
        if call.help:
            return Help(help_text(call.verb, prog=prog, forms=False) + sql_cell.CELL_HELP)
        query = call.positional[0] if query is None else query
        if head.save is not None:
            self._saved.save(head.save, query)
        if not head.execute:
            return None
        composed = self._saved.composed(query, with_=head.with_)
        text, values = sql_cell.bound(composed, namespace, call.options)
        return replace(call, positional=(text,), options={**values, **call.options}).make()

    @context_matcher(identifier=_NAME)  # type: ignore[untyped-decorator]
    def completer(self, context: CompletionContext) -> SimpleMatcherResult:
        """Complete a `%dshistory` line, a query, or a string in the call of a verb; Python's own completions are
        suppressed there.
        """
        known = {"saved": self._saved.names, "variables": self._variables()}
        before = "\n".join([*context.full_text.split("\n")[: context.cursor_line], context.text_until_cursor])
        found = Completions("", [])
        if cell := _CELL.fullmatch(before):
            found = query_completions(cell[1], context.full_text.partition("\n")[2], **known)
        elif head := _HEAD.fullmatch(before):
            found = line_completions(head[1], **known) if " " in head[1] else Completions(head[1], ["sql"])
        elif line := _LINE.fullmatch(context.text_until_cursor):
            found = line_completions(line[1], **known)
        elif not before.lstrip().startswith("%%"):
            found = string_completions(before, self.shell.user_ns)
        return {
            "completions": [SimpleCompletion(text, type=_NAME) for text in found.texts],
            "matched_fragment": found.fragment,
            "ordered": True,
            "suppress": True,
        }

    def _variables(self) -> list[str]:
        return [*_variables(self.shell, self.shell.user_ns)]


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completion, and bind the name `dshistory` in the user's namespace."""
    magics = DSHistoryMagics(shell)
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(magics.completer)
    shell.push({_NAME: dshistory})


def unload(shell: InteractiveShell) -> None:
    """Remove what `load` added; a variable `dshistory` that the user assigned stays."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop(_NAME, None)
    magics = shell.magics_manager.registry.pop(DSHistoryMagics.__name__)
    shell.Completer.custom_matchers.remove(magics.completer)
    shell.drop_by_id({_NAME: dshistory})


def _variables(shell: InteractiveShell, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's variables: without the shell's own names, modules, functions and classes."""
    return {
        name: value
        for name, value in namespace.items()
        if name not in shell.user_ns_hidden and not (callable(value) or isinstance(value, ModuleType))
    }


def _expanded(word: str, namespace: Mapping[str, Any]) -> str:
    """Replace `$name` and `{name}` by the values of variables; the result is one word, whatever they contain."""
    return _VARIABLE.sub(
        lambda found: str(namespace[name]) if (name := found[1] or found[2]) in namespace else found[0], word
    )
