"""SGLang plug-in: passes a layer's attention sinks (gpt-oss) to torch_native.

SGLang's own does not know them. A sink is a number per query head that joins the sum of the softmax
and has no value. `batched_decode` and `batched_extend` compute with it.
"""

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
CHECK = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
BACKENDS = "sglang.srt.arg_groups.model_hook.attention_backends_of"

MODELS = {"GptOssForCausalLM"}
KNOWS_SINKS = "triton"
"""A backend that SGLang has sinks for."""


def call_with_sinks(original, backend, *args, sinks=None, **kwargs):
    """Leave the sinks, [Hq], with the backend, from which the kernels take them
    (`vars(backend).pop("sinks")`).

    Raises NotImplementedError if nothing took them: without its sinks the attention is wrong.
    """
    if sinks is None:
        return original(backend, *args, **kwargs)
    backend.sinks = sinks
    attended = original(backend, *args, **kwargs)
    if vars(backend).pop("sinks", None) is not None:
        raise NotImplementedError("An attention that takes no sinks was called for a layer that has some.")
    return attended


def admit_torch_native(original, server_args):
    """SGLang demands one of its backends that have sinks for these models. Here it sees one in
    torch_native's place."""
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of

    def shown(config):
        names = backends_of(config)
        if MODELS.isdisjoint(model_hook.model_config_of(server_args).hf_config.architectures):
            return names
        return tuple(KNOWS_SINKS if name == "torch_native" else name for name in names)

    model_hook.attention_backends_of = shown
    try:
        return original(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside, stop_without

    for method in ("forward_extend", "forward_decode"):
        run_inside(f"{TARGET}.{method}", call_with_sinks)
    stop_without(BACKENDS, admit_torch_native)
    run_inside(CHECK, admit_torch_native)
