"""A synthetic history of any size.

Manifests, markers, journals, statistics and index are real and written by the same code as in a training. The tensors
are holes in sparse files, which no query reads.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from catalog.format.extents import extent_table
from catalog.format.statistics_file import SCHEMA, StatisticsFile, publish_statistics
from catalog.index import index
from catalog.paths import data_file
from catalog.records import Extent, RunFacts
from catalog.run_writer import RunWriter, create_history, create_run
from catalog.statistics.compute import BUCKETS

RUN = "20261121-101502-a1b2c3"
LAYOUT = "made-up"
NUMEL = 8_192 * 8_192
STEPS_BETWEEN = 10
"""The number of updates between two checkpoints; the journal has the metrics of each."""

OF_A_LAYER = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down")
_HEADER_BYTES = 4096
_JOURNAL_STEPS = 500
_UPDATE = 1e-3


def names(tensors: int) -> list[str]:
    """Return names as in a transformer: weight and bias of six matrices in each layer."""
    parts = [f"{part}.{what}" for part in OF_A_LAYER for what in ("weight", "bias")]
    return [f"model.layers.{i // len(parts)}.{parts[i % len(parts)]}" for i in range(tensors)]


class MadeUp:
    """The writer of a synthetic run of one rank; `publish` adds the next checkpoint, `STEPS_BETWEEN` steps later."""

    def __init__(self, root: Path, *, tensors: int, seed: int = 0) -> None:
        create_history(root)
        create_run(root, RunFacts(RUN, "2026-11-21T10:15:02+00:00", 1, None, None, LAYOUT, {}))
        self._writer = RunWriter(root, run=RUN, rank=0, world_size=1, layout_hash=LAYOUT)
        self._draw = np.random.default_rng(seed)
        self._names = names(tensors)
        self._extents = _extents(self._names)
        self._fixed = _fixed_statistics(self._names)
        # The sketch is that of NUMEL numbers with deviation 0.02: on average it preserves the sum of squares.
        self._sketches = self._draw.normal(0.0, 0.02 * (NUMEL / BUCKETS) ** 0.5, (tensors, BUCKETS))
        self._histogram = np.where((np.arange(64) > 30) & (np.arange(64) < 50), NUMEL // 20, 1000)
        self._sums = self._draw.normal(0.0, 40.0, tensors)
        self.published = 0

    def publish(self, *, register: bool = True) -> int:
        """Publish the next checkpoint with its statistics and metrics; return its step."""
        step = self.published * STEPS_BETWEEN
        self._metrics(step)
        checksums = self._draw.integers(0, 256, (len(self._names), 16), dtype=np.uint8)
        data_tmp = self._writer.begin(step)
        data_bytes = _HEADER_BYTES + len(self._names) * NUMEL * 4
        with data_tmp.open("xb") as file:
            file.truncate(data_bytes)
        self._writer.publish_part(step, data_tmp=data_tmp, extents=self._manifest(step, checksums))
        self._writer.try_commit(step)
        publish_statistics(self._writer.paths, RUN, StatisticsFile(step, 0, 1), self._statistics(checksums))
        if register:
            index.register(self._writer.paths, patience_s=60.0)
        self.published += 1
        return step

    def register(self) -> None:
        """Bring the index up to date."""
        index.register(self._writer.paths, patience_s=600.0)

    def close(self) -> None:
        self._writer.close()

    def _metrics(self, step: int) -> None:
        """Write the metrics of all updates up to the next checkpoint.

        One segment has many updates, as from a session that flushes by time.
        """
        journal = self._writer.journal
        for at in range(step, step + STEPS_BETWEEN):
            loss = 2.0 + 8.0 / (1.0 + at / 100.0)
            for name, value in (
                ("loss", loss),
                ("lr", 1e-3),
                ("grad_norm", 1.0),
                ("step_time_s", 0.5),
                ("applied", 1.0),
            ):
                journal.metric(at, name, value)
        if step % _JOURNAL_STEPS == 0:
            journal.flush()

    def _manifest(self, step: int, checksums: np.ndarray) -> pa.Table:
        file = data_file(RUN, step, 0)
        digests = np.concatenate([np.zeros((1, 16), np.uint8), checksums])
        columns = {name: self._extents[name] for name in self._extents.schema.names}
        columns["file"] = pa.repeat(pa.scalar(file), len(digests))
        columns["checksum"] = _digests(digests)
        return pa.table(columns, schema=self._extents.schema)

    def _statistics(self, checksums: np.ndarray) -> pa.Table:
        """Return the statistics of independent small updates, which resemble a training at a constant learning rate."""
        tensors = len(self._names)
        deviation = 0.02 * (NUMEL / BUCKETS) ** 0.5 * _UPDATE
        self._sketches += self._draw.normal(0.0, deviation, (tensors, BUCKETS)) * self._draw.uniform(
            0.8, 1.2, (tensors, 1)
        )
        self._sums += self._draw.normal(0.0, 0.1, tensors)
        squares = np.square(self._sketches).sum(axis=1)
        columns = dict(self._fixed)
        columns["checksum"] = _digests(checksums)
        columns["min"] = pa.array(self._draw.uniform(-0.11, -0.1, tensors))
        columns["max"] = pa.array(self._draw.uniform(0.1, 0.11, tensors))
        columns["sum"] = pa.array(self._sums)
        columns["sum_of_squares"] = pa.array(squares)
        columns["exponents"] = _lists(self._histogram + self._draw.integers(-500, 500, (tensors, 64)), "exponents")
        columns["zeros"] = pa.array(self._draw.integers(0, 100, tensors))
        columns["sketch"] = _lists(self._sketches, "sketch")
        return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def _extents(tensor_names: list[str]) -> pa.Table:
    file = data_file(RUN, 0, 0)
    header = Extent(
        name="__header__", kind="header", dtype="U8", shape=(_HEADER_BYTES,), start=0, numel=_HEADER_BYTES, file=file,
        offset=0, nbytes=_HEADER_BYTES, checksum=bytes(16), placement="rank_local", aliases=(),
    )  # fmt: skip
    rows = [
        Extent(
            name=name, kind="model", dtype="F32", shape=(8_192, 8_192), start=0, numel=NUMEL, file=file,
            offset=_HEADER_BYTES + i * NUMEL * 4, nbytes=NUMEL * 4, checksum=bytes(16), placement="replicated",
            aliases=(),
        )
        for i, name in enumerate(tensor_names)
    ]  # fmt: skip
    return extent_table([header, *rows])


def _fixed_statistics(tensor_names: list[str]) -> dict[str, pa.Array]:
    tensors = len(tensor_names)
    counts = {"start": 0, "numel": NUMEL, "nan": 0, "inf": 0}
    return {
        "name": pa.array(tensor_names),
        "kind": pa.array(["model"] * tensors),
        "placement": pa.array(["replicated"] * tensors),
        **{name: pa.array([value] * tensors, pa.int64()) for name, value in counts.items()},
    }


def _digests(digests: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(16), len(digests), [None, pa.py_buffer(np.ascontiguousarray(digests))])


def _lists(rows: np.ndarray, column: str) -> pa.Array:
    count, length = rows.shape
    ends = np.arange(0, (count + 1) * length, length, dtype=np.int32)
    return pa.ListArray.from_arrays(ends, rows.ravel(), type=SCHEMA.field(column).type)
