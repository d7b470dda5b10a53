"""What `marlin_jit.repeat` takes for a call like one before, with stand-ins for CuPy's arrays and streams."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import marlin_jit as mj
from marlin_jit import _driver, device, jit, launch, repeat

FP16 = np.dtype(np.float16)
K, N = 128, 64


class Fake:
    """An array of a device, of which nothing but its description is looked at."""

    def __init__(self, shape: tuple[int, ...], ptr: int = 1 << 20, dtype: Any = FP16) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.strides = np.empty(shape, self.dtype).strides
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=ptr, device_id=0)


class World:
    """The current device and stream, and what was launched."""

    def __init__(self) -> None:
        self.device, self.stream = 0, 7
        self.launches: list[tuple[int, ...]] = []
        self.count = [0]
        self.prepared = SimpleNamespace(repeated=self.repeated)
        self.made = 0
        runtime = SimpleNamespace(getDevice=lambda: self.device)
        get_current_stream = lambda: SimpleNamespace(ptr=self.stream)  # noqa: E731
        self.cupy = SimpleNamespace(
            ndarray=Fake,
            cuda=SimpleNamespace(runtime=runtime, get_current_stream=get_current_stream),
            empty=lambda shape, dtype: Fake(shape, 1 << 30, dtype),
        )

    def repeated(self, x: int, x_stride: int, out_stride: int, stream: int) -> Any:
        thread = threading.current_thread()
        self.made += 1

        def launch(x: int, bias: int, out: int) -> None:
            assert (self.stream, threading.current_thread()) == (stream, thread)
            self.launches.append((x, x_stride, bias, out, out_stride))

        return launch


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setitem(sys.modules, "cupy", world.cupy)
    return world


@pytest.fixture
def w() -> mj.MarlinWeight:
    q = np.full((K, N), 9, np.uint8)
    return mj.pack(mj.QuantWeight(q, np.ones((2, N), np.float16), None, 64))


class KernelStub:
    """A kernel of which only the memory of its arguments is looked at."""

    def __init__(self, source: str, name: str) -> None:
        self.layout = jit.parameter_layout(jit._read_sources(None)[0][source], name)

    def __call__(self, grid: Any, block: Any, args: tuple[Any, ...], smem: int, cluster: int) -> None:
        self.seen = grid, block, smem, cluster, _driver._Arguments(self.layout).packing.pack(*args)

    def frozen(self, grid: Any, block: Any, args: Any, smem: int, cluster: int, stream: int) -> Any:
        memory = _driver._Arguments(self.layout)
        memory.packing.pack_into(memory.buffer, 0, *args)

        def launch() -> None:
            self.seen = grid, block, smem, cluster, memory.buffer.raw

        return SimpleNamespace(field=memory.field, launch=launch)


@pytest.mark.parametrize(
    ("source", "boxed"), [("decode.cu", False), ("marlin.cu", False), ("wgmma.cu", False), ("wgmma.cu", True)]
)
def test_a_repeated_launch_passes_what_a_launch_passes(
    source: str, boxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arguments, with the kernel's own parameters: addresses and maps are written where they belong."""
    monkeypatch.setattr(launch, "tensor_map", lambda *of: repr(of).encode().ljust(128)[:128])
    name, wgmma = {"decode.cu": "marlin_decode", "marlin.cu": "marlin_gemm"}.get(source, "marlin_wgmma"), {}
    kernel = KernelStub(source, name)
    count = len(kernel.layout) - 5  # x, its stride, bias, out, its stride
    weights: tuple[Any, ...] = (901, 902, 903)
    if source == "wgmma.cu":
        wgmma = {"kind": 6, "rows": 5, "columns": 128, "out_columns": 72, "box": (16, 64), "boxed": boxed}
        weights = (b"w" * 128, b"s" * 128, b"z" * 128, 901, 902)
    sizes = tuple(range(1000, 1000 + count - len(weights)))
    kind = launch.PreparedWgmma if wgmma else launch.Prepared
    prepared = kind(kernel, (2, 3, 1), (128, 2), 7, weights, sizes, (), 3, **wgmma)  # type: ignore[arg-type]
    again = prepared.repeated(1 << 40, K, 72, 7)
    for x, bias, out in ((1 << 41, 0, 1 << 42), (1 << 20, 48, 1 << 30), (16, 1 << 33, 32), (32, 0, 34)):
        prepared(x, K, bias, out, 72)
        expected = kernel.seen
        del kernel.seen
        again(x, bias, out)
        assert kernel.seen == expected
        of_output = repr((out, 6, 5, 72, 144, (16, 64), 3)).encode()
        assert (of_output in expected[-1]) == (boxed and out % 16 == 0)


