"""An agent of openai's client: answers with tools, streamed or not, several choices, stop texts.

openai_chat.py TASK_FILE RESULT_FILE; the row's extra_info.mode chooses.
"""

import json
import sys

from openai import LengthFinishReasonError, OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def main(task_file: str, result_file: str) -> None:
    with open(task_file) as file:
        task = json.load(file)
    mode = task["extra_info"].get("mode", "tools")
    turns = task["extra_info"].get("turns", 3)
    client, name, messages = OpenAI(), task["model"]["name"], list(task["messages"])
    for turn in range(turns):
        if mode == "stream":
            with client.chat.completions.stream(model=name, messages=messages, tools=TOOLS, max_tokens=12) as stream:
                try:
                    completion = stream.get_final_completion()
                except LengthFinishReasonError as error:  # of this helper alone
                    completion = error.completion
        elif mode == "choices":
            completion = client.chat.completions.create(model=name, messages=messages, n=2, max_tokens=12)
        elif mode == "stop":
            completion = client.chat.completions.create(model=name, messages=messages, stop=["a"], max_tokens=12)
        elif mode == "compacted" and turn == turns - 2:
            summary = client.chat.completions.create(
                model=name, messages=[*messages, {"role": "user", "content": "Summarize."}], max_tokens=12
            )
            messages = [task["messages"][0], {"role": "user", "content": summary.choices[0].message.content or "none"}]
            continue
        else:
            completion = client.chat.completions.create(model=name, messages=messages, tools=TOOLS, max_tokens=12)
        message = completion.choices[-1].message
        messages.append(message.model_dump(exclude_none=True) if mode == "stream" else message)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"}
            for i, call in enumerate(message.tool_calls or [])
        ]
        messages += results or [{"role": "user", "content": f"again {turn}"}]
    with open(result_file, "w") as file:
        json.dump({"reward": float(len(messages) % 2), "metrics": {"messages": len(messages)}}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
