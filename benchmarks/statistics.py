"""Statistics, sketch (256 buckets) and content hash of normally distributed numbers in one pass.

All rows but one run on one core. The parts alone, and numpy, are shown for comparison. *A checkpoint, from the disk* is
`dshistory analyze` of one: its bytes are read back past the page cache, analysed, and the rows are published. It counts
per second of processor time, of all threads.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import capture
import native
from benchmarks.measure import Rows, Series, clock, rotations
from catalog.format.statistics_file import StatisticsFile
from catalog.history import History
from catalog.statistics.compute import analyze_part

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I32": torch.int32,
    "I8": torch.int8,
}
COLUMNS = {name: "GB/s" for name in DTYPES}
ALL_KERNELS = ("avx512", "avx2", "portable")
READ_BACK = "a checkpoint, from the disk"
READ_BACK_DTYPES = ("F32", "BF16", "F16")
TENSOR_BYTES = 16 << 20
RUN_ELEMENTS = 1_000
Contender = tuple[str, str, np.ndarray, Callable[[np.ndarray], object]]


def run(scratch: Path, *, total_bytes: int, times: int) -> tuple[Rows, dict[str, object]]:
    """Measure bytes per second on the same bytes, of which numpy's sketch takes a sixteenth."""
    rows: Rows = defaultdict(lambda: defaultdict(Series))
    contenders = [one for name in DTYPES for one in (*native_ways(name, total_bytes), *numpy_ways(name, total_bytes))]
    for _, _, memory, compute in contenders:
        compute(memory[: 1 << 20])
    for index in rotations(range(len(contenders)), times=times):
        label, dtype, memory, compute = contenders[index]
        with clock() as took:
            compute(memory)
        rows[label][dtype].add(memory.nbytes / took.seconds)
    checkpoints = {dtype: published(scratch / dtype, dtype, total_bytes) for dtype in READ_BACK_DTYPES}
    for dtype in rotations(READ_BACK_DTYPES, times=times):
        before = time.process_time()
        nbytes = analyze(checkpoints[dtype])
        rows[READ_BACK][dtype].add(nbytes / (time.process_time() - before))
    absent = {f"everything, {name}": "not on this processor" for name in ALL_KERNELS if name not in kernels()}
    return rows, {"total_bytes": total_bytes, "rotations": times, "skipped": absent}


def published(root: Path, dtype: str, nbytes: int) -> History:
    """Return a history whose one checkpoint has a model of so many bytes, in tensors of TENSOR_BYTES."""
    model = torch.nn.ParameterList(
        torch.from_numpy(numbers(dtype, min(TENSOR_BYTES, nbytes - at))).view(DTYPES[dtype])
        for at in range(0, nbytes, TENSOR_BYTES)
    )
    capture.enable(model, optimizer=torch.optim.SGD(model, lr=0.1), every=1, stats_every=0, history=root).close()
    history = History.open(root)
    analyze(history)  # the first call imports
    return history


def analyze(history: History) -> int:
    """Compute the statistics of the checkpoint again, and return its bytes."""
    read: list[int] = []
    (ref,) = history.checkpoints()
    analyze_part(history.paths, ref.run, StatisticsFile(ref.step, 0, 1), progress=read.append)
    return sum(read)


def kernels() -> list[str]:
    return native.statistics_kernels()


def native_ways(dtype: str, nbytes: int) -> list[Contender]:
    memory = numbers(dtype, nbytes)
    ways: dict[str, Callable[[np.ndarray], object]] = {
        f"everything, {name}": partial(native.statistics, dtype=dtype, kernel=name) for name in kernels()
    }
    ways["everything, in runs of 1,000 elements"] = partial(in_runs, dtype=dtype)
    ways["without the sketch"] = partial(native.statistics, dtype=dtype, buckets=0)
    ways["the content hash alone"] = native.checksum
    return [(label, dtype, memory, way) for label, way in ways.items()]


def numpy_ways(dtype: str, nbytes: int) -> list[Contender]:
    if dtype not in ("F32", "F64"):
        return []
    memory = numbers(dtype, nbytes).view(f"<f{np.dtype(dtype.lower().replace('f', 'float')).itemsize}")
    return [
        ("numpy: minimum, maximum, sum, sum of squares", dtype, memory, moments),
        ("numpy: all but sketch and hash", dtype, memory, counts),
        ("numpy: the sketch", dtype, memory[: memory.size // 16], sketch),
    ]


def numbers(dtype: str, nbytes: int) -> np.ndarray:
    """Return numbers distributed like weights; integers use a good part of 8 bits."""
    element = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    normal = torch.empty(nbytes // element).normal_(generator=torch.Generator().manual_seed(0))
    scale = 0.02 if DTYPES[dtype].is_floating_point else 30.0
    return (normal * scale).to(DTYPES[dtype]).view(torch.uint8).numpy()


def in_runs(memory: np.ndarray, *, dtype: str) -> None:
    step = RUN_ELEMENTS * torch.empty(0, dtype=DTYPES[dtype]).element_size()
    for offset in range(0, memory.size, step):
        native.statistics(memory[offset : offset + step], dtype, start=offset)


def moments(values: np.ndarray) -> tuple[float, ...]:
    return values.min(), values.max(), values.sum(dtype=np.float64), np.square(values, dtype=np.float64).sum()


def counts(values: np.ndarray) -> tuple[object, ...]:
    _, powers = np.frexp(values)
    histogram = np.bincount(np.clip(powers + 51, 0, 63), minlength=64)
    return *moments(values), np.isnan(values).sum(), np.isinf(values).sum(), (values == 0).sum(), histogram


def sketch(values: np.ndarray) -> np.ndarray:
    """Compute the sketch as in docs/sketches.md, with key 0."""
    index = np.arange(values.size, dtype=np.uint64)
    mixed = ((index >> 4) + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x4453486973746F72)
    mixed = (mixed ^ mixed >> 30) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> 27) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ mixed >> 31
    lane = index & 15
    bucket = (mixed >> 32 & 15) * 16 + (lane ^ (mixed >> 16 & 15))
    return np.bincount(bucket.astype(np.int64), weights=values * (1.0 - 2.0 * (mixed >> lane & 1)), minlength=256)
