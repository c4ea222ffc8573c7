"""A plain torch module with its optimizer as a training loop; a step is one call of `optimizer.step()`."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from capture.loops.deepspeed.flat_tensors import Flat
from capture.loops.interface import LoopEvents
from capture.loops.pytorch.hooks import Pace, TorchHooks
from capture.loops.pytorch.wrappers import with_inner, wrappers_of
from capture.state.interface import ReadAt, StateProvider
from capture.state.providers import (
    Buffers,
    Counters,
    ExtraState,
    ModuleParameters,
    Stateful,
    TorchOptimizer,
)
from capture.state.unwrap import scaler_of, unwrapped, unwrapped_optimizer, unwrapped_scheduler
from capture.user_warning import warn_user
from catalog.errors import SetupError, UnsupportedError

__all__ = ["Optimizers", "TorchLoop", "count_from"]

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""The steps of each optimizer. They outlive a session, so that a restore before `enable` can set them."""

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class TorchLoop:
    """The Loop of `module`; without an optimizer it can be restored, not captured. The last one of several optimizers
    ends a step.
    """

    def __init__(self, module: torch.nn.Module, *, optimizer: Optimizers, scheduler: Any, scaler: Any) -> None:
        self._module = module
        self._optimizers = _optimizers(optimizer)
        # Wrappers come behind what they wrap, and the innermost optimizer of the last chain counts the steps.
        self._last = with_inner(self._optimizers[-1])[0] if self._optimizers else None
        self._scheduler = _with_state("scheduler", unwrapped_scheduler(scheduler))
        self._scaler = _with_state("scaler", scaler if scaler is not None else scaler_of(optimizer))

    def check_capturable(self, *, whole: bool) -> None:
        if not self._optimizers:
            raise SetupError("capturing a plain module needs its optimizer: capture.enable(model, optimizer=optimizer)")
        if whole:
            self._check_state()

    def _check_state(self) -> None:
        self._refuse_sparse_momentum()
        # Every scheduler of torch leaves this mark in the groups whose rate it sets.
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if self._scheduler is None and any("initial_lr" in group for group in groups):
            warn_user(
                "the optimizer's learning rate is moved by a scheduler that is not captured, so a restore will not "
                "bring its state back: pass capture.enable(..., scheduler=scheduler)"
            )
        for wrapper in self._wrappers():
            if not any(wrapper is one for one in self._optimizers):
                warn_user(
                    f"the {type(wrapper).__qualname__} around the optimizer is not captured, so a restore will not "
                    "bring its state back: pass it as optimizer= instead of the inner one"
                )

    def _refuse_sparse_momentum(self) -> None:
        names = {id(parameter): name for name, parameter in unwrapped(self._module).named_parameters()}
        sparse = {id(one.weight) for one in self._module.modules() if isinstance(one, _EMBEDDINGS) and one.sparse}
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            for parameter in group["params"]:
                if group.get("momentum") and id(parameter) in sparse and parameter.requires_grad:
                    raise UnsupportedError(
                        f"optimizer state 'momentum_buffer' of {names.get(id(parameter), 'an embedding')!r} will be a "
                        "sparse tensor, because its embedding has sparse=True: only dense tensors can be captured; "
                        "build it with sparse=False, or train it without momentum"
                    )

    def step(self) -> int:
        return 0 if self._last is None else _steps.get(self._last, 0)

    def may_skip_updates(self) -> bool:
        return self._scaler is not None

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def flat_tensors(self) -> Sequence[torch.Tensor]:
        return ()

    def flats(self) -> Sequence[Flat]:
        return ()

    def why_unrecordable(self) -> str | None:
        return None

    def subjects(self) -> Sequence[Any]:
        return [unwrapped(self._module), *self._optimizers]

    def ranks(self) -> tuple[int, int]:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)

    def providers(self) -> Sequence[StateProvider]:
        found: list[StateProvider] = [ModuleParameters(self._module), Buffers(self._module), ExtraState(self._module)]
        found += [
            TorchOptimizer(one, self._module, name=f"optimizer.{i}" if i else "optimizer", read_at=self._rates_read_at)
            for i, one in enumerate(self._optimizers)
        ]
        if self._optimizers:
            found.append(Counters(self._counters, self._set_counters))
        if self._scheduler is not None:
            found.append(Stateful("lr_scheduler", self._scheduler, read_at=self._rates_read_at))
        if self._scaler is not None:
            found.append(Stateful("loss_scaler", self._scaler, read_at="next_forward"))
        return found

    def facts(self) -> Mapping[str, Any]:
        return {
            "engine": "torch",
            "torch": torch.__version__,
            "module": _qualified(self._module),
            "optimizer": ", ".join(map(_qualified, self._optimizers)) or None,
            "scheduler": None if self._scheduler is None else _qualified(self._scheduler),
            "data_parallel_size": self.ranks()[1],
        }

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        hooks = TorchHooks(
            self._module,
            self._optimizers,
            self._pace(),
            count=self._count,
            events=events,
            last=self._ending(),
            wrappers=self._wrappers(),
        )
        return hooks.remove

    def _ending(self) -> torch.optim.Optimizer:
        assert self._last is not None, "a loop without an optimizer is not captured"
        return self._last

    def _wrappers(self) -> list[torch.optim.Optimizer]:
        return wrappers_of(self._ending())

    def _pace(self) -> Pace:
        return Pace(self._scheduler, self._ending())

    def _rates_read_at(self) -> ReadAt:
        return self._pace().read_at if self._optimizers else "before_update"

    def _count(self) -> None:
        _steps[self._ending()] = self.step() + 1

    def _counters(self) -> Mapping[str, int]:
        return {"global_steps": self.step(), "scheduler_by_epochs": int(self._pace().by_epochs)}

    def _set_counters(self, counters: Mapping[str, int]) -> None:
        if self._optimizers:
            _steps[self._ending()] = int(counters["global_steps"])
            by_epochs = bool(counters.get("scheduler_by_epochs", False))
            self._pace().restored(by_epochs=by_epochs, step=self.step())


def count_from(optimizer: Any, step: int) -> None:
    """Let the next step of `optimizer` be `step` + 1, as the loop around it counts."""
    _steps[with_inner(unwrapped_optimizer(optimizer))[0]] = step


def _optimizers(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers in the order of their updates, those that wrap another one behind it, without wrappers that
    only pass calls through.
    """
    several = () if given is None else given if isinstance(given, (list, tuple)) else (given,)
    found: list[torch.optim.Optimizer] = []
    for optimizer in several:
        optimizer = unwrapped_optimizer(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedError(f"optimizer: expected a torch.optim.Optimizer, got a {_qualified(optimizer)}")
        found += [one for one in with_inner(optimizer) if not any(one is other for other in found)]
    return tuple(found)


def _with_state(argument: str, value: Any) -> Any:
    """Return `value`, or raise SetupError unless it is None or has a state that can be restored, and is what it is
    passed as.
    """
    if isinstance(value, torch.optim.Optimizer):
        raise SetupError(f"{argument}: a {_qualified(value)} is an optimizer: pass it as optimizer=")
    if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise SetupError(
            f"{argument}: a {_qualified(value)} has no state_dict and load_state_dict: leave {argument}= out"
        )
    return value


def _qualified(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
