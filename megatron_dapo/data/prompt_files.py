"""The reader of prompt files, .jsonl and .parquet, with the file and row of each fault.

Faults are damage, rows too large, and text other than JSON.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.common.bounded import MAX_DEPTH, depth_of
from megatron_dapo.common.errors import UserError

if TYPE_CHECKING:
    import pyarrow

# the hidden tests of a programming task take megabytes; a larger row is a mistake
MAX_ROW_BYTES = 32 << 20
_PARQUET_BATCH_ROWS = 8192
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_KINDS = {
    b"\x1f\x8b": "gzip-compressed; decompress it first (gunzip)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; decompress it first (unzstd)",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"PAR1": "a parquet file; name it .parquet",
    b"\xff\xfe": "UTF-16 text; write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16 text; write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
}


ColumnCheck = Callable[[str, list[str]], None]
"""(place, names of its columns): raises UserError if they do not suffice."""


def read_rows(path: Path, columns: tuple[str, ...], check: ColumnCheck | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of each row, counted from 1; of a parquet file only these columns.

    check: of a parquet file's columns, before a row is read. By default the first of `columns` must
    be there. Raises UserError.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"prompt file {str(path)!r} is of no known kind; use {' or '.join(_READERS)}.")
    if not path.is_file():
        raise UserError(f"prompt file {str(path)!r} does not exist (data.train_files, data.val_files).")
    return reader(path, columns, check)


def rows_of(batch: "pyarrow.RecordBatch", path: Path, num_before: int) -> list[dict[str, Any]]:
    """Return the rows of a parquet file's batch. num_before: rows of the file before it.

    Raises UserError, naming the row, for one above MAX_ROW_BYTES and for text not in UTF-8, and for
    two columns of one name.
    """
    names = Counter(batch.schema.names)
    if twice := [name for name, number in names.items() if number > 1]:
        raise UserError(f"{path}: there are {names[twice[0]]} columns {twice[0]!r}; remove or rename all but one.")
    if (offset := _oversized(batch)) is not None:
        raise _too_large(path, num_before + offset + 1)
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        rows = f"rows {num_before + 1} to {num_before + batch.num_rows}"
        raise UserError(f"{path}, {rows}: there is text that is not UTF-8 ({error.reason}); write it anew.") from error


def no_column(place: str, column: str, columns: list[str], key: str = "data.prompt_key") -> UserError:
    """Return the error of a file without the column named by a key."""
    some = ", ".join(columns[:12])
    return UserError(f"{place}: column {column!r} is missing (columns here: {some}); name yours with {key}.")


def _read_jsonl(path: Path, columns: tuple[str, ...], check: ColumnCheck | None) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            start = file.read(4)
            for magic, words in _OTHER_KINDS.items():
                if start.startswith(magic):
                    raise UserError(f"prompt file {str(path)!r} is {words}.")
            file.seek(len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0)
            for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), 1):
                if len(line) > MAX_ROW_BYTES:
                    raise _too_large(path, number)
                if line.strip():
                    yield number, _row_of(line, f"{path}, row {number}")
    except OSError as error:
        raise UserError(f"prompt file {str(path)!r} cannot be read ({error.strerror or error}).") from error


def _row_of(line: bytes, place: str) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: this line is not UTF-8 (byte {line[error.start]:#04x} at position {error.start}); write the "
            f"file as UTF-8, from Latin-1 with iconv -f LATIN1 -t UTF-8."
        ) from error
    try:
        row = _JSON.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and depth_of(row) > MAX_DEPTH:
            raise RecursionError
        if "\\ud" in text or "\\uD" in text:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{place}: lists and objects are nested more than {MAX_DEPTH} deep; flatten them.") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            f"{place}: {ascii(half)} is half of a surrogate pair, which no text may hold; remove it or write the "
            f"character whole."
        ) from error
    except ValueError as error:
        raise UserError(f"{place}: this line is no JSON ({error}).") from error
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return members


def _not_a_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number; write null or text")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_not_a_number)


def _read_parquet(path: Path, columns: tuple[str, ...], check: ColumnCheck | None) -> Iterator[tuple[int, Any]]:
    import pyarrow  # costs 0.2 s, and only processes that read prompts need it
    import pyarrow.parquet

    num_rows = 0
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if check is not None:
                check(str(path), names)
            elif columns[0] not in names:
                raise no_column(f"{path}", columns[0], names)
            wanted = [name for name in columns if name in names]
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=wanted):
                yield from enumerate(rows_of(batch, path, num_rows), num_rows + 1)
                num_rows += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        where = f" past row {num_rows}" if num_rows else ""
        raise UserError(f"prompt file {str(path)!r} cannot be read as parquet{where}: {error}.") from error


def _oversized(batch: "pyarrow.RecordBatch") -> int | None:
    """Return the first row above MAX_ROW_BYTES, found by halves: a batch below it has none."""
    if _num_bytes(batch) <= MAX_ROW_BYTES:
        return None
    if batch.num_rows == 1:
        return 0
    half = batch.num_rows // 2
    in_first_half = _oversized(batch.slice(0, half))
    if in_first_half is not None:
        return in_first_half
    in_second_half = _oversized(batch.slice(half))
    return None if in_second_half is None else half + in_second_half


def _num_bytes(batch: "pyarrow.RecordBatch") -> int:
    """Return the bytes of the batch's own rows.

    The slice of a dictionary column (pandas' category) has the values of all rows, too.
    """
    import pyarrow

    return sum(
        (column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column).nbytes
        for column in batch.columns
    )


def _too_large(path: Path, number: int) -> UserError:
    return UserError(f"{path}, row {number}: the row is larger than {MAX_ROW_BYTES >> 20} MiB; shorten or remove it.")


_READERS: dict[str, Callable[[Path, tuple[str, ...], ColumnCheck | None], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
