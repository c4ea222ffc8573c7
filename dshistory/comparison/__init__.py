"""Two checkpoints side by side: what changed, tensor by tensor, layer by layer, or inside one tensor.

Questions about a whole run are in `dshistory.trends`, which builds on this package.
"""

__all__: list[str] = []
