"""The command line: every verb, with its result as text, JSON or CSV.

Exit status: 0 success, 1 `verify` found problems, 2 a known error or wrong usage (one line on stderr), 130 after
Ctrl-C, 141 when the reader of the output closed it.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from catalog.errors import HistoryError

if TYPE_CHECKING:
    from dshistory.commands.arguments import Call

__all__ = ["main"]

SUCCESS: Final = 0
PROBLEMS: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130
READER_CLOSED: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit status."""
    from dshistory.display.formats import text_of

    words = list(sys.argv[1:] if argv is None else argv)
    with_traceback = "--traceback" in words
    try:
        status = _run([word for word in words if word != "--traceback"])
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes stdout again on exit; a closed pipe must not turn that into a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (HistoryError, OSError) as error:
        if with_traceback:
            traceback.print_exc()
        else:
            message = text_of(" ".join(str(error).split()))
            print(message if message.startswith("dshistory ") else f"dshistory: {message}", file=sys.stderr)
        return FAILED


def _run(words: Sequence[str]) -> int:
    from dshistory.commands.arguments import help_text, overview, parse
    from dshistory.commands.verbs import verb_named
    from dshistory.display.table import Table

    if len(words) == 2 and words[0] == "help":
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview("dshistory", "command line"))
        print("\n--json and --csv change the format of the output; --traceback shows where an error was raised.")
        return SUCCESS
    if words[0] == "--version":
        print(_version())
        return SUCCESS
    verb = verb_named(words[0], "command line")
    prog = f"dshistory {verb.name}"
    call = parse(verb, words[1:], prog=prog, forms=True)
    if call.help:
        print(help_text(verb, prog=prog, forms=True), end="")
        return SUCCESS
    result = _result(call)
    print(_shown(result, call.form))
    confirmed = call.confirmed()
    if confirmed is not None and isinstance(result, Table) and len(result) and _confirms(f"{verb.name}: do it? [y/N] "):
        result = _result(confirmed)
        print(result.note)
    return PROBLEMS if verb.name == "verify" and len(result) else SUCCESS


def _result(call: "Call") -> Any:
    """Return the result of a call; a table's note names options, not arguments of Python."""
    from dshistory.commands.wording import in_options
    from dshistory.display.table import Table

    result = call.make()
    if isinstance(result, Table):
        result.note = in_options(result.note, call.verb)
    return result


def _confirms(question: str) -> bool:
    """Ask the user, where there is one: without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _shown(result: Any, form: str) -> str:
    """Return a verb's result as text, JSON or CSV; for a result other than a table, CSV is its text. A table that goes
    into a pipe or a file is whole."""
    from dshistory.display.report import Report
    from dshistory.display.table import Table, json_value
    from dshistory.display.text import terminal_width

    if form == "csv" and isinstance(result, Table):
        return result.to_csv().rstrip("\n")
    if form == "json":
        if isinstance(result, (Table, Report)):
            return result.to_json()
        return json.dumps(json_value(result.tolist() if hasattr(result, "tolist") else result))
    if isinstance(result, Table) and terminal_width() is None:
        return result.to_text()
    return result if isinstance(result, str) else repr(result)


def _version() -> str:
    from importlib.metadata import version

    return f"dshistory {version('dshistory')}"
