"""A planner of one's own: a ring that sends half of the KV heads each way round, so that links work in both directions.

    python examples/own_planner.py

The function says who computes each block and by which ranks, in which steps, operands come. Waits, the backward pass,
buffers, the proof and the bytes all follow from that. A package offers its planner to every command and setting as an
entry point of the group `charm_megatron.planners`; a program registers it, as here.
"""

import torch

import charm_megatron as cm
from charm_megatron.cost.model import CostModel, Link
from charm_megatron.cost.timeline import evaluate
from charm_megatron.executor.loopback import LoopbackGroup
from charm_megatron.kernels import ReferenceKernel
from charm_megatron.lowering.decisions import Decisions, Method, one_phase, shard_routes
from charm_megatron.planner import Shape
from charm_megatron.planner.common import owner_is_q_home
from charm_megatron.schedule.problem import Problem
from charm_megatron.verify.programs import check_schedule


def halves(domains: cm.Domains, num_heads: int, num_kv_heads: int) -> Shape:
    """Heads are cut into two groups: one for each direction."""
    return Shape(q_head_groups=2, kv_head_groups=2)


@cm.register_planner
@cm.as_planner("folklore: links carry both directions", "half of the KV heads each way round", shape=halves)
def two_way_ring(problem: Problem) -> Method:
    ranks, steps = range(problem.cp_size), range(problem.cp_size - 1)
    onward = [[(rank + hop) % problem.cp_size for hop in ranks] for rank in ranks]
    back = [[(rank - hop) % problem.cp_size for hop in ranks] for rank in ranks]
    routes = (
        shard_routes(problem, "kv", onward, steps, heads=[0]),
        shard_routes(problem, "kv", back, steps, heads=[1]),
    )
    return one_phase(Decisions(problem, owner_is_q_home(problem), routes))


def compiled(schedule: str, dtype: str, seq_len: int = 48) -> cm.Plan:
    workload = cm.Workload(1, seq_len, 4, 4, 8, 8, dtype)
    return cm.compile_attention(cm.CharmConfig(schedule=schedule), cm.even_domains(6, 1), workload, "zigzag")


def main() -> None:
    plan = compiled("two_way_ring", "float64")
    for schedule in plan.schedules:
        check_schedule(schedule)
    group = LoopbackGroup(plan, ReferenceKernel(), softmax_scale=plan.workload.softmax_scale)
    q, k, v, dout = torch.randn(4, 48, 1, 4, 8, dtype=torch.float64)
    got = group.attention(q, k, v, dout)
    logits = torch.einsum("qbhd,kbhd->bhqk", q, k) * plan.workload.softmax_scale
    logits.masked_fill_(torch.ones(48, 48, dtype=torch.bool).triu(1), -torch.inf)
    wanted = torch.einsum("bhqk,kbhd->qbhd", logits.softmax(-1), v)
    print(f"out: largest difference to attention on one rank {float((got.out - wanted).abs().max()):.1e}")
    assert torch.allclose(got.out, wanted)

    each_way = CostModel(1e15, Link(1e9), Link(1e9), is_shared=False)  # a link for each direction
    for name in ("ring", "two_way_ring"):
        large = compiled(name, "bfloat16", seq_len=6 * 4096)
        took_s = sum(evaluate(phase, large.wire, each_way).makespan_s for phase in large.forward)
        print(f"{name}: {took_s * 1e3:.2f} ms forward over links of 1 GB/s each way")


if __name__ == "__main__":
    main()
