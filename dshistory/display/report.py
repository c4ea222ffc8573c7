"""Reports: named facts with tables, as `show` and `doctor` return them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from dshistory.display import html
from dshistory.display.formats import Format, text_of
from dshistory.display.table import Table, json_value

__all__ = ["Report"]


@dataclass(frozen=True, repr=False)
class Report:
    """Facts by name and tables by title, shown together: `report["name"]` is a fact, `report.tables["files"]` a table.

    Text and HTML are for display; `to_json` returns every value."""

    title: str
    facts: Mapping[str, object]
    tables: Mapping[str, Table] = field(default_factory=dict)
    formats: Mapping[str, Format] = field(default_factory=dict)

    def __getitem__(self, name: str) -> object:
        return self.facts[name]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.facts)

    def to_json(self) -> str:
        """Return facts and tables as one JSON object; `table.json_value` converts values that JSON does not have."""
        tables = {name: list(table) for name, table in self.tables.items()}
        return json.dumps(json_value({**self.facts, **tables}), indent=1, ensure_ascii=False)

    def __repr__(self) -> str:
        shown = {text_of(name): text_of(value, self.formats.get(name, "auto")) for name, value in self.facts.items()}
        width = max(map(len, shown), default=0)
        facts = [f"{name.ljust(width)}  {value}".rstrip() for name, value in shown.items()]
        tables = [f"\n{text_of(name)}\n{table!r}" for name, table in self.tables.items()]
        return "\n".join([text_of(self.title), *facts, *tables])

    def _repr_html_(self) -> str:
        parts = [html.title_html(self.title), html.facts_html(self.facts, self.formats)]
        for name, table in self.tables.items():
            parts += [html.title_html(name), html.table_html(table.to_arrow(), table.formats, table.note)]
        return html.document(*parts)
