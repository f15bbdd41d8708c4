"""DAPO training of language models: Megatron-core actor, SGLang rollout, from laptop to cluster.

The public names (megatron_dapo/public_names.py) are imported at their first use.
"""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    from importlib import import_module

    module = import_module("megatron_dapo.public_names").PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (mistake := import_module("megatron_dapo.common.heavy_packages").absence(error.name)) is None:
            raise
        raise ModuleNotFoundError(mistake.sentences[0], name=error.name) from None
    return value


def __dir__() -> list[str]:
    from importlib import import_module

    return sorted({*globals(), *import_module("megatron_dapo.public_names").PUBLIC})
