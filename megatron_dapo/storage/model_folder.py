"""The folder of `model.path` or `ref.path`: a Hugging Face checkpoint, or one of this program."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.common.bounded import read_json
from megatron_dapo.common.errors import UserError

# parts of a checkpoint of this program: weights of policy and critic in torch_dist; config.json and
# tokenizer; with
# LoRA the adapters as a PEFT folder, under the same name as in a run folder
MEGATRON = "megatron"
CRITIC = "critic"
HF = "hf"
ADAPTER = "adapter"

_MODELS = "models"  # the recipes' folder of models
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelFolder:
    """Paths of the parts of a model."""

    path: Path
    """The user's path."""
    hf: Path
    """The folder with config.json and tokenizer."""
    megatron: Path | None = None
    """The weights in torch_dist, of a training checkpoint or of `hf_to_megatron`; None: safetensors
    in `hf`."""

    @classmethod
    def of(cls, path: str | Path) -> "ModelFolder":
        """Return the paths of a model's parts. Any other folder is taken for a Hugging Face
        checkpoint."""
        path = Path(path)
        if (path / MEGATRON).is_dir() and not (path / "config.json").is_file():
            return cls(path, path / HF, path / MEGATRON)
        return cls(path, path)

    @property
    def config_json(self) -> Path:
        return self.hf / "config.json"

    def read_config(self) -> dict[str, Any]:
        """Return the content of config.json. Raises UserError if it is unreadable or no JSON
        object."""
        try:
            content = read_json(self.config_json)
        except OSError as error:
            raise UserError(f"{self.config_json} cannot be read ({error.strerror}); copy it again.") from error
        except ValueError as error:
            raise UserError(f"{self.config_json} is no JSON ({error}); copy it again.") from error
        if not isinstance(content, dict):
            raise UserError(f"{self.config_json} is no JSON object; give the model's own.")
        return content

    def download(self) -> str | None:
        """Return the command that downloads the model, if the path has the Hub's form OWNER/NAME
        and no such folder exists here."""
        path = str(self.path)
        if not _HUB_NAME.fullmatch(path) or self.path.parent.exists() or self.path.parent.name == _MODELS:
            return None
        return f"hf download {path} --local-dir {_MODELS}/{self.path.name}"

    def fault(self) -> str | None:
        """Return why the folder holds no model, as the end of a sentence, or None if it has a
        config.json."""
        if not self.path.is_dir():
            download = f", after `{command}`" if (command := self.download()) else ""
            return f"is not a folder here; give the folder of a Hugging Face checkpoint{download}, or of one of ours."
        if self.config_json.is_file():
            return None
        if self.megatron:
            return f"has {MEGATRON}/, but no {HF}/config.json; give a complete checkpoint folder."
        return f"has no config.json, and no {MEGATRON}/ with {HF}/; give the folder of a checkpoint itself."
