"""Makes the text folder of a published Qwen3.5 or 3.6 folder: without its image model, and without
its layers of multi-token prediction. And puts trained weights back into the published form.

    python -m checkpoints_tools.text_folder IMAGE_FOLDER TEXT_FOLDER
    python -m checkpoints_tools.text_folder IMAGE_FOLDER TEXT_FOLDER --back OUTPUT

Bytes of tensors are copied in blocks; no tensor is ever whole in memory.
"""

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from checkpoints_tools.command_line import exit_code, no_space, rank, signals_as_exit
from checkpoints_tools.converted import check_output, percentage
from megatron_dapo.common.bounded import read_json
from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.common.standard_streams import print_line
from megatron_dapo.storage.staged_folder import StagedFolder

if TYPE_CHECKING:
    from megatron_dapo.models.safetensors_files import SafetensorsFolder, StoredFile, TensorBytes

# class of a published folder -> of its text folder; a text folder's config.json is completed
TEXT_CLASSES = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    **{name: name for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")},
}
_LEFT_OUT = ("model.visual.", "mtp.")
_OF_TEXT = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
# keys of config.json outside text_config that say something about the text
_OUTER_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "transformers_version")
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # beside no rope_parameters
_USUAL_INTERVAL = 4  # transformers' and SGLang's, of layers with attention
_STACK = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")
_OF_EXPERT = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}  # one below the other in a stack
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class ByteRange:
    """A part of a file, or `content` in its place."""

    path: Path
    start: int
    num_bytes: int
    content: bytes | None = None


@dataclass(frozen=True)
class NewFile:
    """A weight file to write."""

    name: str
    header: bytes  # b"" if a range holds it
    ranges: tuple[ByteRange, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0, or 2 for mistakes of the user and disks that fail; then there
    is no output."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_tools.text_folder",
        description="Write the text model of a published Qwen3.5 or 3.6 folder (text_config, model.language_model.*) "
        "into a folder of its own, without images and multi-token prediction; with --back the reverse.",
    )
    parser.add_argument("image_folder", help="the published folder")
    parser.add_argument("text_folder", help="the folder to make; with --back: to read")
    parser.add_argument("--back", metavar="OUTPUT", help="make a copy of image_folder with the weights of text_folder")
    options = parser.parse_args(argv)
    if rank() != 0:  # one process is enough for it, however many were started
        return 0

    def work() -> None:
        if options.back is None:
            make_text_folder(options.image_folder, options.text_folder)
        else:
            put_back(options.image_folder, options.text_folder, options.back)

    with signals_as_exit():
        return exit_code(work)


