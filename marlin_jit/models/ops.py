"""What a Llama layer does between its products: norm, rotary positions, attention, SwiGLU.

Each operation is here twice with the same maths: in NumPy, to be read, and as a kernel of ``llama.cu`` for
CuPy arrays, so that a layer is few launches, nothing waits for the device, and no cuBLAS is needed (whose
calls CuPy refuses while a CUDA graph is captured). Activations are float16 or bfloat16; in between everything
is float32, rounded once at the end of an operation. (Tensor cores want weights of attention rounded too.)
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import numpy as np

import marlin_jit as mj

from .config import LlamaConfig

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "is_numpy",
    "module_of",
    "rotary_tables",
    "rotate_and_store",
    "swiglu",
]

FLOAT32 = np.float32


def is_numpy(array: Any) -> bool:
    """Whether an array is NumPy's; any other is CuPy's."""
    return isinstance(array, np.ndarray)


def module_of(array: Any) -> Any:
    """Return numpy or cupy, whichever `array` belongs to."""
    if is_numpy(array):
        return np
    import cupy

    return cupy


def add_rms_norm(h: Any, delta: Any, weight: Any, eps: float) -> Any:
    """Add `delta` to the residual stream `h` in place; return the RMSNorm of the sum.

    Parameters
    ----------
    h : array [..., hidden]
        Contiguous.
    delta : array [..., hidden] or None
        None adds nothing.
    weight : float32 array [hidden]
    eps : float
    """
    if not is_numpy(h):
        return _gpu_add_rms_norm(h, delta, weight, eps)
    if delta is not None:
        h[...] = h.astype(FLOAT32) + delta.astype(FLOAT32)
    x = h.astype(FLOAT32)
    x /= np.sqrt((x * x).mean(axis=-1, keepdims=True) + FLOAT32(eps))
    return (x * weight).astype(h.dtype)


def rotary_tables(config: LlamaConfig, length: int, xp: Any) -> tuple[Any, Any]:
    """Return cosines and sines of all angles, float32 [length, head_dim/2], computed in float64."""
    frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return xp.asarray(np.cos(angles).astype(FLOAT32)), xp.asarray(np.sin(angles).astype(FLOAT32))


def rotate_and_store(
    q: Any, k: Any, v: Any, tables: tuple[Any, Any], position: Any, keys: Any, values: Any, interleaved: bool
) -> Any:
    """Turn `q` and `k` by their positions; put `k` and `v` into the cache.

    Parameters
    ----------
    q : array [batch, tokens, heads*head_dim]
        May be overwritten.
    k, v : array [batch, tokens, kv_heads*head_dim]
        Rows of all three may be parts of longer rows.
    tables : (array, array)
        Of `rotary_tables`.
    position : int32 array [1]
        Of the first token.
    keys, values : array [batch, kv_heads, length, head_dim]
        The cache of this layer.
    interleaved : bool
        As in `LlamaConfig`.

    Returns
    -------
    array like `q`
        Turned.
    """
    if not is_numpy(q):
        return _gpu_rotate_and_store(q, k, v, tables, position, keys, values, interleaved)
    batch, tokens, _ = q.shape
    head_dim = keys.shape[3]
    new = slice(int(position[0]), int(position[0]) + tokens)
    cosine, sine = (table[new, None] for table in tables)  # [tokens, 1, head_dim/2]

    def turned(x: Any) -> Any:
        x = x.reshape(batch, tokens, -1, head_dim)
        out = np.empty_like(x)
        half = head_dim // 2
        first, second = (
            (np.s_[..., ::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., :half], np.s_[..., half:])
        )
        a, b = x[first].astype(FLOAT32), x[second].astype(FLOAT32)
        out[first] = a * cosine - b * sine
        out[second] = b * cosine + a * sine
        return out

    keys[:, :, new] = turned(k).swapaxes(1, 2)
    values[:, :, new] = v.reshape(batch, tokens, -1, head_dim).swapaxes(1, 2)
    return turned(q).reshape(q.shape)


def attention(q: Any, keys: Any, values: Any, position: Any) -> Any:
    """Let each new token look at all positions up to its own.

    Query heads share key and value heads in order (grouped queries): head h reads h // (heads/kv_heads).

    Parameters
    ----------
    q : array [batch, tokens, heads*head_dim]
    keys, values : array [batch, kv_heads, length, head_dim]
        The cache of this layer, the new tokens in it.
    position : int32 array [1]
        Of the first token.

    Returns
    -------
    array [batch, tokens, heads*head_dim]
    """
    if not is_numpy(q):
        return _gpu_attention(q, keys, values, position)
    batch, tokens, width = q.shape
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    end = int(position[0]) + tokens
    k, v = (kept[:, :, :end].astype(FLOAT32) for kept in (keys, values))
    # [batch, kv_heads, the heads that share one and their tokens, head_dim]
    queries = q.reshape(batch, tokens, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4).astype(FLOAT32)
    queries *= FLOAT32(head_dim**-0.5)
    shared = queries.shape[2]
    scores = queries.reshape(batch, kv_heads, shared * tokens, head_dim) @ k.swapaxes(2, 3)
    if tokens > 1:
        later = np.arange(end) > np.arange(end - tokens, end)[:, None]
        scores.reshape(batch, kv_heads, shared, tokens, end)[..., later] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    y = (scores @ v) / scores.sum(axis=-1, keepdims=True)
    y = y.reshape(batch, kv_heads, shared, tokens, head_dim).transpose(0, 3, 1, 2, 4)
    return y.reshape(batch, tokens, width).astype(q.dtype)


def swiglu(gate: Any, up: Any) -> Any:
    """Return ``silu(gate) * up``; rows may be parts of longer rows."""
    if not is_numpy(gate):
        return _gpu_swiglu(gate, up)
    g = gate.astype(FLOAT32)
    with np.errstate(over="ignore"):  # exp(-g) of a very negative g is infinite, and silu -0 as it should be
        return (g / (1 + np.exp(-g)) * up.astype(FLOAT32)).astype(gate.dtype)


def argmax(logits: Any, out: Any) -> None:
    """Write the place of the largest of each row of `logits` [rows, vocab] to `out`, int32 [rows]."""
    if is_numpy(logits):
        out[...] = logits.argmax(axis=-1)
        return
    rows, columns = logits.shape
    _kernel("argmax", logits.dtype)((rows,), (1024,), (logits, out, np.int32(columns)))


# ---- the same on a GPU: launches of llama.cu --------------------------------------------------------------


def check_head_dim(head_dim: int) -> None:
    """Raise `CheckpointError` unless the GPU's attention takes heads of this size."""
    if head_dim not in (8, 16, 32, 64, 128, 256):
        raise mj.CheckpointError(
            f"heads of {head_dim} elements: on a GPU a power of two from 8 to 256 is what runs"
        )


