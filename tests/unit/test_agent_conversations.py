"""The place of each request of an agent among its trajectory's answers, and the tokens of its turn."""

import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.agents.conversation import Conversations
from megatron_dapo.agents.turns import Answer, Limits, TurnRefused
from tests.agent_templates import source, tokenizer_with

pytestmark = pytest.mark.unit

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ROOMY = Limits(4000, 4000, 100, 1000, None, 8)
END = "<|im_end|>"
ANSWER = "The answer is 5."  # a tokenizer would make fewer tokens than a letter each
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    names = ("chatml", "qwen2_5", "qwen3", "gemma 3", "tools last", "gptoss", "kimi k2", "deepseekv3")
    return {name: tokenizer_with(tmp_path_factory.mktemp("model"), name) for name in names}


@pytest.fixture(scope="module")
def tokenizer(tokenizers):
    return tokenizers["chatml"]


def letters(tokenizer, text):
    """A token per character, as a model may write but no tokenizer does."""
    return [token for character in text for token in tokenizer.encode(character)]


def chatml(messages, tools=None):
    """The text of a prompt by hand, for the template of that name."""
    text = f"<|im_start|>tools\n{json.dumps(tools)}{END}\n" if tools else ""
    for message in messages:
        calls = "".join(
            "<call>"
            + json.dumps(call["function"] | {"arguments": json.loads(call["function"]["arguments"])})
            + "</call>"
            for call in message.get("tool_calls", ())
        )
        text += f"<|im_start|>{message['role']}\n{message['content'] or ''}{calls}{END}\n"
    return text + "<|im_start|>assistant\n"


class Talk:
    """A trajectory whose answers a test writes."""

    def __init__(self, tokenizer, limits=ROOMY, history="tokens", template=True, **template_kwargs):
        self.tokenizer = tokenizer
        self.conversations = Conversations(tokenizer, limits, history, template_kwargs, template)
        self.num_nodes = 0
        self.empty = set()  # nodes of empty answers
        self.paths = {None: []}  # node -> the tokens up to its last

    def prompt(self, place):
        """The tokens of a turn's prompt, from those of the nodes before."""
        return [*self.paths[place.parent], *place.suffix.tolist()]

    def text(self, place):
        return self.tokenizer.decode(self.prompt(place), skip_special_tokens=False)

    def answer(self, place, tokens, *calls, reasoning=None, content=None):
        """Add an answer; return it as the client is shown it."""
        node, self.num_nodes = self.num_nodes, self.num_nodes + 1
        answer = Answer(node, tokens, (0.0,) * len(tokens), "stop")
        shown = self.conversations.read(place, tokens).words if content is None else content
        message = {"role": "assistant", "content": shown}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{node}_{n}", "type": "function", "function": {"name": name, "arguments": words}}
                for n, (name, words) in enumerate(calls)
            ]
        self.conversations.add(place, answer, message)
        if not tokens:
            self.empty.add(node)
        self.paths[node] = [*self.prompt(place), *tokens]
        return message

    def written(self, messages, text=ANSWER, tools=None, calls=(), **shown):
        """Ask, and answer in a token per character with the end-of-turn token."""
        place = self.conversations.place(messages, tools)
        return self.answer(place, letters(self.tokenizer, text) + self.tokenizer.encode(END), *calls, **shown)

    def ask(self, messages, tools=None):
        return self.conversations.place(messages, tools)


def result(text, call="call_0_0"):
    return {"role": "tool", "content": text, "tool_call_id": call}


def user(text):
    return {"role": "user", "content": text}


def test_the_first_request_is_a_branch_with_the_templates_text(tokenizer):
    talk = Talk(tokenizer)
    place = talk.ask(ASK, TOOLS)
    assert place.parent is None and talk.text(place) == chatml(ASK, TOOLS)
    assert (place.num_cached, place.num_prompt) == (0, len(place.suffix))


@pytest.mark.parametrize(
    "rest", [[result("4"), result("5")], [user("Sure?")], [{"role": "system", "content": "Be long."}, user("Sure?")]]
)
def test_results_users_and_systems_messages_are_appended_to_the_exact_tokens(tokenizer, rest):
    talk = Talk(tokenizer)
    said = talk.written(ASK)
    place = talk.ask([*ASK, said, *rest])
    assert place.parent == 0 and talk.text(place) == chatml([*ASK, said, *rest])
    assert talk.prompt(place)[: len(talk.paths[0])] == talk.paths[0]
    assert talk.prompt(place) != tokenizer.encode(chatml([*ASK, said, *rest])), "the model's own tokens are kept"
    assert place.num_cached == len(talk.paths[0])


