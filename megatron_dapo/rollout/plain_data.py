"""Groups as plain data (dicts, lists, tuples, numbers, strings) and back: what goes into a state or a file."""

from megatron_dapo.data.types import Group, PartialResponse, Prompt, Sample

UNKNOWN_VERSION = -1  # of a group that was saved by a program that did not note the version of its draw

_PER_TOKEN = ("prompt_tokens", "response_tokens", "rollout_log_probs", "loss_mask", "weight_versions")

# vars(), not dataclasses.asdict: asdict copies every token of every tuple.


def prompt_to_plain(prompt: Prompt) -> dict:
    """Return a prompt as plain data."""
    return dict(vars(prompt))


def prompt_from_plain(plain: dict) -> Prompt:
    """Return what `prompt_to_plain` described."""
    return Prompt(**{**plain, "tokens": tuple(plain["tokens"])})


def sample_to_plain(sample: Sample) -> dict:
    """Return a sample as plain data."""
    return dict(vars(sample))


def sample_from_plain(plain: dict) -> Sample:
    """Return what `sample_to_plain` described."""
    return Sample(
        **{**plain, **{name: tuple(plain[name]) for name in _PER_TOKEN}, "servers": tuple(plain.get("servers", ()))}
    )


def group_to_plain(group: Group) -> dict:
    """Return a group as plain data."""
    return {
        "uid": group.uid,
        "prompt": prompt_to_plain(group.prompt),
        "samples": [sample_to_plain(sample) for sample in group.samples],
        "baseline_reward": group.baseline_reward,
        "keep": group.keep,
        "version": group.version,
    }


def group_from_plain(plain: dict) -> Group:
    """Return what `group_to_plain` described."""
    return Group(
        uid=plain["uid"],
        prompt=prompt_from_plain(plain["prompt"]),
        samples=tuple(sample_from_plain(sample) for sample in plain["samples"]),
        baseline_reward=plain.get("baseline_reward"),
        keep=plain.get("keep", True),
        version=plain.get("version", UNKNOWN_VERSION),
    )


def draw_to_plain(group: Group) -> dict:
    """Return an open group as plain data, with the samples and partial responses that it has."""
    return {
        "uid": group.uid,
        "prompt": prompt_to_plain(group.prompt),
        "version": group.version,
        "samples": [sample_to_plain(sample) for sample in group.samples],
        "partials": [dict(vars(partial)) for partial in group.partials],
    }


def draw_from_plain(plain: dict) -> Group:
    """Return what `draw_to_plain` described, or a program that noted of an open group only what it borrowed."""
    samples = plain.get("samples", [plain["replayed"]] if "replayed" in plain else [])
    return Group(
        uid=plain["uid"],
        prompt=prompt_from_plain(plain["prompt"]),
        samples=tuple(sample_from_plain(sample) for sample in samples),
        version=plain.get("version", UNKNOWN_VERSION),
        partials=tuple(
            PartialResponse(**{name: tuple(value) for name, value in partial.items()})
            for partial in plain.get("partials", ())
        ),
    )
