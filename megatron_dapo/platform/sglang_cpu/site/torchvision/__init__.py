"""Stands in for torchvision: SGLang and transformers import it for image models, and a CPU server
answers text."""

import enum
import sys
from types import ModuleType

from gpu_only import names_of

__version__ = "0.0.0"
__getattr__ = names_of("torchvision")


class InterpolationMode(enum.Enum):
    """The only name with members read at import; members and values are torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _stand_in(name):
    module = ModuleType(f"torchvision.{name}")
    module.__path__ = []
    module.__getattr__ = names_of(module.__name__)
    module.InterpolationMode = InterpolationMode
    sys.modules[module.__name__] = module
    parent, _, attribute = module.__name__.rpartition(".")
    setattr(sys.modules[parent], attribute, module)


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _stand_in(_name)
