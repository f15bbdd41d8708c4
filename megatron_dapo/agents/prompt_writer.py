"""Tokens of an agent's messages, and the text of a model's answer; one per gateway process."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_dapo.agents.canonical import template_message
from megatron_dapo.agents.template_probe import TemplateForm, template_form
from megatron_dapo.data.chat_messages import Messages
from megatron_dapo.data.chat_template import Variables
from megatron_dapo.data.token_arrays import TokenIds
from megatron_dapo.data.tokenizer import Tokenizer

_OPENING_TOKENS = 16  # of a prompt's end, to see whether it opens the model's thoughts


class AnswerText(NamedTuple):
    """The text of an answer, with special tokens."""

    opening: str  # the end of its prompt
    words: str  # up to a stop string
    end: str  # the end-of-turn token, if the model wrote one


class PromptWriter:
    """Renders and tokenizes messages. All methods raise ValueError for those that the template
    refuses."""

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Variables, apply_chat_template: bool) -> None:
        """Probe the chat template.

        template_kwargs: variables of the chat template.
        """
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self._apply_chat_template = apply_chat_template
        self._form = template_form(tokenizer, template_kwargs) if apply_chat_template else TemplateForm()

    def prompt(self, messages: Messages, tools: Messages | None) -> list[int]:
        """Return the tokens of a whole conversation, ready for the model's answer."""
        if any(message.get("tool_calls") for message in messages) and not self._form.shows_calls:
            raise ValueError("the model's chat template shows no calls of tools")
        if not self._apply_chat_template:
            return list(self.tokenizer.encode_prompt(self._shown(messages), False)[0])
        return self.tokenizer.encode(self.tokenizer.full_text(self._shown(messages), self._variables(tools)))

    def turn(
        self, messages: Messages, last_token: int | None, tools: Messages | None, answered: dict[str, Any]
    ) -> tuple[int, ...]:
        """Return the tokens of messages behind an answer of the model.

        answered: the model's message, for templates that show no result without its calls.
        """
        calls = self._shown([answered])[0].get("tool_calls", ())
        shown = self._shown(messages)
        return self.tokenizer.encode_turn(shown, last_token, self._apply_chat_template, self._variables(tools), calls)

    def read(self, prompt_end: TokenIds, answer: TokenIds, stop: Sequence[str] = ()) -> AnswerText:
        """Return the text of an answer behind the last tokens of its prompt."""
        ids = list(answer)
        num_ends = int(bool(ids) and ids[-1] in self.tokenizer.eos_token_ids)
        words, end = (self._text(part) for part in (ids[: len(ids) - num_ends], ids[len(ids) - num_ends :]))
        cut = min((words.index(text) for text in stop if text in words), default=len(words))
        return AnswerText(self._text(prompt_end[-_OPENING_TOKENS:]), words[:cut], end)

    def survives_decoding(self, tokens: TokenIds) -> bool:
        """Return whether decoding and encoding gives the same tokens."""
        try:
            return self.tokenizer.encode(self._text(tokens)) == list(tokens)
        except ValueError:
            return False

    def _text(self, tokens: TokenIds) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def _shown(self, messages: Messages) -> list[dict[str, Any]]:
        form = self._form
        return [template_message(message, form.arguments_are_text, form.are_ids_short) for message in messages]

    def _variables(self, tools: Messages | None) -> Variables:
        if tools and not self._form.shows_tools:
            raise ValueError("the model's chat template shows no tools; describe them in a message")
        return {**self.template_kwargs, "tools": list(tools) if tools else None}
