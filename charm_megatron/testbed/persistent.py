"""Test networks that stay until they are taken down by name; of a profile there is at most one."""

from charm_megatron.errors import InvalidInput
from charm_megatron.testbed.commands import Names, mark_namespace
from charm_megatron.testbed.namespaces import (
    PREFIX,
    Mark,
    Owner,
    execute,
    networks,
    remove_networks,
    remove_stale,
    require_available,
)
from charm_megatron.testbed.network import Network, digest, make
from charm_megatron.testbed.profile import Profile


def persistent_name(profile_name: str) -> str:
    """Name of the network that `charm-megatron testbed up` makes."""
    return f"{PREFIX}{profile_name}"


def bring_up(profile: Profile) -> bool:
    """Makes a network that stays until `take_down`; false where it is there already.

    Raises `InvalidInput` where one of the same name but another shape is there.
    """
    require_available()
    remove_stale()
    names = Names(persistent_name(profile.name))
    there = networks().get(names.network)
    if there is not None:
        _check_same(profile, there)
        return False
    try:
        # Half a network of a process that was killed must not pass for one that is up.
        make(profile, names, Owner.this_process())
        mark = str(Mark(profile.name, digest(profile), None))
        execute(mark_namespace(name, mark) for name in names.all(profile))
    except BaseException:
        remove_networks([names.network])
        raise
    return True


def take_down(profile_name: str | None = None) -> list[str]:
    """Removes the persistent network of a profile, or all, and what dead processes have left; returns their names."""
    require_available()
    persistent = [name for name, mark in networks().items() if mark.owner is None]
    wanted = persistent if profile_name is None else [persistent_name(profile_name)]
    return [*remove_networks(wanted), *remove_stale()]


def is_up(profile: Profile) -> bool:
    """Whether `up` has made a network of this name."""
    require_available()
    return _persistent(profile) is not None


def attach(profile: Profile) -> Network:
    """The persistent network of a profile. Raises `InvalidInput` where there is none, or one of another shape."""
    require_available()
    there = _persistent(profile)
    if there is None:
        raise InvalidInput(
            f"the test network {profile.name} is not up; `charm-megatron testbed up {profile.name}` makes it"
        )
    _check_same(profile, there)
    return Network(profile, Names(persistent_name(profile.name)))


def _persistent(profile: Profile) -> Mark | None:
    """Of a network that is whole: while it is made, or if that was cut short, it still has an owner."""
    there = networks().get(persistent_name(profile.name))
    return there if there is not None and there.owner is None else None


def _check_same(profile: Profile, there: Mark) -> None:
    if there.digest != digest(profile):
        raise InvalidInput(
            f"a test network {profile.name} of another shape is up; "
            f"`charm-megatron testbed down {profile.name}` removes it"
        )
