"""Device properties and scratch memory, with a runtime that is not there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from marlin_jit import device
from marlin_jit.errors import DeviceError, LaunchError


class FakeRuntime:
    """Stands for CuPy: NumPy arrays for device memory, and a count of what was allocated."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = 0
        self.capturing = False
        self.capture_error = ""
        self.missing = False
        self.driver = 0
        self.allocated: list[tuple[str, int]] = []
        runtime = SimpleNamespace(
            getDevice=self.get_device,
            driverGetVersion=lambda: self.driver,
            streamIsCapturing=self.is_capturing,
            deviceGetAttribute=lambda number, device_id: 1000 * device_id + number,
            getDeviceProperties=self.properties,
        )
        self.cupy = SimpleNamespace(
            uint8=np.uint8,
            zeros=lambda size, dtype: self.allocate("zeros", size),
            empty=lambda size, dtype: self.allocate("empty", size),
            cuda=SimpleNamespace(
                runtime=runtime, get_current_stream=lambda: SimpleNamespace(ptr=self.stream)
            ),
        )

    def get_device(self) -> int:
        if self.missing:
            raise RuntimeError("cudaErrorInsufficientDriver")
        return self.device

    def properties(self, device_id: int) -> dict[str, Any]:
        if device_id > 1:
            raise RuntimeError("cudaErrorInvalidDevice")
        return {"name": b"Some GPU"}

    def is_capturing(self, stream: int) -> bool:
        if self.capture_error:
            raise RuntimeError(self.capture_error)
        return self.capturing

    def allocate(self, kind: str, size: int) -> np.ndarray[Any, Any]:
        self.allocated.append((kind, size))
        return np.zeros(size, np.uint8) if kind == "zeros" else np.full(size, 0xAA, np.uint8)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(device, "import_cupy", lambda: fake.cupy)
    monkeypatch.setattr(device, "_devices", {})
    return fake


def test_device_properties_come_from_their_attributes(runtime: FakeRuntime) -> None:
    runtime.device = 1
    info = device.current_device()
    assert info == device.DeviceInfo(
        id=1,
        name="Some GPU",
        capability=(1075, 1076),
        sm_count=1016,
        smem_per_block=1097,
        smem_per_sm=1081,
        l2_bytes=1038,
    )
    assert device.current_device() is info
    runtime.device = 0
    assert device.current_device().id == 0


def test_missing_device_is_named(runtime: FakeRuntime) -> None:
    with pytest.raises(DeviceError, match="CUDA device 7 cannot be used: cudaErrorInvalidDevice"):
        device.device_info(7)
    assert device.unavailable_reason() is None
    runtime.missing = True
    reason = device.unavailable_reason()
    assert reason == "no CUDA device can be used: no NVIDIA driver is installed"
    runtime.driver = 11040
    reason = device.unavailable_reason()
    assert reason is not None
    assert reason.startswith("no CUDA device can be used: the NVIDIA driver is too old (it is for CUDA 11.4)")


def test_driver_without_a_device(runtime: FakeRuntime) -> None:
    def refuse(device_id: int) -> None:
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    runtime.cupy.cuda.runtime.getDeviceProperties = refuse
    with pytest.raises(DeviceError, match=r"^no CUDA device can be used: the NVIDIA driver finds none$"):
        device.current_device()


def test_buffer_grows_by_doubling_and_then_stays(runtime: FakeRuntime) -> None:
    scratch = device.Scratch()
    first = scratch.get("sums", 10)
    assert first.size == 1 << 16
    assert scratch.get("sums", 1 << 16) is first
    second = scratch.get("sums", (1 << 16) + 1)
    assert second.size == 2 << 16
    third = scratch.get("sums", 10 << 16)
    assert third.size == 10 << 16
    for _ in range(3):
        assert scratch.get("sums", 5) is third
    assert len(runtime.allocated) == 3
    # Graphs may still hold the addresses of the outgrown ones, so they are alive.
    assert scratch.nbytes == (1 + 2 + 10) << 16
    scratch.clear()
    assert scratch.nbytes == 0


def test_purposes_streams_and_devices_do_not_share(runtime: FakeRuntime) -> None:
    scratch = device.Scratch()
    buffers = [scratch.get("a", 1), scratch.get("b", 1)]
    runtime.stream = 4096
    buffers.append(scratch.get("a", 1))
    runtime.device = 1
    buffers.append(scratch.get("a", 1))
    assert len(set(map(id, buffers))) == 4
    assert scratch.get("a", 1) is buffers[3]


def test_zeroed_buffer_is_zero_when_it_is_new_and_when_it_grew(runtime: FakeRuntime) -> None:
    scratch = device.Scratch()
    counters = scratch.get("counters", 4, zeroed=True)
    assert not counters.any()
    counters[0] = 1
    assert scratch.get("counters", 4, zeroed=True)[0] == 1  # not cleared between calls
    grown = scratch.get("counters", 1 << 17, zeroed=True)
    assert grown.size == 1 << 17
    assert not grown.any()
    scratch.get("sums", 4)
    assert [kind for kind, _ in runtime.allocated] == ["zeros", "zeros", "empty"]


def test_growing_during_capture_is_refused(runtime: FakeRuntime) -> None:
    scratch = device.Scratch()
    buffer = scratch.get("sums", 100)
    runtime.capturing = True
    assert scratch.get("sums", 1 << 16) is buffer
    with pytest.raises(LaunchError, match=r"'sums' would have to grow to 65537 bytes.*before the capture"):
        scratch.get("sums", (1 << 16) + 1)
    with pytest.raises(LaunchError, match="'other'"):
        scratch.get("other", 1)
    runtime.capturing = False
    runtime.capture_error = "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend"
    with pytest.raises(LaunchError, match="'other'"):
        scratch.get("other", 1)
    runtime.capture_error = "cudaErrorIllegalAddress"
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        scratch.get("other", 1)


def test_threads_of_one_stream_share_a_buffer(runtime: FakeRuntime) -> None:
    scratch = device.Scratch()
    with ThreadPoolExecutor(8) as pool:
        buffers = list(pool.map(lambda _: scratch.get("sums", 1), range(64)))
    assert len(set(map(id, buffers))) == 1
    assert len(runtime.allocated) == 1


def test_threads_of_one_stream_take_turns(runtime: FakeRuntime) -> None:
    scratch = device.Scratch()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(lambda _: scratch.turn(), range(64))))) == 1
    mine = scratch.turn()
    runtime.stream = 7
    assert scratch.turn() is not mine


def test_per_thread_stream_is_another_stream_in_each_thread(runtime: FakeRuntime) -> None:
    runtime.stream = 2  # cudaStreamPerThread
    scratch = device.Scratch()
    barrier = threading.Barrier(4)  # four threads alive at once, so that none reuses another's number

    def work(_: int) -> Any:
        barrier.wait()
        buffer = scratch.get("sums", 1)
        assert scratch.get("sums", 1) is buffer
        barrier.wait()
        return buffer

    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(work, range(4))))) == 4
