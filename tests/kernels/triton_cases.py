"""Runs Triton's kernels in its interpreter, and prints how far each case is from float64; for a process of its own.

On a GPU the same cases run on it: `--device cuda`.
"""

import argparse
import json
import os
from itertools import product

import torch

STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21, torch.float64: 2**-45}
"""What is allowed for each dtype, relative to the largest value."""
SHAPES = [(5, 2, 3, 16), (33, 1, 4, 24), (7, 2, 1, 1), (300, 1, 2, 8)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from charm_megatron.kernels.triton_elementwise import TritonElementwise

    torch.manual_seed(0)
    found = {}
    for shape, dtype in product(SHAPES, (torch.bfloat16, torch.float16, torch.float32, torch.float64)):
        for case in (merged, added, placed, dotted, stood_in):
            for name, error, largest in case(TritonElementwise(), *shape, dtype, device):
                key = f"{case.__name__} {name} {shape} {dtype}"
                found[key] = [error, STEP[dtype] * max(largest, 1e-3)]
    print(json.dumps(found))


def columns(s, b, h, w, dtype, device):
    """Columns of wider rows, sequences and tokens swapped in memory."""
    return (
        torch.randn(b, s, h, 2 * w + 3, dtype=torch.float64).to(device, dtype).transpose(0, 1)[..., 1 : w + 1]
    )


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def differ(got, wanted):
    """The largest difference; infinite where one is NaN or infinite and the other not so."""
    got, wanted = got.double(), wanted.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    error = torch.where(same, 0.0, (got - wanted).abs()).nan_to_num(nan=torch.inf)
    return float(error.max()), float(wanted.nan_to_num(0, 0, 0).abs().max())


def merged(fused, s, b, h, w, dtype, device):
    sums = (
        torch.randn(s, b, h, w, dtype=wide(dtype), device=device),
        torch.randn(s, b, h, dtype=wide(dtype), device=device),
    )
    sums[1][0] = -torch.inf  # with outputs of 0, as of rows without a finite logit
    sums[0][0] = 0
    parts = [(columns(s, b, h, w, dtype, device), torch.randn_like(sums[1])) for _ in range(2)]
    for i, (out, lse) in enumerate(parts):
        lse[i::2] = -torch.inf
        out[i::2] = 0
    parts[0][1][-1, 0, 0] = torch.nan
    for num_parts, is_first in product((1, 2), (True, False)):
        got = [x.clone() for x in sums]
        fused.merge(*got, parts[:num_parts], is_first=is_first)
        lses = [x.double() for x in ([] if is_first else [sums[1]]) + [lse for _, lse in parts[:num_parts]]]
        outs = [x.double() for x in ([] if is_first else [sums[0]]) + [out for out, _ in parts[:num_parts]]]
        lse = torch.logsumexp(torch.stack(lses), 0)
        weights = [torch.exp(x - torch.where(lse == -torch.inf, 0.0, lse)) for x in lses]
        out = sum(weight.unsqueeze(-1) * x for weight, x in zip(weights, outs, strict=True))
        yield f"out of {num_parts} first {is_first}", *differ(got[0][:-1], out[:-1])
        yield f"lse of {num_parts} first {is_first}", *differ(got[1], lse)


def added(fused, s, b, h, w, dtype, device):
    sums = [torch.randn(s, b, h, width, dtype=wide(dtype), device=device) for width in (w, w + 2)]
    parts = [[columns(s, b, h, x.shape[3], dtype, device) for x in sums] for _ in range(2)]
    for num_sums, num_parts, is_first in product((1, 2), (1, 2), (True, False)):
        got = [x.clone() for x in sums[:num_sums]]
        fused.add(got, [part[:num_sums] for part in parts[:num_parts]], is_first=is_first)
        for i, x in enumerate(got):
            wanted = sum(part[i].double() for part in parts[:num_parts]) + (
                0 if is_first else sums[i].double()
            )
            yield f"{i} of {num_sums} sums, {num_parts} parts, first {is_first}", *differ(x, wanted)


def placed(fused, s, b, h, w, dtype, device):
    rows = torch.zeros(s, b, h, 3 * w, device=device).to(dtype)
    stats = torch.zeros(s, b, h, 2, dtype=wide(dtype), device=device)
    sources = [torch.randn(s, b, h, width, dtype=torch.float32, device=device) for width in (w, 2 * w)]
    lse = torch.randn(s, b, h, dtype=wide(dtype), device=device)
    fused.place([(rows[..., :w], sources[0]), (rows[..., w:], sources[1]), (stats[..., 1], lse)])
    yield "values", *differ(rows, torch.cat(sources, -1))
    yield "statistics", *differ(stats[..., 1], lse)
    yield "others", *differ(stats[..., 0], torch.zeros_like(lse))


def dotted(fused, s, b, h, w, dtype, device):
    dout, out = (columns(s, b, h, w, dtype, device) for _ in range(2))
    into = torch.zeros(s, b, h, 2, dtype=wide(dtype), device=device)[..., 1]
    fused.row_dot(dout, out, into)
    yield "delta", *differ(into, (dout.double() * out.double()).sum(-1))


def stood_in(fused, s, b, h, w, dtype, device):
    """Its row sums with dout, over the lengths of both: what a rounding of it may change."""
    for size in (1.0, 1e-30, 1e30) if dtype != torch.float16 else (1.0,):
        dout = (columns(s, b, h, w, torch.float64, device) * size).to(dtype)
        dout[0, 0, 0] = 0
        delta = torch.randn(s, b, h, dtype=wide(dtype), device=device) * size
        into = torch.full((s, b, h, w), torch.nan, device=device).to(dtype)
        fused.stand_in(dout, delta, into)
        sums = (into.double() * dout.double()).sum(-1)
        delta[0, 0, 0] = 0
        yield f"size {size}", *differ(sums / size, delta / size)


if __name__ == "__main__":
    main()
