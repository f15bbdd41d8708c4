"""Section `actor_rollout_ref.rollout.agent`: trajectories of any program that knows a base URL."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_dapo.config.schema.base import NumProcesses, NumRetries, PositiveInt, Seconds, Section
from megatron_dapo.config.schema.rules import ActsIf, IsNot, MayChangeOnResume, WhileEnabled

_OF_FUNCTION, _OF_COMMAND = ActsIf(IsNot("function", None)), ActsIf(IsNot("command", []))
Port = Annotated[int, Field(ge=1, le=65535)]


class AgentConfig(Section):
    enable: bool = False
    """Produce every trajectory with an agent, a program that calls the model at a base URL; see docs/agents.md."""
    function: WhileEnabled[str | None] = None
    """The agent as an async function, `package.module:name`; this or `command`."""
    command: WhileEnabled[list[str]] = []
    """The agent as a program and its arguments, with its own interpreter; {base_url}, {model}, {task_file} and
    {result_file} in it are filled in. Keys are in its environment; see docs/agents.md."""
    sandbox: WhileEnabled[Annotated[bool, _OF_COMMAND]] = False
    """Run `command` in a sandbox, whose only network is the way to its model; the reward is `reward.function`'s."""
    kwargs: WhileEnabled[Annotated[dict[str, str | int | float | bool], _OF_FUNCTION]] = {}
    """Keyword arguments of `function`."""
    pass_env: MayChangeOnResume[WhileEnabled[list[str]]] = []
    """Names of environment variables that agents get though they look like secrets."""
    max_open: MayChangeOnResume[WhileEnabled[PositiveInt]] = 64
    """Trajectories under way at once; others wait, without a clock."""
    num_workers: MayChangeOnResume[WhileEnabled[NumProcesses]] = 4
    """Processes that run agents, functions or commands, each those of many trajectories."""
    num_gateways: MayChangeOnResume[WhileEnabled[NumProcesses]] = 1
    """Processes that speak HTTP with agents."""
    host: MayChangeOnResume[WhileEnabled[str]] = "127.0.0.1"
    """Address at which gateways listen; agents on other machines need another than loopback."""
    port: MayChangeOnResume[WhileEnabled[Port | None]] = None
    """Port of the first gateway, one more for each further one; null = free ones."""
    public_url: MayChangeOnResume[WhileEnabled[str | None]] = None
    """URL at which agents reach the only gateway, behind a proxy; null = by host and port."""
    timeout_s: WhileEnabled[Seconds] = 1800.0
    """Seconds of one trajectory, servers and tools; one that reaches it is not terminated."""
    end_timeout_s: MayChangeOnResume[WhileEnabled[Seconds]] = 60.0
    """Seconds for an agent to end after a limit was reached; then it is killed."""
    max_turns: WhileEnabled[PositiveInt] = 100
    """Answers of the model per trajectory."""
    max_branches: WhileEnabled[PositiveInt] = 16
    """Branches of a trajectory: conversations that cannot be appended to an earlier one."""
    max_tokens_per_turn: WhileEnabled[PositiveInt | None] = None
    """Tokens of one answer; null = up to the room of its branch."""
    max_request_mb: MayChangeOnResume[WhileEnabled[PositiveInt]] = 16
    """Size of a request's body."""
    max_choices: WhileEnabled[PositiveInt] = 8
    """Answers to one request, the client's `n`."""
    history: WhileEnabled[Literal["tokens", "rendered"]] = "tokens"
    """tokens: a conversation goes on behind its exact tokens. rendered: each turn begins anew as the template shows
    it, as at stock servers: a branch per turn where the template leaves out earlier thoughts."""
    tool_parser: WhileEnabled[str | None] = None
    """SGLang's parser of tool calls, or an import path; null = the family's."""
    reasoning_parser: WhileEnabled[str | None] = None
    """SGLang's parser of thoughts, or an import path; null = the family's, if it has one."""
    template_kwargs: WhileEnabled[dict[str, str | int | float | bool]] = {}
    """Variables of the chat template, such as enable_thinking."""
    credit: WhileEnabled[str | None] = None
    """Factors of the advantages of a trajectory's branches, `package.module:name`; null = 1."""
    max_restarts: MayChangeOnResume[WhileEnabled[NumRetries]] = 1
    """Times that a trajectory begins anew after a crash of its agent, before it has no verdict."""
