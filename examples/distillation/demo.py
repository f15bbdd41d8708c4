"""On-policy distillation in small: the demo's base model learns two-digit sums from a teacher.

    python -m examples.distillation.demo [key=value ...]

The model learns on its own samples. The teacher is the same base model after supervised fine-tuning
on sums worked out digit by digit (`python -m megatron_dapo sft`); it is made once and kept in the
cache. No reward enters the loss.
"""

import sys
from pathlib import Path

from examples.arithmetic.problems import BASE, write_files
from examples.arithmetic.sft import fine_tune
from examples.cache import cache_folder
from examples.character_model import Settings
from examples.demo_run import Demo
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.exit_codes import USER_ERROR_EXIT_CODE

TEACHER = Settings(steps=150, mixture=(("worked", 1.0),))


def teacher() -> Path:
    """Return the teacher's folder, made if missing. Raise UserError if it cannot be made."""
    folder = cache_folder() / "teacher"
    model = folder / "run" / "model"
    if not model.is_dir():
        steps = [f"trainer.total_training_steps={TEACHER.steps}", "actor_rollout_ref.actor.optim.lr_warmup_steps=15"]
        rate = "actor_rollout_ref.actor.optim.lr=5e-4"
        kept = [f"trainer.run_dir={folder / 'run'}", "trainer.save_interval=-1", "trainer.keep_last=null"]
        code, run = fine_tune(BASE, folder, TEACHER, [*steps, rate, *kept])
        if code:
            raise UserError(f"The teacher could not be made (exit code {code}); its logs are in {run.logs}.")
    return model


def main(overrides: list[str]) -> int:
    try:
        path = teacher()
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    demo = Demo(
        title="On-policy distillation: the base model learns two-digit sums from a teacher, on its own samples.",
        config="distillation.yaml",
        files=write_files,
        model=lambda: BASE,
        next_steps=(("learn from a reward instead", "make demo"),),
    )
    return demo.run([f"actor_rollout_ref.ref.path={path}", *overrides])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
