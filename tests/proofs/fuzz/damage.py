"""Ways to damage the bytes of a file.

A byte mutation alone seldom passes a checksum. So the bytes of a file are also changed with its checksum made right
again, values inside JSON and cells of tables are replaced by odd ones, and the result is encoded as the writer would.
"""

import json
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

import native
from catalog.disk import json_file
from catalog.disk.checked_parquet import encode_checked

__all__ = [
    "Chance",
    "json_input",
    "mutated",
    "odd_in_places",
    "odd_json",
    "odd_metadata",
    "odd_table",
    "plain",
    "table_input",
]

Chance = random.Random

ODD_NUMBERS = (0, -1, 1, 2, 7, 64, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**56, 2**62, 2**63 - 1, -(2**63), 10**40)
ODD_VALUES = (
    *ODD_NUMBERS, None, True, False, 0.5, -0.0, 1e308, "", "\0", "a" * 300, "../../x", "\ud800", "1", "F32", "$",
    [], {}, [[]], [0], [-1], [1, 2], {"": None}, {"$": "tuple"}, {"$": "tensor"}, {"$": "float", "hex": "x"},
)  # fmt: skip
MAX_DATA = 64 << 10


def mutated(data: bytes, chance: Chance) -> bytes:
    """Return the bytes with a few random changes."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
        at = chance.randrange(len(out) + 1)
        size = chance.choice((1, 1, 2, 4, 8, 16, chance.randrange(1, 256)))
        kind = chance.randrange(8)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at : at + 1] = bytes([chance.choice((0, 1, 34, 44, 91, 93, 123, 125, 127, 128, 255))])
        elif kind == 2:
            out[at : at + size] = chance.randbytes(size)
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            out[at:at] = out[at : at + size] * chance.choice((1, 2, 30))
        elif kind == 5:
            number = chance.choice(ODD_NUMBERS) % 2**64
            out[at : at + 8] = struct.pack("<Q", number)
        elif kind == 6:
            number = chance.choice(ODD_NUMBERS) % 2**32
            out[at : at + 4] = struct.pack("<I", number)
        else:
            other = chance.randrange(len(out) + 1)
            out[at : at + size] = out[other : other + size]
    return bytes(out[:MAX_DATA])


def odd_json(value: Any, chance: Chance) -> Any:
    """Return a copy of a JSON value in which one value, or a key, is another one."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.15:
        if chance.random() < 0.05:
            return json.loads("[" * 50 + "]" * 50)
        return chance.choice(ODD_VALUES)
    if isinstance(value, list):
        index = chance.randrange(len(value))
        changed = list(value)
        kind = chance.random()
        if kind < 0.1:
            del changed[index]
        elif kind < 0.2:
            changed.insert(index, changed[index])
        else:
            changed[index] = odd_json(value[index], chance)
        return changed
    key = chance.choice(list(value))
    changed = dict(value)
    kind = chance.random()
    if kind < 0.1:
        del changed[key]
    elif kind < 0.2:
        changed[str(chance.choice(ODD_VALUES))] = changed[key]
    else:
        changed[key] = odd_json(value[key], chance)
    return changed


def odd_in_places(content: Any, chance: Chance) -> Any:
    """Return a copy of a JSON value with one to three odd places."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        content = odd_json(content, chance)
    return content


def plain(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=True).encode()


def json_input(seed: bytes) -> Callable[[Chance], bytes]:
    content = json.loads(seed)
    content.pop("checksum", None)

    def make(chance: Chance) -> bytes:
        if chance.random() < 0.2:
            return mutated(seed, chance)
        odd = odd_in_places(content, chance)
        try:
            return json_file.encode(odd) if isinstance(odd, dict) else plain(odd)
        except (ValueError, UnicodeEncodeError):
            return plain(odd)

    return make


def _right_checksum(data: bytes) -> bytes:
    """Return a checked Parquet file with the checksum of its bytes, where it still has a footer."""
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if not 20 <= at < len(data):
        return data
    return data[: at - 16] + native.checksum(data[: at - 16] + data[at:]) + data[at:]


def table_input(table: pa.Table, metadata: Mapping[str, str], seed: bytes) -> Callable[[Chance], bytes]:
    def make(chance: Chance) -> bytes:
        kind = chance.random()
        if kind < 0.15:
            return mutated(seed, chance)
        if kind < 0.75:
            at = len(seed) - 8 - int.from_bytes(seed[-8:-4], "little")
            damaged = mutated(seed[at:-8], chance) if chance.random() < 0.6 else seed[at:-8]
            body = seed[: at - 16] if damaged != seed[at:-8] else mutated(seed[: at - 16], chance)
            return _right_checksum(body + bytes(16) + damaged + len(damaged).to_bytes(4, "little") + b"PAR1")
        return encode_checked(odd_table(table, chance), metadata=odd_metadata(metadata, chance))

    return make


def odd_metadata(metadata: Mapping[str, str], chance: Chance) -> dict[str, str]:
    changed = dict(metadata)
    if chance.random() < 0.3:
        key = chance.choice(list(changed))
        changed[key] = str(chance.choice(ODD_VALUES)).encode("utf-8", "replace").decode()
        if chance.random() < 0.2:
            del changed[key]
    return changed


def odd_table(table: pa.Table, chance: Chance) -> pa.Table:
    rows = table.to_pylist()
    for _ in range(chance.choice((0, 1, 1, 2))):
        if not rows:
            break
        row = chance.choice(rows)
        kind = chance.random()
        if kind < 0.1:
            rows.append(dict(row))
        elif kind < 0.2:
            rows.remove(row)
        else:
            field = chance.choice(table.schema)
            row[field.name] = _odd_cell(field.type, row[field.name], chance)
    schema = pa.schema([pa.field(field.name, field.type) for field in table.schema])
    if chance.random() < 0.05:
        schema = schema.remove(chance.randrange(len(schema)))
        rows = [{name: row[name] for name in schema.names} for row in rows]
    return pa.Table.from_pylist(rows, schema=schema)


def _odd_cell(kind: pa.DataType, value: Any, chance: Chance) -> Any:
    if chance.random() < 0.1:
        return None
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        return (chance.choice(ODD_NUMBERS) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    if pa.types.is_floating(kind):
        return chance.choice((0.0, float("nan"), float("inf"), -1.0, 1e308))
    if pa.types.is_list(kind):
        cells = (_odd_cell(kind.value_type, None, chance) for _ in range(chance.choice((0, 1, 2, 63, 64, 65, 300))))
        return [cell for cell in cells if cell is not None]
    if pa.types.is_fixed_size_binary(kind):
        return chance.randbytes(kind.byte_width)
    if pa.types.is_string(kind):
        texts = [text for text in ODD_VALUES if isinstance(text, str) and text != "\ud800"]
        return chance.choice([*texts, "header", "pad", "rank_local", "{", '{"a":1}', "[", str(value)[::-1]])
    return value
