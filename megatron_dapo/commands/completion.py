"""`megatron-dapo completion`: a script with which bash, and zsh by bashcompinit, complete words."""

from collections.abc import Iterable, Mapping

from megatron_dapo.config.recipes import recipe_names

_SCRIPT = """\
# eval "$(megatron-dapo completion)"; in zsh after: autoload -U bashcompinit && bashcompinit
_megatron_dapo() {{
    local words="" word="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" = 1 ]; then
        words="{first}"
    elif [ "${{COMP_WORDS[COMP_CWORD-1]}}" = --config-name ]; then
        words="{recipes}"
    elif [ "${{COMP_WORDS[1]}}" = convert ]; then
        [ "$COMP_CWORD" = 2 ] && words="{formats}"
    elif [ "${{word#-}}" != "$word" ]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _megatron_dapo megatron-dapo
"""


def completion(names: Iterable[str], options: Mapping[str, Iterable[str]]) -> str:
    """Return the script. Other words are completed as names of files.

    Args:
        names: of all commands, such as "plan" and "convert to-hf".
        options: of each command, as far as known.
    """
    parts = [name.partition(" ") for name in names]
    return _SCRIPT.format(
        first=" ".join(dict.fromkeys(first for first, _, _ in parts)),
        recipes=" ".join(recipe_names()),
        formats=" ".join(second for _, _, second in parts if second),
        cases="\n".join(f'            {name}) words="{" ".join(sorted(of))}" ;;' for name, of in options.items()),
    )
