"""Parses text into the arguments of a verb: one parser for the command line and the magics."""

import re
import shlex
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any, Final, NoReturn

from catalog.errors import HistoryError
from catalog.nearest_names import nearest
from dshistory import current
from dshistory.commands.parameters import Parameter, UsageError, parameters
from dshistory.commands.verbs import all_verbs
from dshistory.commands.wording import in_options
from dshistory.explorer import Explorer
from dshistory.registry import Surface, Verb

__all__ = ["Call", "help_text", "overview", "parse", "split"]

_NO_DEFAULT: Final = (None, Parameter.empty)


@dataclass(frozen=True, slots=True)
class Call:
    """A verb with its arguments; `history` is the folder that the text names, None for the current history."""

    verb: Verb
    history: str | None
    positional: tuple[Any, ...]
    options: Mapping[str, Any]
    form: str
    help: bool

    def confirmed(self) -> "Call | None":
        """Return the call that does what this one only tells; None when this one does it already."""
        name = next((one.name for one in parameters(self.verb) if one.asks_first), None)
        return replace(self, options={**self.options, name: False}) if name and self.options.get(name) else None

    def make(self) -> Any:
        """Run the verb and return its result. Errors name options, not arguments of Python."""
        if not self.verb.needs_history:
            given = self.positional
        else:
            given = (current.current() if self.history is None else Explorer.open(self.history), *self.positional)
        try:
            return self.verb.function(*given, **self.options)
        except HistoryError as error:
            error.args = (in_options(str(error), self.verb),)
            raise


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--?[\w-]+)", message)
        if unknown:
            message = f"no option {unknown[1]}; {nearest(unknown[1], self._option_string_actions, count=2)}"
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def split(line: str) -> list[str]:
    """Split a line into words as a shell does. Raises UsageError for an unclosed quote."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"can't split {line!r}: {error}") from error


def parse(verb: Verb, words: Sequence[str], *, prog: str, forms: bool) -> Call:
    """Bind words to the verb's parameters; with `forms`, --json and --csv are options too.

    The first argument names the history when it is an existing folder, when it is written as a path is (`./runs`), or
    when there is one argument more than the verb takes. Raises UsageError for an argument that is missing, superfluous
    or not understood."""
    words, rest = _without_rest(verb, words)
    given = _parser(verb, prog, forms).parse_intermixed_args(words)
    if given.help:
        return Call(verb, None, (), {}, "text", help=True)
    history, texts = given.history, list(given.arguments)
    places = [parameter for parameter in parameters(verb) if parameter.positional]
    one_more = len(texts) > len(places) and not texts[0].lstrip("+-").isdigit()
    if verb.needs_history and history is None and texts and (one_more or _names_folder(texts[0])):
        history = texts.pop(0)
    missing = [place.name for place in places[len(texts) :] if place.required]
    if missing:
        raise UsageError(f"{prog} needs {' and '.join(name.upper() for name in missing)}; see {prog} --help")
    if len(texts) > len(places):
        raise UsageError(f"{prog}: {texts[len(places)]!r} is one argument too many; see {prog} --help")
    values = tuple(place.parse(text) for place, text in zip(places, texts, strict=False))
    return Call(verb, history, values, _options(verb, given) | rest, given.form or "text", help=False)


def _without_rest(verb: Verb, words: Sequence[str]) -> tuple[Sequence[str], dict[str, Any]]:
    """Cut off what stands behind `--`, where a parameter of the verb takes it."""
    taking = next((parameter for parameter in parameters(verb) if parameter.takes_rest), None)
    if taking is None or "--" not in words:
        return words, {}
    place = list(words).index("--")
    return words[:place], {taking.name: tuple(words[place + 1 :])}


def _names_folder(text: str) -> bool:
    # A query may begin with a comment, as "/* by loss */ SELECT ...".
    if text.startswith(("/", "./", "../", "~/")) and len(text.split()) == 1:
        return True
    try:
        return Path(text).is_dir()
    except OSError:
        # A text that is longer than any file name, such as a query.
        return False


def help_text(verb: Verb, *, prog: str, forms: bool) -> str:
    """Return the text of --help: usage, summary, arguments, options and examples."""
    return _parser(verb, prog, forms).format_help()


def overview(prog: str, surface: Surface) -> str:
    """Return the list of a surface's verbs, with the first clause of each summary."""
    verbs = [f"  {verb.name:<11} {_clause(verb.summary)}" for verb in all_verbs() if surface in verb.surfaces]
    usage = f"usage: {prog} VERB [HISTORY] [arguments] [options]; {prog} VERB --help explains one"
    return "\n".join([usage, "", "Explore the history of a training run.", "", *verbs])