def test_a_client_may_change_everything_that_says_the_same(tokenizer):
    talk = Talk(tokenizer)
    place = talk.ask(ASK, TOOLS)
    calls = [("add", '{"a": 1, "b": [2.0]}')]
    talk.answer(place, letters(tokenizer, "Hm."), *calls, reasoning="thoughts", content="")
    echoed = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "function": {"arguments": '{"b":[2],"a":1}', "name": "add"}}],
        "refusal": None,
    }
    asked = [
        ASK[0],
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]},
    ]
    assert talk.ask([*asked, echoed, result("4")], TOOLS).parent == 0


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Five."},
        {"role": "user"},
        {"tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
    ],
)
def test_an_answer_that_the_client_rewrote_begins_a_branch_read_as_text(tokenizer, change):
    talk = Talk(tokenizer)
    said = talk.written(ASK) | change
    place = talk.ask([*ASK, said, user("Sure?")])
    assert place.parent is None and talk.text(place) == chatml([*ASK, said, user("Sure?")])


@pytest.mark.parametrize("tools", [None, [*TOOLS, *TOOLS]])
def test_other_tools_or_another_system_prompt_begin_a_branch(tokenizer, tools):
    talk = Talk(tokenizer)
    said = talk.written(ASK, tools=TOOLS)
    assert talk.ask([*ASK, said, user("Sure?")], TOOLS).parent == 0
    assert talk.ask([*ASK, said, user("Sure?")], tools).parent is None
    assert talk.ask([{"role": "system", "content": "Sum up."}, ASK[1], said, user("Sure?")], TOOLS).parent is None


def test_a_malformed_turn_that_is_dropped_leaves_the_branch_before_it(tokenizer):
    talk = Talk(tokenizer)
    first = talk.written(ASK)
    more = [*ASK, first, user("And 3+3?")]
    talk.written(more, "garbage")
    again = talk.ask([*more, user("Write a number.")])
    assert again.parent == 0 and talk.text(again) == chatml([*more, user("Write a number.")])


def test_a_turn_cut_by_its_tokens_goes_on_with_the_environments_end_of_turn(tokenizer):
    talk = Talk(tokenizer)
    place = talk.ask(ASK)
    said = talk.answer(place, letters(tokenizer, "Four hu"))
    place = talk.ask([*ASK, said, user("Go on.")])
    assert place.parent == 0
    assert tokenizer.decode(place.suffix, False) == f"{END}\n<|im_start|>user\nGo on.{END}\n<|im_start|>assistant\n"


def test_a_stop_strings_tokens_stay_and_the_client_does_not_see_them(tokenizer):
    talk = Talk(tokenizer)
    place = talk.ask(ASK)
    tokens = letters(tokenizer, "Four</a>")
    text = talk.conversations.read(place, tokens, ("x", "</a>", "a>"))
    assert (text.words, text.end, text.stop) == ("Four", "", "</a>")
    assert text.opening.endswith("<|im_start|>assistant\n")
    said = talk.answer(place, tokens, content=text.words)
    place = talk.ask([*ASK, said, user("Sure?")])
    assert talk.text(place) == chatml(ASK) + f"Four</a>{END}\n" + chatml([user("Sure?")])


def test_the_end_of_turn_token_is_no_word(tokenizer):
    talk = Talk(tokenizer)
    text = talk.conversations.read(talk.ask(ASK), letters(tokenizer, "4") + tokenizer.encode(END))
    assert (text.words, text.end, text.stop) == ("4", END, None)
    assert talk.conversations.read(talk.ask(ASK), []).words == ""


def test_of_equal_answers_the_echoed_call_ids_tell_then_the_thoughts_then_the_latest(tokenizer):
    talk = Talk(tokenizer)
    call = ("add", "{}")
    place = talk.ask(ASK, TOOLS)
    said = [
        talk.answer(place, letters(tokenizer, "Hm."), *calls, reasoning=thoughts)
        for calls, thoughts in [((call,), None), ((call,), "b"), ((), "c"), ((), "d")]
    ]
    rest = [result("4")]
    assert [talk.ask([*ASK, message, *rest], TOOLS).parent for message in said] == [0, 1, 2, 3]
    renamed = {**said[0], "tool_calls": [{**said[0]["tool_calls"][0], "id": "mine"}]}
    assert talk.ask([*ASK, renamed, *rest], TOOLS).parent == 0, "as the other one has thoughts"
    assert talk.ask([*ASK, {**renamed, "reasoning_content": "b"}, *rest], TOOLS).parent == 1
    assert talk.ask([*ASK, {**said[3], "reasoning_content": None}, *rest], TOOLS).parent == 3, "the latest"


