"""The memory of a DeepSpeed engine that only an optimizer update writes, which a save may read until the next update.

Reading it late is what lets `save_checkpoint` return before the bytes are copied. Everything else must be copied at the
call.
"""

from typing import Any

from capture.loops.deepspeed.loop import DeepSpeedLoop
from capture.state.interface import StateProvider
from catalog.errors import UnsupportedError

__all__ = ["lazy_providers", "lazy_storages"]


def lazy_providers(engine: Any) -> tuple[list[StateProvider], str | None]:
    """Return the State Providers that know which memory only an update writes, and None.

    For an engine whose state also changes between updates, return no providers and the reason.
    """
    try:
        return list(DeepSpeedLoop(engine).providers()), None
    except UnsupportedError as error:
        return [], str(error)


def lazy_storages(engine: Any, providers: list[StateProvider]) -> frozenset[int]:
    """Return the data pointers of the storages that only an update writes.

    The answer holds for one save: the first update, loading and offloading replace storages. None are returned for an
    optimizer whose state has another shape than the parameters: a history can't address it, while a copy of it at the
    call is all that a save needs.
    """
    if not providers:
        return frozenset()
    # A storage counts as a whole, because that is what DeepSpeed's dictionaries share: the tensors that it saves are
    # often other views of the storages that the providers list.
    try:
        items = [item for provider in providers for item in provider.tensors()]
    except UnsupportedError:
        return frozenset()
    lazy = {item.tensor.untyped_storage().data_ptr() for item in items if item.when == "lazy"}
    # The weights too: under ZeRO 1 and 2 DeepSpeed saves views of the flat low-precision buffer that the parameters are
    # in. Not under ZeRO 3 (`ds_id`): there `param.data` is the gathered weight, which forward and backward allocate and
    # free; the partition that lasts is `ds_tensor`, and the providers have listed it.
    own = (parameter for parameter in engine.module.parameters() if not hasattr(parameter, "ds_id"))
    lazy |= {parameter.untyped_storage().data_ptr() for parameter in own}
    # An eager tensor, such as a buffer, may share a storage with lazy ones. It is written between updates, so the whole
    # storage has to be copied at the call.
    return frozenset(lazy - {item.tensor.untyped_storage().data_ptr() for item in items if item.when == "eager"})
