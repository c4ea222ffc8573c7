"""Finds what a Parquet file takes once decoded, from the headers of its pages, before anything is decompressed.

A few bytes of compressed data can stand for gigabytes, in three ways: a page decompresses to much more than it has; a
run-length code says that one value is repeated a billion times; and a dictionary stores a long string once for any
number of rows. The footer also has sizes, but no reader looks at them, so a hostile file may say anything there. The
page headers can't lie: a reader allocates what they say, and refuses a page that gives another size.

The footer says where the pages of a column are. pyarrow's own accessor of what it says of a column ends the process
where the footer contradicts itself, so that is read here too. Footer and page headers are Thrift structs in the compact
protocol; the parser here reads integers, structs and lists, and skips everything else.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from catalog.errors import FormatError

__all__ = ["decoded_bytes"]

_MAX_PAGES = 10_000
_MAX_DEPTH = 8
_MAX_FOOTER_FIELDS = 200_000
_MAX_PAGE_FIELDS = 64
_TAIL_BYTES = 8
"""The footer is followed by its length and the magic bytes."""

_ROW_GROUPS, _CHUNKS, _CHUNK_FACTS = 4, 1, 3
_VALUES, _COMPRESSED_BYTES, _DATA_PAGE_AT, _DICTIONARY_PAGE_AT = 5, 7, 9, 11
"""Fields of the footer, of a row group, of a column in it, and of what is said of that column."""

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
    for group, chunks in enumerate(_chunks(data, footer, file=file)):
        rows = footer.row_group(group).num_rows
        for index, facts in enumerate(chunks):
            column = footer.schema.column(index)
            where = f"{file}: column {column.path!r}"
            page_bytes, values = _chunk(data, facts, where=where)
            flat = column.max_repetition_level == 0
            if flat and values != rows:
                raise FormatError(f"{where}: the pages have {values} values, the file has {rows} rows")
            width = _VALUE_BYTES.get(column.physical_type) or column.length
            # Fixed-width values are decoded from the page into a column; strings of a dictionary become indices. The
            # length of a column of lists is not known before, and doubles as it grows, with a copy of what it had.
            total += page_bytes + values * (width * (1 if flat else 2) + _LEVEL_BYTES)
    return total


def _chunks(data: bytes, footer: pq.FileMetaData, *, file: str) -> list[list[_Struct]]:
    """Return what the footer says of each column of each row group. FormatError when it does not say where each is, or
    has not the row groups and columns that pyarrow has found."""
    where = f"{file}: the footer"
    end = len(data) - _TAIL_BYTES
    begin = end - int.from_bytes(data[end : end + 4], "little")
    found, _ = _Structs(data, end, where=where, most_fields=_MAX_FOOTER_FIELDS).read(begin)
    groups = _structs_in(found.get(_ROW_GROUPS), footer.num_row_groups, where=where)
    facts = []
    for group in groups:
        columns = _structs_in(group.get(_CHUNKS), footer.num_columns, where=where)
        facts.append(_structs_in([column.get(_CHUNK_FACTS) for column in columns], len(columns), where=where))
    needed = (_VALUES, _COMPRESSED_BYTES, _DATA_PAGE_AT)
    if not all(isinstance(one.get(field), int) for of_group in facts for one in of_group for field in needed):
        raise FormatError(f"{where}: does not say where each column is")
    return facts


def _structs_in(value: Any, count: int, *, where: str) -> list[_Struct]:
    if not isinstance(value, list) or len(value) != count or not all(isinstance(one, dict) for one in value):
        raise FormatError(f"{where}: describes not {count} row groups or columns where there are so many")
    return value


def _chunk(data: bytes, facts: _Struct, *, where: str) -> tuple[int, int]:
    """Return the decompressed bytes of a column's pages, and the number of its values."""
    if facts[_VALUES] == 0:
        # A reader opens no page of such a column.
        return 0, 0
    at, dictionary_at = facts[_DATA_PAGE_AT], facts.get(_DICTIONARY_PAGE_AT)
    if isinstance(dictionary_at, int) and 0 < dictionary_at < at:
        at = dictionary_at
    end = at + facts[_COMPRESSED_BYTES]
    if not 0 <= at <= end <= len(data):
        raise FormatError(f"{where}: its bytes {at} to {end} are not all in the file of {len(data)} bytes")
    page_bytes = values = pages = 0
    while at < end:
        structs = _Structs(data, end, where=f"{where}: a page header", most_fields=_MAX_PAGE_FIELDS)
        header, at = structs.read(at)
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


class _Structs:
    """Reads Thrift structs that lie before `end`, with at most so many fields together."""

    def __init__(self, data: bytes, end: int, *, where: str, most_fields: int) -> None:
        self._data = data
        self._end = end
        self._where = where
        self._left = most_fields

    def read(self, at: int, *, depth: int = 0) -> tuple[_Struct, int]:
        """Return the integers, structs and lists in a struct by their field ids, and where the struct ends."""
        if depth > _MAX_DEPTH:
            raise FormatError(f"{self._where} is nested too deeply")
        fields: _Struct = {}
        field = 0
        while True:
            head, at = self._byte(at)
            kind = head & 0x0F
            if kind == 0:
                return fields, at
            if head >> 4:
                field += head >> 4
            else:
                field, at = self._zigzag(at)
            if field in fields:
                raise FormatError(f"{self._where} has field {field} twice: readers differ in what it is")
            # The value of a boolean field is its type.
            fields[field], at = (None, at) if kind in (1, 2) else self._value(at, kind, depth)

    def _value(self, at: int, kind: int, depth: int) -> tuple[Any, int]:
        self._left -= 1
        if self._left < 0:
            raise FormatError(f"{self._where} has too many fields")
        if kind in (1, 2, 3):
            return None, at + 1
        if kind in (4, 5, 6):
            return self._zigzag(at)
        if kind == 7:
            return None, at + 8
        if kind == 8:  # bytes, such as the smallest and the largest value of a page
            length, at = self._varint(at)
            return None, at + length
        if kind in (9, 10):
            return self._list(at, depth)
        if kind == 12:
            return self.read(at, depth=depth + 1)
        raise FormatError(f"{self._where} has a field of type {kind}, which none of its fields has")

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        head, at = self._byte(at)
        count, kind = head >> 4, head & 0x0F
        if count == 15:
            count, at = self._varint(at)
        values = []
        for _ in range(count):
            value, at = self._value(at, kind, depth + 1)
            values.append(value)
        return values, at

    def _byte(self, at: int) -> tuple[int, int]:
        if at >= self._end:
            raise FormatError(f"{self._where} is cut off")
        return self._data[at], at + 1

    def _varint(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte, at = self._byte(at)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                raise FormatError(f"{self._where} has a number of more than 64 bits")

    def _zigzag(self, at: int) -> tuple[int, int]:
        value, at = self._varint(at)
        return (value >> 1) ^ -(value & 1), at
