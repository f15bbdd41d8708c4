"""Tiny random Hugging Face checkpoints, made on the spot, for every test that needs a model."""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from tests.families import FAMILIES, Shape

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/=()abcdefghijklmnopqrstuvwxyz .:,"

PAD_ID, EOS_ID, UNK_ID = range(len(SPECIAL_TOKENS))


def tiny_config(
    family: str,
    *,
    tied: bool = False,
    vocab: int = 64,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    num_experts: int = 8,
    experts_per_token: int = 2,
    norm_topk_prob: bool = True,
    rope: dict | None = None,
    more: dict | None = None,
) -> Any:
    """Return the configuration of a tiny checkpoint in transformers. family: key of
    tests/families.py. rope: the block rope_parameters. more: other fields."""
    row = FAMILIES[family]
    fields = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        rope_parameters=rope or row.rope,
    )
    fields |= row.fields(Shape(hidden, heads, num_experts, experts_per_token, norm_topk_prob, layers))
    left_out = [name for name in ("head_dim", "rope_parameters") if fields[name] is None]
    return row.config(**{name: value for name, value in fields.items() if name not in left_out} | (more or {}))


def make_tiny(path: str | Path, family: str, *, vocab: int = 64, seed: int = 0, **options: Any) -> Path:
    """Write a random fp32 checkpoint of a family and a tokenizer of single characters to `path`;
    returns the path. options: of `tiny_config`.

    Every parameter is random, norms and biases too: lost or swapped ones show in the log-probs.
    """
    path = Path(path)
    row = FAMILIES[family]
    config = tiny_config(family, vocab=vocab, **options)
    model = row.model(config).float()
    _randomize(model, row.norm_mean, torch.Generator().manual_seed(seed))
    model.save_pretrained(path)
    make_tokenizer(min(vocab, len(SPECIAL_TOKENS) + len(CHARACTERS))).save_pretrained(path)
    return path


@torch.no_grad()
def _randomize(model: torch.nn.Module, norm_mean: float, generator: torch.Generator) -> None:
    # a router's bias is a buffer
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        mean = norm_mean if "norm" in name else 0.0
        mean = 1.0 if name.endswith("linear_attn.norm.weight") else mean  # without 1 + weight
        scale = 0.1 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
        parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
        # of the size of scores; servers hold them in bfloat16 at every type of model
        if name.endswith(".sinks"):
            parameter.copy_((10 * parameter).bfloat16())


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }},{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_tiny_classifier(
    path: str | Path, family: Literal["qwen2", "qwen3", "llama"], bias: float | None = None, seed: int = 0
) -> Path:
    """Write a random classifier with one label, over characters, with its own chat template;
    returns the path.

    bias: of its head; with one it is a token classifier, as a run's converted critic.
    """
    path = make_tiny(path, family, seed=seed)
    config = AutoConfig.from_pretrained(path, num_labels=1)
    kind = AutoModelForSequenceClassification if bias is None else AutoModelForTokenClassification
    torch.manual_seed(seed)
    model = kind.from_pretrained(path, config=config).float()  # the body of the language model, and a new head
    torch.nn.init.normal_(model.score.weight, std=model.config.hidden_size**-0.5)  # scores of order 1
    if bias is not None:
        torch.nn.init.constant_(model.score.bias, bias)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def make_tokenizer(num_tokens: int = len(SPECIAL_TOKENS) + len(CHARACTERS)) -> PreTrainedTokenizerFast:
    """One token per character; <unk> for unknown ones."""
    words = (*SPECIAL_TOKENS, *CHARACTERS)[:num_tokens]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
