"""The checker and the executor agree on thousands of schedules, nearly all of them wrong."""

import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from charm_megatron.compile import Plan, RankProgram
from charm_megatron.cost.wire import make_wire_format
from charm_megatron.errors import ScheduleFault
from charm_megatron.executor.attention import ForwardResult
from charm_megatron.executor.loopback import LoopbackGroup, run_phases_together
from charm_megatron.executor.run import BoundProgram
from charm_megatron.kernels import ReferenceKernel
from charm_megatron.lowering.place import plan_storage
from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import cut_problem, plan
from charm_megatron.schedule.actions import Accumulate, Attend, Free, Key, Post, Wait
from charm_megatron.schedule.passes import DIRECTIONS
from charm_megatron.schedule.queues import ONE_QUEUE, Queues
from charm_megatron.schedule.schedule import PostOptions
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import even_domains
from charm_megatron.verify.programs import check_programs
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload
from tests.full_attention import full_attention, relative_error

pytestmark = pytest.mark.torch

NUM_MUTANTS, NUM_MUTANTS_PLAIN = 50, 450
"""Of each case in each direction, and of each plain one, where --mutants does not say how many."""

HEAD_DIM = 4
SCALE = HEAD_DIM**-0.5


class Case(NamedTuple):
    """A schedule over ranks in domains. The sequence has 4 tokens a rank."""

    schedule: str
    num_domains: int
    per_domain: int
    layout: str
    mask: Mask
    num_heads: int = 2
    num_kv_heads: int = 2

    def __str__(self):
        grid = f"{self.num_domains}x{self.per_domain}"
        shared = "" if self.num_heads == self.num_kv_heads else f"-{self.num_heads}on{self.num_kv_heads}"
        return f"{self.schedule}-{grid}-{self.layout}-{self.mask}{shared}"


PLAIN = [
    Case("ring", 1, 3, "contiguous", NO_MASK),
    Case("ring", 1, 2, "zigzag", CAUSAL),
    Case("rm_plus", 1, 4, "contiguous", NO_MASK),
    Case("charm", 2, 2, "zigzag", CAUSAL),
    Case("charm_keep_kv", 2, 2, "zigzag", CAUSAL),
    Case("charm_together", 2, 2, "zigzag", CAUSAL),
    Case("charm_per_domain", 2, 2, "contiguous", NO_MASK),
    Case("ulysses", 1, 2, "zigzag", CAUSAL),
]

MASKED = [
    Case("ring", 1, 3, "zigzag", Mask(5, 0)),
    Case("ring", 1, 3, "contiguous", Mask(3, 2)),
    Case("ring", 1, 2, "striped", Mask(None, 0, (3, 5))),
    Case("ring", 1, 2, "document_zigzag", Mask(None, None, (4, 4))),
    Case("pass_q", 1, 3, "zigzag", Mask(None, 0, (5, 7))),
    Case("charm", 2, 2, "zigzag", Mask(6, 0, (5, 11))),
    Case("charm", 2, 2, "striped", CAUSAL, 4, 2),
]

OTHERS = [
    Case("tasp", 1, 3, "zigzag", CAUSAL),
    Case("mesh", 1, 4, "zigzag", CAUSAL),
    Case("attention_2d", 2, 2, "contiguous", Mask(6, 1)),
    Case("merge", 1, 4, "contiguous", NO_MASK),
    Case("all_gather", 1, 3, "zigzag", CAUSAL),
    Case("burst_backward", 1, 3, "zigzag", CAUSAL),
    Case("dist_flash", 1, 4, "contiguous", CAUSAL),
    Case("double_ring", 2, 2, "zigzag", CAUSAL, 4, 1),
    Case("hierarchical", 2, 2, "zigzag", CAUSAL, 4, 2),
    Case("hierarchical_ring_inside", 2, 2, "contiguous", NO_MASK),
    Case("charm", 3, 2, "contiguous", CAUSAL),
    Case("charm_together", 3, 2, "zigzag", CAUSAL),
]


ON_TWO = [
    Case("charm", 2, 2, "zigzag", CAUSAL),
    Case("charm", 3, 2, "contiguous", NO_MASK),
    Case("double_ring", 2, 2, "zigzag", CAUSAL),
    Case("charm_per_domain", 2, 2, "zigzag", CAUSAL),
]
"""Judged on two communicators as well, with posts lane by lane."""


