"""Loading, launching and scratch memory on a real device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from marlin_jit import _disk_cache, device, jit
from marlin_jit.errors import LaunchError

KERNEL = """
extern "C" __global__ void scale(float* values, int count, float factor) {
    extern __shared__ float shared[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    shared[threadIdx.x] = i < count ? values[i] : 0.0f;
    __syncthreads();
    if (i < count) values[i] = shared[threadIdx.x] * factor + OFFSET;
}
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MARLIN_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_loaded", {})
    (tmp_path / "scale.cu").write_text(KERNEL)
    yield tmp_path


def load(root: Path, dynamic_smem: int = 0) -> jit.Kernel:
    return jit.load_kernel("scale.cu", "scale", {"OFFSET": "0.5f"}, dynamic_smem=dynamic_smem, _root=root)


def check(kernel: jit.Kernel, smem: int = 1024) -> None:
    import cupy

    values = cupy.arange(1000, dtype=np.float32)
    kernel((4, 1, 1), 256, (values.data.ptr, 1000, 3.0), smem)
    assert (values.get() == np.arange(1000, dtype=np.float32) * 3 + 0.5).all()


def test_kernel_runs_on_the_exact_architecture(kernels: Path) -> None:
    kernel = load(kernels)
    assert kernel.arch == jit.arch_for(device.current_device().capability, jit.supported_archs())
    assert kernel.registers > 0
    check(kernel)
    assert load(kernels) is kernel


def test_device_properties(kernels: Path) -> None:
    import cupy

    info = device.current_device()
    attributes = cupy.cuda.Device(info.id).attributes
    assert "".join(map(str, info.capability)) == cupy.cuda.Device(info.id).compute_capability
    assert info.sm_count == attributes["MultiProcessorCount"]
    assert info.smem_per_block == attributes["MaxSharedMemoryPerBlockOptin"]
    assert info.smem_per_sm == attributes["MaxSharedMemoryPerMultiprocessor"]
    assert info.l2_bytes == attributes["L2CacheSize"]
    assert info.name


def test_cached_code_for_another_device_is_compiled_again(
    kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole and valid file with code that this device cannot run."""
    major = device.current_device().capability[0]
    arch = jit.arch_for(device.current_device().capability, jit.supported_archs())
    options = {"name": "scale", "_root": kernels}
    good = jit.compile_cubin("scale.cu", arch, {"OFFSET": "0.5f"}, **options)
    other = jit.compile_cubin("scale.cu", "80" if major > 8 else "90a", {"OFFSET": "0.5f"}, **options)
    header = {name: getattr(good, name) for name in ("name", "arch", "registers", "spill_bytes")}
    header |= {name: getattr(good, name) for name in ("stack_bytes", "log", "seconds")}
    assert _disk_cache.save(good.key, header, other.cubin)
    check(load(kernels))
    assert "compiling it again" in caplog.text
    found = _disk_cache.load(good.key)
    assert found is not None
    assert found[1] == good.cubin


def test_large_dynamic_shared_memory(kernels: Path) -> None:
    most = device.current_device().smem_per_block
    with pytest.raises(LaunchError, match="was refused"):
        check(load(kernels), smem=most)
    check(load(kernels, dynamic_smem=most), smem=most)
    assert load(kernels).occupancy(256, most) == 1
    assert load(kernels).occupancy(256, 1024) > 1
    with pytest.raises(LaunchError, match="cannot have"):
        load(kernels, dynamic_smem=most + 1)


def test_static_and_dynamic_shared_memory_together(kernels: Path) -> None:
    """Together over 48 KiB, neither of them alone."""
    text = KERNEL.replace(
        "extern __shared__", "__shared__ float fixed[2048]; fixed[threadIdx.x] = 0; extern __shared__"
    )
    text = text.replace("* factor + OFFSET", "* factor + OFFSET + fixed[threadIdx.x ^ 1]")
    (kernels / "scale.cu").write_text(text)
    jit._read_sources.cache_clear()
    check(load(kernels, dynamic_smem=47 * 1024), smem=47 * 1024)


def test_capture_after_a_first_call(kernels: Path) -> None:
    import cupy

    values = cupy.zeros(256, dtype=np.float32)
    args = (values.data.ptr, 256, 2.0)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(LaunchError, match="captured into a CUDA graph"):
            load(kernels)
        stream.end_capture()
        kernel = load(kernels)
        stream.begin_capture()
        load(kernels)((1, 1, 1), 256, args, 1024)
        graph = stream.end_capture()
        assert kernel is load(kernels)
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert (values.get() == 3.5).all()  # ((0.5) * 2 + 0.5) * 2 + 0.5


def test_scratch_memory_of_streams(kernels: Path) -> None:
    import cupy

    scratch = device.Scratch()
    first = scratch.get("sums", 1000)
    assert first.data.ptr % 256 == 0
    counters = scratch.get("counters", 1 << 20, zeroed=True)
    assert not counters.get().any()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        other = scratch.get("sums", 1000)
        assert other.data.ptr != first.data.ptr
        stream.begin_capture()
        assert scratch.get("sums", 1000) is other
        with pytest.raises(LaunchError, match="would have to grow"):
            scratch.get("sums", other.size + 1)
        stream.end_capture()
        assert scratch.get("sums", other.size + 1).size == 2 * other.size
    assert scratch.get("sums", 1000) is first


def test_each_device_has_its_own_kernel(kernels: Path) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    loaded = []
    for number in (0, 1, 0):
        with cupy.cuda.Device(number):
            loaded.append(load(kernels))
            check(loaded[-1])
    assert [kernel.device_id for kernel in loaded] == [0, 1, 0]
    assert loaded[0] is loaded[2]