def kept(world: World, w: Any, x: Fake, bias: Any = None, gated: int = 0) -> None:
    repeat.remember(x, w, bias, gated, world.prepared, world.count)  # type: ignore[arg-type]


def test_a_call_like_one_before_is_launched_with_its_own_addresses(world: World, w: Any) -> None:
    kept(world, w, Fake((2, 3, K)))
    done = repeat.again(Fake((2, 3, K), ptr=1 << 24), w, None, None, 0)
    assert done is not None
    out, count = done
    assert (out.shape, out.dtype) == ((2, 3, N), FP16)
    assert count is world.count
    mine = Fake((2, 3, N), ptr=1 << 26)
    assert repeat.again(Fake((2, 3, K)), w, None, mine, 0)[0] is mine  # type: ignore[index]
    assert world.launches == [(1 << 24, K, 0, 1 << 30, N), (1 << 20, K, 0, 1 << 26, N)]
    kept(world, w, Fake((2, 3, K)), bias=Fake((N,)))
    assert repeat.again(Fake((2, 3, K)), w, Fake((N,), ptr=48), mine, 0) is not None
    assert world.launches[-1] == (1 << 20, K, 48, 1 << 26, N)


def test_a_new_kind_is_none_before(world: World, w: Any) -> None:
    x = Fake((5, K))
    assert repeat.again(x, w, None, None, 0) is None
    kept(world, w, x)
    for other in (Fake((6, K)), Fake((1, 5, K)), np.zeros((5, K), np.float16)):
        assert repeat.again(other, w, None, None, 0) is None
    assert repeat.again(x, w, Fake((N,)), None, 0) is None
    assert repeat.again(x, w, None, None, 32) is None
    world.stream = 8
    assert repeat.again(x, w, None, None, 0) is None
    world.stream, world.device = 7, 1
    assert repeat.again(x, w, None, None, 0) is None
    world.device = 0
    assert repeat.again(x, replace(w), None, None, 0) is None  # another weight remembers nothing
    assert repeat.again(x, w, None, None, 0) is not None
    assert len(world.launches) == 1


def changed(array: Fake, **what: Any) -> Fake:
    for name, value in what.items():
        setattr(array.data if name in ("ptr", "device_id") else array, name, value)
    return array


STRIDED = {"flags": SimpleNamespace(c_contiguous=False), "strides": (4096, 4)}


@pytest.mark.parametrize(
    "what",
    [
        {"ptr": (1 << 20) + 8},
        {"device_id": 1},
        {"dtype": np.dtype(np.float32)},
        STRIDED,
    ],
)
def test_arrays_that_are_not_plain_go_the_long_way(world: World, w: Any, what: dict[str, Any]) -> None:
    kept(world, w, Fake((5, K)))
    kept(world, w, Fake((5, K)), bias=Fake((N,)))
    assert repeat.again(changed(Fake((5, K)), **what), w, None, None, 0) is None
    assert repeat.again(Fake((5, K)), w, None, changed(Fake((5, N), 1 << 26), **what), 0) is None
    if "ptr" not in what:  # biases are read element by element
        assert repeat.again(Fake((5, K)), w, changed(Fake((N,), 1 << 22), **what), None, 0) is None
    assert world.launches == []
    forgotten = replace(w)
    kept(world, forgotten, changed(Fake((5, K)), **what))
    assert bool(forgotten.repeats) == {"ptr", "flags"}.isdisjoint(what)


