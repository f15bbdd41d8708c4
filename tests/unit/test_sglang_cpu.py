"""The CPU adaptation of SGLang: the batched decode equals SGLang's own, processes fork safely, what moved is named."""

import importlib.util
import multiprocessing
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_dapo.platform import sglang_cpu
from tests.sglang_cpu_cases import decode_inputs, in_server_process

pytestmark = pytest.mark.unit


def load_plug_in(name: str):
    spec = importlib.util.spec_from_file_location(name, sglang_cpu.SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


batched_decode = load_plug_in("batched_decode").batched_decode


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


def test_what_the_batched_decode_does_not_cover_goes_to_the_original():
    calls = []
    inputs = decode_inputs([3], 4, 2, 16, seed=0)

    def original(backend, query, *args, **kwargs):
        calls.append(kwargs["sliding_window_size"])
        return "original"

    assert batched_decode(original, SimpleNamespace(), **inputs, sliding_window_size=2) == "original"
    assert calls == [2]


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


@pytest.mark.parametrize("name", ["batched_decode", "forked_processes", "prompt_end"])
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


def test_ranks_of_a_tensor_parallel_server_need_no_numa_nodes():
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in sglang_cpu.server_environment({})
    environment = sglang_cpu.server_environment({}, tensor_model_parallel_size=3)
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3


def test_sglang_without_plug_ins_is_refused(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(sglang_cpu, "find_spec", lambda name: spec)
    with pytest.raises(RuntimeError, match="hook_registry.py is gone"):
        sglang_cpu.server_environment()
