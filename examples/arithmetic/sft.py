"""Make a base model like the demo's from random weights, with `python -m megatron_dapo sft`.

    python -m examples.arithmetic.sft [key=value ...]        2 minutes on one CPU core

The demonstrations are those of pretrain.py, which wrote the committed base/ with a loop of its own.
They are sums with good, bad and no answers, in the same mixture, each as a prompt and a response.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.arithmetic.pretrain import DEMONSTRATIONS, SETTINGS, accuracies
from examples.arithmetic.problems import Sum, split
from examples.cache import cache_folder
from examples.character_model import Settings, demonstration, random_model
from examples.demo_run import config_path, prompt_files, set_aside
from launch.command_line import checked_config
from launch.local import run_local
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.storage.run_folder import RunFolder


def write_demonstrations(path: Path, problems: Sequence[Sum], number: int, settings: Settings) -> Path:
    """Write `number` demonstrations, one per line, the same for the same settings; return the
    path."""
    draw = random.Random(settings.seed)
    lines = []
    for _ in range(number):
        problem, ((_, response),) = demonstration(settings, DEMONSTRATIONS, problems, draw)
        lines.append(json.dumps({"prompt": problem.prompt, "response": response}) + "\n")
    write_whole(path, "".join(lines))
    return path


def fine_tune(model: Path, folder: Path, settings: Settings, overrides: Sequence[str]) -> tuple[int, RunFolder]:
    """Write the files to a folder, and run configs/sft_demo.yaml on them; return exit code and run
    folder. Raise UserError for mistakes in the overrides."""
    learned, held_out = split()
    folder.mkdir(parents=True, exist_ok=True)
    train = write_demonstrations(folder / "train.jsonl", learned, settings.steps * settings.batch_size, settings)
    val = write_demonstrations(folder / "val.jsonl", held_out, len(held_out), settings)
    prepared = [f"actor_rollout_ref.model.path={model}", *prompt_files(train, val), "trainer.test_freq=100"]
    config = checked_config(str(config_path("sft_demo.yaml")), [*prepared, *overrides])
    run = RunFolder.of(config.trainer)
    set_aside(run.path)
    return run_local(config), run


def main(overrides: Sequence[str]) -> int:
    from transformers import AutoModelForCausalLM

    folder = cache_folder() / "sft_demo"
    try:
        code, run = fine_tune(random_model(folder / "start", SETTINGS.seed), folder, SETTINGS, overrides)
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    if code == 0:
        shares = accuracies(AutoModelForCausalLM.from_pretrained(run.model).float().eval())["held_out_accuracy"]
        print_line(
            f"\nheld-out accuracy of {run.model}: greedy {shares['greedy']:.3f}, sampled {shares['sampled']:.3f}\n"
            f"train it: .venv/bin/python -m examples.arithmetic.demo actor_rollout_ref.model.path={run.model}"
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