def test_outputs_that_do_not_fit_or_overlap_go_the_long_way(world: World, w: Any) -> None:
    kept(world, w, Fake((5, K)))
    kept(world, w, Fake((5, K)), bias=Fake((N,)))
    x, start = Fake((5, K)), 1 << 20
    for out in (Fake((5, N + 8), 1 << 26), Fake((5 * N,), 1 << 26), np.zeros((5, N), np.float16)):
        assert repeat.again(x, w, None, out, 0) is None
    for at in (start, start + 5 * K * 2 - 16, start - 5 * N * 2 + 16):
        assert repeat.again(x, w, None, Fake((5, N), at), 0) is None
    for at in (start + 5 * K * 2, start - 5 * N * 2):
        assert repeat.again(x, w, None, Fake((5, N), at), 0) is not None
    assert repeat.again(x, w, Fake((N,), (1 << 26) + 160), Fake((5, N), 1 << 26), 0) is None


def test_weights_whose_x_is_copied_or_gathered_are_not_remembered(world: World, w: Any) -> None:
    q = np.full((100, N), 9, np.uint8)
    uneven = mj.pack(mj.QuantWeight(q, np.ones((1, N), np.float16), None, -1))
    kept(world, uneven, Fake((5, 100)))
    ordered = replace(w, perm=np.arange(K, dtype=np.int32)[::-1].copy())
    kept(world, ordered, Fake((5, K)))
    assert uneven.repeats == {} == ordered.repeats


def elsewhere(call: Any) -> Any:
    """What a thread of its own returns."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_each_thread_has_a_launch_of_its_own(world: World, w: Any) -> None:
    """One thread could write addresses while another launches. `World.repeated` looks at who launches."""
    kept(world, w, Fake((5, K)))
    for _ in range(3):  # threads that may be given the number of one that has ended
        assert elsewhere(lambda: repeat.again(Fake((5, K)), w, None, None, 0)) is not None
        assert repeat.again(Fake((5, K)), w, None, None, 0) is not None
    assert len(world.launches) == 6
    assert len(w.repeats) == 1
    assert world.made == 4


def test_threads_do_not_share_what_their_own_streams_keep(world: World, w: Any) -> None:
    """The stream "per thread" has one number for all threads, and scratch memory for each."""
    world.stream = device._STREAM_PER_THREAD
    kept(world, w, Fake((5, K)))
    assert repeat.again(Fake((5, K)), w, None, None, 0) is not None
    assert elsewhere(lambda: repeat.again(Fake((5, K)), w, None, None, 0)) is None


def test_what_is_known_is_not_made_anew(world: World, w: Any) -> None:
    for m in range(1, repeat._MOST + 1):
        kept(world, w, Fake((m, K)))
    kinds = dict(w.repeats)
    kept(world, w, Fake((7, K)))
    assert w.repeats == kinds
    assert world.made == 0  # before a call comes again


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_remember_nothing(world: World, w: Any, made: Any) -> None:
    """What is remembered are addresses of the original's arrays."""
    w.repeats["something"] = object
    other = made(w)
    assert other.repeats == {}
    other.repeats["else"] = 1
    assert w.repeats == {"something": object}
    np.testing.assert_array_equal(other.B, w.B)
    assert (other.shape, other.group_size) == (w.shape, w.group_size)


def test_kinds_are_bounded(world: World, w: Any) -> None:
    for m in range(1, 3 * repeat._MOST):
        kept(world, w, Fake((m, K)))
        assert 1 <= len(w.repeats) <= repeat._MOST
        assert repeat.again(Fake((m, K)), w, None, None, 0) is not None
