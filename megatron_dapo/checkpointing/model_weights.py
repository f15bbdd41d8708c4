"""The weights that a model starts from: of a Hugging Face checkpoint, or of one of this program."""

from collections.abc import Callable
from pathlib import Path

from megatron_dapo.checkpointing.manifest import read_manifest, verify
from megatron_dapo.checkpointing.resume import Start
from megatron_dapo.checkpointing.torch_dist.loading import load
from megatron_dapo.common.errors import UserError
from megatron_dapo.models.build import ModelParts
from megatron_dapo.models.hf_io import load_hf_weights
from megatron_dapo.platform.parallel import ParallelLayout
from megatron_dapo.storage.model_folder import CRITIC, ModelFolder

WeightLoader = Callable[[ModelParts, str, ParallelLayout], None]


def weight_loader(start: Start, part: str) -> WeightLoader:
    """Return the loader that fills a model before its optimizer is made; it does nothing if
    `RunCheckpoints.restore` fills both. The frozen weights beside adapters are in no checkpoint of
    their run, and are always read.

    Args:
        part: "model", of the policy, or "critic".
    """
    is_restored = start.folder is not None and part not in start.missing
    return _leave_weights if is_restored else load_weights


def _leave_weights(model: ModelParts, path: str, layout: ParallelLayout) -> None:
    """Read only weights that the checkpoint will not overwrite."""
    if model.lora is not None:
        load_weights(model, path, layout)


def load_weights(model: ModelParts, path: str | Path, layout: ParallelLayout) -> None:
    """Fill this rank's parameters from `model.path` or `ref.path`, before an optimizer is made.

    Of a checkpoint of this program only the model is read; any layout may have written it. For a
    critic it is the checkpoint's critic, or the body of its policy. Collective over all ranks;
    raises UserError on all of them.
    """
    folder = ModelFolder.of(path)
    if folder.megatron is None:
        load_hf_weights(model, folder.hf, layout)
        return
    layout.agreement.leader(f"looking at {path}", _require_complete, folder.path)
    critic = folder.path / CRITIC
    load(critic if model.spec.value_head and critic.is_dir() else folder.megatron, model, layout)


def _require_complete(folder: Path) -> None:
    """Raise UserError if names or sizes of its files show that the checkpoint is damaged.

    `verify_checkpoint` compares checksums: a training checkpoint's optimizer is in the same files
    as its model.
    """
    read_manifest(folder)
    findings = verify(folder, contents=False)
    if not findings.is_whole:
        raise UserError(f"{folder} is damaged: {'; '.join(findings.damage[:5])}; start from another checkpoint.")
