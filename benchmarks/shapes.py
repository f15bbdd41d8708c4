"""The measured sizes: heads of real models on one GPU, and some within a CPU's strength."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """T tokens with loss in a micro-batch, hidden size H, V rows of the vocabulary on this rank."""

    name: str
    num_tokens: int
    hidden_size: int
    vocab_size: int
    about: str

    def with_tokens(self, num_tokens: int | None) -> "Shape":
        return self if num_tokens is None else replace(self, num_tokens=num_tokens)

    @property
    def product_flops(self) -> int:
        """Return the operations of one product [T, H] x [H, V]."""
        return 2 * self.num_tokens * self.hidden_size * self.vocab_size


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("quick", 192, 48, 1000, "seconds: shows that everything runs"),
        Shape("cpu-1k", 1024, 256, 8192, "a CPU's second"),
        Shape("cpu-8k", 8192, 896, 32768, "hidden size of 0.5B, a quarter of its vocabulary"),
        Shape("cpu-4k-logits", 4096, 64, 32768, "logits of half a GiB"),
        Shape("cpu-32k-tokens", 32768, 64, 1024, "many tokens, hardly any head"),
        Shape("0.5B", 16384, 896, 151936, "Qwen2.5-0.5B, TP=1"),
        Shape("7B", 16384, 3584, 152064, "Qwen2.5-7B, TP=1"),
        Shape("32B-tp8", 32768, 5120, 19008, "Qwen2.5-32B, one rank of TP=8"),
    )
}
QUICK = ("quick",)
GPU_SHAPES = ("0.5B", "7B", "32B-tp8")
