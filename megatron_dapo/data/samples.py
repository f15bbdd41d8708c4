"""What flows from the prompt files to the trainer: prompts, samples, groups, and the batch of one rollout step."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from megatron_dapo.data.token_arrays import EXPERT, LOG_PROB, MASK, TOKEN, VERSION, Dtype, TokenRecord, nothing


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set, tokenized."""

    index: int  # row among the kept prompts of its data set; -1 in a row that is not tokenized yet
    key: str  # hash of the content; equal content, equal key
    tokens: tuple[int, ...]
    text: str  # the rendered prompt, for people
    data_source: str
    ground_truth: str
    extra_info: dict = field(default_factory=dict)
    messages: list[dict] | str = ""  # before rendering: an environment's first words may join them


@dataclass(frozen=True, eq=False)
class Sample(TokenRecord):
    """One response, or one trajectory: turns of the model with an environment's tokens between them.

    Arrays are [L], the response's length, but for prompt_tokens, and for routed_experts, which are of prompt and
    response (`data.routed_experts`).
    """

    ARRAYS: ClassVar[Mapping[str, Dtype]] = {
        "prompt_tokens": TOKEN,
        "response_tokens": TOKEN,
        "rollout_log_probs": LOG_PROB,
        "loss_mask": MASK,
        "weight_versions": VERSION,
        "routed_experts": EXPERT,
    }

    uid: str  # the group's
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    response_text: str
    rollout_log_probs: np.ndarray  # by the server, at the sampling temperature; 0 for an environment's tokens
    loss_mask: np.ndarray  # 1 where the model wrote the token, 0 for an environment's
    weight_versions: np.ndarray  # version of the weights that wrote each token
    finish_reason: str  # "stop", or what ended it: "length" | "abort" | "turns" | "time" | "environment"
    raw_reward: float  # by the verifier, before shaping
    correct: bool  # raw correctness: what dynamic sampling filters on
    reward: float  # after shaping
    is_truncated: bool
    is_terminated: bool = True
    exp_mask: bool = False  # True = replayed by experience replay (off-policy)
    num_turns: int = 1
    servers: tuple[str, ...] = ()  # URLs of those that wrote its turns
    reward_error: str | None = None  # why the verifier gave no answer, if it did not
    answer: str | None = None  # what it answers, for a vote among responses; None = nothing
    number: int = 0  # among the responses to its prompt, from 0; the seeds of its requests derive from it
    # the servers', where the trainer is to replay them; empty = not asked for, or unknown
    routed_experts: np.ndarray = field(default_factory=partial(nothing, EXPERT))

    @property
    def num_response_tokens(self) -> int:
        """Return the number of tokens of the response, with those of an environment."""
        return len(self.response_tokens)

    @property
    def num_written_tokens(self) -> int:
        """Return the number of tokens of the response that the model wrote."""
        return int(self.loss_mask.sum())

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of prompt and response."""
        return len(self.prompt_tokens) + len(self.response_tokens)

    def without_text(self) -> "Sample":
        """Return the same without its text: the same arrays, which `dataclasses.replace` would look at once more."""
        bare = copy(self)
        object.__setattr__(bare, "response_text", "")
        return bare

    def without_experts(self) -> "Sample":
        """Return the same without routed experts, with arrays of its own: memory that holds many samples together is
        free when nobody has an array there."""
        arrays = {name: getattr(self, name).copy() for name in self.ARRAYS}
        return replace(self, **arrays | {"routed_experts": nothing(EXPERT)})


@dataclass(frozen=True, eq=False)
class PartialResponse(TokenRecord):
    """The beginning of a response of one turn that a stop ended; another request goes on with it. The arrays are [L],
    its length."""

    ARRAYS: ClassVar[Mapping[str, Dtype]] = {"tokens": TOKEN, "log_probs": LOG_PROB, "weight_versions": VERSION}

    tokens: np.ndarray
    log_probs: np.ndarray
    weight_versions: np.ndarray
    servers: tuple[str, ...]
    number: int = 0  # of the response (`Sample.number`)


@dataclass(frozen=True)
class Group:
    """One use of a prompt, and the n responses to it: while they are sampled a replayed one, and those finished.

    uid: new for every use, so that a prompt that is drawn twice makes two groups.
    baseline_reward: shaped reward of one greedy answer beside them, where the advantage estimator needs it.
    keep: False where dynamic sampling found no signal and masks the group: it is trained on with advantages of 0.
    version: of the weights that the servers had confirmed when the prompt was drawn; no new token is older.
    partials: what an open group has of responses that are not finished, when it is not being sampled.
    """

    uid: str
    prompt: Prompt
    samples: tuple[Sample, ...] = ()
    baseline_reward: float | None = None
    keep: bool = True
    version: int = 0
    partials: tuple[PartialResponse, ...] = ()


def drop_experts(groups: list[Group]) -> None:
    """Put in the place of groups whose samples have routed experts, which take most of their memory, the same groups
    without."""
    for number, group in enumerate(groups):
        if any(len(sample.routed_experts) for sample in group.samples):
            groups[number] = replace(group, samples=tuple(sample.without_experts() for sample in group.samples))


@dataclass(frozen=True)
class RolloutBatch:
    """What one rollout step hands to the trainer.

    groups: those that the step trains on. metrics: flat floats by their public names (reward, filter, length).
    needs_sync: a server came back without the current weights; push them and call again, nothing was lost.
    """

    groups: tuple[Group, ...]
    metrics: dict[str, float]
    needs_sync: bool = False

    def with_texts_of(self, num_groups: int) -> "RolloutBatch":
        """Return the same with the responses' texts of the first groups alone: the trainer shows some of them, and
        reads tokens."""
        rest = (
            replace(group, samples=tuple(sample.without_text() for sample in group.samples))
            for group in self.groups[num_groups:]
        )
        return replace(self, groups=(*self.groups[:num_groups], *rest))
