"""Refuses a redo log for a training whose updates can't be recorded and made again, when its session begins."""

import torch

from capture.loops.interface import Loop
from capture.loops.pytorch.wrappers import wrappers_of
from capture.state.update_rule import refuse_unknown_update
from catalog.errors import UnsupportedError

__all__ = ["module_of", "refuse_unrecordable"]

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def refuse_unrecordable(loop: Loop) -> None:
    """Raise UnsupportedError, by name, for a training whose updates can't be recorded and made again."""
    reason = loop.why_unrecordable()
    if reason is not None:
        raise UnsupportedError(f"redo=True: {reason} can't be recorded yet; leave redo out")
    refuse_unknown_update(
        loop.optimizers(), flats=[flat.tensor for flat in loop.flats()], scaler=loop.may_skip_updates()
    )
    for wrapper in wrappers_of(loop.optimizers()[0]):
        raise UnsupportedError(
            f"redo=True: a {type(wrapper).__qualname__} around the optimizer writes the weights too, which can't be "
            "recorded; leave redo out"
        )
    for name, part in module_of(loop).named_modules():
        if isinstance(part, _EMBEDDINGS) and (part.max_norm is not None or part.sparse):
            what = "max_norm: forward writes its weights" if part.max_norm is not None else "sparse gradients"
            raise UnsupportedError(f"redo=True: the embedding {name!r} has {what}, which can't be recorded")


def module_of(loop: Loop) -> torch.nn.Module:
    """Return the module that a loop trains, itself: an engine is one too, and comes before it."""
    return [one for one in loop.subjects() if isinstance(one, torch.nn.Module)][-1]
