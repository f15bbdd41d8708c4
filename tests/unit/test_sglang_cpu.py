"""SGLang's CPU adaptation: batched attention equals SGLang's own, forks are safe,
moves are named."""

import importlib.util
import multiprocessing
import sys
import threading
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_dapo.platform.sglang_cpu import cpu_server
from tests.sglang_cpu_cases import decode_inputs, extend_inputs, in_server_process

pytestmark = pytest.mark.unit


def load_plug_in(name: str):
    spec = importlib.util.spec_from_file_location(name, cpu_server.SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


batched_decode = load_plug_in("batched_decode").batched_decode
batched_extend = load_plug_in("batched_extend").batched_extend


def backend(sinks: torch.Tensor | None = None) -> SimpleNamespace:
    """As `attention_sinks` leaves it while a layer attends."""
    return SimpleNamespace() if sinks is None else SimpleNamespace(sinks=sinks)


def sinks_of(num_heads: int) -> torch.Tensor:
    """Of the size of scores, in a server's type."""
    return (2 * torch.randn(num_heads, generator=torch.Generator().manual_seed(num_heads))).bfloat16()


def one_by_one(inputs: dict, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """The oracle: each request by itself, in float64, as gpt-oss is written in transformers."""
    window = inputs.get("sliding_window_size")
    rows = []
    for i, length in enumerate(inputs["seq_lens"].tolist()):
        first = 0 if window is None else max(0, length - 1 - window)
        slots = inputs["req_to_token"][inputs["req_pool_indices"][i], first:length]
        keys, values = (inputs[name][slots].transpose(0, 1).double() for name in ("k_cache", "v_cache"))
        repeat = inputs["query"].shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        scores = (keys @ inputs["query"][i, :, :, None].double())[..., 0] * inputs["scaling"]
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        shares = scores.softmax(dim=1)[:, : length - first]
        rows.append((shares[:, None] @ values)[:, 0])
    return torch.stack(rows).float()


KINDS = pytest.mark.parametrize(
    ("window", "has_sinks"), [(None, False), (4, False), (0, False), (None, True), (4, True), (1000, True)]
)
"""Of layers: tokens before the last that they see, and whether they have sinks."""


@KINDS
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("lengths", [[1], [5, 5], [1, 17, 3, 50, 2], list(range(1, 40))])
def test_batched_decode_equals_single_requests(lengths, num_heads, num_kv_heads, window, has_sinks):
    inputs = decode_inputs(lengths, num_heads, num_kv_heads, 16, seed=len(lengths)) | {"sliding_window_size": window}
    sinks = sinks_of(num_heads) if has_sinks else None
    result = batched_decode(None, backend(sinks), **inputs)
    assert result.data_ptr() == inputs["output"].data_ptr()
    torch.testing.assert_close(result, one_by_one(inputs, sinks), rtol=1e-5, atol=1e-5)


def extended_one_by_one(inputs: dict, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """The oracle: each new token by itself, as a decode of the tokens until it."""
    rows = []
    lengths = zip(inputs["extend_prefix_lens"].tolist(), inputs["extend_seq_lens"].tolist(), strict=True)
    for i, (cached, new) in enumerate(lengths):
        for place in range(cached, cached + new):
            one = inputs | {
                "query": inputs["query"][len(rows), None],
                "req_pool_indices": inputs["req_pool_indices"][i, None],
                "seq_lens": torch.tensor([place + 1]),
            }
            rows.append(one_by_one(one, sinks)[0])
    return torch.stack(rows)


@KINDS
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    "lengths",
    [[(0, 1)], [(0, 6)] * 3, [(0, 6), (4, 2), (0, 9), (4, 2), (0, 6)], [(7, 1), (0, 17), (33, 5)], [(2, 3), (3, 9)]],
)
def test_batched_extend_equals_single_requests(lengths, num_heads, num_kv_heads, window, has_sinks):
    inputs = extend_inputs(lengths, num_heads, num_kv_heads, seed=len(lengths)) | {"sliding_window_size": window}
    sinks = sinks_of(num_heads) if has_sinks else None
    result = batched_extend(None, backend(sinks), **inputs)
    assert result.data_ptr() == inputs["output"].data_ptr()
    torch.testing.assert_close(result, extended_one_by_one(inputs, sinks), rtol=1e-5, atol=1e-5)


def test_the_layers_of_a_step_share_the_cache_positions_and_the_next_step_computes_new_ones():
    first, second = (decode_inputs([5, 9, 2], 4, 2, 16, seed) for seed in (1, 2))
    # layers of two kinds in turn
    for inputs, window in product((first, first, second, first), (None, 3)):
        inputs["sliding_window_size"] = window
        torch.testing.assert_close(
            batched_decode(None, backend(), **inputs).clone(), one_by_one(inputs), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("hook", "inputs", "other"),
    [
        (batched_decode, decode_inputs([3], 4, 2, 16, seed=0), {"encoder_lens": torch.tensor([2])}),
        (batched_decode, decode_inputs([3], 4, 2, 16, seed=0), {"scaling": None}),
        (batched_extend, extend_inputs([(0, 3)], 4, 2, seed=0), {"encoder_lens": torch.tensor([2])}),
        (batched_extend, extend_inputs([(0, 3)], 4, 2, seed=0), {"causal": False}),
    ],
)
def test_what_a_batched_attention_does_not_cover_goes_to_the_original(hook, inputs, other):
    calls = []

    def original(backend, query, *args, **kwargs):
        calls.append(kwargs)
        return "original"

    assert hook(original, backend(), **inputs | other) == "original"
    assert other.items() <= calls[0].items()


def test_a_layers_sinks_are_with_the_backend_while_it_attends_and_no_longer():
    plug_in, attending, seen = load_plug_in("attention_sinks"), backend(), []

    def forward(backend, *args, **kwargs):
        seen.append((vars(backend).pop("sinks", None), args, kwargs))
        return "attended"

    for sinks in ("sinks", None):
        assert plug_in.call_with_sinks(forward, attending, "q", sinks=sinks, save_kv_cache=True) == "attended"
    assert seen == [(sinks, ("q",), {"save_kv_cache": True}) for sinks in ("sinks", None)]


@pytest.mark.parametrize(
    ("hook", "inputs", "other"),
    [
        (batched_decode, decode_inputs([3], 4, 2, 16, seed=0), {"scaling": None}),
        (batched_extend, extend_inputs([(0, 3)], 4, 2, seed=0), {"causal": False}),
    ],
)
def test_sinks_that_nothing_computes_with_stop_the_server(hook, inputs, other):
    plug_in = load_plug_in("attention_sinks")

    def forward(backend):
        return hook(lambda *args, **kwargs: "without sinks", backend, **inputs | other)

    with pytest.raises(NotImplementedError, match="takes no sinks"):
        plug_in.call_with_sinks(forward, backend(), sinks=sinks_of(4))


@pytest.mark.parametrize(
    ("architecture", "seen"), [("GptOssForCausalLM", ("triton", "triton")), ("Other", ("torch_native", "triton"))]
)
def test_only_the_check_of_models_with_sinks_sees_another_backend(monkeypatch, architecture, seen):
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    module = ModuleType("model_hook")
    module.model_config_of = lambda server_args: config
    module.attention_backends_of = backends_of = lambda server_args: ("torch_native", "triton")
    package = SimpleNamespace(model_hook=module)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", package)

    def check(server_args):
        assert module.attention_backends_of(server_args) == seen
        raise AssertionError("refused")

    with pytest.raises(AssertionError, match="refused"):
        load_plug_in("attention_sinks").admit_torch_native(check, "arguments")
    assert module.attention_backends_of is backends_of


def test_a_paused_scheduler_counts_its_time_and_sleeps_until_a_request_comes():
    calls = []
    scheduler = SimpleNamespace(maybe_sleep_on_idle=lambda: calls.append("sleep"))
    load_plug_in("sleep_when_paused").sleep_when_paused(lambda paused: calls.append(paused), scheduler)
    assert calls == [scheduler, "sleep"]


def test_a_stand_in_says_which_name_needs_a_gpu():
    done = in_server_process("from sgl_kernel import silu_and_mul; silu_and_mul(1)")
    assert "NotImplementedError: sgl_kernel.silu_and_mul is not there" in done.stderr
    done = in_server_process("import torchvision.transforms.v2.functional as F; F.resize(1)")
    assert "NotImplementedError: torchvision.transforms.v2.functional.resize is not there" in done.stderr


def test_a_server_forks_its_processes_only_while_it_has_one_thread(monkeypatch):
    """The check is at the creation of processes: all earlier threads count."""
    asked = []
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method, force: asked.append(method))
    plug_in = load_plug_in("forked_processes")
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(SystemExit, match="has [0-9]+ threads by then"):
            plug_in.fork_from_here_on(lambda: asked.append("processes"))
    finally:
        end.set()
        thread.join()
    assert asked == []


@pytest.mark.parametrize(
    "name",
    [
        "attention_sinks",
        "batch_invariant",
        "batched_decode",
        "batched_extend",
        "forked_processes",
        "fp8_products",
        "gated_delta_net",
        "prompt_end",
        "sleep_when_paused",
    ],
)
def test_a_server_whose_code_moved_stops_and_names_it(monkeypatch, name):
    monkeypatch.syspath_prepend(cpu_server.SITE)
    plug_in = load_plug_in(name)
    monkeypatch.setattr(plug_in, "TARGET", "json.decoder.JSONDecoder.gone")
    registry = SimpleNamespace(HookRegistry=None, HookType=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    with pytest.raises(SystemExit, match=rf"{name}, .*JSONDecoder.gone[.\w]*, which is gone"):
        plug_in.register()


def test_the_adaptation_reaches_the_servers_processes_and_keeps_the_users_path(monkeypatch):
    environment = cpu_server.server_environment({"PYTHONPATH": "/mine", "HOME": "/home"})
    assert environment["PYTHONPATH"] == f"{cpu_server.SITE}:/mine"
    assert environment["HOME"] == "/home"
    assert str(cpu_server.SITE) not in sys.path


def test_a_servers_allocator_keeps_memory_unless_the_user_says_how():
    kept = cpu_server.server_environment({})
    assert (kept["MALLOC_TRIM_THRESHOLD_"], kept["MALLOC_MMAP_THRESHOLD_"]) == ("268435456", "33554432")
    assert cpu_server.server_environment({"MALLOC_TRIM_THRESHOLD_": "0"})["MALLOC_TRIM_THRESHOLD_"] == "0"


def test_a_server_compiles_nothing_unless_the_user_says_so():
    assert cpu_server.server_environment({})["TORCHDYNAMO_DISABLE"] == "1"
    assert cpu_server.server_environment({"TORCHDYNAMO_DISABLE": "0"})["TORCHDYNAMO_DISABLE"] == "0"


def test_ranks_of_a_tensor_parallel_server_need_no_numa_nodes():
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu_server.server_environment({})
    environment = cpu_server.server_environment({}, tensor_model_parallel_size=3)
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3


def test_sglang_without_plug_ins_is_refused(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(cpu_server, "find_spec", lambda name: spec)
    with pytest.raises(RuntimeError, match="hook_registry.py is gone"):
        cpu_server.server_environment()