def _clause(summary: str) -> str:
    return re.split(r"[:;.](?: |$)", summary)[0]


def _parser(verb: Verb, prog: str, forms: bool) -> _Parser:
    places = [parameter for parameter in parameters(verb) if parameter.positional]
    signature = [name.upper() if p.required else f"[{name.upper()}]" for p in places for name in [p.name]]
    path = ["[HISTORY]"] if verb.needs_history else []
    rest = [f"-- {parameter.name.upper()} ..." for parameter in parameters(verb) if parameter.takes_rest]
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *path, *signature, "[options]", *rest]).replace("%", "%%"),
        description="\n\n".join([fill(verb.summary, 100), *_arguments_help(verb, places)]),
        epilog="\n".join(["examples:", *(f"  {prog.removesuffix(verb.name)}{example}" for example in verb.examples)]),
        formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("arguments", nargs="*", help=SUPPRESS)
    for parameter in parameters(verb):
        if not (parameter.positional or parameter.takes_rest):
            _add_option(parser, parameter)
    _add_common(parser, verb, forms)
    return parser


def _arguments_help(verb: Verb, places: Sequence[Parameter]) -> list[str]:
    lines = [
        f"  {place.name.upper():<10} {place.help}"
        + ("" if place.default in _NO_DEFAULT else f"; default: {place.default}")
        for place in places
    ]
    if verb.needs_history:
        lines.insert(0, f"  {'HISTORY':<10} the folder of the history; default: $DSHISTORY, else ./history")
    return ["\n".join(["arguments:", *lines])] if lines else []


def _add_option(parser: ArgumentParser, parameter: Parameter) -> None:
    name, dest = parameter.option, parameter.name
    text = _option_help(parameter).replace("%", "%%")
    if parameter.asks_first:
        parser.add_argument(name, dest=dest, action="store_const", const=False, help="do it, and not only say what")
    elif parameter.flag:
        parser.add_argument(name, dest=dest, action="store_const", const=not parameter.default, help=text)
    elif parameter.named_values:
        parser.add_argument(name, dest=dest, action="append", metavar=parameter.placeholder, help=text)
    elif parameter.repeatable:
        several = f"{text}; may be given several times"
        parser.add_argument(name, dest=dest, action="append", metavar=parameter.placeholder, help=several)
    else:
        parser.add_argument(name, dest=dest, metavar=parameter.placeholder, help=text)


def _option_help(parameter: Parameter) -> str:
    text = parameter.help
    if parameter.flag and parameter.default:
        return f"do not: {text}"
    if any(word not in text for word in parameter.choices):
        text += f"; one of {', '.join(parameter.choices)}"
    if parameter.flag or parameter.default in _NO_DEFAULT or "default:" in text:
        return text
    return f"{text}; default: {parameter.default}"


def _add_common(parser: ArgumentParser, verb: Verb, forms: bool) -> None:
    parser.set_defaults(history=None, form=None)
    if verb.needs_history:
        parser.add_argument("-C", "--history", metavar="HISTORY", help="the folder of the history")
    if forms:
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--json", dest="form", action="store_const", const="json", help="output as JSON")
        output.add_argument("--csv", dest="form", action="store_const", const="csv", help="output as CSV")
    parser.add_argument("-h", "--help", action="store_true", help="show this help")


def _options(verb: Verb, given: Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for parameter in parameters(verb):
        value = None if parameter.positional or parameter.takes_rest else getattr(given, parameter.name)
        if value is None and parameter.asks_first:
            options[parameter.name] = True
        if value is None:
            continue
        if parameter.named_values:
            options.update(_named_value(parameter, text) for text in value)
        elif parameter.flag or parameter.repeatable:
            options[parameter.name] = value
        else:
            options[parameter.name] = parameter.parse(value)
    return options


def _named_value(parameter: Parameter, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise UsageError(f"{parameter.option} takes NAME=VALUE, not {text!r}")
    return name, parameter.parse(value)
