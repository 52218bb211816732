"""Who holds which tokens, and where the ranks are."""

import pytest

from charm_megatron.errors import PlanError, TopologyError, WorkloadError
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import domains_from_hosts, even_domains, one_domain

pytestmark = pytest.mark.pure


def test_zigzag_gives_each_rank_one_chunk_from_either_end():
    sharding = make_sharding("zigzag", 4)
    assert [sharding.chunks_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert sharding.token_ranges(1, 16) == ((2, 4), (12, 14))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_token_has_exactly_one_home(layout, size):
    sharding = make_sharding(layout, size)
    seq_len = sharding.num_chunks * 5
    tokens = [
        t
        for r in range(size)
        for start, stop in sharding.token_ranges(r, seq_len)
        for t in range(start, stop)
    ]
    assert sorted(tokens) == list(range(seq_len))


def test_a_sequence_that_does_not_divide_is_refused_with_the_multiple():
    with pytest.raises(
        WorkloadError, match=r"length 100 .* over 4 ranks .* multiple of 8, such as 96 or 104"
    ):
        make_sharding("zigzag", 4).chunk_len(100)


def test_an_unknown_layout_names_the_nearest():
    with pytest.raises(PlanError, match="did you mean 'zigzag'"):
        make_sharding("zig_zag", 4)


def test_hosts_become_domains_in_order_of_first_appearance():
    domains = domains_from_hosts(["b", "a", "b", "a"])
    assert domains.members == ((0, 2), (1, 3))
    assert domains.are_even
    assert domains.crosses(0, 1)
    assert not domains.crosses(1, 3)


def test_one_machine_can_stand_for_two():
    assert even_domains(4, 2).members == ((0, 1), (2, 3))
    assert str(even_domains(4, 2)) == "0 1 | 2 3"
    assert one_domain(3).members == ((0, 1, 2),)


def test_ranks_that_do_not_fit_domains_are_refused_with_what_fits():
    with pytest.raises(
        TopologyError, match=r"6 .* ranks do not split into 4 equal domains; domains may be 1 or 2 or 3 or 6"
    ):
        even_domains(6, 4)
