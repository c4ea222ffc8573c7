"""Every verb in every odd situation gives a clear message or missing value, never a traceback or a wrong number."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from explorer_helpers import Run, whole

import capture
import dshistory
from catalog.errors import HistoryError, NotFoundError, SetupError
from catalog.run_writer import create_history
from dshistory.commands.verbs import all_verbs
from dshistory.explorer import Explorer

SHAPE: Final = (4, 32)

Call = Callable[[Any], Any]


def checkpoint(run: Run, step: int, *names: str, shapes: Mapping[str, tuple[int, int]] | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn((shapes or {}).get(name, SHAPE), generator=generator) for name in names}
    run.checkpoint(step, whole(tensors), loss=1 / (1 + step))


def one(run: Run) -> None:
    checkpoint(run, 10, "layers.0.weight", "head.weight")


def three(run: Run) -> None:
    for step in (10, 20, 30):
        checkpoint(run, step, "layers.0.weight", "head.weight")


def two_models(run: Run) -> None:
    three(run)
    other = Run(run.root, "run-b", created="2026-11-22T00:00:00+00:00")
    for step in (10, 20):
        checkpoint(other, step, "layers.0.weight", "new.weight", shapes={"layers.0.weight": (4, 64)})
    other.close()


MADE: Final[dict[str, Callable[[Run], None]]] = {
    "empty": lambda run: None,
    "one": one,
    "no statistics": three,
    "some statistics": three,
    "two models": two_models,
}


@pytest.fixture(scope="module")
def situations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Explorer]:
    folder = tmp_path_factory.mktemp("situations")
    create_history(folder / "no run")
    for name, fill in MADE.items():
        run = Run(folder / name)
        fill(run)
        run.close()
    opened = {name: Explorer.open(folder / name) for name in ("no run", *MADE)}
    opened["some statistics"].analyze(20, quiet=True)
    opened["two models"].analyze(quiet=True)
    return opened


NO_RUN: Final = r"!history .* has no run yet"
EMPTY: Final = r"!run run-a of .* has no committed checkpoint yet"
UNKNOWN: Final = r"!has sketches yet: `analyze` computes them"
NONE_YET: Final = r"!has statistics yet: `analyze` computes them"
FIRST_STEP: Final[dict[str, str]] = {"no run": NO_RUN, "empty": EMPTY}

VERB_CASES: Final[dict[str, tuple[Call, dict[str, str]]]] = {
    "log": (
        lambda h: h.log(),
        {
            "no run": "no checkpoint yet in",
            "empty": "no checkpoint yet in",
            "one": r"committed  \?.*\n1 checkpoint; health is unknown \(\?\) for 1",
            "no statistics": r"3 checkpoints; health is unknown \(\?\) for 3",
            "some statistics": r"committed  \?.*\n.*committed  ok.*\n.*committed  \?.*\n.*for 2 without statistics",
            "two models": "5 checkpoints$",
        },
    ),
    "show": (lambda h: h.show(), {**FIRST_STEP, "one": "checkpoint run-a:10", "two models": "checkpoint run-b:20"}),
    "tags": (lambda h: h.tags(), {"no run": "no tags", "empty": "no tags", "one": "no tags"}),
    "runs": (lambda h: h.runs(), {"no run": "no run yet", "empty": "1 run; ", "two models": "2 runs; "}),
    "reproducibility": (
        lambda h: h.reproducibility(),
        {**FIRST_STEP, "one": r"environment +not captured  the run is imported, or of an earlier release"},
    ),
    "redo_check": (
        lambda h: h.redo_check(),
        {
            "no run": NO_RUN,
            "empty": "!run run-a of .* has no redo log that reaches a second checkpoint",
            "one": "!run run-a of .* has no redo log that reaches a second checkpoint",
            "two models": "!run run-b of .* has no redo log",
        },
    ),
    "fingerprints": (
        lambda h: h.fingerprints(),
        {
            "no run": NO_RUN,
            "empty": "run run-a has no fingerprints",
            "one": "captured without, or by an earlier release",
        },
    ),
    "rank_agreement": (
        lambda h: h.rank_agreement(),
        {
            "no run": NO_RUN,
            "empty": "run run-a has no fingerprints",
            "one": "captured without, or by an earlier release",
        },
    ),
    "diff": (
        lambda h: h.diff(10, quiet=True),
        {
            **FIRST_STEP,
            "one": "this is one checkpoint, compared with itself",
            "no statistics": "2 changed; 0 equal bit for bit; times_usual",
            "some statistics": "2 changed; 0 equal bit for bit; times_usual",
        },
    ),
    "audit": (
        lambda h: h.audit(quiet=True),
        {
            **FIRST_STEP,
            "one": "!audit: checkpoint run-a:10 is the first of its run",
            "no statistics": "!checkpoint run-a:20 has no optimizer",
            "some statistics": "!checkpoint run-a:20 has no optimizer",
            "two models": "!checkpoint run-b:10 has no optimizer",
        },
    ),
    "audit_all": (
        lambda h: h.audit_all(quiet=True),
        {
            **FIRST_STEP,
            "one": "!audit_all: 1 checkpoint, so there are none to compare",
            "no statistics": "!checkpoint run-a:20 has no optimizer",
            "two models": "!checkpoint run-b:10 has no optimizer",
        },
    ),
    "spectra": (
        lambda h: h.spectra(quiet=True),
        {**FIRST_STEP, "one": r"10  head\.weight", "no statistics": r"30  head\.weight"},
    ),
    "diagnose": (
        lambda h: h.diagnose(quiet=True),
        {
            **FIRST_STEP,
            "one": "nothing found in 1 checkpoint, 0 of which .*; not checked: 1 checkpoint without statistics",
            "no statistics": "nothing found in 3 checkpoints, .*the optimizer, which was not captured",
            "some statistics": "nothing found in 3 checkpoints, .*: 2 checkpoints without statistics",
            "two models": "nothing found in 2 checkpoints",
        },
    ),
    "trajectory": (
        lambda h: h.trajectory(quiet=True),
        {
            **FIRST_STEP,
            "one": "2 tensors over 1 checkpoint; there is nothing before it",
            "no statistics": "2 tensors over 3 checkpoints$",
            "some statistics": "2 tensors over 3 checkpoints$",
        },
    ),
    "distances": (
        lambda h: h.distances(),
        {
            **FIRST_STEP,
            "one": UNKNOWN,
            "no statistics": UNKNOWN,
            "some statistics": "left out: 2 checkpoints without statistics of all of them: `analyze`",
            "two models": r"estimated from the sketches of 2 tensors, each within about \d+%$",
        },
    ),
    "anomalies": (
        lambda h: h.anomalies(),
        {
            **FIRST_STEP,
            "one": "unknown: none of 1 checkpoint has statistics, `analyze` computes them",
            "no statistics": "unknown: none of 3 checkpoints has statistics",
            "some statistics": "in the 1 of 3 checkpoints that have statistics, .*; too few for jumps",
            "two models": "0 anomalies in 2 checkpoints; too few for jumps",
        },
    ),
    "layers": (
        lambda h: h.layers(quiet=True),
        {
            **FIRST_STEP,
            "one": NONE_YET,
            "no statistics": NONE_YET,
            "some statistics": "unknown at 3 checkpoints: "
            "the first, those that are not finite, and those without statistics",
            "two models": "2 layers over 2 checkpoints, estimated from the sketches of tensors",
        },
    ),
    "histogram": (
        lambda h: h.histogram("head.weight"),
        {
            **FIRST_STEP,
            "one": "!no checkpoint of run run-a has statistics of model tensors yet: `analyze` computes them",
            "some statistics": "head.weight in 1 checkpoint; 2 have no statistics: `analyze` computes them",
            "two models": "!no statistics of model 'head.weight' in run run-b; the nearest are new.weight",
        },
    ),
    "bisect": (
        lambda h: h.bisect("loss < 0.04", quiet=True),
        {
            **FIRST_STEP,
            "one": "!run run-a of .* has 1 checkpoint to ask; it takes two",
            "no statistics": "not yet at run-a:20, but at run-a:30; 3 of 3 checkpoints asked",
            "two models": "!bisect: at good=run-b:10 the predicate gives 0.09.*, at bad=run-b:20 0.04",
        },
    ),
    "tensor": (lambda h: h.tensor("head.weight"), {**FIRST_STEP, "one": "tensor", "two models": "!no tensor fits"}),
    "restore": (lambda h: h.restore(), {**FIRST_STEP, "one": "tensors in memory"}),
    "export": (
        lambda h: h.export("latest", h.root.parent / "exported.safetensors", overwrite=True, quiet=True),
        {**FIRST_STEP, "one": "checkpoint run-a:10 as safetensors"},
    ),
    "resume_folder": (
        lambda h: h.resume_folder("latest", h.root.parent / "resumed"),
        {
            **FIRST_STEP,
            "one": r"!checkpoint run-a:10 does not say where a Trainer was in its data: it was not captured by",
        },
    ),
    "sql": (
        lambda h: h.sql("SELECT count(*) AS n FROM statistics"),
        {"no run": "0$", "empty": "0$", "no statistics": "0$", "some statistics": "2$"},
    ),
    "verify": (
        lambda h: h.verify(quiet=True),
        {
            "no run": "no checkpoint yet in",
            "empty": "no checkpoint yet in",
            "one": "1 checkpoint verified: no problem",
        },
    ),
    "reindex": (lambda h: h.reindex(), {"no run": "^0$", "empty": "^0$", "one": "^1$"}),
    "open": (repr, {"no run": "checkpoints  0", "empty": "run-a", "one": "checkpoints  1"}),
}


def outcome(call: Call, explorer: Any) -> str:
    """Return what a person sees: the text of the result, or `!` and the one line of the error."""
    try:
        result = call(explorer)
    except HistoryError as error:
        return f"!{' '.join(str(error).split())}"
    if hasattr(result, "_repr_html_"):
        assert "<" in result._repr_html_()
    return result if isinstance(result, str) else repr(result)


@pytest.mark.parametrize(
    ("verb", "situation"), [(verb, situation) for verb, (_, cases) in VERB_CASES.items() for situation in cases]
)
def test_a_verb_in_a_situation(situations: dict[str, Explorer], verb: str, situation: str) -> None:
    call, cases = VERB_CASES[verb]
    shown, expected = outcome(call, situations[situation]), cases[situation]
    assert shown.startswith("!") == expected.startswith("!"), shown
    assert re.search(expected.removeprefix("!"), shown), shown


def test_analyze_adds_the_missing_statistics(tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    explorer = Explorer.open(run.root)
    assert len(explorer.analyze(quiet=True)) == 0
    three(run)
    run.close()
    assert len(explorer.analyze(20, quiet=True)) == 1
    assert explorer.log()["health"].to_pylist() == [None, "ok", None]
    assert len(explorer.analyze(quiet=True)) == 2
    assert explorer.log()["health"].to_pylist() == ["ok", "ok", "ok"]


def test_statistics_that_cannot_be_written_are_refused_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    three(run)
    run.close()
    explorer = Explorer.open(run.root)
    explorer.history.paths.statistics_dir("run-a").touch()
    with pytest.raises(
        SetupError, match=r"the statistics of run-a:10 cannot be written into .*history: .*; .*analyze a copy"
    ):
        explorer.analyze(quiet=True)


def test_no_verb_is_left_out() -> None:
    assert {verb.name for verb in all_verbs() if verb.needs_history} | {"open"} == VERB_CASES.keys() | ELSEWHERE


ELSEWHERE: Final = frozenset(
    {
        "analyze",
        "attribute",
        "average",
        "bisect_replay",
        "compact",
        "compare",
        "crossover",
        "delta",
        "evaluate",
        "explore",
        "interpolate",
        "losses_between",
        "prune",
        "remove",
        "rebuild",
        "replay",
        "replay_check",
        "usage",
        "watch",
    }
)
"""The tests of these verbs cover their odd situations."""

MISTAKES: Final[dict[str, tuple[Call, str]]] = {
    "show": (lambda h: h.show(11), "step 11 was not captured in .*: the nearest are 10 and 20"),
    "diff before": (lambda h: h.diff(11, 20), "the nearest are 10 and 20"),
    "diff after": (lambda h: h.diff(10, 31), "the nearest is 30"),
    "diff far back": (lambda h: h.diff(-9, -1), "checkpoint -9 from the end: .* has only 3"),
    "diff tag": (lambda h: h.diff("goood"), "'goood' is neither a step"),
    "diff run": (lambda h: h.diff("run-z:1"), "no run 'run-z' .* run-a"),
    "diff names": (lambda h: h.diff(10, names="*.mlp.*"), r"no tensor fits '\*\.mlp\.\*' .*layers\.0\.weight"),
    "diff kinds": (lambda h: h.diff(10, kinds="modle"), "no kind fits 'modle' .* the nearest is model"),
    "diff by": (lambda h: h.diff(10, by="row"), "no grouping 'row'; there are tensor, layer, kind"),
    "diff tensor": (lambda h: h.diff(10, tensor="heat"), r"no tensor fits 'heat' .*head\.weight"),
    "diff axis": (lambda h: h.diff(10, tensor="head.weight", axis=2, quiet=True), "there is no axis 2"),
    "diff parts": (lambda h: h.diff(10, tensor="head.weight", parts=3, quiet=True), "can't be cut into 3 equal parts"),
    "log": (lambda h: h.log(run="run-z"), "no run 'run-z' .* run-a"),
    "trajectory names": (
        lambda h: h.trajectory("*.mlp.*"),
        r"fits '\*\.mlp\.\*' in run-a:10 to run-a:30 \(3 checkpoints\); there are head.weight",
    ),
    "trajectory metric": (lambda h: h.trajectory(metric="l2"), "no metric 'l2'; the metrics are norm,"),
    "trajectory run": (lambda h: h.trajectory(run="run-z"), "no run 'run-z'"),
    "distances names": (lambda h: h.distances("*.mlp.*"), r"no tensor fits '\*\.mlp\.\*' in the sketches of run run-a"),
    "distances run": (lambda h: h.distances(run="run-z"), "no run 'run-z'"),
    "anomalies": (lambda h: h.anomalies(run="run-z"), "no run 'run-z'"),
    "diagnose": (lambda h: h.diagnose(run="run-z"), "no run 'run-z'"),
    "tensor name": (lambda h: h.tensor("haed.weight"), "no tensor fits 'haed.weight' .*nearest are head.weight"),
    "tensor step": (lambda h: h.tensor("head.weight", 11), "the nearest are 10 and 20"),
    "histogram state": (
        lambda h: h.histogram("head.weight", state="exp_av"),
        "no state 'exp_av' in .*there is model",
    ),
    "tensor kind": (lambda h: h.tensor("head.weight", state="exp_avg"), "no kind fits 'exp_avg' .*model"),
    "restore step": (lambda h: h.restore(11), "the nearest are 10 and 20"),
    "restore names": (
        lambda h: h.restore(names=["head*", "*.mlp.*"]),
        r"fits '\*\.mlp\.\*' .*there are head\.weight",
    ),
    "restore kinds": (lambda h: h.restore(kinds="modle"), "no kind fits 'modle' .*the nearest is model"),
    "export step": (lambda h: h.export(11, h.root / "x"), "the nearest are 10 and 20"),
    "export format": (lambda h: h.export(10, h.root.parent / "x", format="gguf"), "no format 'gguf'; the formats are"),
    "sql": (lambda h: h.sql("SELECT stp FROM checkpoints"), "no column 'stp'; the nearest is step"),
    "verify": (lambda h: h.verify(11), "the nearest are 10 and 20"),
    "analyze": (lambda h: h.analyze(11), "the nearest are 10 and 20"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_the_nearest(situations: dict[str, Explorer], mistake: str) -> None:
    call, expected = MISTAKES[mistake]
    with pytest.raises((NotFoundError, SetupError)) as caught:
        call(situations["some statistics"])
    assert re.search(expected, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("verb", [verb for verb in VERB_CASES if verb != "open"])
@pytest.mark.usefixtures("nothing_opened")
def test_without_a_history_every_function_says_where_it_looked(verb: str) -> None:
    values = {"diff": (10,), "tensor": ("w",), "export": (10, "x"), "sql": ("SELECT 1",)}
    with pytest.raises(NotFoundError, match=r"no history was opened.*\(\./history\); open one with dshistory\.open"):
        getattr(dshistory, verb)(*values.get(verb, ()))


def test_two_models_side_by_side(situations: dict[str, Explorer]) -> None:
    table = situations["two models"].diff("run-a:30", "run-b:20", quiet=True)
    assert {row["name"]: (row["status"], row["update_norm"]) for row in table} == {
        "head.weight": ("removed", None),
        "new.weight": ("added", None),
        "layers.0.weight": ("reshaped", None),
    }
    assert table.note.endswith(
        "0 changed; 0 equal bit for bit; 1 only in run-a:30; 1 only in run-b:20; 1 of another shape"
    )
    for by in ("layer", "kind"):
        together = situations["two models"].diff("run-a:30", "run-b:20", by=by, quiet=True)
        assert set(together["update_norm"].to_pylist()) == {None}
    (annotation,) = table.plot().layout.annotations
    assert annotation.text == "the two checkpoints have nothing to compare"


def test_every_verb_takes_references_of_other_runs(situations: dict[str, Explorer]) -> None:
    explorer = situations["two models"]
    for ref in ("run-a:30", "run-a:latest", "run-a:-1", "run-a:best"):
        assert (explorer.show(ref)["run"], explorer.show(ref)["step"]) == ("run-a", 30)
        assert explorer.tensor("head.weight", ref).shape == SHAPE
        assert len(explorer.verify(ref, quiet=True)) == 0
        assert set(explorer.restore(ref)["model"]) == {"layers.0.weight", "head.weight"}
    assert set(explorer.trajectory(run="run-a", quiet=True)["step"].to_pylist()) == {10, 20, 30}
    assert len(explorer.distances(run="run-a")) == 3
    assert len(explorer.anomalies(run="run-a")) == 0


def test_statistics_of_a_part_change_no_number(situations: dict[str, Explorer]) -> None:
    without, some = situations["no statistics"], situations["some statistics"]
    for metric in ("norm", "nonfinite", "relative_update"):
        expected = without.trajectory(metric=metric, quiet=True)["value"].to_pylist()
        known = [value for value in expected if value is not None]
        shown = [
            value for value in some.trajectory(metric=metric, quiet=True)["value"].to_pylist() if value is not None
        ]
        assert shown == pytest.approx(known, rel=1e-12)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (lambda h: h.trajectory(quiet=True), "no relative_update is known at any step"),
        (lambda h: h.distances(), "fewer than two checkpoints to compare"),
    ],
)
def test_an_empty_figure_says_why(tmp_path: Path, what: Call, text: str) -> None:
    run = Run(tmp_path / "history")
    one(run)
    run.close()
    explorer = Explorer.open(run.root)
    explorer.analyze(quiet=True)
    assert [annotation.text for annotation in what(explorer).plot().layout.annotations] == [text]


def test_a_log_without_losses_is_a_figure_that_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    run.checkpoint(0, whole({"w": torch.ones(2)}))
    run.close()
    (annotation,) = Explorer.open(run.root).log().plot().layout.annotations
    assert annotation.text == "no loss was recorded"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda h: h.tensor("head.weight", 20, state=5), "tensor: state=5: give a text"),
        (lambda h: h.tensor(7), "tensor: name=7: give a text"),
        (lambda h: h.diff(10, tensor="head.weight", axis="x"), "diff: axis='x': give a whole number"),
        (lambda h: h.diff(10, names=5), "diff: names=5: give a text, or a list of texts"),
        (lambda h: h.diff(10, kinds=["model", 3]), r"diff: kinds=\['model', 3\]: give a text, or a list of texts"),
        (lambda h: h.diff(10, exact="yes"), "diff: exact='yes': give True or False"),
        (lambda h: h.diff(10, by=2), "diff: by=2: give one of tensor, layer, kind"),
        (
            lambda h: h.diff(10, tensor="head.weight", by="layer"),
            "diff: by='layer' groups tensors, and tensor='head.weight' is one: leave one of them out",
        ),
        (lambda h: h.layers(first="10"), "layers: first='10': give a whole number, or None"),
        (lambda h: h.trajectory(run=[]), r"trajectory: run=\[\]: name a run"),
        (lambda h: h.trajectory(run=3), "trajectory: run=3: give a text, a list of texts, or None"),
        (lambda h: h.diff(10, 20, nmaes="x"), "diff: no argument 'nmaes'; the nearest are names, "),
        (lambda h: h.tensor(), "tensor: missing a required argument: 'name'; the arguments are name, step"),
        (lambda h: h.tags(1), "tags: too many positional arguments"),
        (lambda h: h.bisect(4.5), "bisect: predicate=4.5: give a condition, as 'loss > 4.5', or a function"),
        (lambda h: h.restore(20, providers=None), r"restore: providers=None: give a list, as \(\)"),
        (lambda h: h.export(20, 5), "export: path=5: give a path"),
        (lambda h: h.watch(seconds="1"), "watch: seconds='1': give a number"),
        (lambda h: Explorer.open(5), "a history is opened by the path of its folder, not by 5"),
        (lambda h: capture.restore(20, history=h.root, names=5), "names=5: give a pattern, or a list of patterns"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(situations: dict[str, Explorer], wrong: Call, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        wrong(situations["two models"])


def test_numbers_and_names_of_other_libraries_are_taken(situations: dict[str, Explorer]) -> None:
    explorer = situations["no statistics"]
    assert explorer.tensor("head.weight", np.int64(20)).shape == SHAPE
    assert len(explorer.diff(10, tensor="head.weight", axis=np.int32(0), quiet=True)) == SHAPE[0]
    assert len(explorer.diff(10, names=np.array(["head.weight"]), quiet=True)) == 1


def test_several_runs_are_compared_each_checkpoint_once(situations: dict[str, Explorer]) -> None:
    explorer = situations["two models"]
    both = explorer.trajectory("layers.0.weight", metric="norm", run=["run-a", "run-b"], quiet=True)
    alone = [explorer.trajectory("layers.0.weight", metric="norm", run=run, quiet=True) for run in ("run-a", "run-b")]
    assert list(both) == [row for table in alone for row in table]
    assert len(explorer.trajectory("layers.0.weight", metric="norm", run=["run-a", "run-a"], quiet=True)) == 3
    assert {line.name for line in both.plot().data} == {"layers.0.weight, run-a", "layers.0.weight, run-b"}
    assert {line.name for line in alone[0].plot().data} == {"layers.0.weight"}
