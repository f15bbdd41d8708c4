"""Hugging Face checkpoints in and out.

A rank reads only its own slices. Files are written tensor after tensor, the same ones for every
layout.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.files import write_whole
from megatron_dapo.huggingface.model_spec import ModelSpec
from megatron_dapo.huggingface.model_tensors import hf_tensors
from megatron_dapo.huggingface.spec_reader import CLASSIFIERS, LANGUAGE_MODEL
from megatron_dapo.huggingface.weight_rows import EMBEDDING, LM_HEAD, VALUE_HEAD
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.file_plan import FilePlan
from megatron_dapo.models.safetensors_files import (
    INDEX,
    FileWriter,
    SafetensorsFolder,
    TensorSpec,
    byte_view,
)
from megatron_dapo.models.weight_map import Entry, weight_entries
from megatron_dapo.models.weight_source import WeightSource
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.storage.staged_folder import StagedFolder

# a checkpoint's files besides the weights: configuration, tokenizer, chat template
_MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template*", "additional_chat_templates/*.jinja",
)  # fmt: skip
_MESSAGE_BYTES = 64 * 2**20

# (bytes done, bytes in all) of this rank's part
Progress = Callable[[int, int], None]


def check_hf_weights(folder: SafetensorsFolder, spec: ModelSpec) -> None:
    """Raise UserError unless the tensors of a checkpoint are exactly those of its model.

    Extra tensors are allowed in three cases: an equal second copy of a tied embedding, tables of
    old rotary embeddings, and layers of multi-token prediction. The latter are numbered behind the
    model's own and neither trained nor exported.

    A critic may start from the body of a policy, without the policy's head. Its own head may be
    missing, and is then new.
    """

    def may_have(name: str) -> bool:
        is_unused_head = name == LM_HEAD and (spec.tied_embeddings or spec.value_head)
        predicts_more = spec.num_prediction_layers > 0 and name.startswith(prediction_layers)
        return name.endswith(".rotary_emb.inv_freq") or is_unused_head or predicts_more

    first = spec.num_layers
    prediction_layers = tuple(f"model.layers.{first + i}." for i in range(spec.num_prediction_layers))

    expected = {name: shape for name, shape in hf_tensors(spec).items() if not _is_new(name, folder)}
    folder.check(expected, may_have)
    if spec.tied_embeddings and LM_HEAD in folder.names and not folder.equal(LM_HEAD, EMBEDDING):
        raise UserError(
            f"{folder.path}: config.json says tie_word_embeddings, but {LM_HEAD} differs from {EMBEDDING}; set "
            "tie_word_embeddings to false if the model has a head of its own, else remove the tensor."
        )


def exportable(spec: ModelSpec) -> set[str]:
    """Return the tensors for `export_hf` by name: the model's, and a tied head (the embedding)."""
    return {*hf_tensors(spec), LM_HEAD}


def _is_new(name: str, folder: SafetensorsFolder) -> bool:
    return name in VALUE_HEAD and name not in folder.names


def _read_entry(folder: SafetensorsFolder, entry: Entry, model: ModelParts, layout: ParallelLayout) -> Tensor:
    is_vocab = entry.hf_names[0] in (EMBEDDING, LM_HEAD)
    padded = model.spec.padded_vocab_size(layout.tp) if is_vocab else None
    join = entry.transform.join
    if entry.num_stacked:
        assert entry.expert is not None, "what is stacked are experts"
        rows = [folder.read_row(name, entry.expert) for name in entry.hf_names]
        return join(rows, model.spec)
    rank, size = layout.place(of_expert=entry.expert is not None)
    parts = [
        folder.read(name, entry.cut, rank, size, padded, blocks)
        for name, blocks in zip(entry.hf_names, entry.blocks, strict=True)
    ]
    return join(parts, model.spec)


