"""Records what every optimizer update of a training consumes, on the training thread.

    update_begins ─▶ (the user's own hooks) ─▶ consumed: gradients and param groups are taken
    ─▶ the update ─▶ update_ended: changed buffers are copied ─▶ is_final: changed objects, and the step goes to the log

The hook that takes them is the last one before the update, so that it sees the gradients that the update sees. A step
is broken, which readers are told by name, when anything but its update has written a parameter or the optimizer's state
since the step before: a declared edit, a load, another optimizer, or a write that torch's version counters have seen.
"""

import inspect
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.data_file.data_file import PlacedObject
from capture.loops.deepspeed.bias_correction import TracedProducts
from capture.loops.interface import Loop
from capture.loops.module_hooks import install, uncompiled
from capture.on_full import OnFull
from capture.redo_log.budget_room import RedoRoom
from capture.redo_log.changed_contents import ChangedContents
from capture.redo_log.gradients import Gradients, trains_on_all_cores
from capture.redo_log.redo_log import RedoLog, StepInput
from capture.redo_log.refusals import module_of
from capture.redo_log.updated_tensors import UpdatedTensors
from capture.redo_log.written_beside import WrittenBeside
from capture.state.objects import encode_object, inlined
from capture.state.update_rule import CPU_ADAM, refuse_unknown_update, update_rule
from catalog.errors import SnapshotError, UnsupportedError
from catalog.format.redo_segment import BIAS_CORRECTION_SINCE
from catalog.run_writer import RunWriter

__all__ = ["RedoRecorder"]

Objects = Callable[[], Sequence[PlacedObject]]


