"""A weight of your own, from FP16 to products in 4 bits: on a GPU where there is one, else in NumPy."""

import numpy as np

import marlin_jit as mj
from marlin_jit.device import unavailable_reason

if unavailable_reason() is None:
    import cupy as xp
else:
    xp = np

rng = np.random.default_rng(0)
dense = xp.asarray((0.02 * rng.standard_normal((1024, 2048))).astype(np.float16))  # [in, out]: y = x @ dense
w = mj.pack(mj.quantize(dense, group_size=128))
x = xp.asarray(rng.standard_normal((4, 1024)).astype(np.float16))
y = x @ w

exact = (x.astype(np.float32)[:, :, None] * dense.astype(np.float32)).sum(axis=1)  # needs no cuBLAS
error = xp.sqrt(((y - exact) ** 2).sum() / (exact**2).sum())
print(w)
print(f"{float(error):.1%} off the FP16 product, nearly all of it from rounding to 4 bits")
