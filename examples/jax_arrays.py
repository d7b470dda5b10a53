"""JAX arrays in and out: through DLPack on a GPU, as NumPy arrays without one.

Needs JAX (for a GPU: with CUDA) beside marlin-jit. A product is no JAX operation: call it outside `jax.jit`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import marlin_jit as mj


def matmul(x: jax.Array, w: mj.MarlinWeight) -> jax.Array:
    """``x @ W`` for a JAX array on the side where `w` is."""
    if x.device.platform != "gpu":
        return jnp.asarray(mj.matmul(np.asarray(x), w))
    return jnp.from_dlpack(mj.matmul(x, w))  # a CuPy array becomes JAX's


def main() -> None:
    """Multiply a JAX array by a 4-bit weight, and say how far off that is."""
    key, other = jax.random.split(jax.random.key(0))
    dense = 0.02 * jax.random.normal(key, (1024, 2048), jnp.float16)
    x = jax.random.normal(other, (4, 1024), jnp.float16)
    w = mj.pack(mj.quantize(np.asarray(dense), group_size=128))
    if x.device.platform == "gpu":
        w = w.to_device()
    y = matmul(x, w)
    exact = x.astype(jnp.float32) @ dense.astype(jnp.float32)
    print(f"{y.shape} {y.dtype} on {y.device}")
    error = jnp.linalg.norm(y.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    print(f"{float(error):.1%} off, nearly all of it from rounding to 4 bits")


if __name__ == "__main__":
    main()
