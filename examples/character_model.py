"""A small Qwen2 over characters, for the examples' base models: learning from demonstrations."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from examples.prompts import Problem
from megatron_dapo.common.files import write_whole

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=():,.;?! abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"
VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
MANIFEST = "manifest.json"
IGNORED = -100  # cross_entropy's mark for positions without a target

# (whether it is the model's, text); the model's own end with EOS
Turns = tuple[tuple[bool, str], ...]
# by kind: (problem, random.Random) -> a response
Demonstrations = Mapping[str, Callable[..., Turns]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings behind the result."""

    seed: int = 1
    steps: int = 900
    batch_size: int = 64
    lr: float = 2e-3
    mixture: tuple[tuple[str, float], ...]  # weights of the kinds of demonstrations


def written(text: str) -> Turns:
    """Return a response of one turn."""
    return ((True, text),)


def rambling(problem: Problem, draw: random.Random) -> Turns:
    """Return a response without an answer."""
    return written(" ".join(draw.choice(("hm", "well", "let me see")) for _ in range(3)))


def model_config():
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
    )


def new_qwen2():
    """Return a model with random weights."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM(model_config())


def tokenizer():
    """Return a tokenizer with one token per character; decoding joins them without spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=EOS, pad_token=PAD, unk_token=UNK)


def demonstration(
    settings: Settings, demonstrations: Demonstrations, problems: Sequence[Problem], draw: random.Random
) -> tuple[Problem, Turns]:
    """Return a problem and one way to respond to it."""
    kinds, weights = zip(*settings.mixture, strict=True)
    problem = draw.choice(problems)
    return problem, demonstrations[draw.choices(kinds, weights)[0]](problem, draw)


def batch(responses: Iterable[tuple[Problem, Turns]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, targets), both [B, S] int64; targets are IGNORED outside the model's own
    tokens."""
    rows = []  # of (token, whether it is a target)
    for problem, turns in responses:
        row = [(VOCABULARY[c], False) for c in problem.prompt]
        for own, text in turns:
            row += [(VOCABULARY[c], own) for c in text] + ([(VOCABULARY[EOS], True)] if own else [])
        rows.append(row)
    tokens = torch.full((len(rows), max(map(len, rows))), VOCABULARY[PAD])
    targets = torch.full_like(tokens, IGNORED)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor([token for token, _ in row])
        targets[i, : len(row) - 1] = torch.tensor([token if own else IGNORED for token, own in row[1:]])
    return tokens, targets


def lessons(
    settings: Settings, demonstrations: Demonstrations, problems: Sequence[Problem]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield `settings.steps` batches, the same for the same settings."""
    draw = random.Random(settings.seed)
    for _ in range(settings.steps):
        yield batch([demonstration(settings, demonstrations, problems, draw) for _ in range(settings.batch_size)])


def learn(model, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Take one optimizer step of supervised training and return its loss."""
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(
    settings: Settings,
    demonstrations: Demonstrations,
    problems: Sequence[Problem],
    report: Callable[[int, float], None] = lambda step, loss: None,
):
    """Train from random weights and return the model. Call `report(step, loss)` after every
    step."""
    torch.manual_seed(settings.seed)
    model = new_qwen2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=settings.steps, pct_start=0.1)
    for step, (tokens, targets) in enumerate(lessons(settings, demonstrations, problems), start=1):
        loss = learn(model, optimizer, tokens, targets)
        schedule.step()
        report(step, loss)
    return model.eval()


def random_model(folder: Path, seed: int) -> Path:
    """Write the model with random weights, and the tokenizer, as a Hugging Face checkpoint; return
    the folder."""
    torch.manual_seed(seed)
    model = new_qwen2()
    model.generation_config = generation_config()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def generation_config():
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=VOCABULARY[EOS], pad_token_id=VOCABULARY[PAD])


def save(model, settings: Settings, folder: Path, measure: Callable[..., dict]) -> dict:
    """Write the Hugging Face checkpoint (bfloat16) and manifest.json with the results of
    `measure(model)` on the saved weights; return the manifest."""
    model = model.to(torch.bfloat16)
    model.generation_config = generation_config()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    manifest = {
        "settings": asdict(settings),
        **measure(model.float()),
        "sha256": {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name != MANIFEST},
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_made(folder: Path, settings: Settings) -> bool:
    """Return whether the folder has a model made with these settings."""
    manifest = folder / MANIFEST
    wanted = json.loads(json.dumps(asdict(settings)))
    return manifest.is_file() and json.loads(manifest.read_text())["settings"] == wanted


def make(
    folder: Path,
    settings: Settings,
    demonstrations: Demonstrations,
    problems: Sequence[Problem],
    measure: Callable[..., dict],
) -> None:
    """Train and save, and print the progress."""

    def report(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step:4d}/{settings.steps}   loss {loss:.3f}", flush=True)

    model = train(settings, demonstrations, problems, report)
    manifest = save(model, settings, folder, measure)
    print(f"{folder}: { ({key: value for key, value in manifest.items() if key not in ('settings', 'sha256')}) }")
