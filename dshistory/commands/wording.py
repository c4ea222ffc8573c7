"""Messages that name arguments as in Python, `exact=True`, in the words of the command line and the magics, `--exact`.

The verbs raise one message for all surfaces, which names arguments as Python does; text surfaces pass it through here.
"""

import re

from dshistory.commands.parameters import Parameter, parameters
from dshistory.registry import Verb

__all__ = ["in_options"]


def in_options(message: str, verb: Verb) -> str:
    """Return the message with every `name=value` and `name=` of the verb's own arguments as what text would give."""
    known = {one.name: one for one in parameters(verb) if not one.named_values}
    if not known:
        return message
    names = "|".join(map(re.escape, known))
    written = re.compile(rf"(?<![\w.-])({names})=(?:'([^']*)'|\"([^\"]*)\"|([\w./:+*-]*\w))?(?!=)")
    return written.sub(lambda found: _as_option(known[found[1]], found[2] or found[3] or found[4] or ""), message)


def _as_option(parameter: Parameter, value: str) -> str:
    if parameter.flag:
        # The option says what is not the default, whatever the message says about the argument.
        return parameter.option
    name = parameter.name.upper() if parameter.positional else parameter.option
    return f"{name} {value}".rstrip()
