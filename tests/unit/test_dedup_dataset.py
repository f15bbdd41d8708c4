"""dedup_dataset: the rows kept by the program, unchanged, in bounded memory;
or one sentence, no file."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints_tools.dedup_dataset import main
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.storage.file_lock import FileLock
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def row(problem: str, answer: str = "34", index: str = "a") -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": problem, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def key(row: dict) -> tuple[str, str]:
    return row["prompt"][0]["content"], row["reward_model"]["ground_truth"]


def write(path: Path, rows: list[dict], metadata: dict | None = None, **options) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path, **options)
    return path


def read(path: Path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()


def dedup(output: Path, *inputs: Path, options=()) -> int:
    return main(["--input", *map(str, inputs), "--output", str(output), *options])


class CharTokenizer:
    def encode_prompt(self, prompt, apply_chat_template):
        text = "".join(message["content"] for message in prompt)
        return tuple(map(ord, text)), text


few = st.lists(st.builds(row, st.sampled_from("abc"), st.sampled_from("12"), st.text("xyz", max_size=1)), min_size=1)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(few, min_size=1, max_size=3))
def test_it_keeps_the_rows_that_the_program_keeps_with_all_their_columns(tmp_path, monkeypatch, files):
    monkeypatch.setattr("checkpoints_tools.dedup_dataset.BATCH_ROWS", 3)
    paths = [write(tmp_path / f"{number}.parquet", rows) for number, rows in enumerate(files)]
    output = tmp_path / "out.parquet"
    output.unlink(missing_ok=True)
    assert dedup(output, *paths) == 0
    program = PromptDataset.load(list(map(str, paths)), "prompt", CharTokenizer(), 10, conflicting_answers="keep")
    kept = read(output)
    assert [key(row) for row in kept] == [(prompt.text, prompt.ground_truth) for prompt in program.prompts]
    firsts = {key(row): row for row in reversed(sum(files, []))}  # the first of each kind stays
    assert kept == [firsts[key(row)] for row in kept]


@pytest.mark.parametrize("codec", ["snappy", "zstd", "none"])
def test_schema_metadata_and_codec_stay(tmp_path, codec):
    path = write(tmp_path / "in.parquet", [row("a"), row("a")], {"huggingface": "features"}, compression=codec)
    assert dedup(tmp_path / "out.parquet", path) == 0
    before, after = (pyarrow.parquet.ParquetFile(tmp_path / f"{name}.parquet") for name in ("in", "out"))
    assert after.schema_arrow.equals(before.schema_arrow, check_metadata=True)
    codecs = [file.metadata.row_group(0).column(0).compression for file in (before, after)]
    assert codecs[0] == codecs[1]


def test_the_report_counts_rows_duplicates_and_prompts_with_several_answers(tmp_path, capsys):
    rows = [row("a"), row("b"), row("a", index="z"), row("a"), row("b", answer="35")]
    assert dedup(tmp_path / "out.parquet", write(tmp_path / "in.parquet", rows), options=["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_rows"], report["num_kept"], report["num_duplicates"]) == (5, 3, 2)
    assert (report["copies_min"], report["copies_max"], report["num_prompts_with_several_answers"]) == (1, 3, 1)
    assert report["num_output_bytes"] == (tmp_path / "out.parquet").stat().st_size
    assert dedup(tmp_path / "again.parquet", tmp_path / "out.parquet") == 0
    table = capsys.readouterr().out
    assert "duplicates dropped                      0\n" in table and str(tmp_path / "again.parquet") in table


def broken(folder: Path) -> dict[str, tuple[list[str], str, list[str], str]]:
    """Fault -> (inputs, output, options, words of the sentence)."""
    good = str(write(folder / "good.parquet", [row("a")]))
    (folder / "text.parquet").write_text("not parquet")
    content = write(folder / "whole.parquet", [row(f"{i}" * 50) for i in range(5000)], compression="none").read_bytes()
    middle = len(content) // 2
    (folder / "cut.parquet").write_bytes(content[:middle] + bytes(2000) + content[middle + 2000 :])
    write(folder / "other.parquet", [{"prompt": "a", "label": "1"}])
    write(folder / "no_answer.parquet", [{"prompt": "a"}])
    latin = pyarrow.array([b"caf\xe9"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": latin, "label": ["1"]}), folder / "latin.parquet")
    write(folder / "large.parquet", [{"prompt": "a", "label": "1"}, {"prompt": "a", "label": "1" * 100_000}])
    write(folder / "nan.parquet", [{"prompt": "a", "label": float("nan")}])
    empty = pyarrow.parquet.read_table(good).slice(0, 0)
    pyarrow.parquet.write_table(empty, folder / "no_rows.parquet")
    (folder / "there.parquet").write_text("")
    output = str(folder / "out" / "out.parquet")
    return {
        "no such file": ([f"{folder}/absent.parquet"], output, [], "absent.parquet is not a file"),
        "no parquet": ([f"{folder}/text.parquet"], output, [], "text.parquet cannot be read as parquet"),
        "damaged": ([f"{folder}/cut.parquet"], output, [], "cut.parquet"),
        "not UTF-8": ([f"{folder}/latin.parquet"], output, [], "latin.parquet, rows 1 to 1: there is text that is not"),
        "too large a row": ([f"{folder}/large.parquet"], output, [], "large.parquet, row 2: the row is larger than"),
        "no number": ([f"{folder}/nan.parquet"], output, [], "nan.parquet, row 1, column 'label': nan is no answer"),
        "other columns": ([good, f"{folder}/other.parquet"], output, [], "other.parquet has other columns than"),
        "no prompt column": ([good], output, ["--prompt-key", "question"], "no column 'question'"),
        "no answer": ([f"{folder}/no_answer.parquet"], output, [], "no_answer.parquet, row 1: the answer is missing"),
        "no rows": ([f"{folder}/no_rows.parquet"], output, [], "there are no rows"),
        "output exists": ([good], f"{folder}/there.parquet", [], "there.parquet exists already"),
        "no folder": ([good], f"{folder}/nowhere/out.parquet", [], "there is no folder"),
    }


KINDS = (
    "no such file, no parquet, damaged, not UTF-8, too large a row, no number, other columns, no prompt column, "
    "no answer, no rows, output exists, no folder"
).split(", ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_is_one_sentence_and_leaves_nothing(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr("megatron_dapo.data.prompt_files.MAX_ROW_BYTES", 100_000)
    (tmp_path / "out").mkdir()
    inputs, output, options, words = broken(tmp_path)[kind]
    assert dedup(Path(output), *map(Path, inputs), options=options) == 2
    count, *sentences = capsys.readouterr().err.splitlines()
    assert count == "1 mistake to correct:" and len(sentences) == 1 and words in sentences[0], sentences
    assert not list((tmp_path / "out").iterdir()) and not (tmp_path / "nowhere").exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, capsys):
    path = write(tmp_path / "in.parquet", [row(os.urandom(20).hex()) for _ in range(2000)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        code = dedup(tmp_path / "out.parquet", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and "out.parquet cannot be written (File too large)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_what_a_killed_one_left_is_removed_and_nothing_of_another_output(tmp_path):
    path = write(tmp_path / "in.parquet", [row("a"), row("b")])
    for left in (".out.parquet.77.tmp", ".out.parquet.lock", ".about.parquet.77.tmp"):
        (tmp_path / left).touch()
    assert dedup(tmp_path / "out.parquet", path) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"in.parquet", "out.parquet", ".about.parquet.77.tmp"}


def test_an_output_that_another_process_writes_is_refused_and_left_to_it(tmp_path, capsys, monkeypatch):
    path, temporary = write(tmp_path / "in.parquet", [row("a")]), tmp_path / ".out.parquet.77.tmp"
    temporary.touch()
    monkeypatch.setattr(FileLock, "try_acquire", lambda lock: False)
    monkeypatch.setattr(FileLock, "holder", lambda lock: "process 77 on node2")
    assert dedup(tmp_path / "out.parquet", path) == 2
    assert "out.parquet is being written by process 77 on node2; wait for its end" in capsys.readouterr().err
    assert temporary.exists() and not (tmp_path / "out.parquet").exists()


def test_an_interrupted_deduplication_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "in.parquet", [row("a")])
    monkeypatch.setattr("checkpoints_tools.dedup_dataset._write", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        dedup(tmp_path / "out.parquet", path)
    assert end.value.code == 128 + signal.SIGTERM and [file.name for file in tmp_path.iterdir()] == ["in.parquet"]


def test_of_many_processes_one_works(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert dedup(tmp_path / "out.parquet", write(tmp_path / "in.parquet", [row("a")])) == 0
    assert not (tmp_path / "out.parquet").exists()


MEASURED = """
import resource, sys
from checkpoints_tools.dedup_dataset import main
for path in sys.argv[1:]:
    assert main(["--input", path, "--output", path + ".out"]) == 0
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    """42 000 rows of 3 kB, which do not compress: 126 MB in one row group, never held at once."""
    table = pyarrow.Table.from_pylist([row(os.urandom(1500).hex(), index=str(i)) for i in range(700)])
    paths = [tmp_path / "few.parquet", tmp_path / "many.parquet"]
    for path, copies in zip(paths, (10, 60), strict=True):
        whole = pyarrow.concat_tables([table] * copies)
        pyarrow.parquet.write_table(whole, path, compression="none", use_dictionary=False, row_group_size=1 << 20)
    command = [sys.executable, "-c", MEASURED, *map(str, paths)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    peaks = [int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("peak")]
    assert paths[1].stat().st_size > 120e6
    assert peaks[1] - peaks[0] < 60e6, peaks  # of 100 MB more
