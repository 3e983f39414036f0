"""The gated delta rule over chunks, in plain torch for torch.compile: no custom kernel, no loop over tokens.

State S[D, V] per head: S_t = exp(g_t) S_{t-1} + k_t b_t (v_t - exp(g_t) S_{t-1}^T k_t)^T, output S_t^T q_t (Yang et al.
2025, Gated Delta Networks). Inside a chunk the rule is a unit lower-triangular system (the UT transform); between
chunks only the state is carried. B windows, S tokens each, P key heads, Q value heads (a multiple of P), chunks of C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64  # tokens; half of it would double the steps that must follow each other


def causal_conv(x, weight):
    """Depthwise causal convolution over tokens; x[B, S, channels], weight[channels, 1, W] -> float32 of x's shape.

    A sum of shifted products: one fused kernel under inductor, where a depthwise convolution's gradient is slow.
    """
    length, width = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0)).float()
    return sum(padded[:, tap : tap + length] * weight[:, 0, tap].float() for tap in range(width))


def unit(x):
    """Rows of length one, float32, as the architecture's kernels take them (1e-6 under the root)."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def unit_lower_inverse(lower, dtype=torch.float32):
    """(I + lower)^-1 with its gradient; lower float32[N, C, C] strictly lower-triangular, C a power of two.

    Blocks are merged from size 1 to C: [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]], as stable as forward
    substitution (powers of `lower` overflow where keys repeat). These products are in `dtype`, without gradient; one
    Newton step T = D + D (I - (I + lower) D) in float32 then squares their error, and its gradient is the inverse's,
    -T^T dT T^T, with D for T.
    """
    size = lower.shape[-1]
    if size & (size - 1):
        raise ValueError(f"chunk length is {size}; needed: a power of two")
    place = torch.arange(size, device=lower.device)
    row, column = place[:, None], place[None, :]
    eye = (row == column).to(lower.dtype)
    fixed, block = lower.detach(), 2
    inverse = (eye - fixed * (row // 2 == column // 2)).to(dtype)
    while block < size:
        between = (row // (2 * block) == column // (2 * block)) & (row // block != column // block)
        inverse = torch.baddbmm(inverse, inverse, torch.bmm((fixed * between).to(dtype), inverse), alpha=-1)
        block *= 2
    inverse = inverse.to(lower.dtype)
    error = torch.baddbmm(eye - inverse, lower, inverse, alpha=-1)
    return torch.baddbmm(inverse, inverse, error)


def _chunks(x, chunk: int, dtype):
    """[B, S, heads, D] -> [B, heads, chunks, C, D]."""
    batch, _, heads, width = x.shape
    return x.transpose(1, 2).reshape(batch, heads, -1, chunk, width).to(dtype)


def _within(query, key, decay, beta, dtype):
    """What a chunk's tokens do to each other, and the log decays from its start.

    query, key[B, P, n, C, D]; decay (log), beta[B, P, Q/P, n, C] float32 -> the system's inverse float32 and attention,
    each [B, P, Q/P, n, C, C]; cumulative decay[B, P, Q/P, n, C].
    """
    chunk = key.shape[-2]
    passed = decay.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).triu(1)
    between = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    alike = (key @ key.mT).unsqueeze(2).float()
    lower = (alike * between * beta.unsqueeze(-1)).tril(-1)
    inverse = unit_lower_inverse(lower.flatten(0, 3), dtype).view_as(lower)
    return inverse, ((query @ key.mT).unsqueeze(2) * between).to(dtype), passed


def _carry(writes, reads, keys, last, dtype):
    """Carry the state over chunks: corrected values [H, n, C, V] and each chunk's first state [H, n, D, V].

    writes[H, n, C, V], reads[H, n, C, D], keys[H, n, C, D] in `dtype`; last float32[H, n]: a chunk's whole decay.
    """
    state = torch.zeros(keys.shape[0], keys.shape[-1], writes.shape[-1], device=keys.device)
    values, states = [], []
    writes, reads, keys, last = writes.unbind(1), reads.unbind(1), keys.unbind(1), last.unbind(1)
    for step, write in enumerate(writes):
        states.append(state.to(dtype))
        values.append(torch.baddbmm(write, reads[step], states[-1], alpha=-1))
        state = state * last[step][:, None, None] + torch.bmm(keys[step].mT, values[-1])
    return torch.stack(values, 1), torch.stack(states, 1)


def gated_delta_rule(query, key, value, decay, beta, chunk: int = CHUNK, dtype=torch.float32):
    """Outputs of the gated delta rule from an empty state.

    Args:
        query, key: [B, S, P, D], made of unit length here; the query is then divided by sqrt(D). value: [B, S, Q, V];
            value head i reads key head i // (Q/P). decay: log decay [B, S, Q], at most 0. beta: [B, S, Q].
        chunk: tokens of a chunk, a power of two. dtype: of the products; states, decays and the solve are float32.

    Returns:
        [B, S, Q, V] in `dtype`.
    """
    batch, length, heads, width = key.shape
    extra, groups = -length % chunk, value.shape[2] // heads
    query, key = unit(query) * width**-0.5, unit(key)
    query, key, value = (F.pad(part, (0, 0, 0, 0, 0, extra)) for part in (query, key, value))
    # [B, S, Q] -> [B, P, Q/P, n, C]
    split = (batch, heads, groups, -1, chunk)
    decay, beta = (F.pad(part.float(), (0, 0, 0, extra)).transpose(1, 2).reshape(split) for part in (decay, beta))
    query, key, value = (_chunks(part, chunk, dtype) for part in (query, key, value))
    inverse, attention, passed = _within(query, key, decay, beta, dtype)
    shape = (batch * heads * groups, -1, chunk)
    weighted = inverse * beta.unsqueeze(-2)
    reader = (weighted * passed.exp().unsqueeze(-2)).to(dtype)
    query, key = query.unsqueeze(2), key.unsqueeze(2)
    writes = weighted.to(dtype).reshape(*shape, chunk) @ value.reshape(*shape, value.shape[-1])
    last = passed[..., -1:]
    carried = (key * (last - passed).exp().unsqueeze(-1)).to(dtype).reshape(*shape, width)
    reads, kept = (reader @ key).reshape(*shape, width), last.exp().reshape(shape[:2])
    values, states = _carry(writes, reads, carried, kept, dtype)
    asked = (query * passed.exp().unsqueeze(-1)).to(dtype).reshape(*shape, width)
    out = asked @ states + attention.reshape(*shape, chunk) @ values
    return out.view(batch, heads * groups, -1, out.shape[-1]).transpose(1, 2)[:, :length]