class RedoRecorder:
    """The recording of one session, from `attach` on; then it is closed, or given up.

    room: what the log may write, where the session has a byte budget
    """

    def __init__(self, loop: Loop, *, run: RunWriter, on_full: OnFull, room: RedoRoom | None = None) -> None:
        module, (optimizer,) = module_of(loop), loop.optimizers()
        self._optimizer = optimizer
        self._updated = UpdatedTensors(loop, module, rank=run.rank, world_size=run.world_size)
        self._updated.look()
        self._contents = ChangedContents(module)
        self._beside = WrittenBeside(optimizer, self._updated)
        self._rule = update_rule(optimizer)
        self._calls: list[list[str]] = []
        self._consumed_now: StepInput | None = None
        self._ended: StepInput | None = None
        self._broken: str | None = None
        self._refused: str | None = None
        self._products = TracedProducts(optimizer) if self._rule["class"] == CPU_ADAM else None
        self._reached = -1
        self._has_gone_back = False
        self._hook_ids = 0, 0
        self._has_updated = False
        self.room = room
        # Last, for it starts a thread.
        cores = len(os.sched_getaffinity(0))
        at_once = trains_on_all_cores(module, world_size=run.world_size, cores=cores)
        self._log = RedoLog(run, on_full=on_full, room=room, packs_at_once=at_once)
        self._gradients = Gradients(self._log, self._updated)

    def attach(self) -> Callable[[], None]:
        """Begin to see updates; return the function that ends it."""
        before = self._optimizer.register_step_pre_hook(uncompiled(self._consumes))
        after = self._optimizer.register_step_post_hook(uncompiled(self._has_written))
        self._hook_ids = before.id, after.id
        return install([before.remove, after.remove])

    # Events, in the order of a step.

    def update_begins(self) -> None:
        """The update is about to begin, and hooks of others may change what it reads, and what it has written: stand
        behind all that come before it, and before all that come behind it.
        """
        before, after = self._hook_ids
        hooks: Any = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        if before in hooks[0]:
            hooks[0].move_to_end(before)
            hooks[1].move_to_end(after, last=False)
        if self._updated.are_flat:
            # The optimizer around these may skip the update, or make it by several calls.
            self._begin_step()

    def _begin_step(self) -> StepInput:
        self._drop_unended()
        self._has_updated = True
        self._calls = []
        now = self._consumed_now = StepInput(self._rule, self._updated.current, [])
        try:
            now.rule = self._rule_now()
            if self._updated.look():
                self._refused = self._why_unknown()
            now.writes = self._updated.current
            now.groups = [_encoded(group) for group in self._optimizer.param_groups]
            now.broken = self._refused or self._broken or self._beside.since_the_update()
            self._beside.update_begins()
            if self._products is not None:
                self._products.update_begins()
        except Exception as error:  # noqa: BLE001 - nothing that fails here may reach the training
            now.broken = f"it could not be recorded: {error}"
        self._broken = None
        return now

    def _consumes(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        now = self._consumed_now if self._updated.are_flat else self._begin_step()
        if now is None:
            # A call that no event of the loop has told of: its engine was not asked for it.
            self._broken = self._broken or "a call of the optimizer that its engine has not made"
            return
        try:
            called = [one for group in optimizer.param_groups for one in group["params"]]
            if self._products is not None:
                self._products.call_begins()
            self._beside.call_begins(called)
            written = now.broken or self._hooked() or self._beside.between_calls(called)
            now.broken = written or self._unreadable(called, args, kwargs)
            if now.broken is None:
                self._note_call(now, called)
                self._gradients.take(now, called)
        except Exception as error:  # noqa: BLE001 - as above
            now.broken = f"it could not be recorded: {error}"

    def _note_call(self, now: StepInput, updates: Sequence[torch.Tensor]) -> None:
        """Note which flat tensors this call of the optimizer updates, and by which hyperparameters."""
        if not self._updated.are_flat:
            return
        self._calls.append([self._updated.known_name(one) for one in updates])
        for group in self._optimizer.param_groups:
            for index in {self._updated.group(one) for one in group["params"]}:
                now.groups[index] = _encoded(group)

    def _has_written(self, *_: Any) -> None:
        if not self._updated.are_flat:
            self._beside.forget()
            return
        self._beside.call_ended()
        if self._products is not None:
            try:
                self._products.call_ended()
            except Exception:  # noqa: BLE001 - as above
                self._products.since = None

    def update_ended(self, step: int, *, applied: bool) -> None:
        """The update that makes `step` is over, or was skipped: copy the buffers that have changed since the step
        before."""
        self._log.warn()
        ended, self._consumed_now = self._consumed_now, None
        if step <= self._reached:
            if ended is not None:
                self._log.release(ended.memory)
            self._leave_out(step, f"step {self._reached} came before it: a load has counted the steps back")
            self._has_gone_back = True
            return
        self._reached = step
        if ended is None or ended.is_left_out:
            self._leave_out(step, "the steps before it were still being written")
            return
        ended.step = step
        if self._has_gone_back:
            # The checkpoints before it may be of the steps that were made the first time.
            ended.broken = ended.broken or "the steps before it were counted twice, as after a load"
            self._has_gone_back = False
        self._ended = ended
        try:
            if self._updated.are_flat:
                self._note_update(ended, applied=applied)
            ended.tensors += self._contents.changed_buffers()
        except Exception as error:  # noqa: BLE001 - as above
            ended.broken = f"its update or its buffers could not be recorded: {error}"
        except BaseException:
            ended.broken = "an interrupt came while its buffers were recorded"
            raise

    def _leave_out(self, step: int, reason: str) -> None:
        if not self._log.has_no_room_for(step):
            self._log.left_out([step], reason)
        self._contents.forget()
        if self._updated.are_flat:
            # What it has written is no write outside the next update.
            self._beside.forget()

    def is_final(self, objects: Objects | None) -> None:
        """The step that has ended is final: hand it to the log, with the objects that belong to it; None where they
        could not be read.
        """
        ended = self._ended
        if ended is None and self._has_updated:
            return  # It was final before, and what was written since belongs to the next step.
        written = None if self._broken else self._beside.since_the_update()
        if ended is not None:
            ended.broken = ended.broken or self._broken or written
            try:
                if ended.broken is None:
                    ended.tensors += self._contents.changed_objects(_given(objects)())
            except Exception as error:  # noqa: BLE001 - a user's provider may raise anything
                ended.broken = f"its objects could not be recorded: {error}"
            except BaseException:
                # Ctrl-C while a provider is read: the step becomes final at the next event, with all its objects.
                self._contents.forget()
                raise
            if ended.broken is not None:
                self._contents.forget()
            self._ended = None
            self._log.add(ended)
        # A declared edit is part of the checkpoint of this step, if it has one. Another write came behind it.
        self._broken = written
        self._beside.forget()

    def state_written(self, how: str) -> None:
        """Anything but the update writes the state now: the step that has ended if it is not final yet, else the next
        one, is broken."""
        self._broken = self._broken or how

    def capture_begins(self, step: int) -> None:
        """A checkpoint of `step` is about to begin. If the log may have the steps around it as they were before a load
        has counted back, let it say first, durably, that these do not count: where that can't be written there must be
        no such checkpoint, and this raises why.
        """
        if step < self._reached or self._has_gone_back:
            reason = "the step was made twice, since a load has counted the steps back"
            again = (
                StepInput(self._rule, self._updated.current, [], broken=reason, counted_twice=True, step=number)
                for number in (step, step + 1)
            )
            self._log.write_now(list(again))
        self._reached = max(self._reached, step)

    def captured(self) -> None:
        """A checkpoint of the step that has ended has begun: from it the steps after it are made again."""
        self._contents.captured()

    def write_out(self) -> None:
        """Return once all steps that are final are on the disk, or left out."""
        self._log.write_now([])

    def close(self) -> None:
        """Write the rest of the log."""
        self._drop_unended()
        self._log.close()

    def give_up(self) -> None:
        """Let go of everything without waiting for the disk."""
        self._log.give_up()

    # What is recorded.

    def _rule_now(self) -> dict[str, Any]:
        """Return what this update's bits depend on, the same object while nothing of it has changed."""
        rule = update_rule(self._optimizer)
        if rule != self._rule:
            self._rule = rule
        return self._rule

    def _why_unknown(self) -> str | None:
        """Return why no update of what is updated now can be made again, until something else is; None for one that
        can."""
        flats = self._updated.all if self._updated.are_flat else ()
        try:
            refuse_unknown_update([self._optimizer], flats=flats, scaler=False)
        except UnsupportedError as error:
            return str(error)
        return None

    def _note_update(self, ended: StepInput, *, applied: bool) -> None:
        """Note how an update of flat tensors was made, and that what it has written since belongs to it: the parameters
        are rounded behind the optimizer's own hooks."""
        ended.applied = applied
        ended.broken = (
            ended.broken
            or self._hooked()
            or self._beside.between_calls(self._updated.all)
            or (None if applied else self._beside.since_the_update())
        )
        self._beside.forget()
        updated = sorted(name for names in self._calls for name in names)
        if applied and ended.broken is None:
            if updated == sorted(map(self._updated.known_name, self._updated.all)):
                ended.writes = self._updated.writes(self._calls)
            else:
                ended.broken = f"the calls of its optimizer have updated {len(updated)} of the flat tensors"
        if not applied and updated:
            ended.broken = ended.broken or "its update was skipped, although its optimizer was called"
        if applied and self._products is not None and ended.broken is None:
            ended.broken = self._note_products(ended, self._products.since)

    def _note_products(self, ended: StepInput, since: int | None) -> str | None:
        """Note from where the products of betas of DeepSpeed's CPU Adam have come; return why nothing tells that."""
        if since is None:
            return f"the updates of {CPU_ADAM} so far do not tell by which powers of its betas it corrects its bias"
        if since:
            ended.groups = [{**group, BIAS_CORRECTION_SINCE: since} for group in ended.groups]
        return None

    def _hooked(self) -> str | None:
        """Return that a hook of others came between what is copied here and the update, if one did."""
        before, after = self._hook_ids
        hooks: Any = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        if (next(reversed(hooks[0])), next(iter(hooks[1]))) != (before, after):
            return "a hook of its optimizer was added while it was under way"
        return None

    def _unreadable(self, updates: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Return why this update can't be made again from what is here; None when it can."""
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            return "its update was given a closure, which makes gradients of its own"
        if _is_compiled():
            return "its update was compiled (torch.compile), which gives other bits than the optimizer's own code"
        if any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return "its update was given a gradient scale"
        for one in updates:
            name = self._updated.name(one)
            if name is None:
                return f"a parameter of shape {tuple(one.shape)} is not in the module, so it has no name"
            grad = one.grad
            if grad is not None and not (
                grad.layout is torch.strided and grad.device.type == "cpu" and grad.is_contiguous()
            ):
                return f"the gradient of {name!r} is not dense in host memory, in row-major order"
        return None

    def _drop_unended(self) -> None:
        """Forget an update that an exception has ended: it belongs to no step, and the next one begins elsewhere."""
        if self._consumed_now is not None:
            self._log.release(self._consumed_now.memory)
            self._consumed_now = None
            self._broken = self._broken or "an exception has ended an update half-way"


def _is_compiled() -> bool:
    """Return whether the update that has called this may be compiled: it is within a call of a compiled function."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == torch._dynamo.eval_frame.__file__:
            return True
        frame = frame.f_back
    return False


def _given(objects: Objects | None) -> Objects:
    if objects is None:
        raise SnapshotError("a provider has failed")
    return objects


def _encoded(group: dict[str, Any]) -> Any:
    """Return the hyperparameters of a param group as a JSON tree."""
    plain = {key: value for key, value in group.items() if key != "params"}
    return json.loads(inlined(encode_object("param_group", plain)).json)
