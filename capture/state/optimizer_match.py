"""Whether two optimizer classes follow the same update rule, so that the state of one means the same to the other."""

import re

from catalog.errors import MismatchError

__all__ = ["require_same_rule"]

_IMPLEMENTATIONS = re.compile(r"DeepSpeed|CPU|Fused|Torch")


def require_same_rule(saved: str, here: str) -> None:
    """MismatchError unless the qualified class names stand for the same rule: the same class, wherever it was imported
    from, or the implementations of one rule in torch and DeepSpeed (whose Adam is AdamW by a switch).
    """
    if _last(saved) == _last(here):
        return
    both_torch = saved.startswith("torch.") and here.startswith("torch.")
    if both_torch or _rule(saved) != _rule(here):
        raise MismatchError(
            f"the checkpoint's optimizer is a {saved}, this one a {here}: their state does not mean the same; build the one the "
            "checkpoint was written with, or restore without an optimizer: nothing was changed"
        )


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _rule(name: str) -> str:
    return _IMPLEMENTATIONS.sub("", _last(name)).removesuffix("W").lower()
