"""All ranks find the same domains, and the receipt says which and why."""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from charm_megatron.config import CharmConfig
from charm_megatron.executor import AttentionRuntime
from charm_megatron.topology import Place
from charm_megatron.workload import Workload
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

PLACE = "charm_megatron.executor.runtime.place_of_this_rank"
WORKLOAD = Workload(1, 32, 2, 2, 8, 8)


def receipt_on(rank: int, size: int, domains: str, places: list[Place]) -> str:
    with mock.patch(PLACE, return_value=places[rank]):
        return AttentionRuntime(CharmConfig(domains=domains)).receipt(dist.group.WORLD, WORKLOAD).lines()[0]


def first_lines(domains: str, places: list[Place]) -> set[str]:
    return set(run_ranks(receipt_on, len(places), domains, places))


def test_domains_are_found_in_what_ranks_say_of_their_place(tmp_path: Path) -> None:
    scattered = [Place("a", 0), Place("b", 0), Place("a", 1), Place("b", 0)]
    assert first_lines("hosts", scattered) == {
        "context parallelism: 4 ranks in 2 domains [0 2 | 1 3], one a host"
    }
    assert first_lines("numa", scattered) == {
        "context parallelism: 4 ranks in 3 domains [0 | 1 3 | 2], one a NUMA node: a:0 b:0 a:1 b:0"
    }
    path = tmp_path / "domains.yaml"
    path.write_text("domains: [[a:0, b], [a:1]]")
    assert first_lines(str(path), scattered) == {
        f"context parallelism: 4 ranks in 2 domains [0 1 3 | 2], as {path} says: a:0 b:0 a:1 b:0"
    }


def test_a_group_may_have_one_rank_a_host() -> None:
    places = [Place(name) for name in "abcd"]
    assert first_lines("hosts", places) == {
        "context parallelism: 4 ranks in 4 domains [0 | 1 | 2 | 3], one a host"
    }


def place_found(rank: int, size: int) -> str:
    import torch

    from charm_megatron.executor.places import place_of_this_rank

    return str(place_of_this_rank(torch.device("cpu")))


def test_a_rank_on_a_cpu_knows_its_host() -> None:
    import socket

    assert {word.split(":")[0] for word in run_ranks(place_found, 2)} == {socket.gethostname()}
