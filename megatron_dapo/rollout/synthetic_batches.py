"""Batches of random tokens (`trainer.synthetic_batch`): only the trainer, at a run's sizes."""

import math
import random
from collections.abc import Callable

import numpy as np

from megatron_dapo.config.derived import advantage_estimator
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.lengths import MEAN_SHARE, SPREAD, Lengths
from megatron_dapo.data.samples import Group, Prompt, RolloutBatch, Sample
from megatron_dapo.data.token_arrays import LOG_PROB, MASK, TOKEN, VERSION, repeated
from megatron_dapo.queue.step_statistics import StepStatistics
from megatron_dapo.rollout.batch_source import NoServerRollout, never

SOURCE = "synthetic batches"


class SyntheticBatches(NoServerRollout):
    """Random groups in place of a controller and its servers, fixed by `trainer.seed` and step.

    Lengths of prompts and responses are log-normal and cut at the longest, with the mean and spread
    assumed by `plan`. Each group of two or more has right and wrong responses, so that no advantage
    is 0. The log-probs in place of a server's are those of an ignorant model: -log(vocab_size).
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__(SOURCE)
        self._seed = config.trainer.seed
        self._vocab_size = vocab_size
        self._num_groups = config.data.train_batch_size
        self._n = config.actor_rollout_ref.rollout.n
        self._prompts = _lengths(config.data.max_prompt_length)
        self._responses = _lengths(config.data.max_response_length)
        self._has_baseline = advantage_estimator(config).needs_baseline

    def next_batch(self, step: int, weight_version: int, is_to_stop: Callable[[], bool] = never) -> RolloutBatch:
        """Return the step's groups, as if written by weight_version, and their statistics."""
        lengths = random.Random(f"{self._seed} {step}")
        values = np.random.default_rng((self._seed, step))
        statistics = StepStatistics()
        groups = []
        for number in range(self._num_groups):
            group = self._group(f"{step}-{number}", number, weight_version, lengths, values)
            statistics.add(group)
            groups.append(group)
        return RolloutBatch(tuple(groups), statistics.metrics())

    def _group(self, uid: str, number: int, version: int, lengths: random.Random, values: np.random.Generator) -> Group:
        tokens = self._tokens(self._prompts.sample(lengths), values)
        prompt = Prompt(number, uid, tuple(tokens.tolist()), "", "synthetic", "")
        num_right = int(values.integers(1, self._n)) if self._n > 1 else int(values.integers(2))
        is_right = values.permutation(self._n) < num_right
        samples = tuple(
            self._sample(uid, tokens, bool(right), version, self._responses.sample(lengths), values)
            for right in is_right
        )
        return Group(uid, prompt, samples, num_right / self._n if self._has_baseline else None, version=version)

    def _sample(
        self, uid: str, prompt: np.ndarray, right: bool, version: int, length: int, values: np.random.Generator
    ) -> Sample:
        is_truncated = length == self._responses.longest
        return Sample(
            uid=uid,
            prompt_tokens=prompt,
            response_tokens=self._tokens(length, values),
            rollout_log_probs=repeated(-math.log(self._vocab_size), length, LOG_PROB),
            loss_mask=repeated(1, length, MASK),
            weight_versions=repeated(version, length, VERSION),
            finish_reason="length" if is_truncated else "stop",
            raw_reward=float(right),
            correct=right,
            reward=float(right),
            is_truncated=is_truncated,
        )

    def _tokens(self, length: int, values: np.random.Generator) -> np.ndarray:
        return values.integers(self._vocab_size, size=length, dtype=TOKEN)


def _lengths(longest: int) -> Lengths:
    return Lengths.with_mean(MEAN_SHARE * longest, SPREAD, longest)
