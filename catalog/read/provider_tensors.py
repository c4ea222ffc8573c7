"""The tensors inside a State Provider's object as tensors of a kind of their own, named by the object.

A manifest has them as rows of the kind `object_tensor`, under the object's name and a number. The alias of such a row
is the tensor's place in the object; rows of tensors that nobody looks at (generators, positions) have none. Whoever
restores an object reads the rows as they are, and whoever looks at a checkpoint reads them through here.
"""

import pyarrow as pa
import pyarrow.compute as pc

from catalog.format.manifest import NOT_STATE

__all__ = ["state_only", "with_provider_tensors"]


def with_provider_tensors(rows: pa.Table) -> pa.Table:
    """Return rows of manifests, where the tensors of an object `ema` have the kind `ema` and the name of their place.

    `rows` has the columns name, kind and aliases. A kind that other tensors have already, because an object has the
    name of one, stays theirs: the tensors of that object remain rows of the kind `object_tensor`.
    """
    shown = pc.and_(pc.equal(rows["kind"], "object_tensor"), pc.greater(pc.list_value_length(rows["aliases"]), 0))
    if not pc.any(shown, min_count=0).as_py():
        return rows
    kinds = pc.replace_substring_regex(rows["name"], pattern="/[0-9]+$", replacement="")
    shown = pc.and_(shown, pc.invert(pc.is_in(kinds, pc.unique(rows["kind"]))))
    # An element that a list does not have is an error, also in rows that are not shown.
    first = pc.list_element(pc.if_else(shown, rows["aliases"], pa.scalar([""], rows["aliases"].type)), 0)
    none = pa.scalar([], rows["aliases"].type)
    for name, changed in (("name", first), ("kind", kinds), ("aliases", none)):
        values = pc.if_else(shown, changed, rows[name])
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)
    return rows


def state_only(rows: pa.Table) -> pa.Table:
    """Return the rows that are tensors: those of the training's own state and of its providers."""
    found = with_provider_tensors(rows)
    return found.filter(pc.invert(pc.is_in(found["kind"], pa.array(sorted(NOT_STATE)))))