@torch.no_grad()
def load_hf_weights(
    model: ModelParts,
    path: str | Path | SafetensorsFolder,
    layout: ParallelLayout,
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill this rank's parameters from a checkpoint folder.

    Raises UserError with a list of missing, unexpected and misshapen tensors.
    """
    folder = path if isinstance(path, SafetensorsFolder) else SafetensorsFolder(path)
    check_hf_weights(folder, model.spec)
    entries = weight_entries(model.chunks, model.spec)
    entries = [entry for entry in entries if not _is_new(entry.hf_names[0], folder)]
    done = 0
    total = sum(entry.parameter.nbytes for entry in entries)
    for entry in entries:
        try:
            shard = _read_entry(folder, entry, model, layout)
        except OSError as error:
            raise UserError(f"`{folder.path}` cannot be read ({error}); copy or download it again.") from error
        assert shard.shape == entry.parameter.shape, f"{entry.hf_names}: {shard.shape} for {entry.parameter.shape}"
        entry.parameter.copy_(shard)
        done += entry.parameter.nbytes
        progress(done, total)


def copy_model_files(source_path: str | Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config.json, tokenizer and the like from one checkpoint folder to another. Raises
    OSError.

    dtype: replaces another one in config.json, because engines load in it; None keeps the file.
    """
    for pattern in _MODEL_FILES:
        for file in Path(source_path).glob(pattern):
            if file.is_file():
                target = out / file.relative_to(source_path)
                target.parent.mkdir(exist_ok=True)
                shutil.copy(file, target)
    if dtype is None:
        return
    config = out / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    old = {key for key in ("dtype", "torch_dtype") if content.get(key) not in (None, name)}
    if old:
        write_whole(config, json.dumps(content | dict.fromkeys(old, name), indent=2) + "\n")


def _name_as_classifier(config: Path) -> None:
    """Make a language model's config.json a token classifier's of one label: it has a value
    head."""
    content = json.loads(config.read_text(encoding="utf-8"))
    names = [name.replace(LANGUAGE_MODEL, CLASSIFIERS[0]) for name in content["architectures"]]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    content |= {"architectures": names, "tie_word_embeddings": False, **labels}
    write_whole(config, json.dumps(content, indent=2) + "\n")


def export_hf(
    model: ModelParts,
    layout: ParallelLayout,
    source_path: str | Path,
    out: str | Path,
    *,
    plan: FilePlan | None = None,
    dtype: torch.dtype | None = None,
    replace: bool = True,
    readme: str | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the model as a Hugging Face checkpoint.

    Collective over all ranks; data-parallel rank 0 writes. A rank holds one full tensor at a time.
    Raises UserError on every rank if one of them could not write.

    Args:
        source_path: the checkpoint with config.json and the tokenizer, for copying.
        out: a folder shared by the stages' nodes; it appears when all is written.
        plan: its files (standard: `model-00001-of-000NN.safetensors` of about 4 GB, the same for
            every layout).
        dtype: of the files (standard: the model's).
        replace: put it in the place of an existing folder.
        readme: of rank 0, the text of its README.md; None: without one.
        progress: called with this rank's bytes, written and in all.
    """
    dtype = dtype or model.config.params_dtype
    plan = plan or FilePlan.standard(model.spec, dtype)

    def add_files(staging: Path, num_bytes: int) -> None:
        copy_model_files(source_path, staging, dtype)
        if model.spec.value_head:
            _name_as_classifier(staging / "config.json")
        if index := plan.index_json(num_bytes):
            write_whole(staging / INDEX, index)
        if readme is not None:
            write_whole(staging / "README.md", readme)

    folder = StagedFolder(out, replace=replace)
    source = WeightSource(model, layout)
    write_folder(source, layout, plan, hf_tensors(model.spec), dtype, folder, add_files, progress)


def write_folder(
    source: WeightSource,
    layout: ParallelLayout,
    plan: FilePlan,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    folder: StagedFolder,
    add_files: Callable[[Path, int], None],
    progress: Progress = lambda done, total: None,
) -> None:
    """Write tensors of all ranks into a folder; it appears when all is written.

    Collective over all ranks. Raises UserError on every rank if one of them could not write.

    Args:
        source: of this rank's stage.
        plan: the files.
        shapes: of the tensors of all stages.
        dtype: of the files.
        folder: the files' place.
        add_files: writes the other files, given the folder and the bytes of all tensors; on rank 0.
            May raise OSError.
        progress: as for `export_hf`.
    """
    is_main = layout.rank == 0
    agreement = layout.agreement
    step = f"writing {folder.path}"
    try:
        agreement.leader(step, folder.open)
        export = _Export(source, layout, plan, dtype, folder.staging, progress)
        export.write_files(shapes)
        if is_main:
            export.attempt(lambda: add_files(folder.staging, export.num_bytes))
        agreement.each(step, export.check)
        agreement.leader(step, export.publish, folder)
    finally:
        if is_main:
            folder.discard()


class _Export:
    """One export. A rank unable to write takes part until the end, so that no other waits for it.

    It keeps the reason as `problem`.
    """

    def __init__(
        self,
        source: WeightSource,
        layout: ParallelLayout,
        plan: FilePlan,
        dtype: torch.dtype,
        folder: Path,
        progress: Progress,
    ) -> None:
        self._source = source
        self._layout = layout
        self._plan = plan
        self._dtype = dtype
        self._folder = folder
        self._progress = progress
        self._stage_specs = {spec.name: spec for spec in source.specs()}
        self._owner = self._owners()
        # a checkpoint may store the tied embedding a second time
        is_tied = EMBEDDING in self._owner and LM_HEAD not in self._owner
        self._stored_as = {LM_HEAD: EMBEDDING} if is_tied else {}
        self._owner |= {copy: self._owner[name] for copy, name in self._stored_as.items()}
        self._num_done = 0
        self.problem: str | None = None
        self.num_bytes = 0

    def _owners(self) -> dict[str, int]:
        """Return tensor -> the rank with it whole after gathering. The same on all ranks."""
        own_names = list(self._stage_specs) if self._layout.is_source else []
        names_of_ranks = self._layout.gather(own_names)
        return {name: rank for rank, names in enumerate(names_of_ranks) for name in names}

    def attempt(self, action: Callable[[], object]) -> None:
        """Do it unless something failed before; remember a failure."""
        if self.problem is not None:
            return
        try:
            action()
        except OSError as error:
            self.problem = (
                f"`{self._folder.parent}` cannot be written ({error.strerror or error}); free some space, or give "
                "another folder."
            )

    def publish(self, folder: StagedFolder) -> None:
        """Rename the folder into its place. Raises UserError."""
        self.attempt(folder.publish)
        self.check()

    def check(self) -> None:
        """Raise UserError if something failed."""
        if self.problem is not None:
            raise UserError(self.problem)

    def write_files(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Write all files of the file plan. shapes: of the model's tensors.

        Files with tensors of several stages come first. Otherwise a stage would wait for another's
        work instead of doing its own.
        """
        shapes = shapes | {copy: shapes[name] for copy, name in self._stored_as.items()}
        tensors = {
            file: [TensorSpec(name, shapes[name], self._plan.dtype_of(name, self._dtype)) for name in names]
            for file, names in self._plan.files.items()
        }
        self.num_bytes = sum(spec.num_bytes for specs in tensors.values() for spec in specs)
        if not self._layout.gathers:
            return
        owners = {file: [self._owner[spec.name] for spec in specs] for file, specs in tensors.items()}
        written_here = {file for file, ranks in owners.items() if ranks[0] == self._layout.rank}
        total = sum(spec.num_bytes for file in written_here for spec in tensors[file])
        for file in sorted(tensors, key=lambda file: len(set(owners[file])) == 1):
            writer: FileWriter | None = None
            if file in written_here:
                writer = self._open(self._folder / file, tensors[file], self._plan.metadata[file])
            for spec, rank in zip(tensors[file], owners[file], strict=True):
                self._move(spec, rank, owners[file][0], writer)
                if file in written_here:
                    self._num_done += spec.num_bytes
                    self._progress(self._num_done, total)
            if writer is not None:
                self.attempt(writer.finish)
                writer.close()

    def _open(self, path: Path, specs: list[TensorSpec], metadata: dict[str, str]) -> FileWriter | None:
        opened: list[FileWriter] = []
        self.attempt(lambda: opened.append(FileWriter(path, specs, metadata)))
        return opened[0] if opened else None

    def _move(self, spec: TensorSpec, owner: int, target: int, writer: FileWriter | None) -> None:
        """Move one tensor from its owner's stage into the file written by `target`.

        writer: of that file, on `target`, as long as it can be written.
        """
        rank = self._layout.rank
        stage_spec = self._stage_specs.get(self._stored_as.get(spec.name, spec.name))
        gathered = self._source.gather([stage_spec]) if stage_spec is not None else None
        if rank == owner:
            assert gathered is not None, f"rank {owner} has {spec.name} whole"
            whole = gathered[0].to(spec.dtype).cpu().contiguous()
            if owner != target:
                self._send(whole, target)
            elif writer is not None:
                self.attempt(partial(writer.write, whole))
        elif rank == target:
            self._receive(spec, owner, writer)

    def _send(self, whole: Tensor, target: int) -> None:
        for part in byte_view(whole).split(_MESSAGE_BYTES):
            dist.send(part, target, group=self._layout.cpu_group)

    def _receive(self, spec: TensorSpec, owner: int, writer: FileWriter | None) -> None:
        buffer = torch.empty(min(_MESSAGE_BYTES, spec.num_bytes), dtype=torch.uint8)
        for start in range(0, spec.num_bytes, _MESSAGE_BYTES):
            part = buffer[: spec.num_bytes - start]
            dist.recv(part, owner, group=self._layout.cpu_group)
            if writer is not None:
                self.attempt(partial(writer.write, part))
