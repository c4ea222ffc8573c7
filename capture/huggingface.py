"""Hugging Face's Trainer: a callback that captures what it trains. The only module that imports transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from capture.active_sessions import sessions_of
from capture.enable import enable
from capture.loops.pytorch.loop import count_from
from capture.loops.select import trainer_target
from capture.session.session import Session
from capture.state.unwrap import unwrapped, unwrapped_optimizer
from capture.user_warning import warn_user
from catalog.errors import HistoryError, SetupError

__all__ = ["HistoryCallback"]

_OF_THE_TRAINER = ("target", "optimizer", "scheduler", "scaler")


class HistoryCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[HistoryCallback(every=50, history="history")])` captures every `every`-th update.

    Guarantees the same as `capture.enable`; steps have the numbers of `trainer.state.global_step`. A step's `loss` is
    the mean over its own batches; the numbers that the Trainer logs are recorded too, its mean loss as `trainer_loss`.
    The session ends with the training. A failed snapshot is a warning and does not end the training; with `strict=True`
    it is an error when the training ends. After an exception, which the Trainer does not report to its callbacks, the
    session ends with the process, or when a training of the same model begins.

    options: further arguments of `capture.enable`, except those that the Trainer has itself. `resume` is refused: the
       Trainer has chosen its first batch before any callback runs.
    """

    def __init__(self, *, every: int = 50, history: Path | str | None = None, **options: Any) -> None:
        if "resume" in options:
            raise SetupError(
                "HistoryCallback can't resume: the Trainer chooses the batch it begins with before a callback runs; "
                "pass a checkpoint of the Trainer to trainer.train(resume_from_checkpoint=...), or begin with the "
                "weights of capture.restore(step, model=model)"
            )
        for name in _OF_THE_TRAINER:
            if name in options:
                raise SetupError(f"HistoryCallback takes the {name} from the Trainer: leave {name}= out")
        self._options = {**options, "every": every, "history": history}
        self._session: Session | None = None
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
        """Begin the session. Raises what `capture.enable` raises, before the first batch."""
        target, of_torch = trainer_target(model, optimizer=optimizer, scheduler=lr_scheduler)
        if of_torch:
            # A session that an exception has left open counts the steps of the same optimizer: it must end before the
            # count is set.
            for previous in sessions_of([unwrapped(model), unwrapped_optimizer(optimizer)]):
                previous.close()
            count_from(optimizer, state.global_step)
        self._session = enable(target, **of_torch, **self._options)
        self._training = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Capture the last step now, because afterwards the Trainer may load the best weights."""
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
        self.session.log(**numbers)

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
