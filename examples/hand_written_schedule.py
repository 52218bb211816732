"""A schedule written by hand: checked, shown, and run.

    python examples/hand_written_schedule.py

Two ranks swap their keys and values while each computes its own block. `charm-megatron check FILE` says the same of
the file; `context_parallel_attention(..., schedule="FILE.json", layout="contiguous", mask="none")` runs it on real
ranks. Here all ranks run in this process.
"""

import json
import tempfile
from pathlib import Path

import torch

import charm_megatron as cm
from charm_megatron.errors import ScheduleFault
from charm_megatron.executor.loopback import LoopbackGroup
from charm_megatron.kernels import ReferenceKernel
from charm_megatron.show.grid import format_grid

# A piece is a payload and a chunk: q0 is the queries of chunk 0. Of the backward pass: g is (q, dout, lse, delta),
# dkv1<0 a partial gradient of chunk 1 received from rank 0.
FORWARD = [
    ["post 0.0 | send 1 kv0 | recv 1 kv1", "attend q0 kv0", "wait 0.0", "attend q0 kv1", "free kv1"],
    ["post 0.0 | send 0 kv1 | recv 0 kv0", "attend q1 kv1", "wait 0.0", "attend q1 kv0", "free kv0"],
]
BACKWARD = [
    [
        *("post 0.0 | send 1 kv0 | recv 1 kv1", "attend g0 kv0", "wait 0.0", "attend g0 kv1", "free kv1"),
        *(
            "post 1.0 | send 1 dkv1 | recv 1 dkv0<1",
            "wait 1.0",
            "accumulate dkv0<1",
            "free dkv0<1",
            "free dkv1",
        ),
    ],
    [
        *("post 0.0 | send 0 kv1 | recv 0 kv0", "attend g1 kv1", "wait 0.0", "attend g1 kv0", "free kv0"),
        *(
            "post 1.0 | send 0 dkv0 | recv 0 dkv1<0",
            "wait 1.0",
            "accumulate dkv1<0",
            "free dkv1<0",
            "free dkv0",
        ),
    ],
]
SCHEDULE = {
    "format": "charm-megatron schedule",
    "version": 2,
    "name": "swap",
    "problem": {"layout": "contiguous", "cp_size": 2, "seq_len": 16, "mask": "none", "domain_of": [0, 0]},
    "phases": [{"pass": "forward", "programs": FORWARD}, {"pass": "backward", "programs": BACKWARD}],
}
WORKLOAD = cm.Workload(1, 16, 2, 2, 8, 8, "float64", cm.Mask(None, None))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "swap.json"
        path.write_text(json.dumps(SCHEDULE))
        # Reads the file and proves both passes for these ranks and sizes.
        plan = cm.compile_attention(
            cm.CharmConfig(schedule=str(path)), cm.even_domains(2, 1), WORKLOAD, "contiguous"
        )
        print(format_grid(plan.forward[0]))

        wrong = json.loads(
            path.read_text().replace('"wait 0.0", "attend q0 kv1"', '"attend q0 kv1", "wait 0.0"')
        )
        path.write_text(json.dumps(wrong))
        try:
            cm.compile_attention(
                cm.CharmConfig(schedule=str(path)), cm.even_domains(2, 1), WORKLOAD, "contiguous"
            )
        except ScheduleFault as fault:
            print(f"with one line out of place:\n{str(fault).splitlines()[0]}\n")

    group = LoopbackGroup(plan, ReferenceKernel(), softmax_scale=WORKLOAD.softmax_scale)
    q, k, v, dout = torch.randn(4, 16, 1, 2, 8, dtype=torch.float64)
    got = group.attention(q, k, v, dout)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    logits = torch.einsum("qbhd,kbhd->bhqk", q, k) * WORKLOAD.softmax_scale
    out = torch.einsum("bhqk,kbhd->qbhd", logits.softmax(-1), v)
    wanted = (out, *torch.autograd.grad(out, (q, k, v), dout))
    for name, a, b in zip(("out", "dq", "dk", "dv"), (got.out, got.dq, got.dk, got.dv), wanted, strict=True):
        print(
            f"{name:>3}: largest difference to attention on one rank {float((a - b).detach().abs().max()):.1e}"
        )
        assert torch.allclose(a, b)


if __name__ == "__main__":
    main()
