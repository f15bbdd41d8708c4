"""Folders of runs for tests of the report, with any number of steps and answers."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_dapo.common.files import write_whole
from megatron_dapo.data.samples import Branch, Group, Prompt, Sample
from megatron_dapo.data.token_dump import TokenDump
from megatron_dapo.rollout.answer_records import group_record, with_texts
from megatron_dapo.storage.run_folder import RunFolder

START = 1.7e9
# tricks of an answer: none of it may become a part of the page
HOSTILE = (
    "</script><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script> & \u2028 {{ 7*7 }}"
)
_WORDS = ("so", "we", "carry", "one", "and", "then", "add", "the", "tens", "hence", "4", "12", "+", "=", "wait")


def write_run(
    folder: Path,
    *,
    num_steps: int = 6,
    num_groups: int = 3,
    n: int = 4,
    mean_length: int = 12,
    seed: int = 0,
    with_tokens: bool = True,
    num_distinct: int | None = None,
) -> RunFolder:
    """Write a run that learns. Every fourth answer is cut;
    the first one of the last step is hostile text.

    num_distinct: steps after which the answers come again; None: never.
    """
    rng = random.Random(seed)
    run = RunFolder(folder)
    lines = [{"step": 0, "time": START, "val/accuracy": 0.25}]
    for step in range(1, num_steps + 1):
        lines.append(_record(rng, step, num_steps))
        if num_distinct is None or step <= num_distinct or step == num_steps:
            write_step(run, rng, step, num_groups, n, mean_length, with_tokens, step == num_steps)
            continue
        again = (step - 1) % num_distinct + 1
        for path_of in (run.rollout, run.rollout_tokens):
            shutil.copyfile(path_of(again), path_of(step))
    lines.append({"step": num_steps, "time": START + 10 * num_steps + 1, "val/accuracy": 0.75})
    write_whole(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    config = f"trainer: {{total_training_steps: {num_steps}, seed: {seed}}}\ndata: {{train_batch_size: {num_groups}}}\n"
    write_whole(run.config, config)
    return run


def _record(rng: random.Random, step: int, num_steps: int) -> dict:
    level = step / num_steps
    record = {"step": step, "time": START + 10.0 * step, "time/rollout": 4.0, "time/update": 3.0, "time/step": 8.0}
    if step == 1:
        record["time/start"] = 0.5
    record |= {
        "reward/mean": level + rng.gauss(0, 0.05),
        "reward/accuracy": level,
        "response_length/mean": 12.0,
        "actor/entropy": 1.0 - level / 2,
        "actor/on_pg_clipfrac": 0.01,
        "actor/rollout_kl": 1e-5,
        "actor/rollout_abs_diff": 2e-4,
        "actor/grad_norm": 0.5,
        "rollout/staleness_mean": 0.0,
        "dapo/num_kept_groups": 3.0,
        "dapo/num_filtered_groups": 1.0,
        "dapo/filtered_all_correct": 1.0,
        "rollout/num_servers": 2.0,
        "rollout/num_tokens": 500.0,
        "rollout/num_servers_current": 2.0,
        "rollout/slots_used": 0.8,
        "perf/trainer_waiting": 0.4,
        "rollout/factor/node1:30000": 1.0,
        "rollout/seats/node1:30000": 128.0,
        "rollout/factor/node2:30000": 4.0 if step == 2 else 1.0,
        "rollout/seats/node2:30000": 31.0 if step == 2 else 128.0,
    }
    return record


def write_step(
    run: RunFolder,
    rng: random.Random,
    step: int,
    num_groups: int,
    n: int,
    mean_length: int,
    with_tokens: bool = True,
    is_hostile: bool = False,
) -> None:
    """Write the answers of a step, and the facts about their tokens."""
    groups, responses = [], []
    texts = dict(enumerate([*(f" {word}" for word in _WORDS), HOSTILE, "<eos>"]))
    for group in range(num_groups):
        answers = []
        for member in range(n):
            length = max(2, min(8 * mean_length, round(rng.lognormvariate(0, 0.6) * mean_length)))
            tokens = rng.choices(range(len(_WORDS)), k=length - 1) + [len(_WORDS) + 1]
            if is_hostile and group == member == 0:
                tokens[0] = len(_WORDS)
            is_right = (group + member) % 2 == 0
            answers.append(
                {
                    "text": "".join(texts[token] for token in tokens[:-1]),
                    "reward": 1.0 if is_right else -0.5 * member,
                    "raw_reward": float(is_right),
                    "correct": is_right,
                    "finish_reason": "length" if member % 4 == 3 else "stop",
                    "num_tokens": length,
                }
            )
            responses.append(_known(rng, tokens, step, member, is_right))
        uid = f"{step:08d}-{group}"
        prompt = f"What is {step}+{group}?"
        groups.append(
            {"step": step, "uid": uid, "prompt": prompt, "ground_truth": str(step + group), "responses": answers}
        )
    write_whole(run.rollout(step), "".join(json.dumps(group) + "\n" for group in groups))
    if with_tokens:
        TokenDump.of_responses(responses, texts).write(run.rollout_tokens(step))


TOOL = "[result 7]" * 60  # one token, and long
_AGENT_WORDS = {0: "ask", 1: "go", 2: "done", 3: TOOL, 4: " sum", 5: "42"}


def write_branches(run: RunFolder, step: int) -> Sample:
    """Write a step with one group of two trajectories of an agent, and return the first one: three
    branches, with a tool's answer of 101 tokens in the second, which begins by reading the first.
    """
    verdict = dict(finish_reason="stop", raw_reward=1.0, correct=True, reward=1.0, is_truncated=False, num_turns=4)
    parts = [_branch([0], [1, 2], [1, 1]), _branch([0], [1, 2, *[3] * 101, 5], [0] * 103 + [1]), _branch([4], [2], [1])]
    first = Sample(uid="u", **parts[0], **verdict, others=tuple(Branch(**part) for part in parts[1:]))
    second = Sample(uid="u", **_branch([0], [5], [1]), **verdict | {"reward": -1.0, "correct": False})
    group = Group("u", Prompt(0, "k", (0,), "ask", "agents", "42"), (first, second))
    tokenizer: Any = SimpleNamespace(decode=lambda tokens, **_: "".join(_AGENT_WORDS[int(token)] for token in tokens))
    (shown,) = with_texts((group,), 1, tokenizer)
    write_whole(run.rollout(step), json.dumps(group_record(step, shown, tokenizer)) + "\n")
    known = []
    for number, row in enumerate((*first.branches, second)):
        counted = row.loss_mask != 0
        values = {
            "advantages": np.where(counted, 0.25 * (number + 1), np.nan),
            "log_prob_diffs": -row.rollout_log_probs,
        }
        fields = ("loss_mask", "weight_versions", "rollout_log_probs")
        known.append({"tokens": row.response_tokens, **{name: getattr(row, name) for name in fields}, **values})
    TokenDump.of_responses(known, _AGENT_WORDS).write(run.rollout_tokens(step))
    return first


def _branch(prompt: list[int], response: list[int], mask: list[int]) -> dict:
    return dict(
        prompt_tokens=prompt,
        response_tokens=response,
        rollout_log_probs=[-0.5 * counted for counted in mask],
        loss_mask=mask,
        weight_versions=[3] * len(mask),
    )


def write_validation(run: RunFolder, step: int, num_right: list[int], n: int = 4, text: str = "so 4") -> None:
    """Write the held-out answers of a step: so many of n are right, prompt by prompt.
    text: of each."""
    lines = [
        {
            "step": step,
            "prompt_index": index,
            "prompt": f"Held out {index}?",
            "ground_truth": "4",
            "data_source": "sums",
            "number": number,
            "text": text,
            "raw_reward": float(number < right),
            "correct": number < right,
            "finish_reason": "stop",
            "num_tokens": 2,
        }
        for index, right in enumerate(num_right)
        for number in range(n)
    ]
    write_whole(run.validation(step), "".join(json.dumps(line) + "\n" for line in lines))


def _known(rng: random.Random, tokens: list[int], step: int, member: int, is_right: bool) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(rng.randrange(2**32))
    return {
        "tokens": np.array(tokens),
        "loss_mask": np.ones(len(tokens)),
        "weight_versions": np.full(len(tokens), step - 1 - member % 2),
        "rollout_log_probs": -noise.exponential(0.5, len(tokens)),
        "log_prob_diffs": noise.normal(0, 1e-3, len(tokens)),
        "advantages": np.full(len(tokens), 1.2 if is_right else -0.8),
    }
