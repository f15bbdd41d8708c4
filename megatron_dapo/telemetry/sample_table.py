"""A few of a step's responses, for loggers that show tables: by the names that
rollouts/step_NNNNNN.jsonl has."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent

from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.samples import Group

NUM_TABLES = 50  # in a whole run
_NUM_ROWS = 16
_MAX_TEXT = 4000  # characters
COLUMNS = ("step", "uid", "prompt", "ground_truth", "text", "reward", "correct", "finish_reason", "num_tokens")


@dataclass(frozen=True)
class SampleTable:
    """rows: one per response, with the values of COLUMNS."""

    rows: tuple[tuple, ...]

    def markdown(self) -> str:
        """Return the table as text for TensorBoard. Model output is indented code, which no content
        can end."""
        parts = []
        for row in self.rows:
            one = dict(zip(COLUMNS, row, strict=True))
            verdict = "right" if one["correct"] else "wrong"
            head = f"**{verdict}**, reward {one['reward']:.3g}, {one['num_tokens']} tokens, {one['finish_reason']}"
            texts = (f"{one['prompt']}\n--\n{one['text']}\n--\n{one['ground_truth']}").splitlines()
            parts.append(f"{head}\n\n" + indent("\n".join(texts), "    ", lambda line: True))
        return "\n\n".join(parts)


def sample_table(config: Config, step: int, groups: Sequence[Group] | None) -> SampleTable | None:
    """Return the table of a step, or None: a run has about 50 at most, with the first and the last
    step's. Groups are limited by `rollout.dump_samples`."""
    last = config.trainer.total_training_steps
    every = -(-last // NUM_TABLES)
    shown = (groups or ())[: config.actor_rollout_ref.rollout.dump_samples]
    if not shown or not (step in (1, last) or step % every == 0):
        return None
    rows = [
        (
            step,
            group.uid,
            group.prompt.text[-_MAX_TEXT:],
            group.prompt.ground_truth,
            sample.response_text[:_MAX_TEXT],
            sample.reward,
            sample.correct,
            sample.finish_reason,
            sample.num_response_tokens,
        )
        for group in shown
        for sample in group.samples
    ]
    return SampleTable(tuple(rows[:_NUM_ROWS]))
