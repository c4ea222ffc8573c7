"""States what the bits of an update depend on beside its input: the optimizer, torch, and how the processor computes.

An update that reads nothing but gradients, its own state and its param groups can be made again, bit for bit, where
all of this is the same: so a redo log records it. The number of threads is among it, because torch cuts a large tensor
among them, and with bfloat16 weights SGD's vector loop rounds otherwise than the loop over what is left at each cut.
"""

import contextlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from catalog.errors import FormatError, MismatchError, UnsupportedError

__all__ = ["CPU_ADAM", "known_optimizer", "refuse_unknown_update", "require_same_update", "threads_of", "update_rule"]

_KNOWN: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

CPU_ADAM: Final = "DeepSpeedCPUAdam"
"""DeepSpeed's Adam for the host has this class; its own compiled code makes the updates."""

_REDUCED: Final = (torch.bfloat16, torch.float16)

_MEANING: Final = {
    "torch": "the version of torch",
    "machine": "the kind of processor",
    "capability": "the instructions that torch uses",
    "flush_denormal": "whether denormal numbers become zero",
    "default_dtype": "torch's default dtype",
    "deepspeed": "the version of DeepSpeed",
}
"""These facts must be equal, and are called so; the class is looked up, and the number of threads is set."""


def update_rule(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the bits of an update of `optimizer` depend on here and now, as JSON."""
    facts = {"class": type(optimizer).__name__, "threads": torch.get_num_threads(), **_surroundings()}
    if _is_cpu_adam(optimizer):
        own = {name: bool(getattr(optimizer, name)) for name in ("adam_w_mode", "fp32_optimizer_states")}
        facts |= {"deepspeed": version("deepspeed"), **own}
    return facts


def refuse_unknown_update(
    optimizers: Sequence[torch.optim.Optimizer], *, flats: Sequence[torch.Tensor], scaler: bool
) -> None:
    """Raise UnsupportedError, by name, unless there is one optimizer whose update can be made again from gradients.
    `flats`: what it updates in the place of parameters, if it does."""
    if len(optimizers) != 1:
        names = ", ".join(type(one).__qualname__ for one in optimizers)
        raise UnsupportedError(f"redo=True: {names}: only a training with one optimizer can be recorded yet")
    (optimizer,) = optimizers
    if type(optimizer) not in _KNOWN and not (flats and _is_cpu_adam(optimizer)):
        known = ", ".join(one.__name__ for one in _KNOWN)
        raise UnsupportedError(
            f"redo=True: a {type(optimizer).__module__}.{type(optimizer).__qualname__} may read more than gradients: "
            f"only torch's own {known} are known to be made again bit for bit; leave redo out"
        )
    if scaler and any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedError(
            "redo=True: with a gradient scaler a fused update reads the scale too, which is not recorded: build the "
            "optimizer with fused=False"
        )
    for index, group in enumerate(optimizer.param_groups):
        where = f"redo=True: param group {index}"
        if group.get("differentiable"):
            raise UnsupportedError(f"{where} has differentiable=True, which can't be recorded")
        # Under ZeRO 3 a group has its tensors only while it is updated.
        for parameter in flats or group["params"]:
            _refuse_parameter(parameter, where=where)
            if type(optimizer) is torch.optim.SGD and group.get("fused") and parameter.dtype in _REDUCED:
                raise UnsupportedError(
                    f"{where}: torch's fused SGD gives {parameter.dtype} weights other bits each time it runs, so no "
                    "step could be made again: build the optimizer with fused=False"
                )


def _refuse_parameter(parameter: torch.Tensor, *, where: str) -> None:
    what = f"{where} has a parameter of shape {tuple(parameter.shape)}"
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor) or parameter.device.type != "cpu":
        kind = f"a {type(parameter).__qualname__} on {parameter.device}"
        raise UnsupportedError(f"{what} that is {kind}: only ordinary ones in host memory can be recorded yet")
    if not parameter.is_contiguous():
        raise UnsupportedError(
            f"{what} whose elements are not in row-major order, on which the bits of an update depend: make it "
            "contiguous"
        )


def _is_cpu_adam(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__name__ == CPU_ADAM and kind.__module__.startswith("deepspeed.ops.adam")


def known_optimizer(name: object) -> type[torch.optim.Optimizer]:
    """Return the class of optimizers that a redo log names. FormatError when it is none that can be recorded."""
    found = next((one for one in _KNOWN if one.__name__ == name), None)
    if found is None:
        raise FormatError(f"a redo log of the optimizer {name!r}, which this release does not know")
    return found


def require_same_update(rule: Mapping[str, Any], *, what: str) -> None:
    """Raise MismatchError, which begins with `what` and has both values, unless an update gives here the bits that it
    gave where `rule` was recorded."""
    here = _surroundings()
    if "deepspeed" in rule:
        here["deepspeed"] = _installed("deepspeed")
    others = [
        f"{_MEANING[key]} was {rule.get(key)!r}, here {here[key]!r}" for key in here if rule.get(key) != here[key]
    ]
    if others:
        raise MismatchError(
            f"{what} would have other bits here: {'; '.join(others)}; make it where these are as they were, or restore "
            "the checkpoint before it"
        )


@contextlib.contextmanager
def threads_of(rule: Mapping[str, Any]) -> Iterator[None]:
    """Compute with as many threads as the recorded updates did, until the end of the body."""
    threads = rule.get("threads")
    if type(threads) is not int or not 1 <= threads <= 4096:
        raise FormatError(f"a redo log of {threads!r} threads")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _surroundings() -> dict[str, Any]:
    tiny = torch.full((16,), 1e-39, dtype=torch.float32)
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flush_denormal": not bool((tiny * 1.0).count_nonzero()),
        "default_dtype": str(torch.get_default_dtype()),
    }
