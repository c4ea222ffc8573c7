"""The explorer's ways back into a training: restore a step, replay it, and see which runs came of it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dshistory.display.table import Table
from dshistory.explorer.opened import OpenedHistory
from dshistory.options import Changes, Command, Ref, ReplayPredicate, SkippedSteps, Undo, Verified
from dshistory.patterns import Patterns
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.replays.bisection import ReplayBisection
    from dshistory.replays.crossover import CrossoverTable
    from dshistory.replays.rebuild import RebuiltTable
    from dshistory.replays.result import ReplayTable
    from dshistory.replays.runs import RunsTable
    from dshistory.replays.side_by_side import ComparedRuns

__all__ = ["Replays"]


class Replays(OpenedHistory):
    """The verbs of the room `replays`, and `restore`."""

    @verb("restore 1200 --kinds model", surfaces=("magic",))
    def restore(
        self,
        ref: Ref = "latest",
        *,
        engine: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        providers: Sequence[Any] = (),
        names: Patterns | None = None,
        kinds: Patterns | None = None,
        verify: bool = True,
    ) -> Any:
        """Restore a training to a checkpoint, bit for bit; without a target, return its tensors by kind and name.

        Args:
            ref: the checkpoint
            engine: a DeepSpeed engine
            model: a torch module, with its optimizer, scheduler and scaler
            dataloader: the data loader, which continues at its position
            providers: the training's own State Providers
            names: only tensors whose names match; without a target only
            kinds: only these kinds; without a target only
            verify: check every byte before the first one is overwritten
        """
        import capture
        from dshistory.tensors.state_dict import RestoredState

        done = capture.restore(
            ref,
            history=self.root,
            engine=engine,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            dataloader=dataloader,
            providers=providers,
            names=names,
            kinds=kinds,
            verify=verify,
        )
        return RestoredState(done) if isinstance(done, dict) else done

    @verb(
        "replay 1200 -- python train.py",
        "replay 1200 --until 1250 --change lr_scale=0.5 --skip-batches 1233 -- torchrun --nproc-per-node 2 train.py",
        surfaces=("command line",),
    )
    def replay(
        self,
        step: Ref,
        *,
        until: int | None = None,
        change: Changes = None,
        skip_batches: SkippedSteps = None,
        command: Command = None,
        train_step: Callable[[Any], Any] | None = None,
        engine: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        providers: Sequence[Any] = (),
        batches_per_step: int = 1,
        quiet: bool = False,
    ) -> "ReplayTable":
        """Replay a step: train on from it, as a child run, and compare that run with the one before, bit for bit.

        Either `command` is the training's own script, which runs unchanged, also under deepspeed or torchrun: its
        `capture.enable` puts it back to the step, and its run ends after the step `until`. Or `train_step` makes one
        step of the training in this process, with the engine, or model and optimizer, given.
        Without a change the replay says whether the training repeats bit for bit, or at which step, tensor, rank and
        element it parts, and what on record may be the cause. A change makes it a counterfactual. A replay never
        becomes the current run; a training goes on from it after `capture.restore("RUN:STEP", ...)`.
        Raises SetupError, before anything runs, for a change that does not apply, and MismatchError for a step that
        can't be replayed; Ctrl-C leaves a run that is complete up to there.

        Args:
            step: the checkpoint to begin with, or a step of a redo log, which is made again
            until: the last step; default: the last one that the run came to
            change: what is done otherwise: lr, lr_scale, betas, momentum, weight_decay, seed, reset_optimizer,
                skip_batches; in Python a dict, or a function of model (or engine) and optimizer
            skip_batches: leave out the batches that the run used for these steps
            command: the script, as python train.py
            train_step: a function of a batch that trains on it: forward, backward, and the optimizer's step; returns
                the loss
            engine: a DeepSpeed engine
            model: a torch module, with its optimizer, scheduler and scaler
            dataloader: the data loader, which continues at its position, or a function that returns the batch of a step
            providers: the training's own State Providers
            batches_per_step: how many batches of the loader make a step, to leave out the right ones
            quiet: no progress bar
        """
        given = locals()
        from dshistory.replays import start
        from dshistory.replays.live import Live

        return start.start(
            self.history,
            self._readable(step),
            until=until,
            change=start.change_of(change, skip_batches),
            command=command,
            batches_per_step=batches_per_step,
            quiet=quiet,
            live=Live.among(given),
        )

    @verb(
        "bisect_replay 1200 1240 -- python train.py",
        "bisect_replay 1200 1240 --undo redo --until 1250 -- torchrun --nproc-per-node 2 train.py",
        surfaces=("command line",),
    )
    def bisect_replay(
        self,
        good: Ref,
        bad: int,
        *,
        predicate: ReplayPredicate = None,
        undo: Undo = "skip",
        linear: bool = False,
        until: int | None = None,
        command: Command = None,
        train_step: Callable[[Any], Any] | None = None,
        engine: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        providers: Sequence[Any] = (),
        batches_per_step: int = 1,
        quiet: bool = False,
    ) -> "ReplayBisection":
        """Find the step that brings a jump of the loss about, by replays: the first one without whose batch, and those
        before it, the jump is gone, or after which training again does not undo it.

        Each trial is a replay from `good` up to `until`, captured as a child run; a row says what was changed and
        whether the jump was gone. About log2(bad - good) of them find the step, and one more tells whether its batch is
        to blame alone. That supposes that the jump stays gone when more batches are left out: `linear` leaves out one
        batch at a time instead, with a replay for each step, until the first without which the jump is gone. With
        undo="redo" nothing is left out: the training begins again from one checkpoint or another, and `.steps` are
        those between the last from which the jump is gone and the next. The first replay changes nothing; where the
        jump does not come again, no batch is to blame, and the note says so. The training is left where the last
        replay has ended. Raises SetupError as `replay` does, and, with the replay, for a predicate that fails.

        Args:
            good: a checkpoint before the jump, from which the replays begin
            bad: a step at which the jump is there
            predicate: a function of the result of a replay (`replay`) that returns whether the jump is gone; default:
                whether no loss is beyond what was ordinary up to `good`, 8 times their spread
            undo: "skip" leaves out batches, "redo" begins from later and later checkpoints
            linear: try every step, or checkpoint, in turn
            until: the last step of each replay; default: bad
            command: as for `replay`, and so are train_step, engine, model, optimizer, scheduler, scaler, dataloader,
                providers
            batches_per_step: how many batches of the loader make a step
            quiet: no progress bar
        """
        given = locals()
        from dshistory.replays import bisection
        from dshistory.replays.live import Live

        return bisection.bisect_replay(
            self.history,
            self.history.resolve(good),
            bad,
            Live.among(given),
            predicate=predicate,
            undo=undo,
            linear=linear,
            until=until,
            command=command,
            batches_per_step=batches_per_step,
            quiet=quiet,
        )

    @verb(
        "rebuild 1233 -- python train.py",
        "rebuild 1233 --verify next -- torchrun --nproc-per-node 2 train.py",
        surfaces=("command line",),
    )
    def rebuild(
        self,
        step: int,
        *,
        verify: Verified = "step",
        run: str | None = None,
        command: Command = None,
        train_step: Callable[[Any], Any] | None = None,
        engine: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        providers: Sequence[Any] = (),
        batches_per_step: int = 1,
        quiet: bool = False,
    ) -> "RebuiltTable":
        """Rebuild a step between two checkpoints: replay it from the one before, capture it, and verify it.

        `.rebuilt` is its checkpoint in the child run, which `diff`, `tensor`, `restore` and `export` take. It is
        verified against the fingerprints of the step and of all on the way; with "next", or where the run has no
        fingerprint of the step, the training goes on to the next checkpoint, which must come out bit for bit.
        `.verified_by` says what agreed, and is empty where anything differs: the note then names where. Raises
        SetupError for a step that is captured, or of which nothing is known, NotFoundError for one before the first
        checkpoint, and what `replay` raises.

        Args:
            step: the step
            verify: how far: up to the step, or on to the next checkpoint
            run: the run; default: the current run and its parents
            command: the script, as python train.py
            train_step: as for `replay`, and so are engine, model, optimizer, scheduler, scaler, dataloader, providers
            batches_per_step: how many batches of the loader make a step
            quiet: no progress bar
        """
        given = locals()
        from dshistory.replays import rebuild
        from dshistory.replays.live import Live

        return rebuild.rebuild(
            self.history,
            step,
            Live.among(given),
            run=self._named(run),
            verify=verify,
            command=command,
            batches_per_step=batches_per_step,
            quiet=quiet,
        )

    @verb("reproducibility", "reproducibility --run 20261121-101502-7f3a9c", name="reproducibility")
    def reproducibility(self, *, run: str | None = None) -> Table:
        """List what the bits of a run depend on: what was captured of it, what was not, and what may differ.

        Random numbers, data loader, schedulers, code, versions, threads, deterministic flags and devices.

        Args:
            run: the run; default: the current run
        """
        from dshistory.replays import reproducibility

        return reproducibility.reproducibility(self.history, self._named(run) or self.history.current_run())

    @verb("redo_check", "redo_check --run 20261121-101502-7f3a9c")
    def redo_check(self, *, run: str | None = None) -> Table:
        """Make every checkpoint of a run again by its redo log, from the checkpoint before it: a row for each, with
        whether all bytes are the same, or else the reason, which names the step and the tensor.

        Args:
            run: the run; default: the current run
        """
        from dshistory.replays import redo_check

        return redo_check.redo_check(self.history, self._named(run) or self.history.current_run())

    @verb("runs")
    def runs(self) -> "RunsTable":
        """List the runs as a tree: a row for each, with the step where it forked, what was changed, and its losses.

        `.plot()` draws the tree. A replay is a run of the kind replay, a run that goes on from a restored step a child.
        A run is being written, has ended, or was cut off, as by a kill.
        """
        from dshistory.replays import runs

        return runs.runs(self.history)

    @verb(surfaces=())
    def compare(
        self, *runs: str, names: Patterns = "*", kinds: Patterns = "model", exact: bool = False, quiet: bool = False
    ) -> "ComparedRuns":
        """Compare runs step by step: a row for each step and run but the first, with its loss and the distance of its
        weights from the first run's.

        A run has the steps of its parents too, up to where it forked. Distances are relative to the norm, and estimated
        as in a diff; `.layers` has those of every layer, `.plot("distance")` draws them. Raises SetupError for fewer
        than two runs.

        Args:
            runs: the runs; the beginning of a name is enough
            names: patterns of tensor names, as '*.mlp.*'
            kinds: patterns of kinds: model, master, exp_avg, ...; '*' for all
            exact: read the tensors, however large
            quiet: no progress bar
        """
        from dshistory.replays import side_by_side

        named = [self.history.run_named(run) for run in runs]
        return side_by_side.compare(self.history, named, names=names, kinds=kinds, exact=exact, quiet=quiet)

    @verb(surfaces=())
    def replay_check(
        self,
        count: int = 3,
        *,
        train_step: Callable[[Any], Any],
        engine: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        providers: Sequence[Any] = (),
        batches_per_step: int = 1,
        run: str | None = None,
        seed: int | None = None,
        quiet: bool = False,
    ) -> Table:
        """Replay checkpoints at random, each up to the next one, and compare the bits: a row for each.

        Where kernels are deterministic and all state was captured (`reproducibility`), a difference is silent
        corruption: faulty hardware, or a race. The training is put back to each step; restore the newest to go on.

        Args:
            count: how many checkpoints
            train_step: as for `replay`, and so are engine, model, optimizer, scheduler, scaler, dataloader, providers
            batches_per_step: how many batches of the loader make a step
            run: the run and its parents; default: the current run
            seed: chooses the checkpoints; default: others each time
            quiet: no progress bar
        """
        given = locals()
        from dshistory.replays import check
        from dshistory.replays.live import Live

        return check.replay_check(
            self.history,
            count,
            Live.among(given),
            run=self._named(run),
            seed=seed,
            batches_per_step=batches_per_step,
            quiet=quiet,
        )

    @verb(surfaces=())
    def crossover(
        self,
        a: Ref,
        b: Ref,
        *,
        batches: Sequence[int],
        train_step: Callable[[Any], Any],
        dataloader: Callable[[int], Any],
        engine: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        providers: Sequence[Any] = (),
        sets: int = 5,
        probes: int = 8,
        quiet: bool = False,
    ) -> "CrossoverTable":
        """Find out whether a rise of the loss comes from the data or from the state: the suspicious batches from the
        state before and from another state, other batches from the same states.

        From each state the training goes over the suspicious batches, and, each time anew, over other sets of as many;
        behind each set over the same probes, whose mean loss tells what the set has done. `.verdict` is "data",
        "state", "state and data" (these batches in that state only) or "neither"; the effect size is the distance from
        the other sets in units of their spread, and 5 counts. Nothing is captured; the training is left at a. With
        several ranks, each of which has its own batches, a loss is the mean of theirs.

        Args:
            a: the state right before the suspicious batches
            b: another state, as one of a hundred steps before
            batches: the steps whose batches are suspicious
            train_step: as for `replay`, and so are engine, model, optimizer, scheduler, scaler and providers
            dataloader: a function that returns the batch of a step
            sets: how many sets of other batches
            probes: how many batches follow each set
            quiet: no progress bar
        """
        given = locals()
        from dshistory.replays import crossover
        from dshistory.replays.live import Live

        states, live = (self.history.resolve(a), self.history.resolve(b)), Live.among(given)
        return crossover.crossover(self.history, states, live, batches=batches, sets=sets, probes=probes, quiet=quiet)
