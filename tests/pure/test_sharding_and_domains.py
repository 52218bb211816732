"""Who holds which tokens, and where the ranks are."""

import pytest

from charm_megatron.errors import PlanError, TopologyError, WorkloadError
from charm_megatron.sharding import make_sharding, refine
from charm_megatron.topology import domains_from_hosts, even_domains, one_domain

pytestmark = pytest.mark.pure


def test_zigzag_gives_each_rank_one_chunk_from_either_end():
    sharding = make_sharding("zigzag", 4, 16)
    assert [sharding.chunks_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert sharding.tokens_of(1) == (2, 3, 12, 13)


def test_striped_deals_tokens_out_one_by_one():
    sharding = make_sharding("striped", 3, 9)
    assert [sharding.tokens_of(rank) for rank in range(3)] == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]


def test_document_zigzag_cuts_each_document_by_itself():
    sharding = make_sharding("document_zigzag", 2, 12, (4, 8))
    assert sharding.tokens_of(0) == (0, 3, 4, 5, 10, 11)
    assert sharding.tokens_of(1) == (1, 2, 6, 7, 8, 9)


@pytest.mark.parametrize("documents", [(), (24,), (5, 12, 7), (1, 22, 1), (12, 12)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_token_has_exactly_one_home_and_no_chunk_spans_two_documents(layout, size, documents):
    sharding = make_sharding(layout, size, 24, documents)
    assert sorted(t for rank in range(size) for t in sharding.tokens_of(rank)) == list(range(24))
    starts = [sum(documents[:i]) for i in range(len(documents) + 1)] if documents else [0, 24]
    for chunk in sharding.chunks:
        assert starts[chunk.document] <= chunk.tokens[0]
        assert chunk.tokens[-1] < starts[chunk.document + 1]


def test_runs_tell_shards_apart_as_their_tokens_do():
    shardings = [
        refine(make_sharding(layout, size, length, documents), parts)
        for layout in ("zigzag", "contiguous", "striped", "document_zigzag")
        for size in (1, 2, 4)
        for length, documents in ((8, ()), (16, ()), (16, (8, 8)))
        for parts in (1, 2, 3, 100)
    ]
    for one in shardings:
        for other in shardings:
            assert (one.runs_by_rank == other.runs_by_rank) == (one.tokens_by_rank == other.tokens_by_rank)


def test_a_sequence_that_does_not_divide_is_refused_with_the_multiple():
    with pytest.raises(
        WorkloadError, match=r"length 100 .* over 4 ranks .* multiple of 8, such as 96 or 104"
    ):
        make_sharding("zigzag", 4, 100)
    with pytest.raises(WorkloadError, match=r"document length 6 .* multiple of 4, such as 4 or 8"):
        make_sharding("document_zigzag", 2, 10, (6, 4))


def test_documents_that_do_not_fill_the_sequence_are_refused():
    with pytest.raises(WorkloadError, match="documents have 7 tokens, the sequence has 8"):
        make_sharding("zigzag", 2, 8, (3, 4))


def test_an_unknown_layout_names_the_nearest():
    with pytest.raises(PlanError, match="did you mean 'zigzag'"):
        make_sharding("zig_zag", 4, 8)


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
