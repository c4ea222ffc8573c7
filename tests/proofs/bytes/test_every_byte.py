"""A flipped byte anywhere in a history is found and named: a sample of `make prove-bytes`, which flips every byte."""

from collections.abc import Callable
from pathlib import Path

import pytest
from byte_flips import Flips, published, small_history

EVERY = 499


@pytest.mark.guards("Damage is found and named")
@pytest.mark.slow
def test_a_sample_of_all_bytes(tmp_path: Path, figure: Callable[[str, float], None]) -> None:
    flips = Flips(small_history(tmp_path / "history"))
    for number, path in enumerate(published(flips.root)):
        flips.every_byte(path, every=EVERY, first=number)
    assert flips.missed == []
    assert flips.counts.keys() == {
        "history.json",
        "run.json",
        "commit.json",
        "safetensors",
        "packed",
        "redo",
        "audits",
        "manifest.parquet",
        "journal",
        "statistics",
        "fingerprints",
    }
    figure("flipped bytes and changed lengths found", flips.counts.total())
