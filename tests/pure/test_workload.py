"""Masks, bands and sizes."""

from itertools import product

import pytest

from charm_megatron.errors import WorkloadError
from charm_megatron.schedule.actions import Attend
from charm_megatron.schedule.problem import Problem
from charm_megatron.sharding import make_sharding
from charm_megatron.topology import one_domain
from charm_megatron.workload import CAUSAL, NO_MASK, Band, Mask, Workload, parse_mask
from tests.planned import cut, schedule

pytestmark = pytest.mark.pure


def kept(band, num_rows, num_columns):
    return {(a, b) for a in range(num_rows) for b in range(num_columns) if band.lo <= a - b <= band.hi}


BANDS = [
    (rows, columns, Band(lo, hi))
    for rows, columns in product((1, 2, 5), repeat=2)
    for lo, hi in product(range(-columns, rows + 1), repeat=2)
]


def test_a_band_counts_its_elements():
    for rows, columns, band in BANDS:
        assert band.num_pairs(rows, columns) == len(kept(band, rows, columns))
        if len(kept(band, rows, columns)) == rows * columns:
            assert band.is_full(rows, columns)


def test_a_trimmed_band_has_neither_empty_rows_nor_empty_columns():
    for rows, columns, band in BANDS:
        elements = kept(band, rows, columns)
        if not elements:
            continue
        row_slice, column_slice, inner = band.trimmed(rows, columns)
        assert sorted({a for a, _ in elements}) == list(range(rows))[row_slice]
        assert sorted({b for _, b in elements}) == list(range(columns))[column_slice]
        shifted = {(a + row_slice.start, b + column_slice.start) for a, b in kept(inner, rows, columns)}
        assert elements == shifted & set(product(range(rows)[row_slice], range(columns)[column_slice]))


@pytest.mark.parametrize(
    "mask",
    [CAUSAL, NO_MASK, Mask(5, 0), Mask(3, 2), Mask(None, 4), Mask(None, 0, (7, 9, 8)), Mask(6, 1, (1, 23))],
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_blocks_together_hold_exactly_what_the_mask_shows(layout, mask):
    problem = Problem(make_sharding(layout, 3, 24, mask.documents), one_domain(3), mask)
    document = [i for i, length in enumerate(mask.documents or (24,)) for _ in range(length)]
    seen = set()
    for q, kv in zip(*problem.unmasked.nonzero(), strict=True):
        q_tokens, kv_tokens = problem.sharding.chunks[q].tokens, problem.sharding.chunks[kv].tokens
        inside = kept(problem.band(q, kv), len(q_tokens), len(kv_tokens))
        assert inside
        seen |= {(q_tokens[a], kv_tokens[b]) for a, b in inside}
    assert seen == {
        (p, k)
        for p, k in product(range(24), repeat=2)
        if document[p] == document[k]
        and (mask.left is None or p - k <= mask.left)
        and (mask.right is None or k - p <= mask.right)
    }


@pytest.mark.parametrize("mask", [CAUSAL, NO_MASK, Mask(5, 0), Mask(None, 4), Mask(None, 0, (7, 9, 8))])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_problem_knows_whether_any_of_its_blocks_is_a_band(layout, mask):
    problem = cut("ring", one_domain(3), layout, mask, per_rank=8)
    made = schedule("ring", problem)
    programs = [made.program(rank) for rank in range(3)]
    bands = [a.band for program in programs for a in program if isinstance(a, Attend) and a.band]
    assert problem.has_bands == bool(bands)


@pytest.mark.parametrize(
    "text", ["causal", "none", "window:5,0", "window:-1,3", "causal+documents:3,4", "window:2,2+documents:9"]
)
def test_masks_read_back(text):
    assert str(parse_mask(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "casual",
        "window:3",
        "window",
        "documents",
        "causal:3",
        "",
        "window:1,2,3",
        "documents:0",
        "window:-2,0",
    ],
)
def test_masks_that_cannot_be_read_are_refused(text):
    with pytest.raises(WorkloadError):
        parse_mask(text)


def test_a_misspelt_mask_names_the_nearest():
    with pytest.raises(WorkloadError, match="did you mean 'causal'"):
        parse_mask("casual")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "3 query heads cannot share 2 KV heads evenly"),
        ({"batch": 0}, "batch must be at least 1, but is 0"),
        ({"dtype": "bfloat"}, "of dtype float64, float32, bfloat16 or float16, but they are bfloat"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    sizes = {"batch": 1, "seq_len": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "head_dim_v": 4}
    with pytest.raises(WorkloadError, match=message):
        Workload(**(sizes | changes))