def make_text_folder(image_folder: str, text_folder: str) -> None:
    """Write the text folder. Raises UserError; then there is none."""
    from megatron_dapo.models.hf_io import copy_model_files
    from megatron_dapo.models.safetensors_files import INDEX, SafetensorsFolder

    image = SafetensorsFolder(image_folder, "image_folder")
    config = text_config(image.path / "config.json")
    names = text_names(image)
    kept = {file: {old: new for old in image.files[file].tensors if (new := names[old])} for file in image.files}
    files = [_text_file(image.files[file], of_file) for file, of_file in kept.items() if of_file]

    def write_rest(staging: Path) -> None:
        copy_model_files(image.path, staging)
        write_whole(staging / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if image.index is not None:
            num_bytes = sum(part.num_bytes for file in files for part in file.ranges)
            metadata = image.index.get("metadata", {}) | {"total_size": num_bytes}
            parts = ((file, _parts(new, image.tensor(old))) for file in kept for old, new in kept[file].items())
            weight_map = {part: file for file, of_tensor in parts for part in of_tensor}
            index = {"metadata": metadata, "weight_map": weight_map}
            write_whole(staging / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")

    _write_folder(text_folder, "text_folder", files, write_rest)
    print_line(f"left out: {sum(new is None for new in names.values())} tensors of images and multi-token prediction")


def put_back(image_folder: str, text_folder: str, output: str) -> None:
    """Write a copy of the image folder with the weights of the text folder. Raises UserError; then
    there is none."""
    from megatron_dapo.models.safetensors_files import SafetensorsFolder, listed

    image, text = SafetensorsFolder(image_folder, "image_folder"), SafetensorsFolder(text_folder, "text_folder")
    names = text_names(image)
    sources = {old: _sources(image.tensor(old), new, text) for old, new in names.items() if new}
    if unused := sorted(set(text.names).difference(*sources.values())):
        raise UserError(
            f"text_folder: `{text.path}` has {listed(unused)}, without a place in `{image.path}`; give the image "
            "folder of the same model."
        )
    file_of = {name: file for file in text.files.values() for name in file.tensors}
    files = []
    for name, file in image.files.items():
        end_of_header = min((tensor.start for tensor in file.tensors.values()), default=file.path.stat().st_size)
        ranges = [ByteRange(file.path, 0, end_of_header)]
        for old, stored in file.tensors.items():
            if old not in sources:
                ranges.append(_range_of(file, old))
            for source in sources.get(old, ()):
                is_same = text.tensor(source).dtype == stored.dtype
                ranges.append(_range_of(file_of[source], source) if is_same else _in_type(text, source, stored.dtype))
        files.append(NewFile(name, b"", tuple(ranges)))

    def write_rest(staging: Path) -> None:
        for path in image.path.rglob("*"):
            relative = path.relative_to(image.path)
            if path.is_file() and str(relative) not in image.files and not relative.parts[0].startswith("."):
                (staging / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, staging / relative)

    _write_folder(output, "--back", files, write_rest)


def text_names(folder: "SafetensorsFolder") -> dict[str, str | None]:
    """Return name -> name in the text folder, None for a tensor left out. Raises UserError for
    tensors of unknown use."""
    from megatron_dapo.models.safetensors_files import listed

    names = {}
    for old in folder.names:
        new = old.replace("model.language_model.", "model.", 1) if old.startswith("model.language_model.") else old
        names[old] = None if old.startswith(_LEFT_OUT) else new
    kept = Counter(filter(None, names.values()))
    if unknown := sorted(new for new, number in kept.items() if number > 1 or not new.startswith(_OF_TEXT)):
        raise UserError(
            f"image_folder: `{folder.path}` has {listed(unknown)}, which no text folder has, or twice; give the "
            "folder as it was published."
        )
    return names


def text_config(path: Path) -> dict[str, Any]:
    """Return the text folder's config.json for that of an image folder. Raises UserError."""
    try:
        config = read_json(path)
        (name,) = config["architectures"]
        text_class = TEXT_CLASSES[name]
        outer = {key: config[key] for key in _OUTER_KEYS if key in config}
        inner = {key: value for key, value in config.get("text_config", config).items() if not key.startswith("mtp_")}
        layer_types, interval = _layers(inner)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise UserError(
            f"image_folder: `{path}` is not the config.json of one of {', '.join(TEXT_CLASSES)} ({error!r}); give the "
            "folder of such a model."
        ) from error
    tied = {words["tie_word_embeddings"] for words in (outer, inner) if "tie_word_embeddings" in words}
    if len(tied) > 1:
        raise UserError(f"image_folder: `{path}` says tie_word_embeddings true and false; set both to the right one.")
    text = outer | inner | {"full_attention_interval": interval, "layer_types": layer_types}
    rope = {key: inner[key] for key in _ROPE_KEYS if key in inner}
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {"rope_type": "default"} | rope
    return text | {"architectures": [text_class], "rope_parameters": rope}


def _layers(config: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return (layer_types, full_attention_interval), each from the other if it is missing. Raises
    ValueError if they differ: transformers reads the first, SGLang the second."""
    types = config.get("layer_types")
    usual = _USUAL_INTERVAL if types is None else [*types, "full_attention"].index("full_attention") + 1
    interval = config.get("full_attention_interval", usual)
    numbers = range(1, config["num_hidden_layers"] + 1)
    implied = ["linear_attention" if number % interval else "full_attention" for number in numbers]
    if types not in (None, implied):
        raise ValueError(f"layer_types is not attention in each layer of number {interval}")
    return implied, interval


def _parts(name: str, stored: "TensorBytes") -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the text folder's tensors whose bytes, one after the other, are a
    tensor's: of a stack each expert's, else itself. name: its own in the text folder."""
    if (match := _STACK.fullmatch(name)) is None or len(stored.shape) != 3:
        return {name: stored.shape}
    num_experts, rows, columns = stored.shape
    parts = _OF_EXPERT[match[2]]
    experts = [f"{match[1]}.{number}" for number in range(num_experts)]
    return {f"{expert}.{part}.weight": (rows // len(parts), columns) for expert in experts for part in parts}


def _text_file(file: "StoredFile", kept: Mapping[str, str]) -> NewFile:
    """Return a file with these tensors of an image folder's file: old name -> new one."""
    header: dict[str, Any] = {"__metadata__": file.metadata} if file.metadata else {}
    end = 0
    for old, name in kept.items():
        stored = file.tensors[old]
        parts = _parts(name, stored)
        size = stored.num_bytes // len(parts)
        for new, shape in parts.items():
            header[new] = {"dtype": stored.dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return NewFile(file.path.name, len(text).to_bytes(8, "little") + text, tuple(_range_of(file, old) for old in kept))


def _sources(stored: "TensorBytes", name: str, text: "SafetensorsFolder") -> list[str]:
    """Return the tensors of a text folder for an image folder's tensor. Raises UserError if one is
    missing, or does not fit. name: its own in the text folder."""
    from megatron_dapo.models.safetensors_files import DTYPES

    parts = _parts(name, stored)
    for part, shape in parts.items():
        if part not in text.names:
            raise UserError(f"text_folder: `{text.path}` lacks {part}; give the folder of the whole text model.")
        trained = text.tensor(part)
        # a run holds the few numbers of A_log in float32, whatever the type of a published file
        may_differ = part.endswith(".A_log") and {trained.dtype, stored.dtype} <= DTYPES.keys()
        if trained.shape != shape or (trained.dtype != stored.dtype and not may_differ):
            raise UserError(
                f"text_folder: {part} of `{text.path}` is {trained.dtype} {list(trained.shape)}, in the image folder "
                f"{stored.dtype} {list(shape)}; give the image folder of the same model, and weights of its type."
            )
    return list(parts)


def _range_of(file: "StoredFile", name: str) -> ByteRange:
    tensor = file.tensors[name]
    return ByteRange(file.path, tensor.start, tensor.num_bytes)


def _in_type(folder: "SafetensorsFolder", name: str, dtype: str) -> ByteRange:
    """Return a small tensor's bytes in another type of files."""
    from megatron_dapo.models.safetensors_files import DTYPES, byte_view

    content = byte_view(folder.read(name).to(DTYPES[dtype])).numpy().tobytes()
    return ByteRange(folder.path, 0, len(content), content)


def _write_folder(path: str, option: str, files: Sequence[NewFile], write_rest: Callable[[Path], None]) -> None:
    """Write files, and the others by `write_rest`, into a folder that appears whole. Raises
    UserError."""
    total = sum(part.num_bytes for file in files for part in file.ranges)
    check_output(path, total, option)
    output = StagedFolder(path)
    done = 0
    try:
        output.open()
        with percentage("writing") as show:
            for new in files:
                with (output.staging / new.name).open("wb") as file:
                    file.write(new.header)
                    for part in new.ranges:
                        _copy(part, file)
                        done += part.num_bytes
                        show(done, total)
        write_rest(output.staging)
        output.publish()
    except OSError as error:
        raise no_space(path, error) from error
    finally:
        output.discard()
    print_line(f"{path}: written")


def _copy(part: ByteRange, file: BinaryIO) -> None:
    """Append a part of another file."""
    if part.content is not None:
        file.write(part.content)
        return
    left = part.num_bytes
    with part.path.open("rb") as source:
        source.seek(part.start)
        while left:
            block = source.read(min(left, _BLOCK_BYTES))
            if not block:
                raise UserError(f"`{part.path}` ended early; copy or download it again.")
            file.write(block)
            left -= len(block)


if __name__ == "__main__":
    sys.exit(main())
