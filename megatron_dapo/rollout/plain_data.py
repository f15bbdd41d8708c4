"""Groups as plain data (dicts, lists, tuples, numbers, strings) and back: what goes into a state or a file."""

from megatron_dapo.data.types import Group, Prompt, Sample

_PER_TOKEN = ("prompt_tokens", "response_tokens", "rollout_log_probs", "loss_mask", "weight_versions")

# vars(), not dataclasses.asdict: asdict copies every token of every tuple.


def prompt_to_plain(prompt: Prompt) -> dict:
    return dict(vars(prompt))


def prompt_from_plain(plain: dict) -> Prompt:
    return Prompt(**{**plain, "tokens": tuple(plain["tokens"])})


def group_to_plain(group: Group) -> dict:
    return {
        "uid": group.uid,
        "prompt": prompt_to_plain(group.prompt),
        "samples": [dict(vars(sample)) for sample in group.samples],
        "baseline_reward": group.baseline_reward,
        "keep": group.keep,
    }


def group_from_plain(plain: dict) -> Group:
    samples = (
        Sample(**{**sample, **{name: tuple(sample[name]) for name in _PER_TOKEN}}) for sample in plain["samples"]
    )
    return Group(
        uid=plain["uid"],
        prompt=prompt_from_plain(plain["prompt"]),
        samples=tuple(samples),
        baseline_reward=plain.get("baseline_reward"),
        keep=plain.get("keep", True),
    )
