"""What every section of the config tree is made of."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# Bounds far beyond what anyone means: past them is a slip of the pen, which would cost a run its memory, or its
# deadlines, long after its start.
_MAX_COUNT = 10**9
PositiveInt = Annotated[int, Field(gt=0, le=_MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
BoundedInt = Annotated[int, Field(ge=-_MAX_COUNT, le=_MAX_COUNT)]  # where -1, or 0 and less, means off
NumProcesses = Annotated[int, Field(gt=0, le=10_000)]  # ranks, servers, workers, nodes, and what shares them out
NumResponses = Annotated[int, Field(gt=0, le=10_000)]
NumRetries = Annotated[int, Field(ge=0, le=10_000)]
Megabytes = Annotated[int, Field(gt=0, le=10**7)]
Seconds = Annotated[float, Field(ge=0.01, le=10**8)]  # three years are no deadline; waits of more overflow
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Refused(Exception):
    """A key is read whose value is not known, since what somebody gave for it was refused."""


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    if not TYPE_CHECKING:  # all attributes would be there

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Refused(name)
            return super().__getattr__(name)
