"""What the plug-ins of this folder have in common: functions of SGLang that run inside ours, or a server that stops."""

from pkgutil import resolve_name


def run_inside(target, hook):
    """SGLang calls `hook(original, ...)` where it called `target`; a server ends where there is no such target."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    stop_without(target, hook)
    HookRegistry.register(target, hook, HookType.AROUND)


def stop_without(target, hook):
    """Raise SystemExit where there is no such target of a hook, not an exception: SGLang logs a plug-in's exceptions
    and goes on."""
    try:
        resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"{hook.__module__}, which CPU servers need, changes {target}, which is gone: {error}"
        ) from error
