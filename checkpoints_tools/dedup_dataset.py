"""Drops repeated prompts from parquet files: of DAPO-Math-17k's 1.79 million rows 17.4 thousand are
left.

python -m checkpoints_tools.dedup_dataset --input dapo-math-17k.parquet --output
dapo-math-17k-dedup.parquet
"""

import argparse
import glob
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from checkpoints_tools.command_line import exit_code, no_space, progress, rank, signals_as_exit
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import whole_file
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.data.prompt_dataset import Columns, content_key
from megatron_dapo.data.prompt_files import rows_of
from megatron_dapo.storage.file_lock import FileLock

BATCH_ROWS = 8192  # read at once, and of a row group written
READ_BUFFER_BYTES = 1 << 20  # per column; pyarrow's own choice is to read a whole row group ahead
ANSWER_COLUMNS = ("reward_model", "label")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 2 for mistakes of the user."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.dedup_dataset",
        description="Copy prompt files without repeated prompts. Rows with equal messages and answer are the same "
        "prompt, whatever their index: the rule of data.dedup. The first one is kept, with all its columns. Rows are "
        "read piece by piece; memory grows (by some 300 bytes each) with the number of different prompts only.",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".parquet files of one schema")
    parser.add_argument("--output", required=True, metavar="FILE", help="the .parquet file to write; must not exist")
    parser.add_argument("--prompt-key", default="prompt", metavar="COLUMN", help="as data.prompt_key (default: prompt)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    if rank() != 0:  # one process is enough for it, however many were started
        return 0

    def work() -> None:
        report = dedup([Path(name) for name in options.input], Path(options.output), options.prompt_key)
        print_line(json.dumps(report.as_json(), indent=2) if options.json else report.table())

    with signals_as_exit():
        return exit_code(work)


@dataclass
class Report:
    """The result for the rows."""

    output: str
    num_input_bytes: int
    num_output_bytes: int = 0
    copies: Counter = field(default_factory=Counter)
    """Hash of prompt and answer -> rows."""
    answers: Counter = field(default_factory=Counter)
    """Hash of prompt -> its answers."""

    def is_first(self, row: dict[str, Any], place: str, prompt_key: str) -> bool:
        """Count the row; return True for the first of its kind. Raises UserError for an invalid
        row."""
        key = bytes.fromhex(content_key(row, place, Columns(prompt_key)))
        self.copies[key] += 1
        if self.copies[key] > 1:
            return False
        prompt = json.dumps(row[prompt_key], sort_keys=True, default=str)
        self.answers[hashlib.sha256(prompt.encode()).digest()[:16]] += 1
        return True

    def as_json(self) -> dict[str, Any]:
        num_rows = self.copies.total()
        num_kept = len(self.copies)
        return {
            "output": self.output,
            "num_rows": num_rows,
            "num_kept": num_kept,
            "num_duplicates": num_rows - num_kept,
            "copies_min": min(self.copies.values()),
            "copies_max": max(self.copies.values()),
            "num_prompts_with_several_answers": sum(number > 1 for number in self.answers.values()),
            "num_input_bytes": self.num_input_bytes,
            "num_output_bytes": self.num_output_bytes,
        }

    def table(self) -> str:
        numbers = self.as_json()
        rows = [
            ("rows read", f"{numbers['num_rows']:,}"),
            ("duplicates dropped", f"{numbers['num_duplicates']:,}"),
            ("rows kept", f"{numbers['num_kept']:,}"),
            ("copies of a prompt", f"{numbers['copies_min']:,} to {numbers['copies_max']:,}"),
            ("prompts with several answers, all kept", f"{numbers['num_prompts_with_several_answers']:,}"),
            ("size", f"{self.num_input_bytes / 1e6:,.1f} MB -> {self.num_output_bytes / 1e6:,.1f} MB"),
            ("written", self.output),
        ]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def dedup(inputs: Sequence[Path], output: Path, prompt_key: str = "prompt") -> Report:
    """Write the first row of every prompt, in the order of the files, whole. Schema and codec are
    the first file's.

    Raises UserError for unreadable or unlike files, rows without prompt or answer, and an existing
    or unwritable output. Nothing is then left behind.
    """
    _check_output(output)
    with ExitStack() as stack:
        files = [stack.enter_context(_opened(path)) for path in inputs]
        schema = _common_schema(inputs, files, prompt_key)
        num_rows = sum(file.metadata.num_rows for file in files)
        if num_rows == 0:
            raise UserError(f"--input {', '.join(map(str, inputs))}: there are no rows.")
        report = Report(str(output), sum(path.stat().st_size for path in inputs))
        advance = stack.enter_context(progress("dedup", num_rows, "rows"))
        kept = _kept(zip(inputs, files, strict=True), prompt_key, report, advance)
        try:
            with _only_writer(output), whole_file(output) as target:
                _write(target, kept, schema, _compression(files))
        except OSError as error:
            raise no_space(output, error) from error
    report.num_output_bytes = output.stat().st_size
    return report


def _check_output(output: Path) -> None:
    if output.exists():
        raise UserError(f"--output {output} exists already; name a file that does not, or remove it.")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}; make it first.")


