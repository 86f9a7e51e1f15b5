"""nuScenes JSON tables as Arrow tables: bounded memory, checked fields and references.

A nuScenes table is one JSON array of flat records. DuckDB's reader streams it into Arrow batches, only the fields that are asked for, several times
as fast as any parser that makes Python objects. Small files, and what DuckDB refuses, go through the standard JSON parser, which either reads them or
says where they are broken.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray
from pipeline.errors import file_error

_TEXT, _NUMBER, _INT, _FLAG = pa.string(), pa.float64(), pa.int32(), pa.bool_()
_VECTOR = pa.list_(_NUMBER)

# The fields that are read, by table. Time stamps are read as double because Lyft Level 5 has fractional ones; micro-seconds are exact.
SCHEMAS: dict[str, dict[str, pa.DataType]] = {
    "category": {"token": _TEXT, "name": _TEXT},
    "attribute": {"token": _TEXT, "name": _TEXT},
    "visibility": {"token": _TEXT, "level": _TEXT},
    "instance": {
        "token": _TEXT, "category_token": _TEXT, "nbr_annotations": _INT, "first_annotation_token": _TEXT, "last_annotation_token": _TEXT,
    },
    "sensor": {"token": _TEXT, "channel": _TEXT, "modality": _TEXT},
    "calibrated_sensor": {
        "token": _TEXT, "sensor_token": _TEXT, "translation": _VECTOR, "rotation": _VECTOR, "camera_intrinsic": pa.list_(_VECTOR),
    },
    "ego_pose": {"token": _TEXT, "timestamp": _NUMBER, "rotation": _VECTOR, "translation": _VECTOR},
    "log": {"token": _TEXT, "logfile": _TEXT, "vehicle": _TEXT, "location": _TEXT},
    "scene": {
        "token": _TEXT, "log_token": _TEXT, "nbr_samples": _INT, "first_sample_token": _TEXT, "last_sample_token": _TEXT, "name": _TEXT,
    },
    "sample": {"token": _TEXT, "timestamp": _NUMBER, "prev": _TEXT, "next": _TEXT, "scene_token": _TEXT},
    "sample_data": {
        "token": _TEXT, "sample_token": _TEXT, "ego_pose_token": _TEXT, "calibrated_sensor_token": _TEXT, "timestamp": _NUMBER,
        "is_key_frame": _FLAG, "height": _INT, "width": _INT, "filename": _TEXT,
    },
    "sample_annotation": {
        "token": _TEXT, "sample_token": _TEXT, "instance_token": _TEXT, "visibility_token": _TEXT, "attribute_tokens": pa.list_(_TEXT),
        "translation": _VECTOR, "size": _VECTOR, "rotation": _VECTOR, "prev": _TEXT, "next": _TEXT,
        "num_lidar_pts": _INT, "num_radar_pts": _INT,
    },
    "map": {"token": _TEXT, "filename": _TEXT, "category": _TEXT},
}  # fmt: skip
TABLE_NAMES = tuple(SCHEMAS)
# prev and next of the sensor frames are a quarter of the largest table and only validation looks at them: `read_frame_links` reads them apart.
_FRAME_LINKS: dict[str, pa.DataType] = {"token": _TEXT, "prev": _TEXT, "next": _TEXT}
# Token columns with many rows a token are held as dictionaries: less memory, and each token is looked up once.
_REPEATED = {"sample_data": ("sample_token", "calibrated_sensor_token"), "sample_annotation": ("sample_token", "instance_token", "visibility_token")}
# Fields that may be null: image sizes of sensors that are not cameras.
_NULLABLE = {("sample_data", "height"), ("sample_data", "width")}
# Fields that the devkit reads although some nuScenes-format sets leave them out: a neutral value stands in.
_OPTIONAL: dict[tuple[str, str], Any] = {
    ("sample_annotation", "num_lidar_pts"): -1,
    ("sample_annotation", "num_radar_pts"): -1,
    ("sample_annotation", "visibility_token"): "",
    ("log", "vehicle"): "",
    ("log", "logfile"): "",
    ("visibility", "level"): "",
    ("map", "category"): "",
}
# Token fields that must point at an existing record: without them the tables cannot be joined.
REFERENCES: tuple[tuple[str, str, str], ...] = (
    ("scene", "log_token", "log"),
    ("sample", "scene_token", "scene"),
    ("calibrated_sensor", "sensor_token", "sensor"),
    ("sample_data", "sample_token", "sample"),
    ("sample_data", "ego_pose_token", "ego_pose"),
    ("sample_data", "calibrated_sensor_token", "calibrated_sensor"),
    ("instance", "category_token", "category"),
    ("sample_annotation", "sample_token", "sample"),
    ("sample_annotation", "instance_token", "instance"),
)
# Integers are read as double and cast afterwards, so that 2.7 points are refused and not rounded.
_SQL_TYPES = {_TEXT: "VARCHAR", _NUMBER: "DOUBLE", _INT: "DOUBLE", _FLAG: "BOOLEAN"}
# Nothing is fetched from or written to anywhere.
_DUCKDB: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1, "autoinstall_known_extensions": False, "autoload_known_extensions": False, "temp_directory": "",
}  # fmt: skip
_BATCH_ROWS = 1 << 16
# Below this size DuckDB takes longer to start than the standard parser to finish.
_SMALL_BYTES = 1 << 20
_EDGE_BYTES = 64
# What Arrow raises for a value of another type, an integer that is too large, and a string that is no text.
_MISFITS = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError)


@dataclass(frozen=True)
class Tables:
    """The raw tables of one version; `tables.sample_data` and so on are Arrow tables with the fields of `SCHEMAS`."""

    folder: Path
    category: pa.Table
    attribute: pa.Table
    visibility: pa.Table
    instance: pa.Table
    sensor: pa.Table
    calibrated_sensor: pa.Table
    ego_pose: pa.Table
    log: pa.Table
    scene: pa.Table
    sample: pa.Table
    sample_data: pa.Table
    sample_annotation: pa.Table
    map: pa.Table

    def counts(self) -> dict[str, int]:
        """Rows of each table."""
        return {name: getattr(self, name).num_rows for name in TABLE_NAMES}


def read_tables(dataroot: Path, version: str) -> Tables:
    """Read the 13 tables of `<dataroot>/<version>`.

    Raises:
        DataError: the folder or a table is missing, a table is not valid JSON, a record lacks a field or a field has the wrong type.
    """
    folder = dataroot / version
    if not folder.is_dir():
        known = sorted(path.parent.name for path in dataroot.glob("*/sample.json"))
        raise file_error(folder, "version not found", f"Versions in {dataroot}: {', '.join(known) or 'none'}")
    missing = [name for name in TABLE_NAMES if not (folder / f"{name}.json").is_file()]
    if missing:
        raise file_error(folder, f"table missing: {', '.join(f'{name}.json' for name in missing)}")
    return Tables(folder, **{name: read_table(folder, name) for name in TABLE_NAMES})


def read_table(folder: Path, name: str) -> pa.Table:
    """One table with the columns of `SCHEMAS[name]`, in file order. Raises `DataError` as `read_tables` does."""
    return _read(folder, name, SCHEMAS[name])


def read_frame_links(folder: Path) -> pa.Table:
    """token, prev and next of sample_data, in file order. Raises `DataError` as `read_tables` does."""
    return _read(folder, "sample_data", _FRAME_LINKS)


def _read(folder: Path, name: str, fields: dict[str, pa.DataType]) -> pa.Table:
    path = folder / f"{name}.json"
    schema = pa.schema(list(fields.items()))
    repeated = [field for field in _REPEATED.get(name, ()) if field in fields]
    try:
        parts = _stream(path, schema, repeated) if path.stat().st_size > _SMALL_BYTES else []
        table = _checked(path, name, _contiguous(parts or [_compact(_read_whole(path, schema), repeated)]))
    except OSError as error:
        raise file_error(path, f"file cannot be read ({error.strerror})") from None
    # What parsing held goes back to the system now: the tables that follow need it.
    pa.default_memory_pool().release_unused()
    return table


def _compact(part: pa.Table, repeated: Sequence[str]) -> pa.Table:
    for field in repeated:
        part = part.set_column(part.schema.get_field_index(field), field, part[field].dictionary_encode())
    return part


def _contiguous(parts: list[pa.Table]) -> pa.Table:
    """The parts as one table with one chunk a column; `parts` is emptied. Columns are joined one by one, so the table never exists twice."""
    names, columns = parts[0].column_names, [part.columns for part in parts]
    parts.clear()
    joined = []
    for number in range(len(names)):
        chunks = [chunk for part in columns for chunk in part[number].chunks]
        joined.append(pa.chunked_array(chunks, type=columns[0][number].type).unify_dictionaries().combine_chunks())
        for part in columns:
            part[number] = None
    return pa.table(joined, names=names)


def vectors(path: Path, table: pa.Table, field: str, length: int) -> FloatArray:
    """A list column as a float array (N,length). Raises `DataError` naming the first record whose list has another length."""
    column = table[field].combine_chunks()
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    if (lengths != length).any():
        row = int(np.argmax(lengths != length))
        raise file_error(path, f"{field} of record {table['token'][row].as_py()!r} is {column[row].as_py()}: it must hold {length} numbers")
    numbers = column.flatten()
    if numbers.null_count:
        row = int(np.argmax(numbers.is_null().to_numpy(zero_copy_only=False))) // length
        raise file_error(path, f"{field} of record {table['token'][row].as_py()!r} is {column[row].as_py()}: null is not a number")
    return numbers.to_numpy().reshape(-1, length)


def positions(keys: pa.ChunkedArray | pa.Array, table: pa.Table) -> NDArray[np.int64]:
    """Row of each key in `table['token']`, -1 where unknown."""
    if pa.types.is_dictionary(keys.type):
        keys = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        return positions(keys.dictionary, table)[keys.indices.to_numpy()]
    # nuScenes lists the ego poses in the order of the sensor frames that refer to them: then no token need be looked up.
    if isinstance(keys, pa.ChunkedArray) and keys.equals(table["token"]):
        return np.arange(len(keys))
    found = pc.index_in(keys, value_set=table["token"])
    return np.asarray(pc.fill_null(found, -1), dtype=np.int64)


def reference(tables: Tables, source: str, field: str, target: str) -> NDArray[np.int64]:
    """Row in table `target` of each record of `source` by its token `field`. Raises `DataError` naming an unknown token."""
    table = getattr(tables, source)
    rows = positions(table[field], getattr(tables, target))
    unknown = np.flatnonzero(rows < 0)
    if len(unknown):
        token, value = table["token"][int(unknown[0])].as_py(), table[field][int(unknown[0])].as_py()
        raise file_error(
            tables.folder / f"{source}.json",
            f"{field} {value!r} of record {token!r} is not a token of {target}.json ({len(unknown)} such records)",
        )
    return rows


def check_references(tables: Tables) -> None:
    """Raise `DataError` for the first of `REFERENCES` that names an unknown token."""
    for source, field, target in REFERENCES:
        reference(tables, source, field, target)


def _stream(path: Path, schema: pa.Schema, repeated: Sequence[str]) -> list[pa.Table]:
    """The table in parts, at least one; none where DuckDB refuses the file.

    Where a number is asked for, DuckDB also takes one in quotes, and any value as a string.
    """
    import duckdb

    if not _is_array(path):
        return []
    columns = {field.name: _sql_type(field.type) for field in schema}
    try:
        with duckdb.connect(config=_DUCKDB) as connection:
            records = connection.read_json(glob.escape(str(path)), columns=columns, format="array").to_arrow_reader(_BATCH_ROWS)
            parts = [pa.Table.from_batches([batch]).cast(schema) for batch in records]
            return [_compact(part, repeated) for part in (schema.empty_table(), *parts)]
    except (duckdb.Error, pa.ArrowException, OSError):  # a damaged file is an OSError of Arrow where some records were read before
        return []


def _is_array(path: Path) -> bool:
    """Whether the file begins and ends as an array does; DuckDB takes an empty file, and one that is cut after a comma, for a whole one."""
    with path.open("rb") as stream:
        start = stream.read(_EDGE_BYTES)
        stream.seek(max(0, path.stat().st_size - _EDGE_BYTES))
        return start.lstrip().startswith(b"[") and stream.read().rstrip().endswith(b"]")


def _sql_type(kind: pa.DataType) -> str:
    return f"{_sql_type(kind.value_type)}[]" if pa.types.is_list(kind) else _SQL_TYPES[kind]


def _read_whole(path: Path, schema: pa.Schema) -> pa.Table:
    """The standard JSON parser: slow, with precise messages."""
    try:
        records = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise file_error(path, f"not valid JSON ({error})", "Was the file cut?") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise file_error(path, "must hold one JSON array of records")
    columns = {field.name: [record.get(field.name) for record in records] for field in schema}
    return pa.table([_column(path, field, columns[field.name], columns["token"]) for field in schema], schema=schema)


def _column(path: Path, field: pa.Field, values: list[Any], tokens: list[Any]) -> pa.Array:
    try:
        return _array(values, field.type)
    except _MISFITS:
        pass
    for value, token in zip(values, tokens, strict=True):
        try:
            _array([value], field.type)
        except _MISFITS:
            raise file_error(path, f"{field.name} of record {token!r} is {value!r}: it must be {_plain(field.type)}") from None
    raise file_error(path, f"{field.name}: values do not fit {_plain(field.type)}")


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    # Arrow cuts the fraction off a float that is to be an integer, but refuses to cast it.
    return pa.array(values, type=_NUMBER).cast(_INT) if kind == _INT else pa.array(values, type=kind)


def _plain(kind: pa.DataType) -> str:
    """An Arrow type in a reader's words."""
    names = {_TEXT: "a string", _NUMBER: "a number", _INT: "an integer", _FLAG: "true or false"}
    return names.get(kind, "a list")


def _checked(path: Path, name: str, table: pa.Table) -> pa.Table:
    """Fill optional fields; raise `DataError` where a required field is absent or null."""
    for position, field in enumerate(table.schema):
        column = table[field.name]
        if not column.null_count or (name, field.name) in _NULLABLE:
            continue
        if (name, field.name) in _OPTIONAL:
            table = table.set_column(position, field, pc.fill_null(column, _OPTIONAL[name, field.name]))
            continue
        row = int(np.argmax(column.is_null().to_numpy()))
        token = table["token"][row].as_py() if field.name != "token" else f"number {row}"
        raise file_error(path, f"{field.name} of record {token!r} is missing ({column.null_count} such records)")
    return table
