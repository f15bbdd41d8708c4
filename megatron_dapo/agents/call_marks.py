"""The marks of a tool's call in a model's text."""

# SGLang's parser -> the marks of a call; a malformed call is lost, or a half one is taken for whole
CALL_MARKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen25", "hermes", "qwen3_coder", "glm45", "glm47"), ("<tool_call>", "</tool_call>")),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>",),
    "gpt-oss": (" to=functions.",),
}
