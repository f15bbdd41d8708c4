"""The records on the way from the prompt files to the trainer.

They are prompts, samples, groups, and the batch of one rollout step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self

import numpy as np

from megatron_dapo.data.token_arrays import EXPERT, LOG_PROB, MASK, TOKEN, VERSION, Dtype, TokenRecord, nothing


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set, tokenized."""

    index: int  # row among the kept prompts of its data set; -1 before tokenization
    key: str  # hash of the content; equal content, equal key
    tokens: tuple[int, ...]
    text: str  # the rendered prompt, for people
    data_source: str
    ground_truth: str
    extra_info: dict = field(default_factory=dict)
    messages: list[dict] | str = ""  # before rendering: an environment's first words may join them

    @property
    def chat(self) -> list[dict]:
        """Return the messages; a text is one of the user."""
        return [{"role": "user", "content": self.messages}] if isinstance(self.messages, str) else self.messages


@dataclass(frozen=True, eq=False, kw_only=True)
class Branch(TokenRecord):
    """A path through a trajectory, from a prompt to its last answer; one row for the trainer.

    Arrays are [L], the response's length, but for prompt_tokens, and for routed_experts of prompt
    and response (`data.routed_experts`).
    """

    ARRAYS: ClassVar[Mapping[str, Dtype]] = {
        "prompt_tokens": TOKEN,
        "response_tokens": TOKEN,
        "rollout_log_probs": LOG_PROB,
        "loss_mask": MASK,
        "weight_versions": VERSION,
        "routed_experts": EXPERT,
    }

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    # by the server, at the sampling temperature; 0 for an environment's tokens
    rollout_log_probs: np.ndarray
    # 1 for the model's tokens, 0 for an environment's, and for those that an earlier branch counts
    loss_mask: np.ndarray
    weight_versions: np.ndarray  # version of the weights that wrote each token
    # the servers', for replay by the trainer; empty: not asked for, or unknown
    routed_experts: np.ndarray = field(default_factory=partial(nothing, EXPERT))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of prompt and response, a row of the trainer."""
        return len(self.prompt_tokens) + len(self.response_tokens)

    def without_experts(self) -> Self:
        """Return the same without routed experts, with arrays of its own.

        The memory shared by many samples is free once no sample has an array there.
        """
        arrays = {name: getattr(self, name).copy() for name in self.ARRAYS}
        return replace(self, **arrays | {"routed_experts": nothing(EXPERT)})


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample(Branch):
    """One response, or one trajectory: a model's turns with an environment's tokens between them.

    Its own arrays are those of its first branch.
    """

    uid: str  # the group's
    # "stop", or the cause of an early end: "length" | "abort" | "turns" | "time" | "environment" |
    # "agent"
    finish_reason: str
    raw_reward: float  # by the verifier, before shaping
    correct: bool  # raw correctness, the measure of dynamic sampling's filter
    reward: float  # after shaping
    is_truncated: bool
    is_terminated: bool = True
    exp_mask: bool = False  # replayed by experience replay (off-policy)
    num_turns: int = 1
    servers: tuple[str, ...] = ()  # URLs of the servers that wrote its turns
    reward_error: str | None = None  # the reason for a missing answer of the verifier
    answer: str | None = None  # its answer, for a vote among responses; None without one
    # among the responses to its prompt, from 0; the seeds of its requests derive from it
    number: int = 0
    response_text: str = ""  # of a step's shown groups, for people; rewards decode the tokens
    others: tuple[Branch, ...] = ()  # an agent's further branches
    own_answer: str | None = None  # an agent's, scored in place of the last branch's text

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Return all branches; each token written by the model counts in one of them."""
        return (self, *self.others)

    @property
    def num_response_tokens(self) -> int:
        """Return the number of tokens of the longest branch's response, an environment's too."""
        return max(len(branch.response_tokens) for branch in self.branches)

    @property
    def num_written_tokens(self) -> int:
        """Return the number of tokens of all branches written by the model, each once."""
        return sum(int(branch.loss_mask.sum()) for branch in self.branches)

    def without_experts(self) -> Self:
        """Return the same without routed experts in any branch."""
        others = tuple(branch.without_experts() for branch in self.others)
        return replace(super().without_experts(), others=others)


@dataclass(frozen=True, eq=False)
class PartialResponse(TokenRecord):
    """The beginning of a response of one turn, interrupted by a stop.

    Another request goes on with it. The arrays are [L], its length.
    """

    ARRAYS: ClassVar[Mapping[str, Dtype]] = {"tokens": TOKEN, "log_probs": LOG_PROB, "weight_versions": VERSION}

    tokens: np.ndarray
    log_probs: np.ndarray
    weight_versions: np.ndarray
    servers: tuple[str, ...]
    number: int = 0  # of the response (`Sample.number`)


@dataclass(frozen=True)
class Group:
    """One use of a prompt, and the responses to it."""

    uid: str  # new for every use: a prompt drawn twice makes two groups
    prompt: Prompt
    samples: tuple[Sample, ...] = ()  # finished ones, and a replayed one
    # shaped reward of a greedy answer, for the estimator remax
    baseline_reward: float | None = None
    keep: bool = True  # False: masked by dynamic sampling; trained on with advantages of 0
    version: int = 0  # confirmed weights of the servers at the draw; no new token is older
    # unfinished responses of an open group, while it is not sampled
    partials: tuple[PartialResponse, ...] = ()


def drop_experts(groups: list[Group]) -> None:
    """Replace groups of samples with routed experts by the same groups without.

    Routed experts take most of such samples' memory.
    """
    for number, group in enumerate(groups):
        if any(len(branch.routed_experts) for sample in group.samples for branch in sample.branches):
            groups[number] = replace(group, samples=tuple(sample.without_experts() for sample in group.samples))


@dataclass(frozen=True)
class RolloutBatch:
    """The result of one rollout step, for the trainer."""

    groups: tuple[Group, ...]  # to train on
    metrics: dict[str, float]  # by their public names
