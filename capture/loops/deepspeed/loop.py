"""A DeepSpeed engine as a training loop."""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups

from capture.loops.deepspeed.engine_provider import EngineState, has_grad_scaler
from capture.loops.deepspeed.flat_tensors import Flat, flat_tensors, flats_of
from capture.loops.deepspeed.hooks import attach
from capture.loops.deepspeed.optimizer_provider import ZeroState
from capture.loops.deepspeed.param_groups import class_name
from capture.loops.deepspeed.topology import Topology
from capture.loops.interface import LoopEvents
from capture.state.interface import StateProvider
from capture.state.module_tree import ModuleTree
from capture.state.providers import Buffers, ExtraState, ModuleParameters, Stateful, TorchOptimizer
from capture.state.unwrap import unwrapped
from catalog.errors import UnsupportedError

__all__ = ["DeepSpeedLoop", "engine_of"]

_KNOWN_WRAPPERS = (
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "BF16_Optimizer",
    "FP16_UnfusedOptimizer",
    "FP16_Optimizer",
)


class DeepSpeedLoop:
    """The Loop of a DeepSpeed engine with ZeRO 0, 1, 2 or 3; a step is an optimizer step, applied or skipped on
    overflow.

    Making one raises UnsupportedError, by name, for configurations whose state changes between updates, or is in memory
    that no tensor refers to.
    """

    def __init__(self, engine: Any) -> None:
        _refuse_unsupported(engine)
        self._engine = engine

    def check_capturable(self, *, whole: bool) -> None:
        """Do nothing: configurations that can't be captured were refused when this was made."""

    def step(self) -> int:
        return int(self._engine.global_steps)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self._engine.basic_optimizer]

    def flat_tensors(self) -> Sequence[torch.Tensor]:
        return [] if self._updates_parameters() else flat_tensors(self._engine.optimizer)

    def flats(self) -> Sequence[Flat]:
        names = {id(one): name for name, one, _ in ModuleTree(self._engine.module, of="parameters")}
        return () if self._updates_parameters() else flats_of(self._engine.optimizer, names)

    def why_unrecordable(self) -> str | None:
        engine = self._engine
        reasons = {
            "pipeline stages or experts": _is_split(engine),
            "a gradient scaler of torch (torch_autocast)": has_grad_scaler(engine),
            "parameters that are not in host memory": any(
                getattr(one, "ds_tensor", one).device.type != "cpu" for one in engine.module.parameters()
            ),
        }
        return next((reason for reason, is_so in reasons.items() if is_so), None)

    def _updates_parameters(self) -> bool:
        return isinstance(self._engine.optimizer, torch.optim.Optimizer)

    def subjects(self) -> Sequence[Any]:
        return [self._engine, unwrapped(self._engine.module), self._engine.optimizer]

    def ranks(self) -> tuple[int, int]:
        return deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()

    def providers(self) -> Sequence[StateProvider]:
        engine, optimizer = self._engine, self._engine.optimizer
        providers: list[StateProvider] = [Buffers(engine.module), ExtraState(engine.module)]
        if isinstance(optimizer, torch.optim.Optimizer):
            providers += [ModuleParameters(engine.module), TorchOptimizer(optimizer, engine.module)]
        else:
            providers.append(ZeroState(optimizer, engine.module, topology=_topology(engine)))
        if engine.lr_scheduler is not None:
            # The engine moves it within the step.
            providers.append(Stateful("lr_scheduler", engine.lr_scheduler, read_at="before_update"))
        # Last: it discards the gradients, which belong to the state before the restore.
        return [*providers, EngineState(engine)]

    def may_skip_updates(self) -> bool:
        """False: a step whose update was skipped on overflow ends with `after_step` too."""
        return False

    def facts(self) -> Mapping[str, Any]:
        engine = self._engine
        return {
            "engine": class_name(engine),
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
            "zero_stage": int(engine.zero_optimization_stage()),
            "optimizer": class_name(engine.basic_optimizer),
            "optimizer_wrapper": class_name(engine.optimizer),
            "data_parallel_size": engine.dp_world_size,
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "train_batch_size": engine.train_batch_size(),
            "config": json.loads(json.dumps(engine._config._param_dict, default=str), parse_constant=str),
        }

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        return attach(self._engine, events)


