"""The update rule of an optimizer: how a checkpoint names it, and the check that two classes follow the same one, so
that state of one has a meaning for the other.

torch and DeepSpeed have several implementations of one rule (AdamW, DeepSpeedCPUAdam, FusedAdam, ...), and a checkpoint
of one may be restored into another. So the check compares the names of classes, and no more.
"""

import re
from typing import Any

from catalog.errors import MismatchError

__all__ = ["require_same_rule", "rule_facts"]

_IMPLEMENTATIONS = re.compile(r"DeepSpeed|CPU|Fused|Torch")


def rule_facts(optimizer: Any) -> dict[str, Any]:
    """Return what a checkpoint says of an optimizer's rule: `class`, the qualified name of its class, and for
    DeepSpeed's Adam `adam_w_mode`, whether its decay acts on the weights: no param group tells."""
    facts: dict[str, Any] = {"class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"}
    if hasattr(optimizer, "adam_w_mode"):
        facts["adam_w_mode"] = bool(optimizer.adam_w_mode)
    return facts


def require_same_rule(saved: str, here: str) -> None:
    """Raise MismatchError unless both qualified class names stand for the same update rule.

    That is the same class, wherever it was imported from, or implementations of one rule in torch and in DeepSpeed.
    """
    if _last(saved) == _last(here):
        return
    # DeepSpeed's Adam becomes AdamW by an argument, so its name does not tell them apart. In torch they are two classes
    # with different rules, and one must not be restored into the other.
    both_torch = saved.startswith("torch.") and here.startswith("torch.")
    if both_torch or _rule(saved) != _rule(here):
        raise MismatchError(
            f"the checkpoint's optimizer is a {saved}, this one is a {here}, and their state has different meanings; "
            "build the one the checkpoint was written with, or restore without an optimizer: nothing was changed"
        )


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _rule(name: str) -> str:
    return _IMPLEMENTATIONS.sub("", _last(name)).removesuffix("W").lower()