class Subject:
    """One phase of one schedule, and what it must give."""

    def __init__(self, case, direction, queues=ONE_QUEUE):
        name, num_domains, per_domain, layout, mask, heads, kv_heads = case
        self.queues = queues
        size = num_domains * per_domain
        sharding = make_sharding(layout, size, 4 * size, mask.documents)
        domains = even_domains(size, num_domains)
        self.problem = cut_problem(name, sharding, domains, mask, num_heads=heads, num_kv_heads=kv_heads)
        method = plan(name, self.problem)
        workload = Workload(1, 4 * size, heads, kv_heads, HEAD_DIM, HEAD_DIM, "float64", mask)
        self.wire = make_wire_format(workload, self.problem)
        self.direction, self.size = direction, size
        options = PostOptions(fuse=queues.num_communicators == 1)
        schedules = (make_schedules(method, each, options) for each in DIRECTIONS)
        self.plan = Plan(*schedules, self.wire, "under test")
        (self.schedule,) = self.plan.phases(direction)
        self.programs = [self.schedule.program(rank) for rank in range(size)]
        generator = torch.Generator().manual_seed(0)
        self.inputs = [
            torch.randn(4 * size, 1, h, HEAD_DIM, dtype=torch.float64, generator=generator)
            for h in (heads, kv_heads, kv_heads, heads)
        ]
        q, k, v, dout = self.inputs
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = full_attention(*leaves, mask)
        self.out, self.lse = out.detach(), lse.detach()
        self.grads = torch.autograd.grad(out, leaves, dout)

    def check(self, programs):
        """The checker's verdict."""
        try:
            check_programs("mutant", self.problem, self.schedule.pass_, programs, self.queues)
        except ScheduleFault:
            return False
        return True

    def execute(self, programs):
        """The verdict of running it: it ends, leaves nothing behind, and gives full attention."""
        has_two_queues = self.queues.num_communicators == 2
        group = LoopbackGroup(
            self.plan, ReferenceKernel(), softmax_scale=SCALE, has_two_queues=has_two_queues
        )
        try:
            errors = self._run(group, self._calls(group, programs))
        except (ScheduleFault, AssertionError, KeyError, RuntimeError, ValueError, IndexError):
            return False
        return max(errors) < 1e-9  # False for NaN too

    def _calls(self, group, programs):
        """The group's calls, with other programs."""
        for rank, (call, program) in enumerate(zip(group.calls, programs, strict=True)):
            storage = plan_storage(
                program, self.schedule.pass_, self.problem, rank, self.wire.wide(self.schedule.pass_)
            )
            compiled = BoundProgram(RankProgram("mutant", self.schedule.pass_, program, storage), self.wire)
            yield replace(call, **{f"{self.direction}_programs": (compiled,)})

    def _run(self, group, calls):
        q, k, v, dout = (
            [x[list(group.sharding.tokens_of(r))] for r in range(self.size)] for x in self.inputs
        )
        if self.direction == "forward":
            phases = [c.forward_phases(*x, SCALE) for c, *x in zip(calls, q, k, v, strict=True)]
            results = run_phases_together(phases, group.network)
            got = ([r.out for r in results], [r.lse for r in results])
            wanted = (self.out, self.lse)
        else:
            known = [
                ForwardResult(self.out[list(tokens)], self.lse[list(tokens)], {})
                for tokens in (group.sharding.tokens_of(r) for r in range(self.size))
            ]
            phases = [c.backward_phases(*x, SCALE) for c, *x in zip(calls, dout, q, k, v, known, strict=True)]
            results = run_phases_together(phases, group.network)
            got = zip(*results, strict=True)
            wanted = self.grads
        tokens = [list(group.sharding.tokens_of(r)) for r in range(self.size)]
        return [
            max(relative_error(shard, whole[at]) for shard, at in zip(shards, tokens, strict=True))
            for shards, whole in zip(got, wanted, strict=True)
        ]


