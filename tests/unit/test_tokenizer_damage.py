"""A damaged tokenizer ends in a sentence, and no chat template takes hours or all memory."""

import json
import os

import pytest
import tokenizers
from tokenizers import models

from megatron_dapo.common.errors import UserError
from megatron_dapo.data import template_limits
from megatron_dapo.data.chat_template import ChatTemplate
from megatron_dapo.data.template_limits import MAX_STEPS, MAX_TEXT
from megatron_dapo.data.tokenizer import load_tokenizer
from tests.bounded_process import run_bounded
from tests.model_folders import CHATML, write_byte_level
from tests.proofs import amount

pytestmark = pytest.mark.unit

DEEP = "[" * 100_000 + "]" * 100_000
CHAT = [{"role": "user", "content": "hi"}]


def put(name: str, content: str | bytes):
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def changed(name: str, **values: object):
    def damage(folder):
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))

    return damage


def fifo(name: str):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def endless(name: str):
    def damage(folder):
        with (folder / name).open("ab") as file:
            file.truncate(60 << 30)

    return damage


CONFIG, GENERATION, TOKENIZER, BACKEND = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
)  # fmt: skip
DAMAGE = {
    "none": lambda folder: None,
    **{f"{name}: deep": put(name, f'{{"a": {DEEP}}}') for name in (CONFIG, GENERATION, TOKENIZER, BACKEND)},
    **{f"{name}: a list": put(name, "[1]") for name in (CONFIG, GENERATION, TOKENIZER, BACKEND)},
    **{f"{name}: cut off": put(name, '{"a": ') for name in (CONFIG, GENERATION, TOKENIZER, BACKEND)},
    **{f"{name}: bytes": put(name, bytes(range(256))) for name in (CONFIG, GENERATION, TOKENIZER, BACKEND)},
    **{f"{name}: a pipe": fifo(name) for name in (CONFIG, GENERATION, TOKENIZER, BACKEND)},
    **{f"{name}: sixty gigabytes": endless(name) for name in (CONFIG, GENERATION, TOKENIZER, BACKEND)},
    "a backend without a model": put(BACKEND, '{"version": "1.0"}'),
    "a vocabulary of text": put(
        BACKEND, '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}'
    ),
    "merges of what is not there": put(
        BACKEND, '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}'
    ),
    "an end that is text": changed(GENERATION, eos_token_id="<|im_end|>"),
    "an end that is a list of text": changed(GENERATION, eos_token_id=["2"]),
    "an end beyond the vocabulary": changed(CONFIG, eos_token_id=10**6),
    "an end below 0": changed(CONFIG, eos_token_id=-1),
    "an end that is true": changed(CONFIG, eos_token_id=True),
    "an end that is a fraction": changed(CONFIG, eos_token_id=1.5),
    "an end that is an object": changed(CONFIG, eos_token_id={"a": 1}),
    "an end token that is a number": changed(TOKENIZER, eos_token=5),
    "an end token without its text": changed(TOKENIZER, eos_token={"__type": "AddedToken"}),
    "a token that is a list": changed(TOKENIZER, bos_token=["a"]),
    "a template that is a number": changed(TOKENIZER, chat_template=5),
    "templates without texts": changed(TOKENIZER, chat_template=[{"name": "default", "template": 4}]),
    "a template that does not compile": changed(TOKENIZER, chat_template="{% for %}"),
    "a template of deep blocks": changed(TOKENIZER, chat_template="{% if 1 %}" * 400 + "{% endif %}" * 400),
    "a template of deep brackets": changed(TOKENIZER, chat_template="{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    "a template of a long number": changed(TOKENIZER, chat_template="{{ " + "9" * 5000 + " }}"),
    "a template of megabytes": changed(TOKENIZER, chat_template="x" * (2 << 20)),
    "a template file of bytes": put("chat_template.jinja", bytes(range(256))),
    "a template file that is a pipe": fifo("chat_template.jinja"),
    "a template file that is a folder": lambda folder: (folder / "chat_template.jinja").mkdir(),
    "a template file of sixty gigabytes": endless("chat_template.jinja"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_tokenizer_ends_in_a_sentence(tmp_path, what):
    DAMAGE[what](write_byte_level(tmp_path))

    def load() -> int:
        try:
            load_tokenizer(tmp_path).encode_prompt("hi", True)
        except UserError as error:
            assert len(error.sentences) == 1 and "actor_rollout_ref.model.path" in str(error) and len(str(error)) < 800
            return 2
        return 0

    ended = run_bounded(load)
    assert ended.code == (0 if what == "none" else 2), ended.error[-1500:]


def test_text_that_a_vocabulary_does_not_know_is_an_error_of_the_prompt(tmp_path):
    write_byte_level(tmp_path)
    (tmp_path / CONFIG).unlink()
    (tmp_path / TOKENIZER).unlink()
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).save(str(tmp_path / BACKEND))
    with pytest.raises(ValueError, match="tokenizer refuses it"):
        load_tokenizer(tmp_path).encode_prompt("b", False)


LOOP = "{% for i in range(100000) %}"
HOSTILE = {
    "loops in loops": LOOP * 4 + "x" + "{% endfor %}" * 4,
    "loops that write nothing": LOOP * 3 + "{% endfor %}" * 3,
    "a loop over a text": "{% set s = 'x' * 1000000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": ("{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 5 }}{% endfor %}"),
    "lists of ranges": LOOP + "{% set x = range(100000) | list %}{% endfor %}",
    "sums of ranges": LOOP + "{{ range(100000) | sum }}{% endfor %}",
    "a text that doubles by +": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = n.s + n.s %}{% endfor %}",
    "a text that doubles by ~": "{% set n = namespace(s='x') %}" + LOOP + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a text that doubles by replace": (
        "{% set n = namespace(s='xx') %}" + LOOP + "{% set n.s = n.s.replace('x', 'xx') %}{% endfor %}"
    ),
    "a text that grows by a filter": (
        "{% set n = namespace(s='xx') %}" + LOOP + "{% set n.s = n.s | replace('x', n.s) %}{% endfor %}"
    ),
    "a text that grows by join": (
        "{% set n = namespace(s='xx') %}" + LOOP + "{% set n.s = n.s | join(n.s) %}{% endfor %}"
    ),
    "a text that grows by a method": (
        "{% set n = namespace(s='xx') %}" + LOOP + "{% set n.s = n.s.join(n.s) %}{% endfor %}"
    ),
    "a search in a long text": "{% set s = 'ab' * 4000000 %}" + LOOP + "{% if 'aab' in s %}x{% endif %}{% endfor %}",
    "slices of a long text": "{% set s = 'ab' * 4000000 %}" + LOOP + "{% set t = s[::-1] %}{% endfor %}",
    "long texts that are kept": (
        "{% set n = namespace(s=[]) %}" + LOOP + "{% set n.s = [n.s, 'ab' * 4000000] %}{% endfor %}"
    ),
    "a quotient of long numbers": "{{ ('f' * 700000) | int(base=16) // ('e' * 350000) | int(base=16) }}",
    "a difference of long numbers": "{{ ('9' * 4000) | int - 1 }}",
    "a long product": "{{ 'x' * 10000000000 }}",
    "a long product of a list": "{{ [1] * 1000000000 }}",
    "a power of powers": "{{ 9 ** (9 ** 9) }}",
    "squares of squares": "{% set n = namespace(s=99) %}" + LOOP + "{% set n.s = n.s * n.s %}{% endfor %}",
    "a wide format": "{{ '%1000000000d' | format(1) }}",
    "a wide format with %": "{{ '%1000000000d' % 1 }}",
    "a wide format of a method": "{{ '{:1000000000}'.format(1) }}",
    "a format with its width as an argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a wide center": "{{ 'x' | center(1000000000) }}",
    "a wide method": "{{ 'x'.ljust(1000000000) }}",
    "a wide indent": "{{ 'x\ny' | indent(1000000000) }}",
    "a wide JSON": "{{ {'a': 1} | tojson(indent=1000000000) }}",
    "a block that fills the memory": (
        "{% set s = 'x' * 7000000 %}{% set t %}" + LOOP + "{{ s }}{% endfor %}{% endset %}"
    ),
    "an output that fills the memory": "{% set s = 'x' * 7000000 %}" + LOOP + "{{ s }}{% endfor %}",
    "a division by 0": "{{ 1 // 0 }}",
    "a wrong type": "{{ 1 + 'a' }}",
    "a deep JSON": (
        "{% set n = namespace(s=[]) %}{% for i in range(5000) %}{% set n.s = [n.s] %}{% endfor %}{{ n.s | tojson }}"
    ),
    "a name that is not there": "{{ nowhere.at.all }}",
}
KEPT = {"lists of ranges", "long texts that are kept"} | {what for what in HOSTILE if "fills the memory" in what}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_template_takes_hours_or_all_memory(tmp_path, what, monkeypatch):
    """In `make test` with a tenth of the steps, where memory is no matter: all of them take seconds."""
    if what not in KEPT:
        monkeypatch.setattr(template_limits, "MAX_STEPS", amount(MAX_STEPS // 10, MAX_STEPS))

    def render() -> int:
        tokenizer = load_tokenizer(write_byte_level(tmp_path, template=HOSTILE[what]))
        try:
            tokenizer.encode_prompt("hi", True)
        except UserError:
            return 3
        except ValueError as error:
            return 2 if "chat template refuses it" in str(error) else 3
        return 0

    ended = run_bounded(render)
    assert ended.code == 2, ended.error[-1500:]


def text_of(template, messages):
    return "".join(part.text for part in template.parts(messages, add_generation_prompt=True))


def test_long_conversations_stay_far_below_the_bounds():
    chat = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y" * 2000}] * 1000
    template = ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
    text = text_of(template, chat)
    assert text.count("<|im_start|>") == 2001 and len(text) < MAX_TEXT and MAX_STEPS > 100 * len(chat)
    assert text == text_of(template, chat), "each rendering has all its steps"


def test_what_templates_do_with_loops_numbers_and_texts_is_as_in_the_plain_sandbox():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    for source in (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }} {{ loop.revindex0 }};{% endfor %}",
        "{% for k, v in {'b': 1, 'a': [2]}.items() %}{{ k ~ v ~ none ~ 1.5 }}{% else %}none{% endfor %}",
        "{% for m in nothing %}x{% else %}empty{% endfor %}{{ 1700000000 * 2 }} {{ 2 ** 10 }} {{ 7 % 3 }} {{ 7 // 2 }}",
        "{{ '%d %s' % (1700000000, 'a') }} {{ '{} {:>4}'.format(1700000000, 2) }} {{ '%05.1f' | format(2) }}",
        "{{ 'a,b'.split(',') | map('upper') | join('-') }} {{ messages[::-1] | length }} {{ 'x' * 3 + 'y' }}",
        "{% macro f(function, context=2) %}{{ function }}{{ context }}{% endmacro %}{{ f(function='a', context=3) }}",
        "{{ 'a.b' | replace('.', '--') }} {{ ' x '.strip() }} {{ [3, 1] | sort | list }} {{ 'ab' | indent(2, true) }}",
        "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }},{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}",
    ):
        expected = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
        assert text_of(ChatTemplate(source, {}), CHAT * 3) == expected.render(messages=CHAT * 3), source
