"""The explorer's ways out of a history, into the formats of other programs."""

from pathlib import Path
from typing import Any

from dshistory.display.table import Table
from dshistory.explorer.opened import OpenedHistory
from dshistory.options import ExportFormat, Ref
from dshistory.registry import verb

__all__ = ["Conversion"]


class Conversion(OpenedHistory):
    """The verbs of the room `conversion`."""

    @verb("export 1200 step-1200.safetensors", "export latest my-model --format huggingface --config config.json")
    def export(
        self,
        step: Ref,
        path: Path | str,
        *,
        format: ExportFormat = "safetensors",
        weights: str = "model",
        shard_bytes: int | None = None,
        config: Path | str | None = None,
        model: Any = None,
        zero_stage: int | None = None,
        world_size: int | None = None,
        overwrite: bool = False,
        quiet: bool = False,
    ) -> Table:
        """Write a checkpoint in another format: a row for each file written, with its bytes.

        The export is atomic: it is written beside `path` under a temporary name, made durable, and renamed last. Raises
        SetupError, with the valid choices, for an unknown format, a path that exists, or an option that the format does
        not have; NotFoundError for state that the checkpoint does not have. A step that was not captured but is in a
        redo log is made again first.

        Args:
            step: the checkpoint
            path: the file or folder to create
            format: safetensors, huggingface, dcp, torch; deepspeed or universal, which include the optimizer
            weights: model, master for the fp32 weights that the optimizer updates, or the name of a State Provider that
                averages them, as ema
            shard_bytes: safetensors and huggingface: write a folder of files of at most this many bytes, with an index
            config: huggingface: a config.json, or a folder with one
            model: huggingface: a model (or its configuration) in place of config
            zero_stage: deepspeed: 0, 1, 2 or 3; default: that of the run
            world_size: deepspeed: the number of ranks; default: that of the run
            overwrite: replace what exists at path
            quiet: no progress bar
        """
        from dshistory.conversion import exporting

        ref = self._readable(step)
        options = exporting.options(
            weights=weights,
            shard_bytes=shard_bytes,
            config=config,
            model=model,
            zero_stage=zero_stage,
            world_size=world_size,
        )
        return exporting.export(
            self.history, ref, Path(path), format=format, options=options, overwrite=overwrite, quiet=quiet
        )

    @verb("resume_folder latest outputs/checkpoint-1200")
    def resume_folder(self, step: Ref, path: Path | str, *, overwrite: bool = False, quiet: bool = False) -> str:
        """Write the checkpoint folder from which Hugging Face's Trainer goes on, and return its path.

        `trainer.train(resume_from_checkpoint=h.resume_folder(...))` goes on with the same bits as from a checkpoint of
        the Trainer itself, plain or with its DeepSpeed integration: weights, optimizer, scheduler, scaler, random
        numbers of each rank, and position in the data. The training becomes a child of the run. The folder appears
        whole or not at all. Raises UnsupportedError, which says why, for a step that was not captured by
        HistoryCallback (or imported from a Trainer's folder), and for adapters of PEFT; SetupError when the folder
        exists.

        Args:
            step: the checkpoint
            path: the folder to create; the Trainer finds one in its output_dir named checkpoint-STEP by itself
            overwrite: replace what exists at path
            quiet: no progress bar
        """
        from dshistory.conversion import exporting

        final = Path(path).absolute()
        exporting.resume_folder(self.history, self.history.resolve(step), final, overwrite=overwrite, quiet=quiet)
        return str(final)
