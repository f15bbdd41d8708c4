"""Replies of SGLang's routes for parsers, as tests/e2e/test_agent_parsers.py checks them."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
ADD, ADD_2 = ("add", '{"a": 1}'), ("add", '{"a": 2}')
_JSON = '{"name": "add", "arguments": {"a": 1}}'
_NOPE = '{"name": "nope", "arguments": {}}'
_DS = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_OSS = '<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{{"a": 1}}'
_TWO = '{"name": "add", "parameters": {"a": 1}};{"name": "add", "parameters": {"a": 2}}'

# (parser, text) -> (the other text, calls); None: an error status
CALLS = {
    ("qwen25", f"<tool_call>\n{_JSON}\n</tool_call>"): ("", [ADD]),
    ("qwen25", f"hi <tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_JSON.replace('1', '2')}\n</tool_call>"): (
        "hi",
        [ADD, ADD_2],
    ),
    ("qwen25", f"x <tool_call>{_JSON}</tool_call>"): (f"x <tool_call>{_JSON}</tool_call>", []),
    ("qwen25", f"<tool_call>\n{_NOPE}\n</tool_call>"): ("", []),
    ("qwen25", f"<tool_call>\n{_JSON}\n</tool_call><tool_call>\n{_NOPE}\n</tool_call>"): ("", [ADD]),
    ("qwen25", '<tool_call>\n{"name": "add"'): ("", []),
    ("qwen25", "<tool_call>\n3\n</tool_call>"): None,
    ("llama3", '{"name": "add", "parameters": {"a": 1}}'): ("", [ADD]),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'): ("", [ADD]),
    ("llama3", _TWO): ("", [ADD, ADD_2]),
    ("llama3", '{"name": "nope", "parameters": {}}'): ("", []),
    ("llama3", '<|python_tag|>{"name":'): ('{"name":', []),
    ("llama3", "Four."): ("Four.", []),
    ("mistral", f"[TOOL_CALLS] [{_JSON}, {_JSON.replace('1', '2')}]"): ("", [ADD, ADD_2]),
    ("mistral", '[TOOL_CALLS] [{"name": "add"'): ("", []),
    ("deepseekv3", "hm<｜tool▁calls▁begin｜>" + _DS.format("add", '{"a": 1}') + "<｜tool▁calls▁end｜>"): ("hm", [ADD]),
    ("deepseekv3", "<｜tool▁calls▁begin｜>" + _DS.format("nope", "{}") + "<｜tool▁calls▁end｜>"): ("", []),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"): ("", [ADD]),
    ("glm45", "<tool_call>add\n<arg_key>a"): ("", []),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"): ("", [ADD]),
    ("glm47", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"): None,  # whatever the text
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"): (
        "",
        [ADD],
    ),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1"): ("", [ADD]),
    ("gpt-oss", _OSS.format("add") + "<|call|>"): ("", [ADD]),
    ("gpt-oss", _OSS.format("nope") + "<|call|>"): ("", []),
    ("gpt-oss", "4"): ("4", []),
}
ILL_FORMED = [
    *(case for case, reply in CALLS.items() if not reply or not reply[1]),
    ("qwen25", f"<tool_call>\n{_JSON}\n</tool_call><tool_call>\n{_NOPE}\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1"),  # half a call is taken for a whole one
]
ILL_FORMED = [case for case in ILL_FORMED if case[1] not in ("4", "Four.") and case[0] != "glm47"]
# as models of the families write a call, and the same after `parsed`
WELL_FORMED = {case: reply[1] for case, reply in CALLS.items() if reply and reply[1] and case not in ILL_FORMED}
WELL_FORMED["glm47", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"] = [ADD]

_HARMONY = "<|start|>assistant<|channel|>{}<|message|>{}"
# (parser, text) -> (thoughts, the other text)
THOUGHTS = {
    ("qwen3", "<think>\nhm\n</think>\n\n4"): ("\nhm\n", "\n\n4"),
    ("qwen3", "<think>hm\n</think>\n\n4"): ("hm\n", "\n\n4"),
    ("qwen3", "4"): ("", "4"),
    ("qwen3", "<think>\nhm"): ("\nhm", ""),
    ("glm45", "<think>hm</think>4"): ("hm", "4"),
    ("glm45", "4"): ("", "4"),
    ("gpt-oss", _HARMONY.format("final", "4") + "<|return|>"): ("", "4"),
    ("gpt-oss", _HARMONY.format("analysis", "hm") + "<|end|>" + _HARMONY.format("final", "4") + "<|return|>"): (
        "hm",
        "4",
    ),
    ("gpt-oss", _HARMONY.format("analysis", "hm") + "<|end|>" + _OSS.format("add") + "<|call|>"): (
        "hm",
        _OSS.format("add") + "<|call|>",
    ),
    # cut: the call is lost
    ("gpt-oss", _HARMONY.format("analysis", "hm") + "<|end|>" + _OSS.format("add")): ("hm", ""),
}
