"""Tables and reports as HTML for notebooks: escaped, and themed by the variables of JupyterLab or VS Code.

Cells carry their alignment twice: as a style, which overrides the notebook's own style sheet, and as an attribute for
GitHub, which removes styles and still shows a readable table.
"""

from collections.abc import Mapping, Sequence
from html import escape

import pyarrow as pa

from dshistory.display.formats import Format, text_of
from dshistory.display.text import Page, is_numeric

__all__ = ["document", "facts_html", "plain", "table_html", "title_html"]

_STYLE = """<style>
.dsh { --dsh-fg: var(--jp-content-font-color1, var(--vscode-editor-foreground, #1b1f24));
  --dsh-dim: var(--jp-content-font-color2, var(--vscode-descriptionForeground, #59636e));
  --dsh-line: var(--jp-border-color2, var(--vscode-editorWidget-border, #d0d7de));
  --dsh-stripe: var(--jp-rendermime-table-row-background, var(--vscode-list-hoverBackground, #f6f8fa));
  color: var(--dsh-fg); overflow-x: auto; max-width: 100%; }
@media (prefers-color-scheme: dark) { .dsh {
  --dsh-fg: var(--jp-content-font-color1, var(--vscode-editor-foreground, #e6edf3));
  --dsh-dim: var(--jp-content-font-color2, var(--vscode-descriptionForeground, #9198a1));
  --dsh-line: var(--jp-border-color2, var(--vscode-editorWidget-border, #3d444d));
  --dsh-stripe: var(--jp-rendermime-table-row-background, var(--vscode-list-hoverBackground, #151b23)); } }
.dsh table { color: var(--dsh-fg); border-collapse: collapse; margin: 0.3em 0; font-variant-numeric: tabular-nums; }
.dsh th { border-bottom: 1px solid var(--dsh-line); color: var(--dsh-dim); font-weight: 600; }
.dsh th, .dsh td { padding: 0.15em 0.7em; white-space: nowrap; }
.dsh tbody tr:nth-child(even) { background: var(--dsh-stripe); }
.dsh tbody th { color: var(--dsh-fg); }
.dsh .dsh-note { color: var(--dsh-dim); margin: 0.2em 0; }
</style>"""


def document(*parts: str) -> str:
    """Return the parts as one self-contained output, with their common style."""
    return f'{_STYLE}<div class="dsh">{"".join(parts)}</div>'


def plain(text: str) -> str:
    """Return a text as HTML that shows it verbatim."""
    return escape(text_of(text))


def title_html(title: str) -> str:
    """Return a heading."""
    return f"<h4>{plain(title)}</h4>"


def table_html(data: pa.Table, formats: Mapping[str, Format], note: str, *, whole: bool = False) -> str:
    """Return the table as HTML, with every value and name escaped; long tables are shortened as in text, unless they
    are to be shown `whole`."""
    under = f'<p class="dsh-note">{plain(note)}</p>' if note else ""
    if not data.num_rows:
        return under or '<p class="dsh-note">(no rows)</p>'
    page = Page(data, formats, whole=whole)
    right = [is_numeric(field.type) for field in data.schema]
    rows = [_row("td", cells, right) for cells in page.first]
    if page.left_out:
        rows.append(f'<tr><td colspan="{data.num_columns}" style="text-align:center">{escape(page.gap)}</td></tr>')
    rows += [_row("td", cells, right) for cells in page.last]
    head = _row("th", page.columns, right)
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>{under}"


def facts_html(facts: Mapping[str, object], formats: Mapping[str, Format]) -> str:
    """Return named values as HTML, one per line; an empty string when there are none."""
    if not facts:
        return ""
    rows = (
        f'<tr><th style="text-align:left">{escape(text_of(name))}</th>'
        f'<td style="text-align:left">{escape(text_of(value, formats.get(name, "auto")))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _row(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    inner = "".join(
        f'<{tag} align="{side}" style="text-align:{side}">{escape(cell)}</{tag}>'
        for cell, to_right in zip(cells, right, strict=True)
        for side in ["right" if to_right else "left"]
    )
    return f"<tr>{inner}</tr>"