def test_two_conversations_with_equal_words_stay_apart_behind_their_calls(tokenizer):
    talk = Talk(tokenizer)
    place = talk.ask(ASK, TOOLS)
    firsts = [talk.answer(place, letters(tokenizer, "Hm."), ("add", "{}")) for _ in range(2)]
    talks = [[*ASK, first, result("4", first["tool_calls"][0]["id"])] for first in firsts]
    for messages in talks:
        messages.append(talk.written(messages, tools=TOOLS))
    assert [talk.ask([*messages, user("Sure?")], TOOLS).parent for messages in talks] == [2, 3]


def test_with_history_tokens_thoughts_stay_that_the_template_would_leave_out(tokenizers):
    thinking = "<think>\nhm\n</think>\n\nFour."
    for history, parent in (("tokens", 0), ("rendered", None)):
        talk = Talk(tokenizers["qwen3"], history=history)
        said = talk.written(ASK, thinking, reasoning="hm", content="Four.")
        place = talk.ask([*ASK, said, user("Sure?")])
        assert place.parent == parent
        assert ("hm\n</think>" in talk.text(place)) == (history == "tokens")


def test_rendered_history_goes_on_behind_tokens_that_begin_it_exactly(tokenizer):
    for tokens, parent in ((tokenizer.encode(ANSWER), 0), (letters(tokenizer, ANSWER), None)):
        talk = Talk(tokenizer, history="rendered")
        said = talk.answer(talk.ask(ASK), [*tokens, *tokenizer.encode(END)])
        place = talk.ask([*ASK, said, user("Sure?")])
        assert place.parent == parent and talk.prompt(place) == tokenizer.encode(chatml([*ASK, said, user("Sure?")]))
        assert talk.conversations.num_retokenized == (parent is None)


def test_requests_in_tokens_go_on_behind_the_node_that_begins_them(tokenizer):
    talk = Talk(tokenizer)
    place = talk.conversations.place_tokens([5, 6, 7])
    assert (place.parent, place.suffix.tolist()) == (None, [5, 6, 7])
    talk.conversations.add(place, Answer(0, [8], (0.0,), "stop"), None)
    talk.conversations.add(place, Answer(1, [9], (0.0,), "stop"), None)
    for ids, parent, suffix in (([5, 6, 7, 9, 4], 1, [4]), ([5, 6, 7, 8], 0, []), ([5, 6, 4], None, [5, 6, 4])):
        place = talk.conversations.place_tokens(ids)
        assert (place.parent, place.suffix.tolist()) == (parent, suffix)


@pytest.mark.parametrize("ids", [[], [-1], [10**6], [10**12], [1.5], ["a"], [True], [None]])
def test_tokens_that_the_model_does_not_have_are_refused(tokenizer, ids):
    with pytest.raises(TurnRefused) as refused:
        Talk(tokenizer).conversations.place_tokens(ids)
    assert refused.value.status == 400


def refusal(call, *arguments):
    with pytest.raises(TurnRefused) as refused:
        call(*arguments)
    return refused.value.status, refused.value.code, str(refused.value)


def test_without_room_the_refusal_is_the_one_that_harnesses_compact_on(tokenizer):
    size = len(tokenizer.encode(chatml(ASK)))
    assert refusal(Talk(tokenizer, Limits(size - 1, 10, 9, 9, None, 1)).ask, ASK) == (
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {size - 1} tokens. However, your messages resulted in {size} tokens. "
        f"Please reduce the length of the messages.",
    )
    used = len(tokenizer.encode(f"\n<|im_start|>user\nSure?{END}\n<|im_start|>assistant\n"))
    for room in (1, 0):
        talk = Talk(tokenizer, Limits(size + 50, 6 + used + room, 9, 9, None, 1))
        assert talk.ask(ASK).room == 6 + used + room, "of the whole branch"
        messages = [*ASK, talk.written(ASK, "Four."), user("Sure?")]
        assert len(talk.paths[0]) == size + 6
        if room:
            assert talk.ask(messages).room == 1
        else:
            status, code, _ = refusal(talk.ask, messages)
            assert (status, code) == (400, "context_length_exceeded")
    assert Talk(tokenizer, Limits(size, 50, 9, 9, 7, 1)).ask(ASK).room == 7


