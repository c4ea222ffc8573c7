"""One dictionary states the rooms of every package and the direction of imports between them.

`test_layers` checks the code against it, and CONTRIBUTING.md shows the tree that `tree` makes of it. Run as a script,
this file rewrites that tree.
"""

import ast
import re
from pathlib import Path

from places import ROOT

__all__ = ["LAYERS", "PAGE", "ROOMS", "may_import", "modules_of", "page_with_tree", "room_of"]

PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms -->", "<!-- end of rooms -->"

LAYERS = ("dshistory", "capture", "catalog", "native")
"""The packages are ordered from the top down: each imports itself and those to its right."""

ROOMS: dict[str, tuple[str, ...]] = {
    "dshistory": (
        "commands",
        "current",
        "explorer",
        "widgets",
        "hindsight causes",
        "trends reports conversion replays retention",
        "comparison",
        "tensors",
        "display",
        "registry argument_checks options metrics patterns user_functions",
    ),
    "capture": (
        "huggingface enable checkpoint_engine resume restore active_sessions",
        "redo",
        "session load deepspeed_checkpoints replays",
        "redo_log publishing",
        "snapshot loops maintenance",
        "unwritten",
        "data_file",
        "changes",
        "devices",
        "state",
        "background_thread collectives defaults environment exit_handler lazy_doors",
        "on_full user_warning",
    ),
    "catalog": (
        "retention compaction",
        "run_writer gc damage verify history lineage_metrics lineage_batches lineage_query references later_metrics",
        "index",
        "statistics access",
        "read",
        "data_files",
        "format",
        "disk encoding",
        "paths records argument_names nearest_names errors cell_traceback",
    ),
    "native": ("_siblings",),
}
"""The rooms of every package are ordered from the top down: folders, and files at the package's top. A room imports
itself and the rooms of the lines below it. Folders of one line do not import each other; a file may import the files to
its right. `tests/native/test_rooms.py` guards the rooms of the C++ core.
"""


def modules_of(package: str) -> dict[str, Path]:
    """Return every module of a package by its dotted name."""
    return {_dotted(path): path for path in sorted((ROOT / package).rglob("*.py"))}


def room_of(module: str) -> str:
    """Return the room of a module: the folder, or the file, directly below its package."""
    return module.split(".")[1] if "." in module else "__init__"


def may_import(room: str, other: str, *, package: str) -> bool:
    """Return whether `ROOMS` lets one room of a package import another.

    It raises KeyError, with what to do, for a room that has no place in `ROOMS`.
    """
    (line, place), (other_line, other_place) = _place(package, room), _place(package, other)
    files = not any((ROOT / package / name).is_dir() for name in (room, other))
    return other_line > line or (other_line == line and files and other_place > place)


def _place(package: str, room: str) -> tuple[int, int]:
    for number, line in enumerate(ROOMS[package]):
        if room in line.split():
            return number, line.split().index(room)
    raise KeyError(
        f"{package}/{room}: no line of ROOMS[{package!r}] in {Path(__file__).name} has this room: give it its place"
    )


def tree() -> str:
    """Return the packages and their rooms from the top down, each with the first sentence of its docstring."""
    lines = []
    for package in LAYERS:
        lines.append(f"{package + '/':26}{_first_sentence(ROOT / package / '__init__.py')}")
        for line in ROOMS[package]:
            for room in line.split():
                folder = ROOT / package / room
                home, name = (
                    (folder / "__init__.py", f"{room}/")
                    if folder.is_dir()
                    else (folder.with_suffix(".py"), f"{room}.py")
                )
                lines.append(f"  {name:24}{_first_sentence(home)}")
    return "\n".join(f"    {line}" for line in lines) + "\n"


def page_with_tree(page: str) -> str:
    """Return the page with the tree between its two marks as `tree` makes it now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tree()}\n{END}{after}"


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", text)[0].rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page_with_tree(PAGE.read_text()))
