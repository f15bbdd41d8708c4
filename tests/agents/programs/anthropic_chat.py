"""An agent of anthropic's client: blocks, tools, thinking echoed, streamed or not, token counts.

anthropic_chat.py TASK_FILE RESULT_FILE; the row's extra_info.mode chooses.
"""

import json
import sys

from anthropic import Anthropic

TOOLS = [
    {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "input_schema": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    }
]


def main(task_file: str, result_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    mode = task["extra_info"].get("mode", "tools")
    client, messages = Anthropic(), list(task["messages"])
    fields = {"model": task["model"]["name"], "max_tokens": 12, "tools": TOOLS, "system": "Be brief."}
    counted = client.messages.count_tokens(
        **{key: value for key, value in fields.items() if key != "max_tokens"}, messages=messages
    )
    first = None
    for turn in range(task["extra_info"].get("turns", 3)):
        if mode == "stream":
            with client.messages.stream(**fields, messages=messages) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**fields, messages=messages)
        first = first or message
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"result {i}"}
            for i, block in enumerate(message.content)
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or f"again {turn}"})
    metrics = {"messages": len(messages), "counted": counted.input_tokens, "read": first.usage.input_tokens}
    with open(result_file, "w") as file:
        json.dump({"reward": float(len(messages) % 2), "metrics": metrics}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
