"""What `model.path` and `ref.path` may name: a Hugging Face checkpoint, or one of this program."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.common.bounded import read_json
from megatron_dapo.common.errors import UserError

# parts of a checkpoint of this program: weights in torch_dist, of the policy and of its critic; config.json, tokenizer
# and the like; with LoRA the adapters as a PEFT folder, which a run folder has under this name too
MEGATRON = "megatron"
CRITIC = "critic"
HF = "hf"
ADAPTER = "adapter"

_MODELS = "models"  # where the recipes look for models
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelFolder:
    """Where the parts of a model lie.

    path: as the user named it. hf: the folder with config.json and tokenizer. megatron: the folder with the weights in
    torch_dist, of a training checkpoint or of `hf_to_megatron`; none = they are the safetensors in `hf`.
    """

    path: Path
    hf: Path
    megatron: Path | None = None

    @classmethod
    def of(cls, path: str | Path) -> "ModelFolder":
        """Look at what is in a folder, and return where the parts lie. Raises nothing: a folder that is neither kind is
        taken for Hugging Face's."""
        path = Path(path)
        if (path / MEGATRON).is_dir() and not (path / "config.json").is_file():
            return cls(path, path / HF, path / MEGATRON)
        return cls(path, path)

    @property
    def config_json(self) -> Path:
        return self.hf / "config.json"

    def read_config(self) -> dict[str, Any]:
        """Return the content of config.json. Raises UserError where it cannot be read, or is no JSON object."""
        try:
            content = read_json(self.config_json)
        except OSError as error:
            raise UserError(f"{self.config_json} cannot be read ({error.strerror}); copy it again.") from error
        except ValueError as error:
            raise UserError(f"{self.config_json} is no JSON ({error}); copy it again.") from error
        if not isinstance(content, dict):
            raise UserError(f"{self.config_json} is no JSON object; give the model's own.")
        return content

    def _download(self) -> str | None:
        """Return the command that downloads the model, where the path is of the form OWNER/NAME, as the Hub's names
        are, and not inside a folder of this machine."""
        path = str(self.path)
        if not _HUB_NAME.fullmatch(path) or self.path.parent.exists() or self.path.parent.name == _MODELS:
            return None
        return f"hf download {path} --local-dir {_MODELS}/{self.path.name}"

    def fault(self) -> str | None:
        """Return why no model can be read from the folder, as the end of a sentence; None where config.json is
        there."""
        if not self.path.is_dir():
            download = f", after `{command}`" if (command := self._download()) else ""
            return f"is not a folder here; give the folder of a Hugging Face checkpoint{download}, or of one of ours."
        if self.config_json.is_file():
            return None
        if self.megatron:
            return f"has {MEGATRON}/, but no {HF}/config.json; give a checkpoint folder that is complete."
        return f"has no config.json, and no {MEGATRON}/ with {HF}/; give the folder of a checkpoint itself."
