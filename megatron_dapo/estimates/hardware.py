"""Data sheets of GPUs: the one table of peaks, for MFU and plans; memory and links."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dapo.common.errors import UserError
from megatron_dapo.common.sizes import GB

# Dense bfloat16 tensor-core TFLOP/s by the driver's name for the GPU; the first match wins. From
# NVIDIA's data sheets; figures with sparsity, twice as large, are halved.
PEAK_TFLOPS = {
    "GB200": 2500.0,  # GB200 NVL72: 360 PFLOP/s with sparsity on 72 GPUs
    "B200": 2250.0,  # HGX B200: 36 PFLOP/s with sparsity on 8 GPUs
    "H200 NVL": 835.5,  # H200: 1671 with sparsity
    "H200": 989.5,  # H200: 1979 with sparsity
    "H100 PCIe": 756.5,  # H100: 1513 with sparsity
    "H100 NVL": 835.5,  # H100: 1671 with sparsity
    "H100": 989.5,  # H100: 1979 with sparsity
    "H800 PCIe": 756.5,  # H800: 1513 with sparsity
    "H800": 989.5,  # H800: 1979 with sparsity
    "H20": 148.0,  # H20: 148, dense
    "A100": 312.0,  # A100: 312, dense
    "A800": 312.0,  # A800: 312, dense
}


def peak_flops(gpu_name: str) -> float | None:
    """Return the GPU's peak in FLOP per second, in bfloat16, or None for a GPU not in the table."""
    words = gpu_name.replace("-", " ").split()
    return next((peak * 1e12 for name, peak in PEAK_TFLOPS.items() if _follows(name.split(), words)), None)


