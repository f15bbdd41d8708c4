"""A Hugging Face checkpoint of a made-up Qwen2 of any size: nothing has to be downloaded."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a decoder with two query heads per key-value head, and an untied head."""

    hidden: int
    ffn: int
    layers: int
    vocab: int
    heads: int = 8

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, shape) of every tensor, in the order of the model."""
        half = self.hidden // 2
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, shape in {
                "input_layernorm.weight": (self.hidden,),
                "self_attn.q_proj.weight": (self.hidden, self.hidden),
                "self_attn.q_proj.bias": (self.hidden,),
                "self_attn.k_proj.weight": (half, self.hidden),
                "self_attn.k_proj.bias": (half,),
                "self_attn.v_proj.weight": (half, self.hidden),
                "self_attn.v_proj.bias": (half,),
                "self_attn.o_proj.weight": (self.hidden, self.hidden),
                "post_attention_layernorm.weight": (self.hidden,),
                "mlp.gate_proj.weight": (self.ffn, self.hidden),
                "mlp.up_proj.weight": (self.ffn, self.hidden),
                "mlp.down_proj.weight": (self.hidden, self.ffn),
            }.items():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def num_values(self) -> int:
        return sum(torch.Size(shape).numel() for _, shape in self.shapes())


def write_model(folder: Path, size: ModelSize, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write random weights in files of at most about shard_bytes, with index and config.

    There is no tokenizer.
    """
    folder.mkdir(parents=True)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in size.shapes():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if filled and filled + num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += num_bytes
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: (0.02 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= {name: file for name in tensors}
    total = size.num_values * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "vocab_size": size.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))
