"""The model's tokenizer and chat template, read from its folder with the `tokenizers` package.

Importing transformers costs seconds in every process, and tokenizer.json holds everything needed. A
test holds the tokens equal to those of transformers' AutoTokenizer.
"""

import secrets
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from megatron_dapo.common.bounded import read_bytes, read_json
from megatron_dapo.common.errors import UserError
from megatron_dapo.data.chat_messages import Messages
from megatron_dapo.data.chat_template import NONE, ChatTemplate, TextPart, Variables
from megatron_dapo.data.token_arrays import TokenIds

_KEY = "actor_rollout_ref.model.path"
# bytes of tokenizer.json; those of a vocabulary of 260 000 tokens have 35 million
_MAX_TOKENIZER = 256 << 20
_MAX_TEMPLATE = 1 << 20
ASSISTANT = "assistant"
_OTHER_TEMPLATE = "write a template with {% generation %} blocks around the assistant's words"
# stands for the assistant's words in a chat template; nobody's text holds it
_MARK = f"words{secrets.token_hex(8)}"
_OTHER_MARK = f"other{secrets.token_hex(8)}"  # for the words of others
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer: text to tokens and back. Make it with `load_tokenizer`.

    eos_token_ids: all tokens that end a response, by generation_config.json, config.json and the
        tokenizer.
    num_tokens: size of the vocabulary, added tokens included.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._backend = _load_backend(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = _special_tokens(settings)
        self._template = self._compile(_chat_template(folder, settings))
        self.num_tokens: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids: tuple[int, ...] = self._eos_token_ids()

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model comes with a chat template."""
        return self._template is not None

    def encode_prompt(self, prompt: str | Messages, apply_chat_template: bool) -> tuple[tuple[int, ...], str]:
        """Return (tokens, rendered text) of a prompt.

        With the chat template a string becomes one user message, and the text ends before the
        assistant's first word. Without it the messages' contents are joined as they are, with the
        tokenizer's own special tokens (such as BOS).

        Raises UserError if the model has no chat template, ValueError if template or contents do
        not fit.
        """
        if apply_chat_template:
            text = self.render(_messages(prompt))
        else:
            text = prompt if isinstance(prompt, str) else _joined(prompt)
        return tuple(self.encode(text, add_special_tokens=not apply_chat_template)), text

    def encode_turn(
        self,
        messages: Messages,
        last_token: int | None,
        apply_chat_template: bool,
        variables: Variables = NONE,
        calls: Messages = (),
    ) -> tuple[int, ...]:
        """Return the tokens of an environment's messages in a conversation after a model's turn.

        With the chat template: its text between an assistant's last word and the next one's first,
        with the messages between them. The end-of-turn token, and white space before it, is left
        out if the model wrote it itself (last_token). Without it: the messages' contents. Both are
        tokenized on their own: the tokens before them stay the same.

        Args:
            messages: those between the two turns.
            last_token: the model's last one.
            apply_chat_template: whether the template stands between the turns.
            variables: of the template, such as `tools`.
            calls: of the model's turn, for templates that show no result without them.

        Raises:
            UserError: as `encode_prompt`.
            ValueError: as `encode_prompt`, and if the template hides the turn or a message.
        """
        if not apply_chat_template:
            return tuple(self.encode(_joined(messages)))
        tokens = self.encode(self.turn_text(messages, variables, calls))
        end = tokens.index(last_token) if last_token in tokens else -1
        # for Llama 2 the text is " </s>"
        is_written = end >= 0 and not self.decode(tokens[:end], skip_special_tokens=False).strip()
        return tuple(tokens[end + 1 :] if is_written else tokens)

    def turn_text(self, messages: Messages, variables: Variables = NONE, calls: Messages = ()) -> str:
        """Return the template's text from an assistant's last word to the next one's first; if it takes
        calls for that, from the end of their turn. Raises as `encode_turn`."""
        try:
            return self._behind({"role": ASSISTANT, "content": _MARK}, messages, variables)
        except ValueError:
            if not calls:
                raise
        calling = {"role": ASSISTANT, "content": "", "tool_calls": [_marked(call) for call in calls]}
        text = self._behind(calling, messages, variables)
        names = [self.decode([token], skip_special_tokens=False) for token in self.eos_token_ids]
        ends = [text.index(name) for name in names if name and name in text]
        if not ends:
            raise ValueError("the model's chat template ends a turn with calls by no end-of-turn token")
        return text[min(ends) :]

    def _behind(self, turn: dict[str, Any], messages: Messages, variables: Variables) -> str:
        """Return the text behind the mark in a turn, with all messages."""
        probe, roles = _probe(messages)
        begin = [{"role": "user", "content": "-"}, turn]
        _, is_shown, after = self.render([*begin, *probe], variables).rpartition(_MARK)
        _require(after, roles, " behind a turn")  # some show a late system prompt first
        if not is_shown:
            raise ValueError("the model's chat template does not show an assistant's earlier words as they are")
        return self.render([*begin, *messages], variables).rpartition(_MARK)[2]

    def full_text(self, messages: Messages, variables: Variables = NONE) -> str:
        """Return the text of a prompt. Raises as `render`, and ValueError for a message left out.

        The assistant's own may be.
        """
        probe, roles = _probe(messages)
        _require(self.render(probe, variables), roles)
        return self.render(messages, variables)

    def encode_answered(self, prompt: str | Messages, response: str) -> tuple[int, ...]:
        """Return the tokens of a prompt with its response, as the chat template ends a turn.

        Without a template the two are joined. For classifiers, readers of finished answers. Raises
        as `encode_prompt`.
        """
        if not self.has_chat_template:
            text = (prompt if isinstance(prompt, str) else _joined(prompt)) + response
            return tuple(self.encode(text, add_special_tokens=True))
        answer = {"role": ASSISTANT, "content": response}
        text = self.render([*_messages(prompt), answer], add_generation_prompt=False)
        return tuple(self.encode(text))

    def decode(self, tokens: TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, exactly: no clean-up of spaces."""
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def encode_conversation(self, messages: Messages, apply_chat_template: bool) -> tuple[list[int], list[bool]]:
        """Return (tokens, whether the assistant wrote each) of a whole conversation.

        The assistant's words end with its end-of-turn token, if the template has one: white space
        behind it is not the assistant's.

        With the chat template: its `generation` blocks mark the assistant's words. A template
        without them marks by a difference: the text up to an answer, less the text up to its
        generation prompt. Without a chat template the messages' contents are joined, and each of
        the assistant's ends with the end-of-text token.

        Raises UserError and ValueError as `encode_prompt`, ValueError too if the assistant's words
        cannot be found.
        """
        if not any(message["role"] == ASSISTANT for message in messages):
            raise ValueError("there is no message of the assistant, and so nothing to learn")
        if messages[0]["role"] == ASSISTANT:
            raise ValueError("the first message is the assistant's, and nothing stands before it to be answered")
        encoded = self._templated(messages) if apply_chat_template else self._contents(messages)
        tokens: list[int] = []
        is_learned: list[bool] = []
        for ids, is_own in encoded:
            ends = [place for place, token in enumerate(ids) if token in self.eos_token_ids]
            num_own = (ends[-1] + 1 if ends else len(ids)) if is_own else 0
            tokens += ids
            is_learned += [True] * num_own + [False] * (len(ids) - num_own)
        return tokens, is_learned

    def _templated(self, messages: Messages) -> list[tuple[list[int], bool]]:
        """Return the tokens of each part of a conversation, and whether the assistant wrote it.

        The tokens are those of the whole text, as far as a token begins at the beginning of each
        part. An answer is tokenized on its own if a token would reach into it from its prompt: no
        prompt is sampled from otherwise.
        """
        parts = self._parts(messages)
        separate = [self.encode(part.text) for part in parts]
        learned = [part.is_learned for part in parts]
        if list(chain.from_iterable(separate)) == self.encode("".join(part.text for part in parts)):
            return list(zip(separate, learned, strict=True))
        tokens: list[int] = []
        encoded: list[tuple[list[int], bool]] = []
        text = ""
        for part, own in zip(parts, separate, strict=True):
            text += part.text
            so_far = self.encode(text)
            added = so_far[len(tokens) :] if so_far[: len(tokens)] == tokens else own
            tokens += added
            encoded.append((added, part.is_learned))
        return encoded

    def _parts(self, messages: Messages) -> list[TextPart]:
        if not self._required_template().has_generation_blocks:
            return list(self._parts_by_prefixes(messages))
        parts = self._rendered(messages, False)
        if not any(part.is_learned for part in parts):
            raise ValueError("the model's chat template has no {% generation %} block around the assistant's words")
        return parts

    def _parts_by_prefixes(self, messages: Messages) -> Iterator[TextPart]:
        whole = self.render(messages, add_generation_prompt=False)
        done = 0
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            asked = self.render(messages[:place])
            answered = self.render(messages[: place + 1], add_generation_prompt=False)
            if not answered.startswith(asked):
                raise ValueError(
                    f"the model's chat template begins message {place + 1}, the assistant's, otherwise than its "
                    f"generation prompt does, so that nothing tells where the words begin; {_OTHER_TEMPLATE}"
                )
            if not whole.startswith(answered):
                raise ValueError(
                    f"the model's chat template writes the first {place + 1} messages differently when others follow, "
                    f"as those do that leave out earlier thoughts; end the row with message {place + 1}, and give a "
                    f"later answer a row of its own, or {_OTHER_TEMPLATE}"
                )
            yield TextPart(whole[done : len(asked)], False)
            yield TextPart(whole[len(asked) : len(answered)], True)
            done = len(answered)
        yield TextPart(whole[done:], False)

    def _contents(self, messages: Messages) -> Iterator[tuple[list[int], bool]]:
        end = self._end_of_text()
        is_first = True
        for is_own, group in groupby(messages, lambda message: message["role"] == ASSISTANT):
            if is_own:
                for message in group:
                    yield [*self.encode(_joined([message])), end], True
            else:
                # special tokens of the tokenizer's own, such as BOS, stand only before a prompt
                yield self.encode(_joined(list(group)), add_special_tokens=is_first), False
            is_first = False

    def _end_of_text(self) -> int:
        """Return the end-of-text token of a conversation without a template."""
        named = self._backend.token_to_id(self._special_tokens.get("eos_token", ""))
        if named is not None:
            return named
        if not self.eos_token_ids:
            raise UserError(
                f"{_KEY}: {str(self._folder)!r} names no end-of-text token, which ends an answer with "
                f"data.apply_chat_template: false; write eos_token into tokenizer_config.json."
            )
        return self.eos_token_ids[0]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text. Raises ValueError for a text that the tokenizer refuses."""
        try:
            # lets other threads run, and computes no places in the text
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # bare ones: a vocabulary without a token for unknown text
            raise ValueError(f"the model's tokenizer refuses it: {error}") from error

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError(
                f"data.apply_chat_template: true, but the model in {_KEY} = {str(self._folder)!r} has no chat "
                f"template; "
                f"set data.apply_chat_template: false to use the prompts as they are."
            )
        return self._template

    def render(self, messages: Messages, variables: Variables = NONE, add_generation_prompt: bool = True) -> str:
        """Return the chat template's text of messages. Raises as `encode_prompt`."""
        return "".join(part.text for part in self._rendered(messages, add_generation_prompt, variables))

    def _rendered(self, messages: Messages, add_generation_prompt: bool, variables: Variables = NONE) -> list[TextPart]:
        try:
            return self._required_template().parts(messages, add_generation_prompt, variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error

    def _compile(self, template: str | None) -> ChatTemplate | None:
        """Return the compiled template, None without one."""
        try:
            return None if template is None else ChatTemplate(template, self._special_tokens)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # the latter are Python's own, of blocks or brackets nested too deep, and of long
            # numbers
            raise UserError(f"{_KEY}: the chat template in {str(self._folder)!r} does not compile: {error}.") from error

    def _eos_token_ids(self) -> tuple[int, ...]:
        tokens: list[int | None] = []
        sizes = [self.num_tokens, _read_json(self._folder / "config.json").get("vocab_size")]
        # the model may have rows beyond the tokenizer's
        num_tokens = max(size for size in sizes if type(size) is int)
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(self._folder / name).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            if wrong := [token for token in ids if token is not None and not _is_token(token, num_tokens)]:
                raise UserError(
                    f"{_KEY}: `eos_token_id` in {str(self._folder / name)!r} has {wrong[0]!r:.40}, which is none "
                    f"of the {num_tokens} tokens; write numbers of tokens."
                )
            tokens += ids
        if "eos_token" in self._special_tokens:
            tokens.append(self._backend.token_to_id(self._special_tokens["eos_token"]))
        return tuple(dict.fromkeys(token for token in tokens if token is not None))


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face checkpoint folder; no network.

    Raises UserError if the folder has none.
    """
    return Tokenizer(Path(model_path))


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        cure = (
            "make one of tiktoken.model with the pattern of the model's own tokenizer (docs/models.md, Kimi-K2)"
            if (folder / "tiktoken.model").is_file()
            else "write one with transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
        raise UserError(f"{_KEY}: {str(folder)!r} has no tokenizer.json; {cure}.")
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_bytes(path, _MAX_TOKENIZER))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exceptions of the package; of a Rust panic not even these
        raise UserError(f"{_KEY}: {str(path)!r} cannot be read: {error}.") from error
    # lengths are the data set's business; files may carry settings of a training
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, {} if it does not exist."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{_KEY}: {str(path)!r} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"{_KEY}: {str(path)!r} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{_KEY}: {str(path)!r} is no JSON object; write the model's own there.")
    return content


def _is_token(token: Any, num_tokens: int) -> bool:
    return type(token) is int and 0 <= token < num_tokens


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> text; older files hold each token as an object.

    Raises UserError for a token of another type.
    """
    tokens = {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name)}
    texts: dict[str, str] = {}
    for name, token in tokens.items():
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise UserError(f"{_KEY}: `{name}` in tokenizer_config.json is no text ({token!r:.40}); write text.")
        texts[name] = text
    return texts


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the template of chat_template.jinja, else of tokenizer_config.json.

    Of several templates it is the one named default. Raises UserError for an unreadable one, and
    for another type than text.
    """
    path = folder / "chat_template.jinja"
    try:
        return read_bytes(path, _MAX_TEMPLATE).decode("utf-8")
    except FileNotFoundError:
        template = settings.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{_KEY}: {str(path)!r} cannot be read ({why}).") from error
    if isinstance(template, list):
        named = {str(row.get("name")): row.get("template") for row in template if isinstance(row, dict)}
        template = named.get("default")
    if template is not None and not (isinstance(template, str) and len(template) <= _MAX_TEMPLATE):
        raise UserError(
            f"{_KEY}: `chat_template` in {str(folder / 'tokenizer_config.json')!r} is no text of 1 MiB at most; write "
            f"the template, or a list of objects with name and template."
        )
    return template


def _probe(messages: Messages) -> tuple[Messages, dict[str, str]]:
    """Return messages with marks for all words but the assistant's, and the role behind each mark."""
    marks = {place: f"{_OTHER_MARK}-{place}-" for place, row in enumerate(messages) if row["role"] != ASSISTANT}
    probe = [{**row, "content": marks[at]} if at in marks else row for at, row in enumerate(messages)]
    return probe, {mark: messages[place]["role"] for place, mark in marks.items()}


def _require(text: str, roles: dict[str, str], place: str = "") -> None:
    """Raise ValueError if a mark is not in the text."""
    for mark, role in roles.items():
        if mark not in text:
            raise ValueError(f"the model's chat template leaves out a message of role {role!r}{place}")


def _marked(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with the mark for its only argument, as text or as an object, as it was."""
    function = call["function"]
    marked = f'{{"x": "{_MARK}"}}' if isinstance(function["arguments"], str) else {"x": _MARK}
    return {**call, "function": {**function, "arguments": marked}}


def _messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _joined(messages: Messages) -> str:
    contents = [message["content"] for message in messages]
    if not all(isinstance(content, str) for content in contents):
        raise ValueError("a message's content is not text, and without a chat template only text can be joined")
    return "".join(contents)
