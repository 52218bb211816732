"""Whole groups in one process: every planner against full attention, and what the loopback refuses."""

from functools import reduce
from operator import or_

import pytest
import torch

from charm_megatron.compile import Plan
from charm_megatron.cost.buffers import peak_buffers
from charm_megatron.cost.wire import make_wire_format, traffic
from charm_megatron.errors import PlanError, ScheduleFault
from charm_megatron.executor.loopback import LoopbackGroup
from charm_megatron.kernels import ReferenceKernel
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import cut_problem, plan, shipped_planners
from charm_megatron.schedule.passes import DIRECTIONS, FORWARD, Direction
from charm_megatron.schedule.problem import Problem
from charm_megatron.schedule.text import parse_program
from charm_megatron.schedule.written import written_schedule
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload
from tests.full_attention import full_attention, relative_error

pytestmark = pytest.mark.torch

PLANNERS = shipped_planners()

HEADS, HEAD_DIM = 12, 4
SCALE = HEAD_DIM**-0.5

CASES = [
    ("zigzag", CAUSAL, 12),
    ("contiguous", NO_MASK, 2),
    ("striped", Mask(5, 1), 12),
    ("contiguous", Mask(None, 0, (7, 29)), 4),
    ("document_zigzag", Mask(6, 0, (12, 24)), 12),
]
"""Layout, mask and KV heads, for 36 tokens."""


def make_wire(problem, kv_heads=HEADS):
    workload = Workload(
        1, problem.sharding.seq_len, HEADS, kv_heads, HEAD_DIM, HEAD_DIM, "float64", problem.mask
    )
    return make_wire_format(workload, problem)


def inputs(seq_len, kv_heads=HEADS):
    random = torch.Generator().manual_seed(1)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(seq_len, 1, h, HEAD_DIM, dtype=torch.float64, generator=random) for h in heads]


def expected(q, k, v, dout, mask):
    """out, lse, dq, dk, dv of full attention."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = full_attention(*leaves, mask)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors(group, kv_heads=HEADS):
    """Relative errors of out, lse, dq, dk, dv, and what the group gave."""
    problem = group.calls[0].wire.problem
    tensors = inputs(problem.sharding.seq_len, kv_heads)
    got = group.attention(*tensors)
    values = (got.out, got.lse, got.dq, got.dk, got.dv)
    pairs = zip(values, expected(*tensors, problem.mask), strict=True)
    return [relative_error(value, reference) for value, reference in pairs], got


@pytest.mark.parametrize(("size", "is_buffered"), [(1, False), (2, False), (3, False), (6, False), (6, True)])
@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_gives_exact_attention_and_sends_and_stores_what_it_plans(name, size, is_buffered):
    num_run = 0
    for layout, mask, kv_heads in CASES:
        sharding = make_sharding(layout, size, 36, mask.documents)
        domains = even_domains(size, 2 if size == 6 else 1)
        try:
            problem = cut_problem(name, sharding, domains, mask, num_heads=HEADS, num_kv_heads=kv_heads)
            method = plan(name, problem)
        except PlanError:
            continue
        forward, backward = (make_schedules(method, direction) for direction in DIRECTIONS)
        wire = make_wire(problem, kv_heads)
        made = Plan(forward, backward, wire, "under test")
        group = LoopbackGroup(made, ReferenceKernel(), softmax_scale=SCALE, is_buffered=is_buffered)
        worst, got = errors(group, kv_heads)
        assert max(worst) < 1e-12
        planned = traffic(*forward, *backward, wire=wire).total_bytes
        assert got.num_bytes_sent == tuple(planned.tolist())
        for rank, call in enumerate(group.calls):
            needs = (peak_buffers(schedule, wire, rank) for schedule in made.schedules)
            assert call.memory.num_bytes == reduce(or_, needs).pool_bytes
        num_run += 1
    if name in ("dist_flash", "tasp"):
        return  # the one takes one layout and mask, the other not every size
    assert num_run >= 3


PROBLEM = Problem(make_sharding("contiguous", 2, 8), even_domains(2, 1), NO_MASK)

PAIR = [
    "post 0.0 | send 1 kv0 | recv 1 kv1\nattend q0 kv0\nwait 0.0\nattend q0 kv1\nfree kv1",
    "post 0.0 | send 0 kv1 | recv 0 kv0\nattend q1 kv1\nwait 0.0\nattend q1 kv0\nfree kv0",
]


def by_hand(*texts):
    programs = [parse_program(text.splitlines()) for text in texts]
    forward = written_schedule("by hand", PROBLEM, FORWARD, programs)
    backward = make_schedules(plan("ring", PROBLEM), Direction.BACKWARD)
    made = Plan((forward,), backward, make_wire(PROBLEM), "by hand")
    return LoopbackGroup(made, ReferenceKernel(), softmax_scale=SCALE)


def test_a_schedule_written_by_hand_runs():
    worst, _ = errors(by_hand(*PAIR))
    assert max(worst) < 1e-12


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("send 1 kv0 | ", "", "deadlock: ranks"),
        ("recv 1 kv1", "recv 2 kv1", "rank 0 has no peer 2"),
        ("send 1 kv0", "send 1 q0", "a message has 1536 bytes where 3072 are expected"),
        ("wait 0.0\nattend q0 kv1\nfree kv1", "attend q0 kv0", "under way|in use|deadlock"),
    ],
)
def test_what_cannot_run_is_an_error_and_not_a_hang(old, new, message):
    assert old in PAIR[0]
    with pytest.raises((ScheduleFault, AssertionError), match=message):
        errors(by_hand(PAIR[0].replace(old, new), PAIR[1]))


def test_a_buffer_that_is_freed_while_it_is_being_sent_is_an_error():
    relay = "post 1.0 | send 1 kv1\nfree kv1\nwait 1.0"
    with pytest.raises(AssertionError, match="kv1 is being sent"):
        errors(by_hand(PAIR[0].replace("free kv1", relay), PAIR[1]))
