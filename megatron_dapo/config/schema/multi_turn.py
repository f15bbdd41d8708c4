"""Section `actor_rollout_ref.rollout.multi_turn`: responses of several turns in an environment."""

from megatron_dapo.config.schema.base import Megabytes, NumProcesses, PositiveInt, Seconds, Section
from megatron_dapo.config.schema.rules import MayChangeOnResume, WhileEnabled


class MultiTurnConfig(Section):
    enable: bool = False
    """Play every response with an environment, over several turns; see docs/multi_turn.md."""
    environment: WhileEnabled[str] = ""
    """reasoning_gym, or `package.module:Class`."""
    environment_kwargs: WhileEnabled[dict[str, str | int | float | bool]] = {}
    """Keyword arguments of the environment."""
    max_turns: WhileEnabled[PositiveInt] = 16
    """Turns of the model per trajectory; one that reaches it is not terminated."""
    max_tokens_per_turn: WhileEnabled[PositiveInt | None] = None
    """Tokens of one turn, which then goes to the environment as it is; null = up to `data.max_response_length`."""
    timeout_s: WhileEnabled[Seconds] = 600.0
    """Seconds of one trajectory at servers, their pauses for weight pushes included, and in its environment; one that
    reaches it is not terminated."""
    step_timeout_s: MayChangeOnResume[WhileEnabled[Seconds]] = 30.0
    """Hard limit of one answer of an environment; its process is killed, and the trajectory ends there."""
    num_workers: MayChangeOnResume[WhileEnabled[NumProcesses]] = 16
    """Environment processes: trajectories that are under way at once."""
    memory_limit_mb: MayChangeOnResume[WhileEnabled[Megabytes]] = 2048
    """Address space of an environment process."""
    pass_env: MayChangeOnResume[WhileEnabled[list[str]]] = []
    """Names of environment variables that environment processes get though they look like secrets."""
