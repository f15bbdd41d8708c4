"""An OpenAI-compatible endpoint without a model: its judge of two-digit sums counts right digits.

It demands a key.

JUDGE_API_KEY=word python -m examples.judge.endpoint PORT
"""

import os
import re
import sys

from aiohttp import web

KEY = "JUDGE_API_KEY"
PROMPT = "Sum: {question} Truth: {ground_truth} Response: {response}"
_ASKED = re.compile(r"Sum: (.*?) Truth: (\d+) Response: (.*)", re.DOTALL)


def judgement(question: str) -> str:
    """Return the judge's words: the number of true digits in their places in the response's last
    number."""
    asked = _ASKED.fullmatch(question)
    if asked is None:
        return "I do not understand the question."
    _, truth, response = asked.groups()
    numbers = re.findall(r"\d+", response)
    digits = numbers[-1].zfill(len(truth)) if numbers else ""
    right = sum(one == other for one, other in zip(truth, digits, strict=False)) if len(digits) == len(truth) else 0
    return f"{right} of {len(truth)} digits are right.\nScore: {10 * right / len(truth):.1f}"


async def answer(request: web.Request) -> web.Response:
    """Answer one chat completion."""
    if request.headers.get("Authorization") != f"Bearer {os.environ[KEY]}":
        return web.json_response({"error": {"message": "the key is wrong"}}, status=401)
    fields = await request.json()
    message = {"role": "assistant", "content": judgement(fields["messages"][-1]["content"])}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": fields["model"], "choices": [choice]}
    return web.json_response(body)


def application() -> web.Application:
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    return app


if __name__ == "__main__":
    web.run_app(application(), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
