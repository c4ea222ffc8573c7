"""Which memory of a DeepSpeed engine only an update writes to: what may be read until the next one."""

from typing import Any

from capture.loops.deepspeed.loop import DeepSpeedLoop
from capture.state.interface import StateProvider
from catalog.errors import UnsupportedError

__all__ = ["lazy_providers", "steady_storages"]


def lazy_providers(engine: Any) -> tuple[list[StateProvider], str | None]:
    """Who knows what only an update changes; nobody, and why, where the state changes at other times too."""
    try:
        return list(DeepSpeedLoop(engine).providers()), None
    except UnsupportedError as error:
        return [], str(error)


def steady_storages(engine: Any, providers: list[StateProvider]) -> frozenset[int]:
    """The storages that nothing but an update writes to, by address."""
    if not providers:
        return frozenset()
    items = [item for provider in providers for item in provider.tensors()]
    steady = {item.tensor.untyped_storage().data_ptr() for item in items if item.when == "lazy"}
    # Under ZeRO-3 a parameter's own memory comes and goes with forward and backward.
    own = (parameter for parameter in engine.module.parameters() if not hasattr(parameter, "ds_id"))
    steady |= {parameter.untyped_storage().data_ptr() for parameter in own}
    return frozenset(steady - {item.tensor.untyped_storage().data_ptr() for item in items if item.when == "eager"})
