"""Two small prompt files, and a run's order of their prompts, by the keys of `data`.

python -m examples.prompt_choice.order
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.arithmetic.problems import BASE
from megatron_dapo.config.loader import load_config
from megatron_dapo.data.prompt_cursor import make_cursor
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.rollout.build_rollout import load_train_prompts

# (prompt, answer, share of a model's answers that were right)
SUMS = [("1+1=", "2", 1.0), ("2+7=", "9", 0.9), ("17+5=", "22", 0.5), ("48+76=", "124", 0.1), ("96+87=", "183", 0.0)]
PRODUCTS = [("2*3=", "6", 0.8), ("7*8=", "56", 0.4), ("12*12=", "144", 0.2)]
CHOICES = {
    "as they are": [],
    "three quarters of the draws are products": ["data.mixture=[1, 3]"],
    "none that is always solved, or never": ["data.pass_rate=[0.05, 0.95]"],
    "easy ones first": ["data.curriculum=column", "data.difficulty_key=difficulty"],
}


def write_files(folder: Path) -> list[Path]:
    """Write both files, with a pass rate and a difficulty per row."""
    paths = []
    for name, rows in (("sums", SUMS), ("products", PRODUCTS)):
        lines = [
            {"prompt": prompt, "label": answer, "data_source": name, "pass_rate": rate, "difficulty": 1 - rate}
            for prompt, answer, rate in rows
        ]
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def first_draws(files: Sequence[Path], overrides: Sequence[str], count: int = 8) -> list[str]:
    """Return the first prompts of a run with these overrides."""
    names = ",".join(map(str, files))
    config = load_config(None, [f"data.train_files=[{names}]", "data.apply_chat_template=false", *overrides])
    dataset = load_train_prompts(config, load_tokenizer(BASE))
    return [dataset.prompts[number].text for number in make_cursor(config.data, dataset).next(count)]


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        for name, overrides in CHOICES.items():
            print(f"{name}: {' '.join(overrides) or 'no key'}\n    {'  '.join(first_draws(files, overrides))}")


if __name__ == "__main__":
    main()