def mutate(programs, problem, chance):
    """Changes one thing on one rank; gives the kind of change and the programs."""
    rank = chance.randrange(len(programs))
    program = list(programs[rank])
    at = chance.randrange(len(program))
    kind = chance.choice(["drop", "duplicate", "swap", "swap", "retarget", "retarget"])
    if kind == "drop":
        del program[at]
    elif kind == "duplicate":
        program.insert(chance.randrange(len(program) + 1), program[at])
    elif kind == "swap":
        other = min(at + 1, len(program) - 1) if chance.random() < 0.5 else chance.randrange(len(program))
        program[at], program[other] = program[other], program[at]
    else:
        program[at] = retarget(program[at], problem, chance)
    return kind, [tuple(program) if r == rank else programs[r] for r in range(len(programs))]


def retarget(action, problem, chance):
    """The same action on something else."""
    match action:
        case Wait(key):
            return Wait(Key(key.step + chance.choice([-1, 1]), key.order))
        case Free(name):
            return Free(other_piece(name, problem, chance))
        case Accumulate(name):
            return Accumulate(other_piece(name, problem, chance))
        case Attend(q, kv, causal, band):
            what = chance.choice(["q", "kv", "mask", "fewer"])
            if what == "q":
                return Attend((other_piece(q[0], problem, chance), *q[1:]), kv, causal, band)
            if what == "kv":
                return Attend(q, (other_piece(kv[0], problem, chance), *kv[1:]), causal, band)
            if what == "mask":
                return Attend(q, kv, not causal, band)
            return Attend(q[1:] or q, kv, causal, band)
        case Post(key, sends, recvs):
            what = chance.choice(["peer", "piece", "fewer", "side"])
            side = list(sends if chance.random() < 0.5 and sends else recvs or sends)
            is_sends = tuple(side) == sends
            i = chance.randrange(len(side))
            if what == "peer":
                side[i] = side[i]._replace(peer=chance.randrange(problem.cp_size))
            elif what == "piece":
                names = side[i].pieces
                side[i] = side[i]._replace(pieces=(other_piece(names[0], problem, chance), *names[1:]))
            elif what == "fewer":
                del side[i]
            else:
                side.reverse()
            return Post(key, tuple(side), recvs) if is_sends else Post(key, sends, tuple(side))


def other_piece(name, problem, chance):
    return name._replace(chunk=chance.randrange(problem.num_chunks))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", [*PLAIN, *MASKED, *OTHERS], ids=str)
def test_a_mutant_passes_the_checker_exactly_when_it_runs_and_gives_full_attention(case, direction, request):
    asked = request.config.getoption("--mutants")
    num_mutants = asked or (NUM_MUTANTS_PLAIN if case in PLAIN else NUM_MUTANTS)
    judge(Subject(case, direction), case, direction, num_mutants, asked)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", ON_TWO, ids=str)
def test_the_same_holds_on_two_communicators(case, direction, request):
    asked = request.config.getoption("--mutants")
    judge(Subject(case, direction, Queues(2)), case, direction, asked or NUM_MUTANTS, asked)


def judge(subject, case, direction, num_mutants, asked):
    """Checker and execution must agree on each of some mutants."""
    assert subject.check(subject.programs)
    assert subject.execute(subject.programs)
    chance = random.Random() if asked else random.Random(f"{case} {direction}")
    verdicts = Counter()
    for _ in range(num_mutants):
        kind, programs = mutate(subject.programs, subject.problem, chance)
        checked, executed = subject.check(programs), subject.execute(programs)
        changed = [
            f"rank {r}: {a}"
            for r, (old, new) in enumerate(zip(subject.programs, programs, strict=True))
            if old != new
            for a in new
        ]
        assert checked == executed, f"{kind}: checker {checked}, execution {executed}\n" + "\n".join(changed)
        verdicts[checked, programs == subject.programs] += 1
    print(f"{verdicts[True, False]} changed and right, {verdicts[True, True]} unchanged of {num_mutants}")
    assert verdicts[True, False] > 0
    assert verdicts[False, False] > num_mutants / 2


def test_a_rectangle_that_is_causal_and_a_band_is_refused_by_the_executor_as_by_the_checker():
    """Also where the band, cut to the rows and columns that count, is the whole of them."""
    subject = Subject(MASKED[0], "forward")
    for rank, program in enumerate(subject.programs):
        for at, action in enumerate(program):
            if isinstance(action, Attend) and action.band:
                both = (*program[:at], replace(action, causal=True), *program[at + 1 :])
                programs = [both if r == rank else other for r, other in enumerate(subject.programs)]
                assert not subject.check(programs)
                assert not subject.execute(programs)
