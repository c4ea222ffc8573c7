"""How answers look: tables, reports and figures, as text, HTML and plotly; and the progress of long work.

Nothing here asks a history anything: it is given rows and shows them.
"""

__all__: list[str] = []
