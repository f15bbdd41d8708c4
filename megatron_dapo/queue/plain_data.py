"""Groups as plain data and back, for states and files.

Plain data are dicts, lists, tuples, numbers, strings and arrays per token. Lists of a file become
arrays.
"""

from megatron_dapo.data.routed_experts import from_text
from megatron_dapo.data.samples import Branch, Group, PartialResponse, Prompt, Sample

# vars(), not dataclasses.asdict: asdict copies every array.


def _prompt_to_plain(prompt: Prompt) -> dict:
    """Return a prompt as plain data."""
    return dict(vars(prompt))


def _prompt_from_plain(plain: dict) -> Prompt:
    """Return the prompt of `_prompt_to_plain`."""
    return Prompt(**{**plain, "tokens": tuple(plain["tokens"])})


def sample_to_plain(sample: Sample) -> dict:
    """Return a sample as plain data; one branch alone has no list of others."""
    others = [_branch_to_plain(branch) for branch in sample.others]
    return _branch_to_plain(sample) | ({"others": others} if others else {})


def _branch_to_plain(branch: Branch) -> dict:
    left_out = {"others"} if len(branch.routed_experts) else {"others", "routed_experts"}
    return {name: value for name, value in vars(branch).items() if name not in left_out}


def sample_from_plain(plain: dict) -> Sample:
    """Return the sample of `sample_to_plain`, or of a batch file.

    Raises ValueError, the end of a sentence, for values that no token can have.
    """
    others = tuple(Branch(**_branch_values(branch)) for branch in plain.get("others", ()))
    return Sample(**{**_branch_values(plain), "servers": tuple(plain["servers"]), "others": others})


def _branch_values(plain: dict) -> dict:
    values = {**plain}
    if isinstance(experts := values.get("routed_experts"), str):
        values["routed_experts"] = from_text(experts)
    return values


def group_to_plain(group: Group) -> dict:
    """Return a group as plain data."""
    return {
        "uid": group.uid,
        "prompt": _prompt_to_plain(group.prompt),
        "samples": [sample_to_plain(sample) for sample in group.samples],
        "baseline_reward": group.baseline_reward,
        "keep": group.keep,
        "version": group.version,
    }


def group_from_plain(plain: dict) -> Group:
    """Return the group of `group_to_plain`.

    Raises ValueError naming a sample with impossible values.
    """
    samples = []
    for number, sample in enumerate(plain["samples"], 1):
        try:
            samples.append(sample_from_plain(sample))
        except ValueError as error:
            raise ValueError(f"group {plain['uid']}, sample {number} {error}") from error
    return Group(
        uid=plain["uid"],
        prompt=_prompt_from_plain(plain["prompt"]),
        samples=tuple(samples),
        baseline_reward=plain["baseline_reward"],
        keep=plain["keep"],
        version=plain["version"],
    )


def draw_to_plain(group: Group) -> dict:
    """Return an open group as plain data, with its samples and partial responses so far."""
    return {
        "uid": group.uid,
        "prompt": _prompt_to_plain(group.prompt),
        "version": group.version,
        "samples": [sample_to_plain(sample) for sample in group.samples],
        "partials": [dict(vars(partial)) for partial in group.partials],
    }


def draw_from_plain(plain: dict) -> Group:
    """Return the open group of `draw_to_plain`."""
    return Group(
        uid=plain["uid"],
        prompt=_prompt_from_plain(plain["prompt"]),
        samples=tuple(sample_from_plain(sample) for sample in plain["samples"]),
        version=plain["version"],
        partials=tuple(
            PartialResponse(**{**partial, "servers": tuple(partial["servers"])}) for partial in plain["partials"]
        ),
    )
