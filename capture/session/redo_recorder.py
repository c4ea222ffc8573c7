"""Records what every optimizer update of a training consumes, on the training thread.

    update_begins ─▶ (the user's own hooks) ─▶ consumed: gradients and param groups are copied
    ─▶ the update ─▶ update_ended: changed buffers are copied ─▶ is_final: changed objects, and the step goes to the log

The hook that copies is the last one before the update, so that it sees the gradients that the update sees. A step is
broken, which readers are told by name, when anything but its update has written a parameter or the optimizer's state
since the step before: a declared edit, a load, another optimizer, or a write that torch's version counters have seen.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

import native
from capture.loops.deepspeed.bias_correction import TracedProducts
from capture.loops.interface import Loop
from capture.loops.module_hooks import install
from capture.loops.pytorch.wrappers import wrappers_of
from capture.session.options import OnFull
from capture.session.redo_log import RedoLog, StepInput
from capture.session.updated_tensors import UpdatedTensors
from capture.snapshot.data_file import PlacedObject
from capture.state.dtypes import dtype_name
from capture.state.objects import encode_object, inlined
from capture.state.optimizer_state import state_tensors
from capture.state.providers import Buffers
from capture.state.update_rule import CPU_ADAM, refuse_unknown_update, update_rule
from catalog.errors import SetupError, SnapshotError, UnsupportedError
from catalog.format.redo_segment import BIAS_CORRECTION_SINCE, RedoTensor
from catalog.read.redo_allowance import MOST_MORE_BYTES
from catalog.retention.policy import Policy
from catalog.run_writer import RunWriter

__all__ = ["RedoRecorder", "refuse_unrecordable"]

_ALIGN: Final = 16
_MOST_OBJECT_BYTES: Final = 4 << 20
_NO_BYTES: Final = torch.empty(0, dtype=torch.uint8)
Objects = Callable[[], Sequence[PlacedObject]]
_Version = tuple[int, float]
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def refuse_unrecordable(loop: Loop, keep: Policy | None) -> None:
    """Raise UnsupportedError, by name, for a training whose updates can't be recorded and made again, and SetupError
    for a byte budget, which a redo log would not keep.
    """
    reason = loop.why_unrecordable()
    if reason is not None:
        raise UnsupportedError(f"redo=True: {reason} can't be recorded yet; leave redo out")
    if keep is not None and keep.budget_bytes is not None:
        raise SetupError(f"redo=True with keep={str(keep)!r}: a redo log does not keep to a budget of bytes yet")
    refuse_unknown_update(
        loop.optimizers(), flats=[flat.tensor for flat in loop.flats()], scaler=loop.may_skip_updates()
    )
    for wrapper in wrappers_of(loop.optimizers()[0]):
        raise UnsupportedError(
            f"redo=True: a {type(wrapper).__qualname__} around the optimizer writes the weights too, which can't be "
            "recorded; leave redo out"
        )
    for name, part in _module_of(loop).named_modules():
        if isinstance(part, _EMBEDDINGS) and (part.max_norm is not None or part.sparse):
            what = "max_norm: forward writes its weights" if part.max_norm is not None else "sparse gradients"
            raise UnsupportedError(f"redo=True: the embedding {name!r} has {what}, which can't be recorded")


class RedoRecorder:
    """The recording of one session, from `attach` on; then it is closed, or given up."""

    def __init__(self, loop: Loop, *, run: RunWriter, on_full: OnFull) -> None:
        module, (optimizer,) = _module_of(loop), loop.optimizers()
        self._optimizer = optimizer
        self._updated = UpdatedTensors(loop, module, rank=run.rank, world_size=run.world_size)
        self._updated.look()
        self._buffers = Buffers(module)
        self._rule = update_rule(optimizer)
        self._calls: list[list[str]] = []
        self._consumed_now: StepInput | None = None
        self._ended: StepInput | None = None
        self._broken: str | None = None
        self._refused: str | None = None
        self._products = TracedProducts(optimizer) if self._rule["class"] == CPU_ADAM else None
        self._buffer_hashes = self._hashed_buffers()
        self._object_hashes: dict[str, bytes] = {}
        self._recorded_bytes: dict[tuple[str, str], int] = {}
        self._captured_bytes = self._buffer_bytes()
        self._reached = -1
        self._has_gone_back = False
        self._called: Sequence[torch.Tensor] = ()
        self._around: dict[str, _Version] = {}
        self._versions = self._read_versions()
        self._hook_ids = 0, 0
        self._has_updated = False
        # Last, for it starts a thread.
        self._log = RedoLog(run, on_full=on_full)

    def attach(self) -> Callable[[], None]:
        """Begin to see updates; return the function that ends it."""
        before = self._optimizer.register_step_pre_hook(self._consumes)
        after = self._optimizer.register_step_post_hook(self._has_written)
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
            now.broken = self._refused or self._broken or self._written_since()
            self._around = self._versions_of(self._updated.all) if self._updated.are_flat else {}
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
            self._called = [one for group in optimizer.param_groups for one in group["params"]]
            if self._products is not None:
                self._products.call_begins()
            now.broken = now.broken or self._hooked(self._called) or self._unreadable(self._called, args, kwargs)
            if now.broken is None:
                self._note_call(now, self._called)
                self._copy_gradients(now, self._called)
        except Exception as error:  # noqa: BLE001 - as above
            now.broken = f"it could not be recorded: {error}"

    def _note_call(self, now: StepInput, updates: Sequence[torch.Tensor]) -> None:
        """Note which flat tensors this call of the optimizer updates, and by which hyperparameters."""
        if not self._updated.are_flat:
            return
        self._calls.append([self._names_of(one) for one in updates])
        for group in self._optimizer.param_groups:
            for index in {self._updated.group(one) for one in group["params"]}:
                now.groups[index] = _encoded(group)

    def _has_written(self, *_: Any) -> None:
        if not self._updated.are_flat:
            self._versions = self._read_versions()
            return
        self._around.update(self._versions_of(self._called))
        if self._products is not None:
            try:
                self._products.call_ended()
            except Exception:  # noqa: BLE001 - as above
                self._products.since = None

    def update_ended(self, step: int, *, applied: bool) -> None:
        """The update that makes `step` is over, or was skipped: copy the buffers that have changed since the step
        before."""
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
        try:
            if self._updated.are_flat:
                self._note_update(ended, applied=applied)
            ended.tensors += self._changed_buffers()
        except Exception as error:  # noqa: BLE001 - as above
            ended.broken = f"its update or its buffers could not be recorded: {error}"
        self._ended = ended

    def _leave_out(self, step: int, reason: str) -> None:
        self._log.left_out([step], reason)
        self._forget_contents()
        if self._updated.are_flat:
            # What it has written is no write outside the next update.
            self._versions = self._read_versions()

    def is_final(self, objects: Objects | None) -> None:
        """The step that has ended is final: hand it to the log, with the objects that belong to it; None where they
        could not be read.
        """
        ended, self._ended = self._ended, None
        if ended is None and self._has_updated:
            return  # It was final before, and what was written since belongs to the next step.
        written = None if self._broken else self._written_since()
        if ended is not None:
            ended.broken = ended.broken or self._broken or written
            try:
                if ended.broken is None:
                    ended.tensors += self._changed_objects(_given(objects)())
            except Exception as error:  # noqa: BLE001 - a user's provider may raise anything
                ended.broken = f"its objects could not be recorded: {error}"
            if ended.broken is not None:
                self._forget_contents()
            self._log.add(ended)
        # A declared edit is part of the checkpoint of this step, if it has one. Another write came behind it.
        self._broken = written
        self._versions = self._read_versions()

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
        self._captured_bytes = self._buffer_bytes()
        self._recorded_bytes.clear()

    def close(self) -> None:
        """Write the rest of the log."""
        self._drop_unended()
        self._log.close()

    def give_up(self) -> None:
        """Let go of everything without waiting for the disk."""
        self._log.give_up()

    # What is copied.

    def _rule_now(self) -> dict[str, Any]:
        """Return what this update's bits depend on, the same object while nothing of it has changed."""
        rule = update_rule(self._optimizer)
        if rule != self._rule:
            self._rule = rule
        return self._rule

    def _forget_contents(self) -> None:
        """Record all buffers and objects with the next step: readers do not have those of this one, or another's."""
        self._buffer_hashes.clear()
        self._object_hashes.clear()

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
        ended.broken = ended.broken or self._hooked(self._updated.all) or (None if applied else self._written_since())
        self._versions = self._read_versions()
        updated = sorted(name for names in self._calls for name in names)
        if applied and ended.broken is None:
            if updated == sorted(map(self._names_of, self._updated.all)):
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

    def _hooked(self, written: Sequence[torch.Tensor]) -> str | None:
        """Return what hooks of others, or a wrapped step, have written of flat tensors and their state since the update
        began, or its last call has ended; and whether they will, behind what is copied here."""
        before, after = self._hook_ids
        hooks: Any = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        if (next(reversed(hooks[0])), next(iter(hooks[1]))) != (before, after):
            return "a hook of its optimizer was added while it was under way"
        now = self._versions_of(written) if self._updated.are_flat else {}
        changed = sorted(name for name, version in now.items() if self._around.get(name) != version)
        return f"{changed[0]} was written within its update, as by a hook of its optimizer" if changed else None

    def _names_of(self, tensor: torch.Tensor) -> str:
        name = self._updated.name(tensor)
        if name is None:
            raise UnsupportedError(f"a tensor of shape {tuple(tensor.shape)} is none of those that were known before")
        return name

    def _unreadable(self, updates: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Return why this update can't be made again from what is here; None when it can."""
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            return "its update was given a closure, which makes gradients of its own"
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

    def _copy_gradients(self, into: StepInput, updates: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of a call, behind those of earlier calls of the same update."""
        found = [
            (self._names_of(one), one.grad.detach())
            for one in updates
            if one.grad is not None and self._updated.is_recorded(one)
        ]
        at = sum(_aligned(copy.nbytes) for _, copy in into.tensors)
        if into.memory is None and not into.is_left_out:
            into.memory = self._log.memory(self._most_bytes())
            into.is_left_out = into.memory is None
        if into.memory is None:
            return
        for name, gradient in found:
            copy = into.memory[at : at + gradient.nbytes].view(gradient.dtype).view(gradient.shape)
            copy.copy_(gradient)
            dtype = dtype_name(gradient.dtype, what=f"the gradient of {name!r}")
            into.tensors.append((RedoTensor("gradient", name, dtype, tuple(gradient.shape)), copy))
            at += _aligned(gradient.nbytes)

    def _most_bytes(self) -> int:
        """Return how much memory the gradients of one update take; those of a flat tensor are as large as it is."""
        recorded = [one for one in self._updated.all if self._updated.is_recorded(one)]
        if self._updated.are_flat:
            return sum(_aligned(one.nbytes) for one in recorded)
        return sum(_aligned(one.grad.nbytes) for one in recorded if one.grad is not None)

    def _hashed_buffers(self) -> dict[str, bytes]:
        return {name: _checksum(buffer) for name, buffer in self._buffers.live()}

    def _buffer_bytes(self) -> int:
        return sum(buffer.nbytes for _, buffer in self._buffers.live())

    def _changed_buffers(self) -> list[tuple[RedoTensor, torch.Tensor]]:
        changed = []
        for name, buffer in self._buffers.live():
            digest = _checksum(buffer)
            if self._buffer_hashes.get(name) != digest:
                self._buffer_hashes[name] = digest
                changed.append((name, buffer))
        self._require_room({("buffer", name): buffer.nbytes for name, buffer in changed})
        found = []
        for name, buffer in changed:
            dtype = dtype_name(buffer.dtype, what=f"buffer {name!r}")
            copy = buffer.detach().to("cpu", copy=True).contiguous()
            found.append((RedoTensor("buffer", name, dtype, tuple(buffer.shape)), copy))
        return found

    def _require_room(self, more: Mapping[tuple[str, str], int]) -> None:
        """Raise UnsupportedError when what has changed since the last checkpoint is more than readers take."""
        found = {**self._recorded_bytes, **more}
        total, most = sum(found.values()), self._captured_bytes + MOST_MORE_BYTES
        if total > most:
            raise UnsupportedError(
                f"buffers and objects that have changed since the last checkpoint take {total} bytes, where {most} can "
                "be recorded: capture more often, or make them smaller"
            )
        self._recorded_bytes = found

    def _changed_objects(self, objects: Sequence[PlacedObject]) -> list[tuple[RedoTensor, torch.Tensor]]:
        found = []
        for encoded in (inlined(placed.encoded) for placed in objects):
            # Of a large object most is still in its own memory, which goes on changing.
            text = b"" if encoded.live or len(encoded.json) > _MOST_OBJECT_BYTES else encoded.json
            digest = native.checksum(text)
            # One that is too large is named with every step, so that none takes an older one for it.
            if not text or self._object_hashes.get(encoded.name) != digest:
                self._object_hashes[encoded.name] = digest
                content = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NO_BYTES
                found.append((RedoTensor("object", encoded.name, "U8", (len(text),)), content))
        self._require_room({("object", tensor.name): content.nbytes for tensor, content in found})
        return found

    # What was written beside the update.

    def _read_versions(self) -> dict[str, _Version]:
        """Return the identity and the version of every tensor that an update writes."""
        found = {name: _version(one) for name, one in self._updated.held}
        if self._updated.are_flat:
            return found | self._versions_of(self._updated.all)
        _, tensors = state_tensors(self._optimizer.state.values())
        found.update({f"optimizer state {i}": _version(one) for i, one in enumerate(tensors)})
        return found

    def _versions_of(self, flats: Sequence[torch.Tensor]) -> dict[str, _Version]:
        """Return the identity and the version of flat tensors, and those of their state, or its value for a number."""
        found = {}
        for flat in flats:
            name = self._names_of(flat)
            found[name] = _version(flat)
            for key, value in self._optimizer.state.get(flat, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{key} of {name}"] = _version(value)
                elif isinstance(value, (int, float)):
                    found[f"{key} of {name}"] = 0, value
        return found

    def _written_since(self) -> str | None:
        now = self._read_versions()
        if now == self._versions:
            return None
        names = sorted(name for name in now | self._versions if now.get(name) != self._versions.get(name))
        return (
            f"{names[0]} and {len(names) - 1} more were written outside the update"
            if names[1:]
            else (f"{names[0]} was written outside the update")
        )

    def _drop_unended(self) -> None:
        """Forget an update that an exception has ended: it belongs to no step, and the next one begins elsewhere."""
        if self._consumed_now is not None:
            self._log.release(self._consumed_now.memory)
            self._consumed_now = None
            self._broken = self._broken or "an exception has ended an update half-way"


def _version(tensor: torch.Tensor) -> _Version:
    """Return the identity and the version of a tensor; one made in inference mode counts no writes."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _given(objects: Objects | None) -> Objects:
    if objects is None:
        raise SnapshotError("a provider has failed")
    return objects


def _module_of(loop: Loop) -> torch.nn.Module:
    """Return the module itself: an engine is one too, and comes before it."""
    return [one for one in loop.subjects() if isinstance(one, torch.nn.Module)][-1]


def _encoded(group: dict[str, Any]) -> Any:
    """Return the hyperparameters of a param group as a JSON tree."""
    plain = {key: value for key, value in group.items() if key != "params"}
    return json.loads(inlined(encode_object("param_group", plain)).json)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _checksum(buffer: torch.Tensor) -> bytes:
    content = buffer.detach().to("cpu").contiguous()
    return native.checksum(content.view(-1).view(torch.uint8).numpy() if content.numel() else b"")
