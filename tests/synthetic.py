"""Made-up groups for tests that need a rollout step without a server."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megatron_dapo.data.routed_experts import RouterShape
from megatron_dapo.data.samples import Branch, Group, Prompt, Sample


def synthetic_groups(
    vocab_size: int, *, num_groups: int = 8, n: int = 4, max_prompt: int = 12, max_response: int = 24, seed: int = 0
) -> list[Group]:
    """Groups of random tokens, lengths, rewards and server log-probs,
    the same for the same arguments."""
    rng = random.Random(seed)
    groups = []
    for index in range(num_groups):
        tokens = tuple(rng.randrange(3, vocab_size) for _ in range(rng.randint(2, max_prompt)))
        prompt = Prompt(index, f"key{index}", tokens, "", "synthetic", "0")
        samples = tuple(_sample(rng, f"group{index}", tokens, vocab_size, max_response) for _ in range(n))
        groups.append(Group(f"group{index}", prompt, samples))
    return groups


def with_replayed(groups: list[Group]) -> list[Group]:
    """With the first sample of every other group marked as replayed."""

    def changed(group: Group) -> Group:
        first, *others = group.samples
        return replace(group, samples=(replace(first, exp_mask=True), *others))

    return [changed(group) if number % 2 == 0 else group for number, group in enumerate(groups)]


def with_older(groups: list[Group]) -> list[Group]:
    """The same as if a push of weights had interrupted every response:
    older weights wrote its first half."""

    def changed(sample: Sample) -> Sample:
        length = sample.num_response_tokens
        return replace(sample, weight_versions=(-1,) * (length // 2) + (0,) * (length - length // 2))

    return [replace(group, samples=tuple(changed(sample) for sample in group.samples)) for group in groups]


def with_experts(groups: list[Group], shape: RouterShape, seed: int = 0) -> list[Group]:
    """The same with the experts of a server with routers that draw lots."""
    generator = np.random.default_rng(seed)
    moe = shape.moe

    def changed(sample: Sample) -> Sample:
        scores = generator.random(((sample.num_tokens - 1) * shape.num_layers, moe.num_experts))
        experts = scores.argsort(1)[:, : moe.experts_per_token]
        return replace(sample, routed_experts=experts.flatten().astype(shape.dtype))

    return [replace(group, samples=tuple(map(changed, group.samples))) for group in groups]


def with_branches(groups: list[Group], seed: int = 0) -> list[Group]:
    """The same tokens in one to four branches per trajectory, each counted once behind the same
    prefix.

    Some branches begin where the one before ends; some read its tokens again, uncounted.
    """
    rng = random.Random(seed)
    return [replace(group, samples=tuple(_cut(sample, rng) for sample in group.samples)) for group in groups]


def _cut(sample: Sample, rng: random.Random) -> Sample:
    length, num_prompt = len(sample.response_tokens), len(sample.prompt_tokens)
    cuts = sorted(rng.sample(range(1, length), min(rng.randrange(4), length - 1)))
    per_token = len(sample.routed_experts) // (num_prompt + length - 1)
    parts = []
    for begin, end in pairwise([0, *cuts, length]):
        start = rng.randrange(begin + 1)  # of the branch's response
        mask = sample.loss_mask[start:end].copy()
        mask[: begin - start] = 0
        part = {
            name: getattr(sample, name)[start:end]
            for name in ("response_tokens", "rollout_log_probs", "weight_versions")
        }
        prompt = np.concatenate([sample.prompt_tokens, sample.response_tokens[:start]])
        experts = sample.routed_experts[: (num_prompt + end - 1) * per_token]
        parts.append(dict(**part, prompt_tokens=prompt, loss_mask=mask, routed_experts=experts))
    return replace(sample, **parts[0], others=tuple(Branch(**part) for part in parts[1:]))


def _sample(rng: random.Random, uid: str, prompt: tuple[int, ...], vocab_size: int, max_response: int) -> Sample:
    length = rng.randint(1, max_response)
    reward = rng.choice([0.0, 1.0]) - 0.1 * rng.random()
    return Sample(
        uid=uid,
        prompt_tokens=prompt,
        response_tokens=tuple(rng.randrange(3, vocab_size) for _ in range(length)),
        rollout_log_probs=tuple(-4.0 - rng.random() for _ in range(length)),
        loss_mask=tuple(int(rng.random() < 0.9) for _ in range(length)),
        weight_versions=(0,) * length,
        finish_reason="length" if length == max_response else "stop",
        raw_reward=reward,
        correct=reward > 0.5,
        reward=reward,
        is_truncated=length == max_response,
    )