def build_options(dtype: Any, head_dim: int) -> tuple[str, ...]:
    """Return the macros that ``llama.cu`` is compiled with."""
    return (f"-DBF16={int(np.dtype(dtype).name == 'bfloat16')}", f"-DHEAD_DIM={head_dim}")


def source() -> str:
    """Return the text of ``llama.cu``."""
    return resources.files(__package__).joinpath("llama.cu").read_text(encoding="utf-8")


@cache
def _module(dtype: Any, head_dim: int) -> Any:
    """The kernels of ``llama.cu``, which CuPy compiles for each device that asks and keeps on the disk."""
    import cupy

    return cupy.RawModule(code=source(), options=build_options(dtype, head_dim))


@cache
def _kernel(name: str, dtype: Any, head_dim: int = 64) -> Any:
    return _module(dtype, head_dim).get_function(name)


def _row_stride(x: Any) -> int:
    """Elements from one row of [batch, tokens, columns] to the next; rows must lie at one distance."""
    batch, tokens, _ = x.shape
    stride = x.strides[1] if tokens > 1 else x.strides[0]
    if x.strides[2] != x.itemsize or (batch > 1 and tokens > 1 and x.strides[0] != tokens * x.strides[1]):
        raise mj.ShapeError(f"rows must lie at one distance, got strides {x.strides} of shape {x.shape}")
    return int(stride // x.itemsize)


def _gpu_add_rms_norm(h: Any, delta: Any, weight: Any, eps: float) -> Any:
    import cupy

    columns = h.shape[-1]
    out = cupy.empty_like(h)
    nothing = np.intp(0)
    _kernel("add_rms_norm", h.dtype)(
        (h.size // columns,),
        (256,),
        (h, nothing if delta is None else delta, weight, out, np.int32(columns), FLOAT32(eps)),
    )
    return out


def _gpu_rotate_and_store(
    q: Any, k: Any, v: Any, tables: tuple[Any, Any], position: Any, keys: Any, values: Any, interleaved: bool
) -> Any:
    batch, tokens, width = q.shape
    _, kv_heads, length, head_dim = keys.shape
    heads = width // head_dim
    _kernel("rotate_and_store", q.dtype, head_dim)(
        (batch * tokens, heads + 2 * kv_heads),
        (head_dim // 2,),
        (
            *(q, k, v),
            *(np.int64(_row_stride(x)) for x in (q, k, v)),
            *(*tables, position, keys, values),
            *(np.int32(n) for n in (tokens, heads, kv_heads, length, interleaved)),
        ),
    )
    return q


def _gpu_attention(q: Any, keys: Any, values: Any, position: Any) -> Any:
    import cupy

    batch, tokens, width = q.shape
    _, kv_heads, length, head_dim = keys.shape
    heads = width // head_dim
    out = cupy.empty(q.shape, dtype=q.dtype)
    if tokens >= 16 and head_dim >= 16:  # what one product of a tensor core takes
        name, grid, threads = "attention_of_many", (heads, batch, -(-tokens // 64)), 128
    else:
        name, grid, threads = "attention", (tokens, heads, batch), 256
    _kernel(name, q.dtype, head_dim)(
        grid,
        (threads,),
        (
            *(q, np.int64(_row_stride(q)), keys, values, position, out),
            *(np.int32(n) for n in (tokens, heads, kv_heads, length)),
        ),
    )
    return out


def _gpu_swiglu(gate: Any, up: Any) -> Any:
    import cupy

    out = cupy.empty(gate.shape, dtype=gate.dtype)
    strides = (np.int64(_row_stride(x)) for x in (gate, up))
    _kernel("swiglu", gate.dtype)(
        (-(-out.size // 256),),
        (256,),
        (gate, up, *strides, out, np.int32(gate.shape[-1]), np.int64(out.size)),
    )
    return out
