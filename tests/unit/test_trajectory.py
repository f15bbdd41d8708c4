"""Trajectories of several turns, token by token: requests to the server, counted tokens, ends."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.rollout_errors import Aborted
from megatron_dapo.config.schema.multi_turn import MultiTurnConfig
from megatron_dapo.config.schema.run import DataConfig
from megatron_dapo.data.samples import Prompt
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.envs.environment import Observation
from megatron_dapo.envs.environment_pool import EnvironmentFailure
from megatron_dapo.rewards.reward_result import RewardResult
from megatron_dapo.rollout.trajectory import Budget, MultiTurn, OutOfTime, TrajectoryStart
from megatron_dapo.servers.client import Generation, SamplingParams
from tests.unit.test_tokenizer import write_byte_level

pytestmark = pytest.mark.unit

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "What is 2+3?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_byte_level(tmp_path_factory.mktemp("chatml"), template=CHATML))


def tokens_of(tokenizer, text):
    """Token ids of a text, a token per character: possible for a model,
    but never from a tokenizer."""
    return tuple(token for char in text for token in tokenizer.encode_prompt(char, False)[0])


def ids(tokenizer, text):
    return tokenizer.encode_prompt(text, False)[0]


class Turn:
    """A scripted environment: its answers in turn; an exception is raised."""

    def __init__(self, *answers, opening=None):
        self.answers, self.opening, self.seen, self.tasks = list(answers), opening or Observation(), [], []

    @asynccontextmanager
    async def session(self, seed):
        yield self

    async def reset(self, task):
        self.tasks.append(task)
        return self._given(self.opening)

    async def step(self, response):
        self.seen.append(response)
        return self._given(self.answers.pop(0))

    def _given(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer


class Model:
    """A scripted server: writes the given turns; log-probs and versions tell the tokens apart."""

    def __init__(self, *turns):
        self.turns, self.sent, self.limits = list(turns), [], []
        self.reasons = []

    async def __call__(self, tokens, params, budget):
        self.sent.append(tuple(tokens.tolist()))
        self.limits.append(params.max_new_tokens)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        cut = turn[: params.max_new_tokens]
        reason = self.reasons.pop(0) if self.reasons else "stop" if cut == turn else "length"
        return Generation(cut, tuple(-0.1 * (i + 1) for i in range(len(cut))), reason, (7,) * len(cut))


def play(tokenizer, environment, model, max_tokens=200, chat=True, prompt=None, max_prompt_length=100, **limits):
    data = DataConfig(max_prompt_length=max_prompt_length, apply_chat_template=chat)
    # a time of -1 is over at once
    keys = MultiTurnConfig(max_turns=8, timeout_s=60.0).model_copy(update=limits)
    multi_turn = MultiTurn(environment, tokenizer, data, keys)
    tokens, text = tokenizer.encode_prompt(MESSAGES, chat)
    prompt = prompt or Prompt(0, "", tokens, text, "test", "5", {"index": 0}, MESSAGES)
    return asyncio.run(multi_turn.play(TrajectoryStart(prompt, SamplingParams(max_new_tokens=max_tokens), model)))


def says(content, **fields):
    return Observation(messages=({"role": "tool", "content": content},), **fields)


END = 2  # <|im_end|>


def test_the_server_is_sent_the_very_tokens_it_wrote(tokenizer):
    """Re-tokenised, they would be others: the model writes a token per character."""
    first, second = (*tokens_of(tokenizer, "The answer"), END), (*tokens_of(tokenizer, "is 5."), END)
    model, environment = Model(first, second), Turn(says("5"), Observation(done=True, reward=1.0))
    trajectory = play(tokenizer, environment, model)
    assert ids(tokenizer, tokenizer.decode(first, False)) != first  # else this test shows nothing
    between = ids(tokenizer, "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    prompt = ids(tokenizer, "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n")
    assert model.sent == [prompt, prompt + first + between]
    assert tuple(trajectory.response_tokens) == first + between + second
    assert environment.seen == ["The answer", "is 5."]

    assert trajectory.loss_mask.tolist() == [1] * len(first) + [0] * len(between) + [1] * len(second)
    scores = [[-0.1 * (i + 1) for i in range(len(turn))] for turn in (first, second)]
    assert trajectory.rollout_log_probs.tolist() == pytest.approx(scores[0] + [0.0] * len(between) + scores[1])
    assert trajectory.weight_versions.tolist() == [7] * len(trajectory.response_tokens)
    assert (trajectory.num_turns, trajectory.finish_reason) == (2, "stop")
    assert trajectory.verdict == RewardResult(1.0, True)
    (task,) = environment.tasks
    assert (task.ground_truth, task.extra_info, task.data_source) == ("5", {"index": 0}, "test")


def test_a_turn_that_is_aborted_ends_the_trajectory_without_a_word_to_the_environment(tokenizer):
    """It begins anew later: nobody brings an environment back to its former place."""
    first, second = (*ids(tokenizer, "The answer"), END), (*ids(tokenizer, "is 5."), END)
    model, environment = Model(first, second), Turn(says("5"), Observation(done=True))
    model.reasons = ["stop", "abort"]
    with pytest.raises(Aborted):
        play(tokenizer, environment, model)
    assert environment.seen == ["The answer"]


def test_what_stands_between_turns_is_what_the_template_puts_there(tokenizer):
    """The oracle renders the whole conversation at once."""
    first, second = (*ids(tokenizer, "The answer"), END), (*ids(tokenizer, "is 5."), END)
    trajectory = play(tokenizer, Turn(says("5"), Observation(done=True)), Model(first, second))
    chat = [*MESSAGES, {"role": "assistant", "content": "The answer"}, {"role": "tool", "content": "5"}]
    whole = tokenizer.encode_prompt(chat, True)[0] + second
    assert trajectory.prompt_tokens + tuple(trajectory.response_tokens) == whole


def test_whatever_an_environment_says_is_words(tokenizer):
    """Also the stand-in for the model's words during questions to the template."""
    trajectory = play(tokenizer, Turn(says("assistant-words"), Observation(done=True)), Model(TALK, TALK))
    between = ids(tokenizer, "\n<|im_start|>tool\nassistant-words<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.response_tokens.tolist() == [*TALK, *between, *TALK]


def test_a_turn_without_its_end_token_gets_it_from_the_environment(tokenizer):
    first = ids(tokenizer, "The answer")
    model = Model(first, (END,))
    trajectory = play(
        tokenizer, Turn(says("5"), Observation(done=True)), model, max_tokens_per_turn=len(first) - 1, chat=True
    )
    cut = first[:-1]
    between = ids(tokenizer, "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.response_tokens[: len(cut) + len(between)].tolist() == [*cut, *between]
    assert trajectory.loss_mask[: len(cut) + len(between)].tolist() == [1] * len(cut) + [0] * len(between)


def test_without_a_chat_template_the_contents_alone_stand_between(tokenizer):
    trajectory = play(tokenizer, Turn(says("=5;"), Observation(done=True)), Model((50, END), (51, END)), chat=False)
    between = ids(tokenizer, "=5;")
    assert trajectory.response_tokens.tolist() == [50, END, *between, 51, END]
    assert trajectory.loss_mask.tolist() == [1, 1, *[0] * len(between), 1, 1]


def test_an_opening_observation_joins_the_prompt(tokenizer):
    opening = Observation(({"role": "user", "content": "You are in a room."},))
    model = Model((50, END))
    trajectory = play(tokenizer, Turn(Observation(done=True), opening=opening), model)
    expected = tokenizer.encode_prompt([*MESSAGES, *opening.messages], True)[0]
    assert trajectory.prompt_tokens == expected == model.sent[0]
    assert trajectory.response_tokens.tolist() == [50, END]
    failed = play(tokenizer, Turn(opening=opening), Model(), max_prompt_length=10)
    assert failed.verdict.error.startswith("environment: exception: the prompt with the first observation has")
    assert (len(failed.response_tokens), failed.num_turns, failed.finish_reason) == (0, 0, "environment")


TALK = (50, END)


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns"),
    [
        ({"max_turns": 3}, "turns", 3),
        ({"max_tokens": 5}, "length", 1),  # the observation leaves no room to answer
        ({"max_tokens": 1}, "length", 1),  # the first turn is cut
        ({"timeout_s": -1.0}, "time", 1),
    ],
)
def test_a_limit_ends_a_trajectory_that_keeps_what_it_earned(tokenizer, limits, reason, num_turns):
    model = Model(*[TALK] * 9)
    trajectory = play(tokenizer, Turn(*[says("on", reward=0.25, correct=False)] * 9), model, **limits)
    assert (trajectory.finish_reason, trajectory.num_turns) == (reason, num_turns)
    assert len(trajectory.response_tokens) <= limits.get("max_tokens", 200)
    assert trajectory.loss_mask[-1] == 1  # never ends with words that nobody answers
    earned = 0.0 if limits.get("max_tokens") == 1 else 0.25 * num_turns
    assert (trajectory.verdict.score if trajectory.verdict else 0.0) == earned


def test_every_turn_may_use_what_the_response_has_left(tokenizer):
    model = Model(TALK, TALK, TALK)
    environment = Turn(says("on"), says("on"), Observation(done=True))
    trajectory = play(tokenizer, environment, model, max_tokens=60)
    step = (len(trajectory.response_tokens) - len(TALK)) // 2  # a turn and the words after it
    assert model.limits == [60, 60 - step, 60 - 2 * step]
    capped = Model(TALK, TALK, TALK)
    play(tokenizer, Turn(says("on"), says("on"), Observation(done=True)), capped, max_tokens=60, max_tokens_per_turn=20)
    assert capped.limits[:2] == [20, 20]


def test_time_used_up_at_the_server_ends_the_trajectory_before_that_turn(tokenizer):
    trajectory = play(tokenizer, Turn(says("on")), Model(TALK, OutOfTime()))
    assert (trajectory.finish_reason, trajectory.num_turns) == ("time", 1)
    assert trajectory.response_tokens.tolist() == list(TALK)  # without words that nobody answers


def test_a_failed_environment_costs_what_was_not_earned_yet(tokenizer):
    environment = Turn(says("on", reward=0.5, correct=True), EnvironmentFailure("timeout"))
    trajectory = play(tokenizer, environment, Model(TALK, TALK))
    assert trajectory.verdict == RewardResult(0.5, correct=False, error="environment: timeout")
    assert (trajectory.finish_reason, trajectory.num_turns) == ("environment", 2)
    at_once = play(tokenizer, Turn(opening=EnvironmentFailure("crash")), Model())
    assert (at_once.verdict.score, at_once.verdict.error, len(at_once.response_tokens)) == (
        0.0,
        "environment: crash",
        0,
    )


def test_a_turn_without_a_word_on_correctness_does_not_overrule_the_last_one(tokenizer):
    """The reward's sign decides only without the environment's word on the task."""
    on = [says("on", reward=0.5, correct=False), says("on", reward=0.1), Observation(done=True, reward=0.25)]
    assert play(tokenizer, Turn(*on), Model(TALK, TALK, TALK)).verdict == RewardResult(0.85, correct=False)
    on = [says("on", reward=-1.0, correct=True), Observation(done=True)]
    assert play(tokenizer, Turn(*on), Model(TALK, TALK)).verdict == RewardResult(-1.0, correct=True)
    on = [says("on", reward=-1.0), Observation(done=True, reward=1.5)]
    assert play(tokenizer, Turn(*on), Model(TALK, TALK)).verdict == RewardResult(0.5, correct=True)


def test_an_environment_that_is_over_before_it_begins_is_not_played(tokenizer):
    model = Model()
    trajectory = play(tokenizer, Turn(opening=Observation(done=True, reward=1.0)), model)
    assert (model.sent, len(trajectory.response_tokens), trajectory.finish_reason) == ([], 0, "stop")
    assert trajectory.verdict == RewardResult(1.0, True)


def test_without_rewards_of_its_own_the_reward_function_is_to_score(tokenizer):
    assert play(tokenizer, Turn(says("5"), Observation(done=True)), Model(TALK, TALK)).verdict is None


@st.composite
def scripts(draw):
    """(turns of the model, the environment's messages between them, limits)."""
    turn = st.lists(st.integers(3, 250), max_size=6).map(lambda tokens: (*tokens, END))
    num_turns = draw(st.integers(1, 5))
    turns = draw(st.lists(turn, min_size=num_turns, max_size=num_turns))
    said = draw(st.lists(st.text("ab <|im_end|>\n", max_size=8), min_size=num_turns, max_size=num_turns))
    limits = {"max_tokens": draw(st.integers(1, 120)), "max_turns": draw(st.integers(1, 6))}
    limits["max_tokens_per_turn"] = draw(st.none() | st.integers(1, 5))
    return turns, said, limits, draw(st.booleans())


@given(scripts())
def test_whatever_is_said_the_requests_grow_and_masks_count_what_was_written(tokenizer, script):
    """For every script: each request begins with the one before and the model's next words, letter
    by letter. The trajectory is the last of them with the last turn; the mask marks the written
    tokens and nothing else."""
    turns, said, limits, chat = script
    model = Model(*turns)
    answers = [says(text) for text in said[:-1]] + [Observation(done=True)]
    trajectory = play(tokenizer, Turn(*answers), model, chat=chat, **limits)
    written = [turn[:cap] for turn, cap in zip(turns, model.limits, strict=False)]
    for sent, following, own in zip(model.sent, model.sent[1:], written, strict=False):
        assert following[: len(sent) + len(own)] == (*sent, *own)
    assert trajectory.prompt_tokens == model.sent[0]
    assert (*trajectory.prompt_tokens, *trajectory.response_tokens) == (*model.sent[-1], *written[-1])
    mask = [0] * len(trajectory.response_tokens)
    for sent, own in zip(model.sent, written, strict=True):
        start = len(sent) - len(trajectory.prompt_tokens)
        mask[start : start + len(own)] = [1] * len(own)
    assert trajectory.loss_mask.tolist() == mask
    assert [score for score, own in zip(trajectory.rollout_log_probs, mask, strict=True) if not own] == [
        0.0
    ] * mask.count(0)
    assert len(trajectory.weight_versions) == len(mask) <= limits["max_tokens"]
    assert trajectory.num_turns == len(written) <= limits["max_turns"]


def test_a_template_that_rewrites_earlier_turns_does_not_touch_what_was_written(tmp_path):
    """As Qwen3's: it drops the thinking of all turns but the last,
    and wraps a tool's words in a user's turn."""
    template = (
        "{% for m in messages %}{% set role = 'user' if m.role == 'tool' else m.role %}"
        "<|im_start|>{{ role }}\n{{ m.content.split('</think>')[-1] if not loop.last else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer(write_byte_level(tmp_path, template=template))
    first = (*ids(tokenizer, "<think>2+3</think>The answer"), END)
    trajectory = play(tokenizer, Turn(says("5"), Observation(done=True)), Model(first, TALK))
    between = ids(tokenizer, "\n<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.response_tokens.tolist() == [*first, *between, *TALK]


def test_an_end_token_that_the_template_sets_off_by_a_space_is_not_doubled(tmp_path):
    """As Llama 2's: "the answer </s>"."""
    template = CHATML.replace("<|im_end|>", " <|im_end|>")
    tokenizer = load_tokenizer(write_byte_level(tmp_path, template=template))
    words = "\n<|im_start|>tool\n5 <|im_end|>\n<|im_start|>assistant\n"
    trajectory = play(tokenizer, Turn(says("5"), Observation(done=True)), Model(TALK, TALK))
    assert trajectory.response_tokens.tolist() == [*TALK, *ids(tokenizer, words), *TALK]
    # stands behind the end token, too: more than white space comes before it
    newline = ids(tokenizer, "\n")
    cut = play(tokenizer, Turn(says("5"), Observation(done=True)), Model((50, *newline), TALK))
    assert cut.response_tokens.tolist() == [50, *newline, *ids(tokenizer, f" <|im_end|>{words}"), *TALK]


def test_a_template_that_hides_earlier_turns_is_told(tmp_path):
    write_byte_level(tmp_path, template="{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="does not show an assistant's earlier words"):
        play(tokenizer, Turn(says("5")), Model(TALK))


def test_a_budget_counts_what_happens_inside_only():
    async def scenario():
        budget = Budget(0.2)
        await asyncio.sleep(0.3)  # outside: waiting for a place
        async with budget.spend():
            await asyncio.sleep(0.01)
        with pytest.raises(OutOfTime):
            async with budget.spend():
                await asyncio.sleep(30)
        assert budget.seconds_left <= 0
        async with Budget().spend():
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):  # somebody else's
            async with Budget(5.0).spend():
                raise TimeoutError

    asyncio.run(scenario())
