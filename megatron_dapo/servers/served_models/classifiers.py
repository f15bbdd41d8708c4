"""Reward models of the families of docs/models.md: SGLang's classes, their checkpoints' heads.

SGLang 0.5.23 gives the heads of Qwen2 and Qwen3 a bias, and Llama's none. Hugging Face's sequence
classifiers have none, so a bias would keep its initial value and shift all scores. A critic of ours
has one. Here it is 0 until a checkpoint brings another.
"""

from typing import Any

from sglang.srt.models import llama_reward, qwen2_classification, qwen3_classification
from torch import nn


def _head(config: Any) -> nn.Linear:
    head = nn.Linear(config.hidden_size, config.num_labels)
    nn.init.zeros_(head.bias)
    return head


class LlamaForSequenceClassification(llama_reward.LlamaForSequenceClassification):
    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.score = _head(config)


class MistralForSequenceClassification(LlamaForSequenceClassification):
    """As Llama's, with the same tensors. SGLang has none."""


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):
    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.score = _head(config)


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):
    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.score = _head(config)


EntryClass = [
    LlamaForSequenceClassification,
    MistralForSequenceClassification,
    Qwen2ForSequenceClassification,
    Qwen3ForSequenceClassification,
]
