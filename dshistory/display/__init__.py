"""Display of results: tables, reports and figures as text, HTML and plotly, and the progress of long work.

Nothing here reads a history; every function displays the rows that it is given.
"""

__all__: list[str] = []
