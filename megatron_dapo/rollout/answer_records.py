"""Responses as records for people, a line each in a file.

Lines of rollouts/step_NNNNNN.jsonl hold a group each, lines of an evaluation's file one answer.
"""

import json
from dataclasses import replace
from itertools import groupby

import numpy as np

from megatron_dapo.data.samples import Branch, Group, Sample
from megatron_dapo.data.tokenizer import Tokenizer

# of the prompts of further branches: each may begin with all turns before it
_SHOWN_TOKENS = 2048


def with_texts(groups: tuple[Group, ...], num_shown: int, tokenizer: Tokenizer) -> tuple[Group, ...]:
    """Return the groups, the first ones with the texts of their responses."""
    shown = (
        replace(group, samples=tuple(with_text(sample, tokenizer) for sample in group.samples))
        for group in groups[:num_shown]
    )
    return (*shown, *groups[num_shown:])


def with_text(sample: Sample, tokenizer: Tokenizer) -> Sample:
    """Return a response with its text."""
    texts = (tokenizer.decode(branch.response_tokens) for branch in sample.branches)
    return replace(sample, response_text="\n\n".join(texts))


def group_record(step: int, group: Group, tokenizer: Tokenizer) -> dict:
    """Return a group, with its texts, as the plain data of a line."""
    return {
        "step": step,
        "uid": group.uid,
        "prompt": group.prompt.text,
        "ground_truth": group.prompt.ground_truth,
        "responses": [_response(sample, group, tokenizer) for sample in group.samples],
        **({} if group.keep else {"masked": True}),
    }


def answer_record(step: int, group: Group, sample: Sample, tokenizer: Tokenizer) -> dict:
    """Return the line of one answer of an evaluation."""
    prompt = group.prompt
    return {
        "step": step,
        "data_source": prompt.data_source,
        "prompt_index": prompt.index,
        "prompt_key": prompt.key,
        "number": sample.number,
        "prompt": prompt.text,
        "ground_truth": prompt.ground_truth,
        **_response(with_text(sample, tokenizer), group, tokenizer),
    }


def line_of(record: dict) -> bytes:
    """Return the line of a record. Half a character, as in the name of a file, is shown as "?"."""
    return f"{json.dumps(record, ensure_ascii=False)}\n".encode("utf-8", "replace")


def _response(sample: Sample, group: Group, tokenizer: Tokenizer) -> dict:
    record = {
        "text": sample.response_text,
        "reward": sample.reward,
        "raw_reward": sample.raw_reward,
        "correct": sample.correct,
        "answer": sample.answer,
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_response_tokens,
        "weight_versions": np.unique(np.concatenate([each.weight_versions for each in sample.branches])).tolist(),
    }
    if sample.others:
        others = [_branch(branch, tokenizer, _SHOWN_TOKENS) for branch in sample.others]
        record |= {"num_turns": sample.num_turns, "branches": [_branch(sample, tokenizer, None), *others]}
    else:
        # an environment's first words joined it
        if not np.array_equal(sample.prompt_tokens, group.prompt.tokens):
            record["prompt"] = tokenizer.decode(sample.prompt_tokens, skip_special_tokens=False)
        if 0 in sample.loss_mask or sample.num_turns != 1:
            record |= {"num_turns": sample.num_turns, "turns": turns(sample, tokenizer)}
    if sample.exp_mask:
        record["replayed"] = True
    if sample.reward_error:
        record["reward_error"] = sample.reward_error
    return record


def _branch(branch: Branch, tokenizer: Tokenizer, num_shown: int | None) -> dict:
    """Return a branch with the last num_shown tokens of its prompt, or all of them."""
    shown = branch.prompt_tokens[-num_shown:] if num_shown else branch.prompt_tokens
    return {
        "num_tokens": len(branch.response_tokens),
        "prompt": tokenizer.decode(shown, skip_special_tokens=False),
        "turns": turns(branch, tokenizer),
    }


def turns(branch: Branch, tokenizer: Tokenizer) -> list[dict]:
    """Return the turns of model and environment with every token.

    They are [{"by": "model", "text": ...}, ...]. The environment's are all that the branch does not
    count: also turns of the model that an earlier branch does.
    """
    pairs = zip(branch.loss_mask.tolist(), branch.response_tokens.tolist(), strict=True)
    parts = groupby(pairs, key=lambda pair: pair[0])
    return [
        {
            "by": "model" if own else "environment",
            "text": tokenizer.decode([token for _, token in part], skip_special_tokens=False),
        }
        for own, part in parts
    ]
