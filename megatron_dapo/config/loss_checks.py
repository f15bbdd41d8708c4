"""What a loss of the user's own demands of the other keys."""

from collections.abc import Iterator

from megatron_dapo.config.keys import changed
from megatron_dapo.config.mistake import Mistake
from megatron_dapo.config.schema import Config

ACTOR = "actor_rollout_ref.actor"
LOSS_FUNCTION = f"{ACTOR}.loss_function"
# keys that would put a term of ours into the loss, or weigh it: key -> what the function does in its place
_TERMS_OF_OURS = {
    f"{ACTOR}.use_kl_loss": "ref_log_probs, where actor_rollout_ref.ref.path is given",
    f"{ACTOR}.entropy_coef": f"entropy, where {ACTOR}.calculate_entropy is true",
    "algorithm.rollout_correction.rollout_is": "rollout_log_probs",
    "exp_manager.experience_replay.enable": "",
}
_READ_BY_OURS = tuple(
    f"{ACTOR}.{key}"
    for key in ("use_dapo", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")
)


def loss_function(config: Config) -> Iterator[Mistake]:
    """Yield the mistakes of `actor.loss_function` with the keys that it cannot be combined with."""
    path = config.actor_rollout_ref.actor.loss_function
    if path is None:
        return
    module, _, function = path.partition(":")
    if not (module and function):
        yield Mistake(
            (LOSS_FUNCTION,),
            f"{LOSS_FUNCTION} is {path!r}, which is not of the form package.module:function; correct it.",
        )
    for name, value in changed(config, _TERMS_OF_OURS):
        given = _TERMS_OF_OURS[name]
        cure = f"; let the function compute that term, it gets {given}" if given else ""
        yield Mistake(
            (name, LOSS_FUNCTION),
            f"{name} is {value}, which cannot be combined with {LOSS_FUNCTION}, the whole loss{cure}; remove one of "
            f"the two.",
        )
    unread = [name for name, _ in changed(config, _READ_BY_OURS)]
    if unread:
        yield Mistake(
            (*unread, LOSS_FUNCTION),
            f"{', '.join(unread)} {'has' if len(unread) == 1 else 'have'} no effect while {LOSS_FUNCTION} is given, "
            f"the whole loss; remove {'it' if len(unread) == 1 else 'them'}, or loss_function.",
        )
