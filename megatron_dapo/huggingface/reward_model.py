"""Needs of a folder to be served as a reward model."""

from pathlib import Path

from megatron_dapo.common.bounded import read_json
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.spec_reader import CLASSIFIERS


def architecture_of(path: str) -> str:
    """Return the architecture of the classifier in a folder.

    Raises UserError without a classifier of one label and a tokenizer.
    """
    file = Path(path) / "config.json"
    try:
        config = read_json(file)
    except (OSError, ValueError):
        raise UserError(
            f"reward.model.path is {path}, which has no config.json that can be read; give the folder of a Hugging "
            f"Face checkpoint."
        ) from None
    if not (Path(path) / "tokenizer.json").is_file():
        raise UserError(f"reward.model.path is {path}, which has no tokenizer.json; put the model's own there.")
    names = config.get("architectures") if isinstance(config, dict) else None
    name = str(names[0]) if isinstance(names, list) and names else "no architecture"
    if not name.endswith(CLASSIFIERS):
        raise UserError(
            f"reward.model.path is {path}, whose config.json names {name}; give a sequence classifier "
            f"(...ForSequenceClassification), or the critic of a checkpoint (`python -m "
            f"checkpoints_tools.megatron_to_hf --critic`)."
        )
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if num_labels != 1:
        raise UserError(
            f"reward.model.path is {path}, a classifier of {num_labels} labels; give a reward model, which has one."
        )
    return name
