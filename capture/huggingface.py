"""Hugging Face's Trainer: a callback that captures what it trains, and where the Trainer is in it.

The object `trainer` of a checkpoint has what `dshistory.resume_folder` needs beside the training's own state: `state`,
the fields of the Trainer's own state without its log, which the journal has; and `rng`, the random numbers from which
the next batch is drawn. An evaluation after the step draws some, so these are not those of right after the update.

The Trainer stores its state in each of its own checkpoints, and the run stands there under the name `DSHistory`. So a
training that the Trainer resumes knows which run it goes on from.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from capture.active_sessions import close_sessions, note_origin, sessions_of
from capture.collectives import Ranks
from capture.defaults import history_path
from capture.enable import enable
from capture.loops.pytorch.loop import count_from
from capture.loops.select import loop_for, trainer_target
from capture.replays.request import asked_replay
from capture.session.session import Session
from capture.state.providers import RandomState, Stateful
from capture.state.unwrap import unwrapped, unwrapped_optimizer
from capture.user_warning import warn_user
from catalog.errors import HistoryError, NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef

__all__ = ["HistoryCallback"]

_OF_THE_TRAINER = ("target", "optimizer", "scheduler", "scaler")
_ENTRY: Final = "DSHistory"
"""The name of our entry in the Trainer's state; no callback's class has it, so the Trainer only carries it."""


class _Position:
    """Where the Trainer is in its training, as a State Provider reads it."""

    def __init__(self) -> None:
        self._state: TrainerState | None = None
        self._random: Any = None

    def note(self, state: TrainerState) -> None:
        """Note the random numbers of now: the next batch is drawn from them, unless more is noted before."""
        self._state = state
        self._random = RandomState().objects()["rng"][0]

    def state_dict(self) -> Mapping[str, Any]:
        assert self._state is not None, "the training has begun before anything is captured"
        fields = (field.name for field in dataclasses.fields(self._state) if field.name != "log_history")
        return {"state": {name: getattr(self._state, name) for name in fields}, "rng": self._random}

    def load_state_dict(self, state: Any) -> None:
        raise SetupError("a Trainer goes on from a folder: pass one of dshistory.resume_folder to trainer.train")


class HistoryCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[HistoryCallback(every=50, history="history")])` captures every `every`-th update.

    Guarantees the same as `capture.enable`; steps have the numbers of `trainer.state.global_step`. A step's `loss` is
    the mean over its own batches; the numbers that the Trainer logs are recorded too, its mean loss as `trainer_loss`.
    The session ends with the training. A failed snapshot is a warning and does not end the training; with `strict=True`
    it is an error when the training ends. After an exception, which the Trainer does not report to its callbacks, the
    session ends with the process, or when a training of the same model begins.

    A training that `trainer.train(resume_from_checkpoint=...)` resumes is a child of the run that its checkpoint is of,
    if that run is in the same history; `dshistory.resume_folder` writes such a checkpoint from a history.

    options: further arguments of `capture.enable`, except those that the Trainer has itself. `resume` is refused: the
       Trainer has chosen its first batch before any callback runs.
    """

    def __init__(self, *, every: int = 50, history: Path | str | None = None, **options: Any) -> None:
        if "resume" in options:
            raise SetupError(
                "HistoryCallback can't resume: the Trainer chooses the batch it begins with before a callback runs; "
                "pass a checkpoint to trainer.train(resume_from_checkpoint=...): one of the Trainer's own, or one that "
                "dshistory.resume_folder(step, path) writes from a history"
            )
        for name in _OF_THE_TRAINER:
            if name in options:
                raise SetupError(f"HistoryCallback takes the {name} from the Trainer: leave {name}= out")
        self._options = {**options, "every": every, "history": history}
        self._session: Session | None = None
        self._position = _Position()
        self._training = False

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        session = "no session yet" if self._session is None else repr(self._session)
        return f"<HistoryCallback({given}): {session}>"

    @property
    def session(self) -> Session:
        """The session of the current training, or of the last one. SetupError before the first."""
        if self._session is None:
            raise SetupError("HistoryCallback has no session yet: it begins with trainer.train()")
        return self._session

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        **others: Any,
    ) -> None:
        """Begin the session. Raises what `capture.enable` raises, before the first batch; SetupError in a script that
        `dshistory replay` has started, because the Trainer has chosen the batch it begins with already."""
        replay = asked_replay()
        if replay is not None:
            raise SetupError(
                f"a Trainer can't be replayed from {replay.ref}: write dshistory.resume_folder('{replay.ref}', path), "
                "pass trainer.train(resume_from_checkpoint=path), and compare the two runs: dshistory.compare(a, b)"
            )
        target, of_torch = trainer_target(model, optimizer=optimizer, scheduler=lr_scheduler)
        ranks = Ranks(*loop_for(target, **of_torch).ranks())
        if of_torch:
            # A session that an exception has left open counts the steps of the same optimizer: it must end before the
            # count is set.
            close_sessions(sessions_of([unwrapped(model), unwrapped_optimizer(optimizer)]), ranks=ranks)
            count_from(optimizer, state.global_step)
        parent = ranks.agree("looking for the step that the Trainer goes on from", lambda: self._parent(state))
        if parent is not None:
            note_origin(loop_for(target, **of_torch).subjects(), parent)
        self._position.note(state)
        position = Stateful("trainer", self._position, placement="rank_local", read_at="next_forward")
        options = self._options
        if options.get("what") != "weights":
            options = {**options, "providers": [*options.get("providers", ()), position]}
        self._session = enable(target, **of_torch, **options)
        state.stateful_callbacks[_ENTRY] = {"run": self._session.run}
        self._training = True

    def _parent(self, state: TrainerState) -> CheckpointRef | None:
        """Return the step that the Trainer has resumed from; None when it began anew, or elsewhere than here."""
        entry = state.stateful_callbacks.get(_ENTRY)
        run = entry.get("run") if isinstance(entry, dict) else None
        with contextlib.suppress(NotFoundError):
            runs = History.open(history_path(self._options["history"])).runs()
            if isinstance(run, str) and any(run == one.run for one in runs):
                return CheckpointRef(run, state.global_step)
        return None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Capture the last step now, because afterwards the Trainer may load the best weights."""
        self._position.note(state)
        if control.should_training_stop:
            _or_warn(self.session.snapshot)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any],
        **others: Any,
    ) -> None:
        """Record the numbers among `logs`, unless no training is running, as in `trainer.evaluate()`."""
        if not self._training:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        if "loss" in numbers:
            numbers["trainer_loss"] = numbers.pop("loss")
        self._position.note(state)
        self.session.log(**numbers)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Note the random numbers: the evaluation has drawn some."""
        if self._training:
            self._position.note(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Note the random numbers that the Trainer's own checkpoint has."""
        self._position.note(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """End the session. SnapshotError with `strict=True`, when a snapshot has failed."""
        self._training = False
        self.session.close()


def _or_warn(action: Callable[[], object]) -> None:
    try:
        action()
    except (HistoryError, OSError) as error:
        warn_user(str(error))
