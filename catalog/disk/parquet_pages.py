"""Finds what a Parquet file takes once decoded, from the headers of its pages, before anything is decompressed.

A few bytes of compressed data can stand for gigabytes, in three ways: a page decompresses to much more than it has; a
run-length code says that one value is repeated a billion times; and a dictionary stores a long string once for any
number of rows. The footer also has sizes, but no reader looks at them, so a hostile file may say anything there. The
page headers can't lie: a reader allocates what they say, and refuses a page that gives another size.

Page headers are Thrift structs in the compact protocol. The parser here reads integers and skips everything else.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from catalog.errors import FormatError

__all__ = ["decoded_bytes"]

_MAX_PAGES = 10_000
_MAX_DEPTH = 8
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DETAILS: Mapping[Any, int] = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""The field of a page header that has the details of this kind of page."""

_ENCODINGS = {0, 2, 3, 8}
"""PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY: those with which a value takes no more than its page or its dictionary
says. Others can make a value out of pieces of earlier ones."""

_VALUE_BYTES: Mapping[str, int] = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
_LEVEL_BYTES = 4
"""The size of a value's levels while it is decoded; they say in which list it is, and whether it is missing."""

_Struct: TypeAlias = dict[int, Any]


def decoded_bytes(data: bytes, footer: pq.FileMetaData, *, file: str) -> int:
    """Return how many bytes the pages and the values of a file take once decoded, dictionaries counted once.

    FormatError when the page headers can't be read, or do not agree with the footer in the number of rows.
    """
    total = 0
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            where = f"{file}: column {column.path_in_schema!r}"
            page_bytes, values = _chunk(data, column, where=where)
            flat = footer.schema.column(index).max_repetition_level == 0
            if flat and values != row_group.num_rows:
                raise FormatError(f"{where}: the pages have {values} values, the file has {row_group.num_rows} rows")
            width = _VALUE_BYTES.get(column.physical_type) or footer.schema.column(index).length
            # Fixed-width values are decoded from the page into a column; strings of a dictionary become indices. The
            # length of a column of lists is not known before, and doubles as it grows, with a copy of what it had.
            total += page_bytes + values * (width * (1 if flat else 2) + _LEVEL_BYTES)
    return total


def _chunk(data: bytes, column: pq.ColumnChunkMetaData, *, where: str) -> tuple[int, int]:
    """Return the decompressed bytes of a column's pages, and the number of its values."""
    if column.num_values == 0:
        # A reader opens no page of such a column.
        return 0, 0
    at = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < at:
        at = column.dictionary_page_offset
    end = at + column.total_compressed_size
    if not 0 <= at <= end <= len(data):
        raise FormatError(f"{where}: its bytes {at} to {end} are not all in the file of {len(data)} bytes")
    page_bytes = values = pages = 0
    while at < end:
        header, at = _read_struct(data, at, end, where=where, depth=0)
        kind = header.get(1)
        decompressed, compressed = header.get(2), header.get(3)
        details = header.get(_DETAILS.get(kind, -1)) if isinstance(kind, int) else None
        if not isinstance(details, dict) or not isinstance(decompressed, int) or not isinstance(compressed, int):
            raise FormatError(f"{where}: a page of an unknown kind, or without its sizes")
        count, encoding = details.get(1), details.get(4 if kind == _DATA_V2 else 2)
        if not isinstance(count, int) or not isinstance(encoding, int) or encoding not in _ENCODINGS:
            raise FormatError(f"{where}: a page without the number of its values, or in an encoding not in use here")
        if decompressed < 0 or compressed < 0 or count < 0 or at + compressed > end:
            raise FormatError(f"{where}: a page has {compressed} bytes of {end - at}, {decompressed} decompressed")
        page_bytes += decompressed
        values += 0 if kind == _DICTIONARY else count
        pages += 1
        if pages > _MAX_PAGES:
            raise FormatError(f"{where}: more than {_MAX_PAGES} pages")
        at += compressed
    return page_bytes, values


def _read_struct(data: bytes, at: int, end: int, *, where: str, depth: int) -> tuple[_Struct, int]:
    """Return the integers and structs in a struct by their field ids, and where the struct ends."""
    if depth > _MAX_DEPTH:
        raise FormatError(f"{where}: a page header is nested too deeply")
    fields: _Struct = {}
    field = 0
    while True:
        head, at = _byte(data, at, end, where)
        kind = head & 0x0F
        if kind == 0:
            return fields, at
        if head >> 4:
            field += head >> 4
        else:
            field, at = _zigzag(data, at, end, where)
        fields[field], at = _read_value(data, at, end, kind, where=where, depth=depth)


def _read_value(data: bytes, at: int, end: int, kind: int, *, where: str, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # a boolean: its value is its type
        return None, at
    if kind in (4, 5, 6):
        return _zigzag(data, at, end, where)
    if kind == 8:  # bytes, such as the smallest and the largest value of a page
        length, at = _varint(data, at, end, where)
        return None, at + length
    if kind == 12:
        return _read_struct(data, at, end, where=where, depth=depth + 1)
    raise FormatError(f"{where}: a page header has a field of type {kind}, which none of its fields has")


def _byte(data: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    if at >= end:
        raise FormatError(f"{where}: a page header is cut off")
    return data[at], at + 1


def _varint(data: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = _byte(data, at, end, where)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise FormatError(f"{where}: a page header has a number of more than 64 bits")


def _zigzag(data: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    value, at = _varint(data, at, end, where)
    return (value >> 1) ^ -(value & 1), at
