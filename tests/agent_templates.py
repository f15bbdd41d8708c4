"""Chat templates for tests of agents: those of models in tests/templates, and short ones by hand."""

import json
from pathlib import Path

from megatron_dapo.data.tokenizer import Tokenizer, load_tokenizer
from tests.model_folders import write, write_byte_level

FOLDER = Path(__file__).parent / "templates"
_ALTERNATE = (
    "{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}"
)
BY_HAND = {
    # plain, with tools, calls and results
    "chatml": (
        "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or () %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinks %}<think>\n{% endif %}{% endif %}"
    ),
    # as Llama 3.1: one call to a message, whose text is then not shown
    "one call": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
        "<|im_start|>assistant\n{{ m.tool_calls[0].function | tojson }}<|im_end|>"
        "{% elif m.role == 'tool' %}<|im_start|>ipython\n{{ m.content | tojson }}<|im_end|>"
        "{% else %}<|im_start|>{{ m.role }}\n"
        "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content | trim }}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # as Gemma 3: no tools, strict turns, the system's text with the first user's
    "gemma 3": (
        "{{ bos_token }}"
        "{% if messages[0].role == 'system' %}{% set head, rest = messages[0].content + '\n\n', messages[1:] %}"
        "{% else %}{% set head, rest = '', messages %}{% endif %}"
        "{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if loop.first %}{{ head }}{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    # as GLM-4-0414: a turn ends with the next role, systems' texts stand first; tools are shown, calls and results not
    "glm 4": (
        "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
        "{% for m in messages if m.role == 'system' %}<|system|>\n{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role in ('user', 'assistant') %}"
        "<|{{ m.role }}|>\n{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    # as Kimi-K2: nothing but its id names a call, and a result
    "kimi k2": (
        "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
        "{% if messages[0].role != 'system' %}<|im_system|>system<|im_middle|>You help.<|im_end|>{% endif %}"
        "{% for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>"
        "{{ m.name or m.role }}<|im_middle|>"
        "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls or () %}{% if loop.first %}<|tool_calls_section_begin|>{% endif %}"
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
        "<|tool_call_end|>{% if loop.last %}<|tool_calls_section_end|>{% endif %}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    ),
    # as LFM2: marks around results
    "lfm2": (
        "{{ bos_token }}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'tool' %}<|tool_response_start|>{{ m.content }}<|tool_response_end|>"
        "{% else %}{{ m.content }}{% for call in m.tool_calls or () %}"
        "<|tool_call_start|>[{{ call.function.name }}("
        "{% for name, value in call.function.arguments | items %}{{ name }}='{{ value }}'{% endfor %}"
        ")]<|tool_call_end|>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # as Nemotron 3: results share a user's turn; an assistant's words are stripped behind empty thoughts
    "nemotron 3": (
        "<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}"
        "<tool_response>\n{{ m.content }}\n</tool_response>\n"
        "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ ('<think></think>' + m.content) | trim }}"
        "{% for call in m.tool_calls or () %}\n<tool_call>\n<function={{ call.function.name }}>\n"
        "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>"
        "{% endfor %}</function>\n</tool_call>\n{% endfor %}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    # as Cohere's: a result is a turn without its text
    "no results": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'tool' %}{{ m.content }}{% endif %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # as Mistral's: the system's text and the tools stand with the last user's
    "tools last": (
        _ALTERNATE.replace("in messages if", "in messages if m.role != 'system' and")
        + "{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if m == last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
        "[INST]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS]{% for call in m.tool_calls %}"
        "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "{{ call.function | tojson }}, {{ call.id }}{% endfor %}{{ eos_token }}"
        "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
        "{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "[TOOL_RESULTS]{{ m.content }}, {{ m.tool_call_id }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
    ),
    # as DeepSeek-V3's with tools: later results begin otherwise than the first
    "later results": (
        "{{ tools | tojson }}{% set ns = namespace(begun=false) %}{% for m in messages %}"
        "{% if m.role == 'tool' %}{% if not ns.begun %}<results>{% set ns.begun = true %}{% endif %}"
        "<result>{{ m.content }}</result>"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or () %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # its assistant's end depends on the role that follows
    "changing": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if not loop.last and messages[loop.index0 - 1].role == 'user' and loop.index > 3 %}!{% endif %}<|im_end|>"
        "{% if loop.last and loop.index > 4 %}late{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "short talks": (
        "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "arguments as they are": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or () %}{{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))


def source(name: str) -> str:
    return BY_HAND[name] if name in BY_HAND else (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_with(folder: Path, name: str, eos: str = "<|im_end|>") -> Tokenizer:
    """A byte-level tokenizer with a template, by its file's name or that of BY_HAND.

    eos: the end-of-turn token, which the tokenizer learns as one.
    """
    write_byte_level(folder, template=source(name))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", {**settings, "bos_token": "<|endoftext|>", "eos_token": eos})
    if eos != "<|im_end|>":
        tokens = json.loads((folder / "tokenizer.json").read_text())
        number = len(tokens["model"]["vocab"])
        row = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokens["added_tokens"].append({"id": number, "content": eos, **row})
        write(folder, "tokenizer.json", tokens)
    return load_tokenizer(folder)