def test_branches_are_counted_as_rows(tokenizer):
    talk = Talk(tokenizer, Limits(4000, 4000, 99, 3, None, 8))
    said = talk.written(ASK)
    first = [*ASK, said, user("a")]
    for _ in range(5):  # asked again: the last one counts
        last = talk.written(first)
    talk.written([*first, last, user("b")])  # on behind the last: still one
    talk.written([*ASK, said, user("other")])
    talk.written([user("a new one")])
    assert refusal(talk.ask, [user("a fourth")])[:2] == (403, "max_branches")
    assert talk.ask([*first, last, user("b")]).parent == 5, "which is none more"
    wide = Talk(tokenizer, Limits(4000, 4000, 99, 3, None, 8))
    wide.conversations.drop(wide.ask([user("without an answer")]))
    assert refusal(wide.conversations.place, ASK, None, 4)[:2] == (403, "max_branches")
    wide.conversations.place(ASK, None, 3)


def test_an_answer_with_turns_behind_it_stays_a_branch_when_it_is_asked_again(tokenizer):
    talk = Talk(tokenizer, Limits(4000, 4000, 99, 2, None, 8))
    said = talk.written(ASK)
    talk.written([*ASK, said, user("b")])
    talk.written(ASK)
    talk.written(ASK)
    assert refusal(talk.ask, [user("a third")])[:2] == (403, "max_branches")


def called(**fields):
    call = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


def test_calls_are_rendered_with_ids_that_mistrals_templates_take(tokenizers):
    talk = Talk(tokenizers["tools last"], history="rendered")
    text = talk.text(talk.ask([user("2+2?"), called(), result("4")], TOOLS))
    call, shown = re.fullmatch(
        r".*\[TOOL_CALLS\](.*), (?:.*)<\|im_end\|>\[TOOL_RESULTS\]4, (.*)\[/TOOL.*", text
    ).groups()
    assert json.loads(call) == {"name": "add", "arguments": {"a": 1}}
    assert re.fullmatch("[0-9a-z]{9}", shown) and text.count(shown) == 2


def test_kimis_template_names_calls_and_results_by_name_and_place(tokenizers):
    """Its models write `functions.add:0`: behind their own tokens a result must name the same."""
    talk = Talk(tokenizers["kimi k2"])
    asked = [user("2+2?")]
    names = []
    for number in range(3):
        calls = [("add", f'{{"a": {number}}}')]
        said = talk.written(asked, f"functions.add:{number}", TOOLS, calls, content="")
        asked += [said, result("4", said["tool_calls"][0]["id"])]
        names += [f"functions.add:{number}"] * 2
    appended, rendered = talk.ask(asked, TOOLS), talk.ask([user("Again?"), *asked[1:]], TOOLS)
    assert appended.parent == 2 and rendered.parent is None
    for place in (appended, rendered):
        assert re.findall(r"functions\.add:\d", talk.text(place)) == names
    assert "## Return of functions.add:2\n4<|im_end|>" in talk.text(appended)


def test_a_late_system_prompt_that_the_template_shows_first_begins_a_branch(tokenizers):
    talk = Talk(tokenizers["deepseekv3"])
    asked = [user("2+2?"), talk.written([user("2+2?")]), {"role": "system", "content": "Be long."}, user("Sure?")]
    place = talk.ask(asked)
    assert place.parent is None and talk.text(place).startswith("<|endoftext|>Be long.<｜User｜>2+2?")


def test_thoughts_reach_a_rendered_prompt_where_the_template_shows_them(tokenizers):
    talk = Talk(tokenizers["gptoss"], history="rendered")
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant to=functions.add"
    for fields, words in (({}, "hm"), ({"content": "Let me add."}, "Let me add.")):
        place = talk.ask([user("2+2?"), called(reasoning_content="hm", **fields), result("4")])
        assert analysis.format(words) in talk.text(place)


