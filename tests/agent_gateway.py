"""A gateway of a scripted model: a byte a token, answers by a list of texts."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_dapo.agents.gateways import Gateways, GatewaySettings, Session
from megatron_dapo.agents.turns import Answer, Limits, Turn

NAME = "policy"
END = "<|im_end|>"
# whole lines of a template; {%- joins them
TEMPLATE = "".join(
    (
        "{%- if tools %}{{ '<|im_start|>system\n' }}",
        "{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}",
        "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}",
        '{%- for call in message.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + call.function.name }}',
        "{{- '\", \"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}",
        "{{- '<|im_end|>\n' }}{% endfor %}",
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )
)
LIMITS = Limits(
    max_prompt_tokens=2000,
    max_response_tokens=2000,
    max_turns=100,
    max_branches=16,
    max_tokens_per_turn=None,
    max_choices=4,
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'


def make_folder(path: Path, template: str = TEMPLATE) -> Path:
    """Write a tokenizer of bytes, with a chat template; return the folder."""
    path.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(END, special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))
    (path / "config.json").write_text(json.dumps({"vocab_size": 258, "eos_token_id": 257}))
    return path


@dataclass
class ScriptedModel:
    """Answers turns by `texts`, the last one again and again; an exception is raised.

    A text that ends in END ends by itself. `gate`: answers wait for it.
    """

    folder: Path
    texts: list[str | Exception] = field(default_factory=lambda: [f"hello{END}"])
    gate: asyncio.Event | None = None
    turns: list[Turn] = field(default_factory=list)
    prompts: dict[int | None, list[int]] = field(default_factory=lambda: {None: []})
    num_nodes: int = 0
    num_under_way: int = 0
    most_under_way: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    parses: list[tuple[str, dict]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    async def answer(self, turn: Turn) -> list[Answer]:
        self.turns.append(turn)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_under_way -= 1
        return [self._one(turn) for _ in range(turn.num_answers)]

    def _one(self, turn: Turn) -> Answer:
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        if isinstance(text, Exception):
            raise text
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        is_cut = len(tokens) > turn.max_new_tokens
        tokens = tokens[: turn.max_new_tokens]
        node, self.num_nodes = self.num_nodes, self.num_nodes + 1
        self.prompts[node] = [*self.prompt(turn), *tokens]
        log_probs = tuple(-place / 64 for place in range(len(tokens)))
        return Answer(node, tuple(tokens), log_probs, "length" if is_cut else "stop")

    def prompt(self, turn: Turn) -> list[int]:
        """Return all tokens that a turn reads."""
        return [*self.prompts[turn.parent], *map(int, turn.suffix)]

    def text(self, turn: Turn) -> str:
        """Return what a turn reads."""
        return self.tokenizer.decode(self.prompt(turn), skip_special_tokens=False)

    async def parse(self, route: str, fields: dict) -> Any:
        """Answer as SGLang's server does for qwen25 and qwen3."""
        self.parses.append((route, fields))
        text = fields["text"]
        if route == "/separate_reasoning":
            thoughts, _, rest = text.removeprefix("<think>").rpartition("</think>")
            return {"reasoning_text": thoughts, "text": rest}
        texts = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
        calls = [json.loads(call) for call in texts]  # ValueError, as for a server's error
        return {
            "normal_text": text.partition("<tool_call>")[0],
            "calls": [
                {"tool_index": 0, "name": call["name"], "parameters": json.dumps(call["arguments"])} for call in calls
            ],
        }


@dataclass
class Bench:
    """Running gateways, and the loop they run in."""

    runner: asyncio.Runner
    gateways: Gateways
    folder: Path

    def play(
        self,
        agent: Callable[[Session, ScriptedModel], Awaitable[Any]],
        *texts: str | Exception,
        limits: Limits = LIMITS,
        gate: bool = False,
    ) -> tuple[Session, ScriptedModel]:
        """Run an agent in a session of its own; return both, with the notes complete."""

        async def played() -> tuple[Session, ScriptedModel]:
            model = ScriptedModel(self.folder, list(texts) or [f"hello{END}"], asyncio.Event() if gate else None)
            async with asyncio.timeout(20), self.gateways.session(limits, model.answer, model.parse) as session:
                await agent(session, model)
            return session, model

        return self.runner.run(played())


@contextmanager
def bench(folder: Path, num_gateways: int = 1, **settings: Any) -> Iterator[Bench]:
    """Start gateways."""
    with asyncio.Runner() as runner:
        every_setting = {"model": str(make_folder(folder)), "model_name": NAME, "tool_parser": "qwen25"} | settings
        gateways = Gateways(GatewaySettings(**every_setting), num_gateways)
        runner.run(gateways.start())
        try:
            yield Bench(runner, gateways, folder)
        finally:
            runner.run(gateways.close())


def plain_http(**options: Any) -> httpx.AsyncClient:
    """Return a client without TLS, whose certificates take 20 ms to read."""
    return httpx.AsyncClient(**{"verify": False, "timeout": 20} | options)


def openai_client(session: Session, **options: Any) -> openai.AsyncOpenAI:
    """Return a client of a trajectory."""
    endpoint = session.endpoint
    options = {"http_client": plain_http(timeout=options.get("timeout", 20))} | options
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, **options)


async def refused(call: Awaitable[Any], kind: type[Exception]) -> Exception:
    """Return the error of a call."""
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
