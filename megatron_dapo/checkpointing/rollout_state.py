"""The rollout's part of a checkpoint: restores it, and reports on it."""

from typing import Any, Protocol

from megatron_dapo.common.errors import UserError


class Rollout(Protocol):
    """The part of the rollout that a checkpoint keeps: prompt cursor, groups that wait. `halt`: see
    RolloutHandle.

    Of a run that learns from conversations: the place in their order.
    """

    def halt(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def restore_rollout(rollout: Rollout, state: dict[str, Any], may_begin_anew: bool) -> tuple[list[str], list[str]]:
    """Return (restored, not restored), in words.

    Args:
        may_begin_anew: whether the rollout may stay as it is if the state is of other prompts; else
            UserError.
    """
    try:
        rollout.load_state_dict(state)
    except UserError as error:
        if not may_begin_anew:
            raise
        why = "; ".join(sentence.partition("; ")[0] for sentence in error.sentences)
        return [], [f"prompt cursor and groups that waited: they begin anew (accepted), since {why}"]
    now = rollout.state_dict()
    lost = [f"{_WORDS[part]}: this run has none" for part in _WORDS if part in state and part not in now]
    new = [f"{_WORDS[part]}: the checkpoint has none" for part in _WORDS if part in now and part not in state]
    return _describe(now), lost + (new if "queue" in state else [])


def num_groups_under_way(state: dict[str, Any]) -> int:
    """Return the number of finished groups of the step that was open; 0 between two steps, and in a
    replay."""
    queue = state.get("queue") or {}
    step = queue.get("step")
    return step["generated"]["num_groups"] + len(queue["finished"]) if step else 0


def num_tokens_under_way(state: dict[str, Any]) -> int:
    """Return the number of response tokens in unfinished groups; 0 in a replay."""
    draws = (state.get("queue") or {}).get("open", ())
    finished = sum(
        len(branch["response_tokens"])
        for draw in draws
        for sample in draw.get("samples", ())  # none if the group is finished
        if not sample["exp_mask"]
        for branch in (sample, *sample.get("others", ()))
    )
    return finished + sum(len(partial["tokens"]) for draw in draws for partial in draw.get("partials", ()))


_WORDS = {"queue": "prompt cursor and groups that waited", "experiences": "experiences to replay"}


def _describe(state: dict[str, Any]) -> list[str]:
    if "conversations" in state:
        return ["the place in the conversations"]
    if "queue" not in state:
        return ["the place in the replay"]
    queue = state["queue"]
    groups = [f"{len(queue['kept'])} finished groups that wait", f"{len(queue['open'])} prompts that are open"]
    num_partials = sum(len(draw.get("partials", ())) for draw in queue["open"])
    groups += [f"{num_partials} unfinished answers"] if num_partials else []
    pool = [f"{len(state['experiences']['experiences'])} experiences to replay"] if "experiences" in state else []
    return [f"prompt cursor ({queue['num_drawn']} drawn)", *groups, *pool]
