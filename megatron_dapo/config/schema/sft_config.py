"""Section `sft`: supervised fine-tuning on conversations."""

from megatron_dapo.config.schema.base import PositiveInt, Section
from megatron_dapo.config.schema.rules import WhileEnabled


class SftConfig(Section):
    enable: bool = False
    """Fine-tune on the conversations of `data.train_files` in place of reinforcement learning; the command `sft` sets
    it (docs/sft.md)."""
    messages_key: WhileEnabled[str] = "messages"
    """Column with a conversation: a list of chat messages. Rows without it have a prompt (`data.prompt_key`) and a
    response."""
    response_key: WhileEnabled[str] = "response"
    """Column with the response to a prompt. Here and in `data.prompt_key` a dot leads into an object, as in
    extra_info.answer."""
    max_length: WhileEnabled[PositiveInt] = 4096
    """Tokens of a conversation; longer ones are dropped, and counted."""
