"""Problems cut for a planner, and the schedules that it makes for them."""

import numpy as np

from charm_megatron.lowering.schedules import make_schedules
from charm_megatron.planner import cut_problem, plan
from charm_megatron.schedule.schedule import PostOptions
from charm_megatron.sharding import make_sharding
from charm_megatron.workload import NO_MASK

DIRECTIONS = ("forward", "backward")
TOKENS_PER_RANK = 8


def cut(name, domains, layout="contiguous", mask=NO_MASK, *, per_rank=TOKENS_PER_RANK, heads=None):
    """A problem cut as the planner asks for. `heads` are those of queries and of keys."""
    size = domains.cp_size
    num_heads, num_kv_heads = heads or (2 * size, 2 * size)
    sharding = make_sharding(layout, size, per_rank * size, mask.documents)
    return cut_problem(name, sharding, domains, mask, num_heads=num_heads, num_kv_heads=num_kv_heads)


def schedules(name, problem, direction="forward", **options):
    return make_schedules(plan(name, problem), direction, PostOptions(**options))


def schedule(name, problem, direction="forward"):
    (made,) = schedules(name, problem, direction)
    return made


def payloads(made):
    """The names of what travels."""
    return {made.pass_.payloads[i].name for i in np.unique(made.hops.payload)}


def hops_of(made, payload):
    """(step, piece, src, dst) of each hop of a payload."""
    hops = made.hops
    rows = hops.payload == [kind.name for kind in made.pass_.payloads].index(payload)
    return list(
        zip(*(c[rows].tolist() for c in (hops.comm_step, hops.piece, hops.src, hops.dst)), strict=True)
    )


def assert_is_one_sentence(error):
    assert "\n" not in str(error)
    assert ". " not in str(error)
    assert not str(error).endswith(".")
