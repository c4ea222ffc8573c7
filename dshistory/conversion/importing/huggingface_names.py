"""The parameters of a Hugging Face model in the order in which a Trainer gives them to its optimizer.

An optimizer's file numbers its parameters, and safetensors have no order. The order is that of the model's class in the
installed transformers, which is made from config.json without memory for its weights. Only a class of transformers
itself is made, never one whose code comes with the checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from catalog.errors import UnsupportedError

__all__ = ["ModelNames", "model_names"]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of a model's parameters in order, with their shapes; the further names of tied ones; the names of those
    with weight decay, and of the buffers.
    """

    parameters: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    decayed: frozenset[str]
    buffers: frozenset[str]

    def groups(self, counts: Sequence[int]) -> list[list[str]]:
        """Return the names of each group of an optimizer that has so many parameters in each: the Trainer's two groups,
        with weight decay and without, or one group of all. UnsupportedError for any others.
        """
        with_decay = [name for name in self.parameters if name in self.decayed]
        without = [name for name in self.parameters if name not in self.decayed]
        for known in ([with_decay, without], [list(self.parameters)]):
            if [len(group) for group in known] == list(counts):
                return known
        raise UnsupportedError(
            f"its groups have {' and '.join(map(str, counts))} parameters, those of a Trainer for this model "
            f"{len(with_decay)} and {len(without)}"
        )


def model_names(folder: Path, *, most_layers: int) -> ModelNames:
    """Return the names for the config.json in the folder. UnsupportedError, which says why, when there is no telling.

    most_layers: a configuration with more layers is refused, so that a hostile one can't take forever.
    """
    if not (folder / "config.json").is_file():
        raise UnsupportedError("no config.json says the order of its parameters")
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError("transformers, which knows the order of its parameters, is not installed") from error
    try:
        content = json.loads((folder / "config.json").read_text())
        name = content["architectures"][0]
        cls = getattr(transformers, name, None)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            raise UnsupportedError(f"transformers has no model {name!r}, so the order of its parameters is not known")
        layers = [value for key, value in content.items() if "layer" in key and isinstance(value, int)]
        if max(layers, default=0) > most_layers:
            raise UnsupportedError(f"config.json has {max(layers)} layers, the weights only {most_layers} tensors")
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return _names_of(cls(config), transformers.Trainer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ImportError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(f"no model can be made of config.json: {error}") from error


def _names_of(model: Any, trainer: Any) -> ModelNames:
    first: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != first[parameter]:
            aliases[first[parameter]] = (*aliases.get(first[parameter], ()), name)
    return ModelNames(
        parameters={name: tuple(parameter.shape) for parameter, name in first.items()},
        aliases=aliases,
        decayed=frozenset(trainer.get_decay_parameter_names(None, model)),
        buffers=frozenset(name for name, _ in model.named_buffers()),
    )