def _follows(name: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether all words of a name occur in this order. Others may stand between them: A100
    80GB PCIe is an A100 PCIe."""
    rest = iter(words)
    return all(word in rest for word in name)


@dataclass(frozen=True)
class Hardware:
    """One GPU, its links, and its share of the node. Bandwidths are bytes per second.

    The last three fields are a server's own work, hidden behind no kernel.
    """

    name: str
    flops: float  # dense bfloat16, per second
    memory: float  # bytes
    memory_bandwidth: float
    link_bandwidth: float  # to GPUs of the same node, one direction
    network_bandwidth: float  # to other nodes, one direction: the GPU's share of the adapters
    host_memory_bandwidth: float  # the GPU's share of its node's
    host_link_bandwidth: float  # between GPU and host memory, one direction
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability
    host_token_s: float = 1e-3  # seconds per token of all requests: sampler, launch of a graph
    # Per token of one request. 0 on a GPU: SGLang's overlap scheduler works while the GPU computes.
    host_request_token_s: float = 0.0
    host_request_s: float = 0.0  # seconds per request


# The table's GPUs with FP8 are twice as fast in it as in bfloat16, by the same data sheets.
FP8_SPEED = 2.0
# Compute capability for Transformer Engine's recipes (TE 2.20, pytorch/quantization.py).
FP8_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}


def serves_fp8(capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this capability serves FP8 blocks. An older one has no FP8 products;
    on a newer one SGLang 0.5.23 gives the scales another form, which no push fills."""
    return (8, 9) <= capability < (10, 0)


def lack_of_fp8(name: str, capability: tuple[int, int], recipe: str) -> str | None:
    """Return the end of a sentence on a GPU too old for a recipe of FP8, or None."""
    needed = FP8_CAPABILITY[recipe]
    if capability >= needed:
        return None
    numbers = [".".join(map(str, pair)) for pair in (needed, capability)]
    others = [other for other, least in FP8_CAPABILITY.items() if capability >= least]
    cure = f"set fp8_recipe to {' or '.join(others)}" if others else "set fp8 to none"
    return f"which needs compute capability {numbers[0]}, but {name} has {numbers[1]}; {cure}."


def _row(
    name: str,
    capability: tuple[int, int],
    memory_gb: float,
    memory_tb_s: float,
    link_gb_s: float,
    network_gb_s: float,
    host: tuple[float, float],
) -> Hardware:
    return Hardware(
        name.lower(),
        PEAK_TFLOPS[name] * 1e12,
        memory_gb * GB,
        memory_tb_s * 1e12,
        link_gb_s * GB,
        network_gb_s * GB,
        host[0] * GB,
        host[1] * GB,
        capability,
    )


# The node of a GPU: its share of the processors' memory bandwidth, and its PCIe x16, in GB/s.
_DGX_A100 = (51, 31)  # 2 x EPYC 7742 with 8 channels of DDR4-3200 for 8 GPUs; PCIe 4.0
_DGX_H100 = (77, 63)  # 2 x Xeon 8480C with 8 channels of DDR5-4800 for 8 GPUs; PCIe 5.0
_DGX_B200 = (90, 63)  # 2 x Xeon 8570 with 8 channels of DDR5-5600 for 8 GPUs; PCIe 5.0
# 512 GB/s of LPDDR5X for 2 GPUs; NVLink-C2C, 900 GB/s in both directions, for 2 GPUs
_GRACE = (256, 225)

# The SXM versions. A data sheet's NVLink figure is both directions together: half of it stands
# here. Network: one adapter per GPU, as in NVIDIA's DGX of that generation (200 Gbit/s beside A100,
# 400 beside the later ones).
HARDWARE = {
    row.name: row
    for row in (
        # NVIDIA A100 data sheet (2021): SXM, 2039 GB/s, NVLink 600 GB/s; DGX A100: 8 x ConnectX-6
        _row("A100", (8, 0), 80, 2.039, 300, 25, _DGX_A100),
        # NVIDIA H100 data sheet (2023): SXM5, 3.35 TB/s, NVLink 900 GB/s; DGX H100: 8 x ConnectX-7
        _row("H100", (9, 0), 80, 3.35, 450, 50, _DGX_H100),
        # NVIDIA H200 data sheet (2024): SXM, 141 GB, 4.8 TB/s, NVLink 900 GB/s
        _row("H200", (9, 0), 141, 4.8, 450, 50, _DGX_H100),
        # NVIDIA H20 (2023; from resellers, not on NVIDIA's site): 96 GB, 4.0 TB/s, NVLink 900 GB/s
        _row("H20", (9, 0), 96, 4.0, 450, 50, _DGX_H100),
        # NVIDIA DGX B200 data sheet (2024): 1440 GB and 64 TB/s for 8 GPUs, NVLink 14.4 TB/s
        _row("B200", (10, 0), 180, 8.0, 900, 50, _DGX_B200),
        # NVIDIA GB200 NVL72 (2024): 72 GPUs with 13.4 TB and 576 TB/s together, NVLink 130 TB/s
        _row("GB200", (10, 0), 186, 8.0, 900, 50, _GRACE),
        # For plans of runs on a CPU: one core of a server with AVX-512, in float32, 2.5 GHz x 2
        # units x 16 numbers x 2 operations; memory and loopback are orders of magnitude. The
        # server's own work was measured with the demo's server: 8 to 128 requests of 8 to 32
        # tokens, to 9 % (benchmarks/results/plan_cpu.json, "server").
        Hardware(
            "cpu",
            0.16e12,
            12 * GB,
            10e9,
            2 * GB,
            1 * GB,
            10e9,
            10e9,
            host_token_s=2.42e-3,
            host_request_token_s=29.8e-6,
            host_request_s=0.697e-3,
        ),
    )
}


def hardware_named(name: str) -> Hardware:
    """Return the GPU of this name, in any case. Raises UserError with the known names."""
    if (row := HARDWARE.get(name.lower())) is None:
        raise UserError(f"--hardware is {name}, which is not in the table; known are {', '.join(HARDWARE)}.")
    return row