def engine_of(optimizer: Any) -> Any:
    """Return the engine whose optimizer is inside Accelerate's wrapper; None for an optimizer that is not wrapped for
    an engine.

    Nothing that the Trainer passes to a callback refers to the engine, so it is looked for among all objects.
    """
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        return None
    engines = (held for held in gc.get_objects() if issubclass(type(held), deepspeed.DeepSpeedEngine))
    return next((engine for engine in engines if engine.optimizer is inner), None)


def _refuse_unsupported(engine: Any) -> None:
    optimizer = engine.optimizer
    plain = isinstance(optimizer, torch.optim.Optimizer)
    offload_optimizer, offload_param = engine.zero_offload_optimizer(), engine.zero_offload_param()
    refused = {
        "an engine without an optimizer": engine.basic_optimizer is None,
        "SuperOffload (it updates during backward)": bool(engine.super_offload()),
        "ZenFlow (it updates in another process)": bool(engine.zenflow),
        "optimizer state swapped to NVMe": offload_optimizer is not None and offload_optimizer.device == "nvme",
        "parameters swapped to NVMe": offload_param is not None and offload_param.device == "nvme",
        "partial optimizer offload (offload_optimizer.ratio below 1)": offload_optimizer is not None
        and offload_optimizer.ratio < 1,
        "ZeRO++ secondary partitions (zero_hpz_partition_size above 1)": engine.zero_hpz_partition_size() > 1,
        "ZeRO++ quantized weights": bool(
            engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights()
        ),
        "ZeRO++ quantized gradients": bool(engine.zero_quantized_gradients()),
        "random layer token drop (random_ltd)": bool(engine.random_ltd_enabled()),
        "curriculum learning (its sampler keeps state)": engine.training_dataloader is not None
        and bool(engine.curriculum_learning_enabled()),
        "DeepCompile": bool(engine.is_deepcompile_enabled()),
        "tensor parallelism": _tensor_parallel_size(engine) > 1,
        "experts that DeepSpeed put into the model (expert_parallel)": bool(engine._has_autoep_layers()),
        "pipeline stages or experts without ZeRO, bf16 or fp16": _is_split(engine) and plain,
    }
    for what, is_used in refused.items():
        if is_used:
            raise UnsupportedError(f"{what} can't be captured safely; turn it off in the DeepSpeed configuration")
    if not plain and type(optimizer).__name__ not in _KNOWN_WRAPPERS:
        raise UnsupportedError(f"the optimizer {class_name(optimizer)} is not known, so its state can't be captured")
    if "onebit" in type(engine.basic_optimizer).__module__:
        raise UnsupportedError(
            f"{class_name(engine.basic_optimizer)} keeps error feedback per rank, which has no logical tensor; use Adam"
        )


def _tensor_parallel_size(engine: Any) -> int:
    if isinstance(engine, PipelineEngine):
        # The grid's model parallel groups include the pipeline stages; its slices do not.
        return int(engine.grid.get_slice_parallel_world_size())
    sizes = [int(engine.autotp_size())]
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        if hasattr(engine.mpu, name):
            sizes.append(int(getattr(engine.mpu, name)()))
    return max(sizes)


def _is_split(engine: Any) -> bool:
    """Return whether ranks hold different parameters."""
    return bool(engine.has_moe_layers) or (isinstance(engine, PipelineEngine) and engine.num_stages > 1)


def _topology(engine: Any) -> Topology | None:
    if not _is_split(engine):
        return None
    prefixes: dict[str, str] = {}
    for path, module in engine.module.named_modules():
        if isinstance(module, Experts):
            first = groups._get_expert_parallel_rank(next(module.parameters()).group_name) * module.num_local_experts
            at = f"{path}.deepspeed_experts."
            prefixes.update({f"{at}{i}.": f"{at}{first + i}." for i in range(module.num_local_experts)})
    naming = Topology(prefixes, {})
    holders = {}
    for name, parameter in engine.module.named_parameters():
        if is_moe_param(parameter):
            group = groups._get_expert_data_parallel_group(parameter.group_name)
        else:
            group = engine.data_parallel_group
        answers = not getattr(parameter, PIPE_REPLICATED, False)
        holders[naming.logical(name)] = (dist.get_rank(group), dist.get_world_size(group) if answers else 0)
    return Topology(prefixes, holders)
