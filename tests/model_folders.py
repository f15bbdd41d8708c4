"""Folders with the tokenizer and chat template of a model, made on the spot, without weights."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\n"
    "    {%- if loop.last %}{% break %}{% endif %}\n    {{- eos_token }}\n{%- endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{%- if add_generation_prompt %}\n{% generation %}{{ '<|im_start|>é\"' | tojson }}{% endgeneration %}\n{% endif %}"
)
TRAINING_TEXT = ["What is 2+3? The answer is 5.", "Ünïcödé wörds, naïve café", "def f(x):\n    return x ** 2\n"] * 4


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
QWEN = [
    pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
]


def write_byte_level(folder, tokenizer_class="PreTrainedTokenizerFast", template=CHATML, bos=False):
    """A byte-level BPE folder as Qwen and Llama 3 have it, with truncation and padding left on."""
    backend = tokenizers.Tokenizer(models.BPE())
    is_qwen = tokenizer_class == "Qwen2Tokenizer"
    # transformers adds it to every model called qwen2 in config.json, as below
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(QWEN if is_qwen else DIGITS)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    backend.enable_truncation(5)
    backend.enable_padding(length=40)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "eos_token": "<|im_end|>"}
    config["pad_token"] = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    if template is not None:
        config["chat_template"] = template
    write(folder, "tokenizer_config.json", config)
    write(folder, "config.json", {"model_type": "qwen2", "eos_token_id": 0})
    return folder


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