@contextmanager
def _only_writer(output: Path) -> Iterator[None]:
    """Keep other processes out while the file is written, and remove the leftovers of a killed
    process.

    Raise UserError if another process is writing the file, or if it exists or is not writable.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    if not lock.try_acquire():
        raise UserError(f"--output {output} is being written by {lock.holder()}; wait for its end, or name another.")
    try:
        _check_output(output)  # the one who wrote it may just have ended
        for left in output.parent.glob(f".{glob.escape(output.name)}.*.tmp"):
            left.unlink()
        yield
    finally:
        lock.release(remove=True)


def _opened(path: Path) -> pyarrow.parquet.ParquetFile:
    if not path.is_file():
        raise UserError(f"--input {path} is not a file here; correct the path.")
    try:
        return pyarrow.parquet.ParquetFile(
            path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"--input {path} cannot be read as parquet: {error}; download it again.") from error


def _common_schema(inputs: Sequence[Path], files: Sequence, prompt_key: str) -> pyarrow.Schema:
    first = files[0].schema_arrow
    for path, file in zip(inputs, files, strict=True):
        if not file.schema_arrow.equals(first):
            raise UserError(f"--input {path} has other columns than {inputs[0]}; give files of one schema.")
    if prompt_key not in first.names:
        columns = ", ".join(first.names[:12])
        raise UserError(f"--input {inputs[0]} has no column {prompt_key!r} (it has: {columns}); name it: --prompt-key.")
    return first


def _compression(files: Sequence) -> str:
    """Return the codec of the first stored column."""
    metadata = next(file.metadata for file in files if file.metadata.num_row_groups)
    codec = metadata.row_group(0).column(0).compression.lower()
    return "none" if codec == "uncompressed" else codec


def _kept(files: Iterator, prompt_key: str, report: Report, advance) -> Iterator[pyarrow.RecordBatch]:
    """Yield the new rows of every batch."""
    for path, file in files:
        number = 0
        columns = [name for name in (prompt_key, *ANSWER_COLUMNS) if name in file.schema_arrow.names]
        try:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                rows = rows_of(batch.select(columns), path, number)
                first = [
                    report.is_first(row, f"{path}, row {number + offset}", prompt_key)
                    for offset, row in enumerate(rows, 1)
                ]
                number += len(rows)
                advance(len(rows))
                yield batch.filter(pyarrow.array(first))
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"--input {path} cannot be read past row {number} ({error}); download it again.") from error


def _write(target: BinaryIO, batches: Iterator, schema: pyarrow.Schema, compression: str) -> None:
    """Write the batches in row groups of at least BATCH_ROWS rows; only the last one may have
    fewer.

    A batch with a hundredth of its rows kept would make a poor row group.
    """
    with pyarrow.parquet.ParquetWriter(target, schema, compression=compression) as writer:
        waiting: list[pyarrow.RecordBatch] = []
        for batch in batches:
            waiting += [batch] if batch.num_rows else []
            if sum(part.num_rows for part in waiting) >= BATCH_ROWS:
                writer.write_table(pyarrow.Table.from_batches(waiting, schema))
                waiting = []
        if waiting:
            writer.write_table(pyarrow.Table.from_batches(waiting, schema))


if __name__ == "__main__":
    sys.exit(main())
