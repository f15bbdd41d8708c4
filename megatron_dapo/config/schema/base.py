"""Parts of every section of the config tree."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from megatron_dapo.config.built_ins import IMPORT_PATH

# Bounds far beyond any sensible value. Past them is a slip of the pen: it would cost a run its
# memory, or its deadlines, long after its start.
_MAX_COUNT = 10**9
PositiveInt = Annotated[int, Field(gt=0, le=_MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
BoundedInt = Annotated[int, Field(ge=-_MAX_COUNT, le=_MAX_COUNT)]  # -1, or 0 and less, means off
# ranks, servers, workers, nodes, and divisors of them
NumProcesses = Annotated[int, Field(gt=0, le=10_000)]
NumResponses = Annotated[int, Field(gt=0, le=10_000)]
NumRetries = Annotated[int, Field(ge=0, le=10_000)]
Megabytes = Annotated[int, Field(gt=0, le=10**7)]
# three years are no deadline; longer waits overflow
Seconds = Annotated[float, Field(ge=0.01, le=10**8)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# of the user's own code; `checks/machine_checks.py` looks for it in its file
ImportPath = Annotated[str, StringConstraints(pattern=f"^{IMPORT_PATH.pattern}$")]


class Refused(Exception):
    """Error on reading a key without a known value: the user's value was refused."""


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    if not TYPE_CHECKING:  # all attributes would be there

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Refused(name)
            return super().__getattr__(name)
