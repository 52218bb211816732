"""Where the ranks of a group are, and what connects them. Plain data: nothing here talks to a device."""

from charm_megatron.topology.domains import Domains, domains_from_hosts, even_domains, one_domain
from charm_megatron.topology.places import Place

__all__ = [
    "Domains",
    "Place",
    "domains_from_hosts",
    "even_domains",
    "one_domain",
]
