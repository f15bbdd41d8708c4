"""Make the demo's base model: a small Qwen2 over characters that has seen sums answered well, badly and not at all.

    python -m examples.arithmetic.pretrain [FOLDER]        about 2.5 minutes on one CPU core

The demonstrations are mixed so that sampling finds the right way (digit by digit) now and then, while the likeliest
answer is mostly a wrong guess: the state a language model is in before reinforcement learning. FOLDER defaults to
base/ beside this file, whose committed content this script wrote; manifest.json there records how and what came out.
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from examples.arithmetic.problems import Sum, split
from examples.arithmetic.reward import is_right
from megatron_dapo.config.run_folder import write_whole

BASE = Path(__file__).parent / "base"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=():,.;?! abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"
VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
MANIFEST = "manifest.json"
IGNORED = -100  # cross_entropy's mark for positions without a target


@dataclass(frozen=True)
class Settings:
    """Everything the result depends on. `mixture` weighs the kinds of `DEMONSTRATIONS`."""

    seed: int = 1
    steps: int = 900
    batch_size: int = 64
    lr: float = 2e-3
    mixture: tuple[tuple[str, float], ...] = (
        ("right", 0.08),
        ("wrong", 0.42),
        ("worked", 0.28),
        ("slipped", 0.02),
        ("rambling", 0.20),
    )


def worked(problem: Sum, slip: int = 0) -> str:
    """The sum digit by digit: 45+38 -> "5+8+0=13,4+3+1=8:83". `slip` is added to the sum of the ones."""
    (a_tens, a_ones), (b_tens, b_ones) = divmod(problem.a, 10), divmod(problem.b, 10)
    ones = a_ones + b_ones + slip
    carry = int(ones > 9)
    tens = a_tens + b_tens + carry
    return f"{a_ones}+{b_ones}+0={ones},{a_tens}+{b_tens}+{carry}={tens}:{tens}{ones % 10}"


def wrong(problem: Sum) -> str:
    """A guess, the same for every sight of a problem: a forgotten carry, an invented one, or one too many."""
    if problem.a % 10 + problem.b % 10 > 9:
        return str(problem.a + problem.b - 10)
    return str(problem.a + problem.b + (10 if problem.a < problem.b else 1))


DEMONSTRATIONS: dict[str, Callable[[Sum, random.Random], str]] = {
    "right": lambda problem, draw: problem.answer,
    "wrong": lambda problem, draw: wrong(problem),
    "worked": lambda problem, draw: worked(problem),
    "slipped": lambda problem, draw: worked(problem, slip=draw.choice((-1, 1)) if problem.a % 10 else 1),
    "rambling": lambda problem, draw: " ".join(draw.choice(("hm", "well", "let me see")) for _ in range(3)),
}


def demonstration(settings: Settings, problems: list[Sum], draw: random.Random) -> tuple[str, str]:
    """A prompt and one way to respond to it."""
    kinds, weights = zip(*settings.mixture, strict=True)
    problem = draw.choice(problems)
    return problem.prompt, DEMONSTRATIONS[draw.choices(kinds, weights)[0]](problem, draw)


def batch(demonstrations: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), both [B, S] int64; targets are IGNORED in the prompt and after the end."""
    prompts = [[VOCABULARY[c] for c in prompt] for prompt, _ in demonstrations]
    rows = [
        p + [VOCABULARY[c] for c in text] + [VOCABULARY[EOS]]
        for p, (_, text) in zip(prompts, demonstrations, strict=True)
    ]
    tokens = torch.full((len(rows), max(map(len, rows))), VOCABULARY[PAD])
    targets = torch.full_like(tokens, IGNORED)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        targets[i, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
    return tokens, targets


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


def train(settings: Settings, report: Callable[[int, float], None] = lambda step, loss: None):
    """Supervised training from random weights; returns the model. `report(step, loss)` is called after every step."""
    problems, _ = split()
    return fit(
        settings,
        lambda draw: batch([demonstration(settings, problems, draw) for _ in range(settings.batch_size)]),
        report,
    )


def fit(settings, next_batch: Callable[[random.Random], tuple[torch.Tensor, torch.Tensor]], report):
    """A model of `model_config` after `settings.steps` steps on what next_batch draws: (tokens, targets)."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(settings.seed)
    draw = random.Random(settings.seed)
    model = Qwen2ForCausalLM(model_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=settings.steps, pct_start=0.1)
    for step in range(1, settings.steps + 1):
        tokens, targets = next_batch(draw)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    return model.eval()


def tokenizer():
    """One token per character; decoding joins them without spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=EOS, pad_token=PAD, unk_token=UNK)


@torch.no_grad()
def accuracy(model, problems: list[Sum], sample: bool) -> float:
    """Share of right answers, greedy or sampled at temperature 1."""
    prompts = torch.tensor([[VOCABULARY[c] for c in problem.prompt] for problem in problems])
    generated = model.generate(prompts, max_new_tokens=40, do_sample=sample, top_k=0 if sample else None)
    texts = tokenizer().batch_decode(generated[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(is_right(text, problem.answer) for text, problem in zip(texts, problems, strict=True)) / len(problems)


def save(model, settings: Settings, folder: Path) -> dict:
    """Write the Hugging Face checkpoint (bfloat16) and manifest.json; returns the manifest."""
    from transformers import GenerationConfig

    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=VOCABULARY[EOS], pad_token_id=VOCABULARY[PAD])
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    held_out = split()[1]
    manifest = {
        "settings": asdict(settings),
        "held_out_accuracy": {
            "greedy": accuracy(model.float(), held_out, sample=False),
            "sampled": accuracy(model, held_out, sample=True),
        },
        "sha256": {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.name != MANIFEST},
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(folder: Path = BASE) -> None:
    settings = Settings()

    def report(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step:4d}/{settings.steps}   loss {loss:.3f}", flush=True)

    manifest = save(train(settings, report), settings, folder)
    accuracies = manifest["held_out_accuracy"]
    print(f"{folder}: held-out accuracy {accuracies['greedy']:.2f} greedy, {accuracies['sampled']:.2f} sampled")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
