"""The layer shapes that are compared, what others reach on them, and the time that no kernel can beat.

The numbers of others in `PUBLISHED` were measured on an H200 in another run, with the method of
`benchmarks/README.md`. Machines differ by a few per cent, so a ratio to them is a rough one; cuBLAS and
humming are measured again in every run of ours and should be compared there.
"""

from __future__ import annotations

from dataclasses import dataclass

from marlin_jit.plan import min_bytes

SHAPES: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (8192, 10240), (4096, 28672))
"""(K, N) of the layers: attention output, down projection, fused QKV of a large model, fused gate and up."""

MS: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows of x."""

SINGLE_MAX_M = 64
"""Most rows for which launches that do not overlap are timed too: with more, their starts matter little."""

PROVENANCE = (
    "measured on an H200 in another run (132 SMs, driver 580, CUDA 13.0; fp16, symmetric int4, group 128): "
    "humming-kernels 0.1.20; vllm_marlin and machete of vLLM 0.26.0, default heuristics; cuBLAS through "
    "PyTorch"
)

COPY_TB_S = 4.1
"""Device-to-device copy of an H200, read and write counted."""

STREAM_TB_S, STREAM_PDL_TB_S = 4.35, 4.4
START_US, START_PDL_US = 2.1, 0.8
"""One launch that reads its bytes once takes the start plus bytes over the stream's rate (with programmatic
dependent launch, which lets a launch begin while the one before it ends: the second pair)."""

TFLOPS = 720.0
"""cuBLAS fp16 at 8192^3 on random data, power-limited."""


@dataclass(frozen=True)
class Published:
    """Microseconds a launch of the libraries named, for one (K, N, M)."""

    roof: float
    cublas: float
    humming: float
    machete: float
    vllm_marlin: float


#    K     N    M     roof cublas humming machete vllm_marlin
_TABLE = """
 4096  4096    1     2.1   12.7    8.2   14.1    8.6
 4096  4096    4     2.1   12.9    8.5   14.5    9.0
 4096  4096    8     2.1   13.8    8.5   14.2    9.0
 4096  4096   16     2.2   13.9    9.5   14.2    9.5
 4096  4096   32     2.2   13.7   10.4   15.3   10.9
 4096  4096   64     3.0   11.4   12.0   18.0   15.4
 4096  4096  128     6.0   13.9   15.7   21.8   20.5
 4096  4096  256    11.9   16.8   21.6   22.6   29.9
 4096  4096  512    23.9   29.2   33.7   29.9   47.6
 4096  4096 1024    47.7   52.4   56.0   58.7   97.6
 4096  4096 2048    95.4   94.6    105    114    189
 4096  4096 4096   190.9    208    200    245    371
 4096  4096 8192   381.8    389    405    466    746
14336  4096    1     7.4   34.9   14.9   28.3   20.4
14336  4096    4     7.4   34.6   15.1   23.8   20.4
14336  4096    8     7.5   34.8   15.4   23.1   20.6
14336  4096   16     7.5   33.1   17.4   22.9   22.2
14336  4096   32     7.7   33.4   21.1   30.3   25.6
14336  4096   64    10.4   35.5   23.0   28.7   37.3
14336  4096  128    20.9   37.7   30.7   36.6   63.8
14336  4096  256    41.8   51.4   52.7   57.6   85.8
14336  4096  512    83.5   88.4   96.5   94.9    162
14336  4096 1024   167.0    174    187    201    320
14336  4096 2048   334.1    339    356    406    623
14336  4096 4096   668.1    654    668    841   1230
14336  4096 8192  1336.2   1296   1343   1620   2495
 8192 10240    1    10.6   46.5   18.6   45.5   20.5
 8192 10240    4    10.6   46.9   18.6   33.0   19.8
 8192 10240    8    10.6   47.4   18.6   32.7   19.9
 8192 10240   16    10.7   46.8   21.3   32.8   21.7
 8192 10240   32    10.8   49.0   27.3   29.3   29.1
 8192 10240   64    14.9   43.7   29.5   41.8   41.8
 8192 10240  128    29.8   46.5   41.0   50.8   63.3
 8192 10240  256    59.7   71.9   72.0   81.6    124
 8192 10240  512   119.3    144    129    124    238
 8192 10240 1024   238.6    255    272    248    458
 8192 10240 2048   477.2    504    492    480    911
 8192 10240 4096   954.4    925    945    992   1878
 8192 10240 8192  1908.9   2028   1849   2081   3826
 4096 28672    1    14.8   56.6   22.6   30.7   27.6
 4096 28672    4    14.8   57.6   22.5   27.5   26.9
 4096 28672    8    14.9   57.6   22.8   27.5   27.1
 4096 28672   16    15.0   58.0   26.1   27.5   29.7
 4096 28672   32    15.3   58.6   37.9   30.0   34.7
 4096 28672   64    20.9   59.9   39.4   42.5   49.5
 4096 28672  128    41.8    105   53.5   55.1   88.8
 4096 28672  256    83.5   94.3   99.3   96.0    176
 4096 28672  512   167.0    203    176    179    342
 4096 28672 1024   334.1    352    341    348    663
 4096 28672 2048   668.1    716    678    676   1328
 4096 28672 4096  1336.2   1390   1376   1390   2784
 4096 28672 8192  2672.4   2837   2871   3012   5887
"""


def _parse(table: str) -> dict[tuple[int, int, int], Published]:
    published = {}
    for line in table.strip().splitlines():
        k, n, m, *times = line.split()
        published[int(k), int(n), int(m)] = Published(*map(float, times))
    return published


PUBLISHED: dict[tuple[int, int, int], Published] = _parse(_TABLE)
"""(K, N, M) -> times of others, in microseconds."""


def flops_us(m: int, k: int, n: int) -> float:
    """Microseconds the multiplications take at `TFLOPS`."""
    return 2.0 * m * k * n / (TFLOPS * 1e6)


def roof_us(m: int, k: int, n: int, group_size: int = 128, symmetric: bool = True) -> float:
    """The larger of bytes over the copy rate and flops over cuBLAS's rate: no kernel is faster."""
    return max(min_bytes(m, k, n, group_size, symmetric) / (COPY_TB_S * 1e6), flops_us(m, k, n))


def floor_us(
    m: int, k: int, n: int, group_size: int = 128, symmetric: bool = True, pdl: bool = False
) -> float:
    """What one launch that only reads those bytes takes, or the flops where they take longer.

    Unlike `roof_us` it contains the start of a launch, so that it is what a perfect kernel would show.
    """
    start, rate = (START_PDL_US, STREAM_PDL_TB_S) if pdl else (START_US, STREAM_TB_S)
    return max(start + min_bytes(m, k, n, group_size, symmetric) / (rate * 1e6), flops_us(m, k, n))