@pytest.mark.parametrize(
    "template, messages, tools, words",
    [
        ("gemma 3", ASK, TOOLS, "shows no tool of 'add'"),
        ("gemma 3", [*ASK, {"role": "assistant", "content": "x"}, result("4")], None, "role 'tool'|alternate"),
        ("gemma 3", [ASK[1], ASK[1]], None, "alternate"),
    ],
)
def test_what_the_template_cannot_tell_the_model_is_refused(tokenizers, template, messages, tools, words):
    status, code, text = refusal(Talk(tokenizers[template]).ask, messages, tools)
    assert (status, code) == (400, "invalid_value") and re.search(words, text)


@pytest.mark.parametrize("depth", [101, 900])
def test_tools_nested_too_deep_for_a_template_are_refused(tokenizer, depth):
    parameters = {}
    for _ in range(depth):
        parameters = {"a": parameters}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    assert refusal(Talk(tokenizer).ask, ASK, tools)[:2] == (400, "invalid_value")


def test_without_a_template_contents_are_joined_and_tools_refused(tokenizer):
    talk = Talk(tokenizer, template=False)
    assert talk.text(talk.ask([user("2+2="), user("?")])) == "2+2=?"
    said = talk.written([user("2+2=")], "4")
    place = talk.ask([user("2+2="), said, user(";3+3=")])
    assert place.parent == 0 and tokenizer.decode(place.suffix, False) == ";3+3="
    assert refusal(talk.ask, ASK, TOOLS)[:2] == (400, "invalid_value")


def test_a_trajectory_begins_without_a_look_at_the_template_which_another_may_be_using():
    Conversations(SimpleNamespace(), ROOMY, "tokens", {}, True)


def test_counting_tokens_asks_nothing(tokenizer):
    talk = Talk(tokenizer, Limits(4000, 4000, 9, 1, None, 1))
    for _ in range(3):
        assert talk.conversations.num_tokens(ASK, None) == len(tokenizer.encode(chatml(ASK)))
    said = talk.written(ASK)
    more = [*ASK, said, user("b")]
    assert talk.conversations.num_tokens(more, None) == len(talk.prompt(talk.ask(more)))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "results", "edit", "retry", "new", "choices"]),
        st.integers(0, 10**6),
        st.text("ab .", max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


def by_transformers(messages):
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template([messages], chat_template=source("qwen2_5"), add_generation_prompt=True)[0][0]


@pytest.mark.parametrize("template, shown", [("chatml", chatml), ("qwen2_5", by_transformers)])
@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_each_prompt_is_the_text_of_its_messages_over_the_exact_tokens_of_its_path(tokenizers, template, shown, steps):
    talk = Talk(tokenizer := tokenizers[template])
    dialogues = [list(ASK)]  # of the harness: each ends before an answer, or with one
    nodes = {}  # messages -> the latest node with these, of a harness that echoes no ids
    for kind, pick, text, is_ended in steps:
        messages = list(dialogues[pick % len(dialogues)])
        if kind == "edit":
            at = pick % len(messages)
            messages[at] = {**messages[at], "content": f"{text}!"}
        if kind == "new":
            messages = [user(f"{text}?")]
        if messages[-1]["role"] == "assistant":
            if kind == "retry":
                messages.pop()
            else:
                messages += [result(text), result("")] if kind == "results" else [user(text)]
        known = [size for size in range(len(messages)) if key(messages[:size]) in nodes]
        rest = messages[max(known, default=0) :]
        expected = nodes[key(messages[: known[-1]])] if known else None
        if any(message["role"] == "assistant" for message in rest):
            expected = begins(talk, tokenizer.encode(shown(messages)))
        place = talk.ask(messages)
        assert place.parent == expected
        # an unended answer's turn is ended by the template, so both have the same text
        assert talk.text(place) == shown(messages)
        for _ in range(2 if kind == "choices" else 1):
            said = talk.answer(place, letters(tokenizer, text) + (tokenizer.encode(END) if is_ended else []))
            nodes[key([*messages, said])] = talk.num_nodes - 1
        dialogues.append([*messages, said])


def key(messages):
    return json.dumps([[message["role"], message["content"]] for message in messages])


def begins(talk, ids):
    """The longest path that begins a prompt, the latest of several; None without one."""
    full = {number: path for number, path in talk.paths.items() if number not in (None, *talk.empty)}
    matching = [number for number, path in full.items() if ids[: len(path)] == path]
    return max(matching, key=lambda number: (len(talk.paths[number]), number), default=None)
