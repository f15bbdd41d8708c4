"""Writes the trainer's values per token of dumped responses: rollouts/step_NNNNNN.npz."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from megatron_dapo.config.derived import uses_servers
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.flat_pickle import flat_pickle, from_flat_pickle
from megatron_dapo.data.packing import MicroBatch
from megatron_dapo.data.samples import Branch, Group
from megatron_dapo.data.token_dump import TokenDump, TokenTexts
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.storage.model_folder import ModelFolder
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.training.distribute import StepShard

log = logging.getLogger(__name__)

Values = dict[int, dict[str, np.ndarray]]
"""sample_id -> "advantages" and, if computed, "log_prob_diffs" of its tokens but the last, prompt
first."""


class TokenDumps:
    """The files of a run.

    Collective over all ranks: the ranks with the loss send their part to rank 0.
    """

    def __init__(self, config: Config, layout: ParallelLayout, run: RunFolder) -> None:
        self._config = config
        self._layout = layout
        self._run = run
        self._num_groups = config.actor_rollout_ref.rollout.dump_samples if uses_servers(config) else 0
        self._texts: TokenTexts | None = None
        knows = layout.is_last_stage and layout.counts_tokens
        self._senders = [rank for rank, known in enumerate(layout.gather(knows)) if known] if self._num_groups else []

    def write(self, step: int, groups: Sequence[Group] | None, shard: StepShard) -> None:
        """Write the file of a step. groups: all of the step, on rank 0. shard: with log-probs and
        advantages."""
        if not self._senders:
            return
        local_values: Values = {}
        if self._layout.rank in self._senders:
            local_values = _values_of(chain.from_iterable(shard.mini_batches), shard.num_shown)
        parts = self._layout.collect(flat_pickle(local_values), self._senders)
        if groups is None:
            return
        values = {sample: known for part in parts for sample, known in from_flat_pickle(part).items()}
        shown = groups[: self._num_groups]
        branches = [branch for group in shown for sample in group.samples for branch in sample.branches]
        try:
            self._dump(branches, values).write(self._run.rollout_tokens(step))
        except OSError as error:  # a dump for people must not end the run
            log.warning("the tokens of step %d cannot be written (%s)", step, error)

    def _dump(self, branches: Sequence[Branch], values: Values) -> TokenDump:
        if self._texts is None:
            self._texts = TokenTexts(load_tokenizer(ModelFolder.of(self._config.actor_rollout_ref.model.path).hf))
        responses = [_response(branch, values.get(number, {})) for number, branch in enumerate(branches)]
        tokens = [response["tokens"] for response in responses]
        return TokenDump.of_responses(responses, self._texts.of(np.concatenate(tokens)) if tokens else {})


def _values_of(batches: Iterator[MicroBatch], num_samples: int) -> Values:
    """Return the values per token of the samples with a sample_id below num_samples; NaN for
    uncounted tokens."""
    values: Values = {}
    for batch in batches:
        if min(batch.sample_ids, default=num_samples) >= num_samples:
            continue
        tensors: dict[str, Tensor] = {"advantages": batch.advantages}
        if batch.old_log_probs is not None:
            tensors["log_prob_diffs"] = batch.old_log_probs.float() - batch.rollout_log_probs
        for name, tensor in tensors.items():
            # scoring leaves 0 at uncounted tokens
            known = tensor.detach().masked_fill(batch.loss_mask == 0, math.nan)
            for sample, rows in batch.by_sample(known.cpu()).items():
                if sample < num_samples:
                    values.setdefault(sample, {})[name] = rows[:-1].half().numpy()
    return values


def _response(branch: Branch, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a row's values per token of its response. Uncounted tokens have neither advantage nor
    difference."""
    length = len(branch.response_tokens)
    unknown = np.full(length, np.nan, dtype=np.float32)
    response = {
        "tokens": branch.response_tokens,
        "loss_mask": branch.loss_mask,
        "weight_versions": branch.weight_versions,
        "rollout_log_probs": branch.rollout_log_probs,
    }
    for name in ("advantages", "log_prob_diffs"):
        known = values.get(name)
        ours = unknown if known is None else known[len(known) - length :]
        response[name] = np.where(branch.loss_mask != 0, ours, unknown)
    return response
