"""PyTorch tensors in and out, without copies: DLPack hands memory over, and streams wait for each other.

Needs PyTorch with CUDA beside `pip install "marlin-jit[cuda12]"` (or cuda13).
"""

import torch

import marlin_jit as mj


def packed_linear(linear: torch.nn.Linear) -> tuple[mj.MarlinWeight, torch.Tensor | None]:
    """Quantize and pack a layer. PyTorch keeps [out, in]; we take [in, out]."""
    import cupy

    dense = cupy.from_dlpack(linear.weight.detach().t().contiguous())
    return mj.pack(mj.quantize(dense, group_size=128, dtype=dense.dtype)), linear.bias


def main() -> None:
    """Multiply by a layer of PyTorch's in 4 bits, and say how far off that is."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 2048).cuda().half()
    w, bias = packed_linear(linear)
    x = torch.randn(3, 5, 1024, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        y = torch.from_dlpack(mj.matmul(x, w, bias=bias.detach()))  # a CuPy array becomes a tensor
        exact = linear(x)
    print(f"{tuple(y.shape)} {y.dtype} on {y.device}")
    print(f"{float((y - exact).norm() / exact.norm()):.1%} off, nearly all of it from rounding to 4 bits")


if __name__ == "__main__":
    main()
