"""The CPU adaptation of SGLang: batched attention equals SGLang's own, processes fork safely, what moved is named."""

import importlib.util
import multiprocessing
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dapo.platform import sglang_cpu
from tests.sglang_cpu_cases import decode_inputs, extend_inputs, in_server_process

pytestmark = pytest.mark.unit


def load_plug_in(name: str):
    spec = importlib.util.spec_from_file_location(name, sglang_cpu.SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


batched_decode = load_plug_in("batched_decode").batched_decode
batched_extend = load_plug_in("batched_extend").batched_extend


def one_by_one(inputs: dict) -> torch.Tensor:
    """The oracle: every request alone."""
    rows = []
    for i, length in enumerate(inputs["seq_lens"].tolist()):
        slots = inputs["req_to_token"][inputs["req_pool_indices"][i], :length]
        keys, values = (inputs[name][slots].transpose(0, 1) for name in ("k_cache", "v_cache"))
        repeat = inputs["query"].shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        rows.append(
            scaled_dot_product_attention(inputs["query"][i, :, None], keys, values, scale=inputs["scaling"])[:, 0]
        )
    return torch.stack(rows)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("lengths", [[1], [5, 5], [1, 17, 3, 50, 2], list(range(1, 40))])
def test_batched_decode_is_each_request_alone(lengths, num_heads, num_kv_heads):
    inputs = decode_inputs(lengths, num_heads, num_kv_heads, 16, seed=len(lengths))
    result = batched_decode(None, None, **inputs)
    assert result.data_ptr() == inputs["output"].data_ptr()
    torch.testing.assert_close(result, one_by_one(inputs), rtol=1e-5, atol=1e-5)


def extended_one_by_one(inputs: dict) -> torch.Tensor:
    """The oracle: every new token alone, as a decode of the tokens until it."""
    rows = []
    lengths = zip(inputs["extend_prefix_lens"].tolist(), inputs["extend_seq_lens"].tolist(), strict=True)
    for i, (cached, new) in enumerate(lengths):
        for place in range(cached, cached + new):
            one = inputs | {
                "query": inputs["query"][len(rows), None],
                "req_pool_indices": inputs["req_pool_indices"][i, None],
                "seq_lens": torch.tensor([place + 1]),
            }
            rows.append(one_by_one(one)[0])
    return torch.stack(rows)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    "lengths", [[(0, 1)], [(0, 6)] * 3, [(0, 6), (4, 2), (0, 9), (4, 2), (0, 6)], [(7, 1), (0, 17), (33, 5)]]
)
def test_batched_extend_is_each_request_alone(lengths, num_heads, num_kv_heads):
    inputs = extend_inputs(lengths, num_heads, num_kv_heads, seed=len(lengths))
    result = batched_extend(None, None, **inputs)
    assert result.data_ptr() == inputs["output"].data_ptr()
    torch.testing.assert_close(result, extended_one_by_one(inputs), rtol=1e-5, atol=1e-5)


def test_the_layers_of_a_step_share_where_its_requests_lie_and_the_next_step_looks_anew():
    first, second = (decode_inputs([5, 9, 2], 4, 2, 16, seed) for seed in (1, 2))
    for inputs in (first, first, second, first):
        torch.testing.assert_close(
            batched_decode(None, None, **inputs).clone(), one_by_one(inputs), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("hook", "inputs", "other"),
    [
        (batched_decode, decode_inputs([3], 4, 2, 16, seed=0), {"sliding_window_size": 2}),
        (batched_decode, decode_inputs([3], 4, 2, 16, seed=0), {"scaling": None}),
        (batched_extend, extend_inputs([(0, 3)], 4, 2, seed=0), {"sliding_window_size": 2}),
        (batched_extend, extend_inputs([(0, 3)], 4, 2, seed=0), {"causal": False}),
    ],
)
def test_what_a_batched_attention_does_not_cover_goes_to_the_original(hook, inputs, other):
    calls = []

    def original(backend, query, *args, **kwargs):
        calls.append(kwargs)
        return "original"

    assert hook(original, SimpleNamespace(), **inputs | other) == "original"
    assert other.items() <= calls[0].items()


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
    """Seen where it makes them: whatever it started before counts."""
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
    "name", ["batched_decode", "batched_extend", "forked_processes", "prompt_end", "sleep_when_paused"]
)
def test_a_server_whose_code_moved_stops_and_names_it(monkeypatch, name):
    monkeypatch.syspath_prepend(sglang_cpu.SITE)
    plug_in = load_plug_in(name)
    monkeypatch.setattr(plug_in, "TARGET", "json.decoder.JSONDecoder.gone")
    registry = SimpleNamespace(HookRegistry=None, HookType=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    with pytest.raises(SystemExit, match=f"{name}, .*JSONDecoder.gone, which is gone"):
        plug_in.register()


def test_the_adaptation_reaches_the_servers_processes_and_keeps_the_users_path(monkeypatch):
    environment = sglang_cpu.server_environment({"PYTHONPATH": "/mine", "HOME": "/home"})
    assert environment["PYTHONPATH"] == f"{sglang_cpu.SITE}:/mine"
    assert environment["HOME"] == "/home"
    assert str(sglang_cpu.SITE) not in sys.path


def test_a_servers_allocator_keeps_memory_unless_the_user_says_how():
    kept = sglang_cpu.server_environment({})
    assert (kept["MALLOC_TRIM_THRESHOLD_"], kept["MALLOC_MMAP_THRESHOLD_"]) == ("268435456", "33554432")
    assert sglang_cpu.server_environment({"MALLOC_TRIM_THRESHOLD_": "0"})["MALLOC_TRIM_THRESHOLD_"] == "0"


def test_ranks_of_a_tensor_parallel_server_need_no_numa_nodes():
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in sglang_cpu.server_environment({})
    environment = sglang_cpu.server_environment({}, tensor_model_parallel_size=3)
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3


def test_sglang_without_plug_ins_is_refused(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(sglang_cpu, "find_spec", lambda name: spec)
    with pytest.raises(RuntimeError, match="hook_registry.py is gone"):
        sglang_cpu.server_environment()
