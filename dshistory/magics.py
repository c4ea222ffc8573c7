"""The magics of IPython: `%dshistory VERB ...` and `%%dshistory sql [NAME <<]`, made from `dshistory.verbs`; the only
file that needs IPython."""

from typing import Any, Final

from IPython.core.error import UsageError as ShellUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

import dshistory
from catalog.errors import HistoryError
from dshistory.arguments import help_text, overview, parse, split
from dshistory.completion import completions
from dshistory.verbs import UsageError, verb_named

__all__ = ["DSHistoryMagics", "Help", "load", "unload"]

_NAME: Final = "dshistory"


class Help(str):
    """Text that a notebook shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@magics_class
class DSHistoryMagics(Magics):  # type: ignore[misc]
    """`%dshistory`: the explorer's verbs on the history opened last."""

    @line_cell_magic  # type: ignore[untyped-decorator]
    def dshistory(self, line: str, cell: str | None = None) -> Any:
        """`%dshistory VERB ...` runs a verb of the explorer; `%dshistory` alone lists them, `%dshistory VERB --help`
        explains one.

        `%%dshistory sql [NAME <<]` runs the cell as a query and shows its rows, or puts them into NAME.
        """
        try:
            words = split(line)
            return self._run(words) if cell is None else self._query(words, cell)
        except HistoryError as error:
            # The shell shows its own usage errors as one line, without traceback; the cell still counts as failed.
            raise ShellUsageError(str(error)) from error

    def _run(self, words: list[str]) -> Any:
        if not words or words[0] in ("-h", "--help"):
            return Help(overview("%dshistory", "magic"))
        verb = verb_named(words[0], "magic")
        prog = f"%dshistory {verb.name}"
        call = parse(verb, words[1:], prog=prog, forms=False)
        if call.help:
            return Help(help_text(verb, prog=prog, forms=False))
        return call.make()

    def _query(self, words: list[str], cell: str) -> Any:
        target = None
        if words and words[-1] == "<<":
            words.pop()
            target = words.pop() if len(words) > 1 else ""
        elif words and words[-1].endswith("<<"):
            target = words.pop().removesuffix("<<")
        if not words or words[0] != "sql":
            raise UsageError("a cell holds a query: %%dshistory sql [NAME <<]")
        if target is not None and not target.isidentifier():
            raise UsageError(f"%%dshistory sql NAME <<: {target!r} is no name for a variable")
        result = self._run([*words, cell])
        if target is None:
            return result
        self.shell.push({target: result})
        return None


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completion, and bind the name `dshistory` in the user's namespace."""
    shell.register_magics(DSHistoryMagics)
    for escape in ("%", "%%"):
        shell.set_hook("complete_command", _complete, str_key=escape + _NAME)
    shell.push({_NAME: dshistory})


def unload(shell: InteractiveShell) -> None:
    """Take back what `load` brought; a variable `dshistory` of the user's own stays."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop(_NAME, None)
    for escape in ("%", "%%"):
        shell.strdispatchers["complete_command"].strs.pop(escape + _NAME, None)
    shell.drop_by_id({_NAME: dshistory})


def _complete(shell: InteractiveShell, event: Any) -> list[str]:
    start = event.symbol
    before = event.text_until_cursor[: len(event.text_until_cursor) - len(start)]
    return completions(before.split()[1:], start)
