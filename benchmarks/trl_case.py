"""One run of TRL's GRPOTrainer, started by bench_trl.py in a process with TRL on its PYTHONPATH.

python -m benchmarks.trl_case SETTINGS, the JSON of `Settings`. Writes a row per rollout step to its
rows file.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.arithmetic.reward import score


@dataclass(frozen=True)
class Settings:
    """The settings of a run, the same for both trainers (`bench_trl.py`)."""

    model: str
    prompts: str
    rows: str  # the file for a row per rollout step
    num_steps: int
    prompts_per_step: int
    samples_per_prompt: int
    mini_batches: int
    max_response_length: int
    lr: float
    clip_low: float
    clip_high: float


def reward(completions: list[str], ground_truth: list[str], **columns: object) -> list[float]:
    return [score("", text, truth, {}) for text, truth in zip(completions, ground_truth, strict=True)]


class Measured(GRPOTrainer):
    """Keeps the CPU seconds of generation apart; the only thread of this process does all of it."""

    sampling_s = 0.0

    def _generate(self, prompts):
        start = time.process_time()
        try:
            return super()._generate(prompts)
        finally:
            self.sampling_s += time.process_time() - start


class Rows(TrainerCallback):
    """Writes a row per rollout step: number, CPU seconds of sampling until then, mean reward."""

    def __init__(self, settings: Settings) -> None:
        self.trainer: Measured | None = None
        self._settings = settings

    def on_log(self, args, state, control, logs=None, **unused) -> None:
        if "reward" not in (logs or {}):  # the summary at the end
            return
        step = state.global_step // self._settings.mini_batches
        row = {"step": step, "sampling_s": self.trainer.sampling_s, "reward/mean": logs["reward"]}
        with open(self._settings.rows, "a") as file:
            file.write(json.dumps(row) + "\n")


def main(settings: Settings) -> None:
    """Train.

    Generation is transformers' own, `generate` on one rectangle; vLLM has no place on a CPU.
    """
    torch.set_num_threads(1)
    samples = settings.prompts_per_step * settings.samples_per_prompt
    config = GRPOConfig(
        output_dir=str(Path(settings.rows).parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples // settings.mini_batches,
        steps_per_generation=settings.mini_batches,
        num_generations=settings.samples_per_prompt,
        max_completion_length=settings.max_response_length,
        max_steps=settings.num_steps * settings.mini_batches,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        beta=0.0,
        temperature=1.0,
        logging_steps=settings.mini_batches,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    prompts = load_dataset("json", data_files=settings.prompts, split="train").map(
        lambda row: {"prompt": row["prompt"][0]["content"], "ground_truth": row["reward_model"]["ground_truth"]},
        remove_columns=["reward_model", "ability", "extra_info", "data_source"],
    )
    rows = Rows(settings)
    rows.trainer = Measured(
        model=AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings.model),
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        callbacks=[rows],
    )
    rows.trainer.train()


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
