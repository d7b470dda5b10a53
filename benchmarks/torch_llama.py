"""The same model in PyTorch, from the dequantized weights of ours: dense matrices, PyTorch's operations.

Written the way PyTorch code is: `linear`, `rms_norm`, `scaled_dot_product_attention`, a static cache. Decode
can be captured into a CUDA graph, as ours is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import marlin_jit as mj
from marlin_jit.models import Model


def dense(linear: Any) -> list[torch.Tensor]:
    """[out, in] matrices of one of our products: two of a gate and up, else one."""
    weight = linear.weight
    if isinstance(weight, mj.GateUpWeight):
        parts = list(weight.dequantize(np.float32))
    else:
        parts = [mj.dequantize(weight, np.float32)]
    if linear.eight_bit:  # the upper nibbles of all rows, then the lower ones
        parts = [p[: linear.K] + p[linear.K :] for p in parts]
    return [torch.from_dlpack(p.astype(weight.dtype)).t().contiguous() for p in parts]


class TorchLlama:
    """A copy of a model of ours on the GPU, for one text."""

    def __init__(self, model: Model, length: int) -> None:
        self.config = c = model.config
        self.embedding = torch.from_dlpack(model.embedding).clone()
        self.layers = []
        for layer in model.layers:
            gate, up = [m for linear in layer.gate_up.linears for m in dense(linear)]
            self.layers.append(
                {
                    "attention_norm": torch.from_dlpack(layer.attention_norm).to(self.embedding.dtype),
                    "qkv": torch.cat([m for linear in layer.qkv.linears for m in dense(linear)]),
                    "output": dense(layer.output)[0],
                    "mlp_norm": torch.from_dlpack(layer.mlp_norm).to(self.embedding.dtype),
                    "gate_up": torch.cat([gate, up]),
                    "down": dense(layer.down)[0],
                }
            )
        self.norm = torch.from_dlpack(model.norm).to(self.embedding.dtype)
        self.head = dense(model.head)[0]
        shape = (c.layers, 1, c.kv_heads, length, c.head_dim)
        self.keys = torch.zeros(shape, device="cuda", dtype=self.embedding.dtype)
        self.values = torch.zeros_like(self.keys)
        frequencies = c.rope_base ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        self.cosine, self.sine = angles.cos().float().cuda(), angles.sin().float().cuda()
        self.places = torch.arange(length, device="cuda")

    def rotated(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """`x` [1, heads, tokens, head_dim] turned by its positions."""
        pair = x.unflatten(-1, (-1, 2)) if self.config.interleaved else x.unflatten(-1, (2, -1)).mT
        a, b = pair[..., 0].float(), pair[..., 1].float()
        cosine, sine = self.cosine[position], self.sine[position]
        turned = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).to(x.dtype)
        return (turned if self.config.interleaved else turned.mT).flatten(-2)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, *, decode: bool) -> torch.Tensor:
        """Logits [1, 1, vocab] of the last of `tokens` [1, n] at `position` [n].

        A prompt attends to itself and starts at 0; a decode step attends to the whole cache, masked.
        """
        c = self.config
        h = self.embedding[tokens]
        mask = (self.places <= position)[None, None, None] if decode else None
        heads = (c.heads, c.kv_heads, c.kv_heads)
        for i, w in enumerate(self.layers):
            x = F.rms_norm(h, (c.hidden,), w["attention_norm"], c.eps)
            split = F.linear(x, w["qkv"]).unflatten(-1, (-1, c.head_dim)).transpose(1, 2).split(heads, dim=1)
            q, k, v = self.rotated(split[0], position), self.rotated(split[1], position), split[2]
            self.keys[i].index_copy_(2, position, k)
            self.values[i].index_copy_(2, position, v)
            if decode:
                k, v = self.keys[i], self.values[i]
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=not decode and tokens.shape[1] > 1, enable_gqa=True
            )
            h = h + F.linear(y.transpose(1, 2).flatten(2), w["output"])
            x = F.rms_norm(h, (c.hidden,), w["mlp_norm"], c.eps)
            gate, up = F.linear(x, w["gate_up"]).chunk(2, -1)
            h = h + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(F.rms_norm(h[:, -1:], (c.hidden,), self.norm, c.eps), self.head)


class TorchDecoder:
    """Greedy decode steps after a prompt, launched one by one or as a replayed graph."""

    def __init__(self, model: TorchLlama, *, graph: bool) -> None:
        self.model = model
        self.token = torch.zeros((1, 1), device="cuda", dtype=torch.int64)
        self.position = torch.zeros(1, device="cuda", dtype=torch.int64)
        self.graph = None
        if graph:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()

    def _step(self) -> None:
        logits = self.model.forward(self.token, self.position, decode=True)
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position += 1

    def start(self, prompt: torch.Tensor) -> None:
        """Read a prompt [1, n]."""
        position = torch.arange(prompt.shape[1], device="cuda")
        logits = self.model.forward(prompt, position, decode=False)
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.fill_(prompt.shape[1])

    def step(self) -> int:
        """Read the last token; return the next one."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()
        return int(self.token)
