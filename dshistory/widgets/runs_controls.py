"""The controls of the runs: a list in which runs are chosen, and a picture of those that are compared.

The picture is an SVG in a text of HTML: a second figure of plotly would cost megabytes in the notebook.
"""

from collections.abc import Sequence
from typing import Any

from dshistory.display import html
from dshistory.display.svg import svg
from dshistory.display.table import Table
from dshistory.replays.side_by_side import ComparedRuns
from dshistory.widgets.page_parts import ChoosableRows

__all__ = ["RunsControls"]


class RunsControls:
    """The list, the choice of a picture and the picture; `root` holds them, and is shown where there are two runs.

    The widgets are given: a dropdown, one for HTML, and a box for all of them.
    """

    def __init__(self, *, picture: Any, comparison: Any, root: Any) -> None:
        self.runs, self.picture, self.comparison, self.root = ChoosableRows(), picture, comparison, root
        root.children = [self.runs, picture, comparison]
        for name, piece in {"runs": self.runs, "picture": self.picture, "comparison": self.comparison}.items():
            piece.add_class(f"dsh-{name}")
        self.picture.layout.width = "230px"
        self.picture.style.description_width = "70px"
        self.root.layout.display = "none"
        self.show_comparison("", None, "loss")

    def show_runs(self, table: Table, chosen: Sequence[str]) -> None:
        """List the runs, those chosen marked."""
        note = f"{table.note}; click two or more to compare them with the first of these"
        data = table.to_arrow().drop_columns(["parent"])
        rows = html.table_html(data, table.formats, note, whole=True)
        self.runs.value = html.document(html.title_html("h.runs()"), rows)
        self.mark(table, chosen)
        self.root.layout.display = "" if len(table) > 1 else "none"

    def mark(self, table: Table, chosen: Sequence[str]) -> None:
        """Mark the rows of the runs that are chosen."""
        self.runs.chosen = [place for place, run in enumerate(table["run"].to_pylist()) if run in chosen]

    def show_comparison(self, title: str, compared: ComparedRuns | None, figure: str) -> None:
        """Show a picture of the runs that are compared; None shows the title alone."""
        parts = [html.title_html(title)] if title else []
        if compared is not None:
            note = f'<p class="dsh-note">{html.plain(compared.note)}</p>'
            parts += [svg(compared.plot(figure).to_plotly_json()), note]
        self.comparison.value = html.document(*parts) if parts else ""
        self.picture.layout.display = "" if parts else "none"

    def pieces(self) -> tuple[Any, ...]:
        """Return every widget."""
        return self.runs, self.picture, self.comparison, self.root
