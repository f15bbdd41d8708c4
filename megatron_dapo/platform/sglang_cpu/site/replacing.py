"""Replaces functions of SGLang for the plug-ins of this folder, or stops the server if one is
missing."""

from pkgutil import resolve_name


def run_inside(target, hook):
    """Have SGLang call `hook(original, ...)` in place of `target`; the server ends if there is no
    such target."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    stop_without(target, hook)
    HookRegistry.register(target, hook, HookType.AROUND)


def stop_without(target, hook):
    """Raise SystemExit if there is no such target. SGLang logs a plug-in's exceptions and
    continues, so none would stop it."""
    try:
        resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"{hook.__module__}, which CPU servers need, changes {target}, which is gone: {error}"
        ) from error
