"""Measures how often a model solves each prompt of a file, and writes the file with a column of
these pass rates.

python -m checkpoints_tools.score_dataset --model MODEL --data train.parquet --output scored.parquet
--num-answers 8
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from checkpoints_tools.command_line import exit_code, signals_as_exit
from megatron_dapo.__main__ import main as program
from megatron_dapo.commands.evaluation.answer_file import read_answers
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import whole_file
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.config.loader import load_config
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_dataset import Columns, content_key
from megatron_dapo.data.prompt_files import read_rows
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.rollout.build_rollout import load_dataset
from megatron_dapo.storage.model_folder import ModelFolder

_ROLLOUT = "actor_rollout_ref.rollout"

Rates = Mapping[str, float]
"""Key of a prompt -> share of right answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 2 for mistakes of the user, else that of the evaluation."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.score_dataset",
        description="Answer every prompt of a file with a model, as `python -m megatron_dapo eval` does, and write the "
        "file with the share of right answers in a column, for data.pass_rate. It can be killed: the same command goes "
        "on. All options of eval, and key=value, are passed on; without others answers are sampled at temperature 1.",
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="a .jsonl or .parquet file with prompts")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="of the same kind; must not exist")
    parser.add_argument("--num-answers", type=int, default=8, metavar="N", help="to each prompt (default: 8)")
    parser.add_argument("--column", default="pass_rate", help="name of the new column (default: pass_rate)")
    options, passed_on = parser.parse_known_args(argv)
    codes: list[int] = []

    def work() -> None:
        _check(Path(options.data), options.output, options.column)
        answers = options.output.with_name(f"{options.output.name}.answers")
        sampling = [f"{_ROLLOUT}.val_n={options.num_answers}", f"{_ROLLOUT}.val_temperature=1.0"]
        named = ["--data", options.data, "--output", str(answers)]
        codes.append(program(["eval", *named, *sampling, *passed_on]))
        if codes[0] == 0:
            config = load_config(str(answers / "config.yaml"))
            rates = _pass_rates(config, options.data, answers)
            num_rows, num_scored = _write_scored(Path(options.data), options.output, config, rates, options.column)
            print_line(f"{num_scored} of {num_rows} rows have a pass rate: {options.output}")

    with signals_as_exit():
        code = exit_code(work)
    return code or (codes[0] if codes else 0)


def _check(data: Path, output: Path, column: str) -> None:
    """Raise UserError for mistakes that would otherwise show after hours; eval itself checks the
    data file."""
    if output.suffix != data.suffix:
        raise UserError(f"--output {output} is of another kind than --data {data}; name a {data.suffix} file.")
    if output.exists():
        raise UserError(f"--output {output} exists already; name a file that does not, or remove it.")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}; make it first.")
    if data.is_file() and column in _columns(data):
        raise UserError(f"{data} has a column {column!r} already; name another one: --column.")


def _columns(data: Path) -> set[str]:
    if data.suffix == ".parquet":
        return set(pyarrow.parquet.read_schema(data).names)
    return {name for _, row in read_rows(data, ()) if isinstance(row, dict) for name in row}


def _pass_rates(config: Config, data: str, answers: Path) -> Rates:
    """Return the rates by an evaluation's answers to a file. Raises UserError."""
    tokenizer = load_tokenizer(ModelFolder.of(config.actor_rollout_ref.model.path).hf)
    prompts = load_dataset([data], config, tokenizer).prompts
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for record in read_answers(answers):
        verdicts[prompts[record["prompt_index"]].key].append(record["correct"])
    return {key: sum(correct) / len(correct) for key, correct in verdicts.items()}


def _write_scored(data: Path, output: Path, config: Config, rates: Rates, column: str) -> tuple[int, int]:
    """Write the rows with their rates, null for an unanswered prompt (too long); return the number
    of rows and of those with a rate."""
    keys = config.data
    columns = Columns(keys.prompt_key, keys.answer_key, keys.prompt_template, keys.data_source)
    of_rows = [rates.get(key) for key in _keys(data, columns)]
    with whole_file(output) as target:
        if data.suffix == ".parquet":
            table = pyarrow.parquet.read_table(data)
            scored = table.append_column(column, pyarrow.array(of_rows, type=pyarrow.float64()))
            pyarrow.parquet.write_table(scored, target)
        else:
            for (_, row), rate in zip(read_rows(data, (keys.prompt_key,)), of_rows, strict=True):
                target.write(json.dumps({**row, column: rate}, ensure_ascii=False).encode() + b"\n")
    return len(of_rows), sum(rate is not None for rate in of_rows)


def _keys(data: Path, columns: Columns) -> Iterator[str]:
    answer = ("reward_model", "label") if columns.answer_key is None else (columns.answer_key,)
    for number, row in read_rows(data, (columns.prompt_key, *answer)):
        yield content_key(row, f"{data}, row {number}", columns)


if __name__ == "__main__":
    sys.exit(main())
