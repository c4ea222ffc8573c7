"""Writes a Hugging Face model folder: config.json, and the weights under the names that `from_pretrained` looks for."""

import json
from pathlib import Path
from typing import Any, Final

from catalog.errors import FormatError, NotFoundError, SetupError
from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.safetensors import write_sharded
from dshistory.conversion.exporting.weights import T, Weights

__all__ = ["write_huggingface"]

_SHARD_BYTES: Final = 5 << 30
_TORCH_NAMES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def write_huggingface(checkpoint: Weights[T], target: Path, options: Options) -> None:
    """Write config.json and model.safetensors, in shards with an index above `shard_bytes` (5 GiB).

    The configuration is as given, except for its dtype, which becomes that of the weights. transformers need not be
    installed. SetupError without a configuration, NotFoundError or FormatError when it can't be read.
    """
    options.require_only("huggingface", "shard_bytes", "config", "weights")
    config = _config(options)
    tensors = checkpoint.state_dict(options.weights)
    sizes: dict[str, int] = {}
    for tensor in checkpoint.parameters(options.weights).values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(sizes, key=lambda dtype: sizes[dtype])
    if most in _TORCH_NAMES:
        config.pop("torch_dtype", None)  # the key before transformers 5; both must not disagree
        config["dtype"] = _TORCH_NAMES[most]
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    metadata = {"format": "pt", "dshistory": str(checkpoint.ref), "weights": options.weights}
    write_sharded(checkpoint, target, tensors, metadata, shard_bytes=options.shard_bytes or _SHARD_BYTES)


def _config(options: Options) -> dict[str, Any]:
    given = options.config
    if given is None:
        raise SetupError(
            "the format 'huggingface' needs the model's configuration: pass config= (a config.json, a folder that has "
            "one) or model= (a model with .config)"
        )
    if isinstance(given, dict):
        return dict(given)
    path = Path(given)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFoundError(f"no configuration at {path}: pass a config.json, or a folder that has one, as config=")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise FormatError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content
