"""Run configurations: strict, frozen models of a YAML file.

A file has four sections: `launch` (how many ranks), `charm` (our attention), `data` (the text to
train on) and `megatron` (Megatron's own flags under Megatron's own names, with underscores).
An unknown key is an error that names the nearest known one; nothing is rewritten after validation.

A file may also have `variants`, sections by name that are laid over those of the file, and `variant`, the one that
counts: configs of one model on other lengths, or the rows of a table. `variant=NAME` as an override chooses another.
"""

import types
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from charm_megatron.errors import MOST_QUOTED_CHARACTERS, ConfigError, nearest, quoted, shortened
from charm_megatron.files import exists
from charm_megatron.limits import (
    MOST_DEADLINE_S,
    MOST_IDLE_MIB,
    MOST_JOB_RANKS,
    MOST_MULTIPROCESSORS,
    MOST_RANKS,
    MOST_STEPS,
    MOST_YAML_BYTES,
)
from charm_megatron.reading import parse_yaml, path_text, read_text

MegatronValue = bool | int | float | str | list[bool | int | float | str] | None


class Section(BaseModel):
    """Base of every configuration model: no unknown keys, no changes after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True)


DomainFile = Annotated[str, StringConstraints(pattern=r"\.ya?ml$")]
NumDomains = Annotated[int, Field(gt=0, le=MOST_RANKS)]


class CharmConfig(Section):
    """The context-parallel attention."""

    schedule: str = Field("charm", description="Name of the planner that makes the schedule.")
    keep_kv_mib: float = Field(
        0,
        ge=0,
        allow_inf_nan=False,
        description="charm keeps the KV that it has received, for fewer bytes inside a domain, where all buffers of a "
        "rank then take at most this many MiB; 0: never. Without, they grow neither with ranks nor with domains.",
    )
    domains: Literal["hosts", "numa", "nvlink"] | NumDomains | DomainFile = Field(
        "hosts",
        description="How the ranks of a context-parallel group fall into domains of fast links: one per host, right "
        "where its GPUs are all connected alike; one per NUMA node of a host; one per island of NVLink, where a host "
        "has several; this many of equal size (so that one machine can stand for several); or as a YAML file lists "
        "hosts.",
    )
    kernel: str = Field(
        "auto", description="Implementation of attention over one block: auto, or the name of a kernel."
    )
    sm_margin: int = Field(
        0,
        ge=0,
        le=MOST_MULTIPROCESSORS,
        description="Multiprocessors of a GPU that attention leaves to NCCL's kernels; FlashAttention 3 only.",
    )
    out_return_dtype: Literal["model", "float32"] = Field(
        "model", description="Width of a partial output on its way home."
    )
    grad_return_dtype: Literal["model", "float32", "by_link"] = Field(
        "by_link",
        description="Width of a partial gradient on its way home; by_link: float32 inside a domain, the model's dtype "
        "across, where what a domain adds up is rounded once.",
    )
    prefetch_depth: int = Field(
        1,
        gt=0,
        le=MOST_STEPS,
        description="Steps that a transfer may start ahead of the computation that needs it.",
    )
    fuse: bool = Field(
        False,
        description="Post all transfers of a step as one group; else each lane (payload and class of links) by itself, "
        "so that what is needed early waits for nothing else. On one NCCL communicator always, on two never.",
    )
    communicators: Literal["auto", "one", "two"] = Field(
        "auto",
        description="Communicators of a context-parallel group. With two, one inside domains and one across, no "
        "transfer waits for one of the other kind, and transfers are posted lane by lane whatever `fuse` says. auto: "
        "two on NCCL, whose communicators each work in order, and one elsewhere.",
    )
    idle_memory_mib: int = Field(
        1024,
        ge=0,
        le=MOST_IDLE_MIB,
        description="Memory for transfers that a CPU rank keeps between calls, in MiB; on GPUs torch's allocator does.",
    )
    check_calls: bool = Field(
        True,
        description="Tell a neighbour with each call which call it is, so that ranks in different calls stop.",
    )
    deadline_s: float = Field(
        300.0, gt=0, le=MOST_DEADLINE_S, description="Longest wait for one transfer, in seconds."
    )
    flight_folder: Path | None = Field(
        None,
        description="Folder where a rank writes its last actions when a transfer is lost; none if not given, in "
        "pretraining runs the run folder.",
    )
    self_check: bool = Field(
        True,
        description="In Megatron's layers, check the first use of every plan: some rows against attention over "
        "gathered keys and values, and the bytes sent against the plan. A difference stops the job.",
    )
    strict: bool = Field(
        False,
        description="Refuse what this attention does not do, where Transformer Engine could do it instead.",
    )


class LaunchConfig(Section):
    """The processes of a job on this machine."""

    ranks: int = Field(
        1, gt=0, le=MOST_JOB_RANKS, description="Number of ranks to start, Megatron's world size."
    )


class DataConfig(Section):
    """The text to train on."""

    text: Path | None = Field(
        None, description="Folder of text files; when absent, the sources of Python's standard library."
    )


class RunConfig(Section):
    """One pretraining job."""

    launch: LaunchConfig = LaunchConfig()
    charm: CharmConfig = CharmConfig()
    data: DataConfig = DataConfig()
    megatron: dict[str, MegatronValue] = Field(
        default_factory=dict, description="Megatron's flags: `num_layers: 2` is `--num-layers 2`."
    )


Override = Annotated[str, "SECTION.KEY=VALUE, the value in YAML"]


def load_run_config(path: Path, overrides: list[Override] | None = None) -> RunConfig:
    """Reads a YAML file, lays its variant over it, applies `overrides` in order, and validates the result.

    `path` may also be the name of a configuration that comes with the package, such as `gpt_tiny_cpu`.
    Raises `ConfigError` when the file cannot be read, is not a mapping, or holds an unknown key or a
    value of the wrong type.
    """
    path = run_config_file(path)
    data = read_mapping(path, "sections")
    chosen = [text.partition("=")[2] for text in overrides or [] if _is_choice(text)]
    data = _with_variant(data, chosen[-1].strip() if chosen else None, path)
    for override in overrides or []:
        if not _is_choice(override):
            _apply(data, override)
    return parse_run_config(data, path_text(path))


def load_charm_config(path: Path) -> CharmConfig:
    """Reads a YAML file with the keys of section `charm`, for programs that are configured by something else.

    Raises `ConfigError` as `load_run_config` does.
    """
    return parse_section(CharmConfig, read_mapping(path, "settings"), path_text(path))


def variant_names(path: Path) -> tuple[str, ...]:
    """The variants of a file, in its order; none for most files. Raises `ConfigError` as `load_run_config` does."""
    path = run_config_file(path)
    return tuple(_variants(read_mapping(path, "sections"), path))


def shipped_run_configs() -> dict[str, Path]:
    """The run configurations that come with the package, by name."""
    folder = Path(str(files("charm_megatron") / "configs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def run_config_file(path: Path) -> Path:
    """The file behind what a user names: a path, or the name of a configuration that comes with the package.

    Raises `ConfigError` for a name that is neither.
    """
    shipped = shipped_run_configs()
    is_name = path.name == str(path) and not path.suffix
    if not is_name or exists(path):
        return path
    if path.name not in shipped:
        raise ConfigError(
            f"there is no file {path_text(path)}, and no configuration of that name{nearest(path.name, shipped)}"
        )
    return shipped[path.name]


def parse_run_config(data: dict[str, Any], source: str) -> RunConfig:
    """Validates a mapping; `source` names it in error messages."""
    return parse_section(RunConfig, data, source)


def read_mapping(path: Path, content: str) -> dict[str, Any]:
    """The YAML mapping in a file; `content` says of what, for errors. Raises `ConfigError` when there is none."""
    name = f"configuration {path_text(path)}"
    data = parse_yaml(read_text(path, name, MOST_YAML_BYTES, ConfigError), name, ConfigError)
    if data is None:
        raise ConfigError(f"{name} is empty; it needs a mapping of {content}")
    if not isinstance(data, dict):
        raise ConfigError(f"{name} is not a mapping of {content} but {type(data).__name__}")
    return data


def _is_choice(override: Override) -> bool:
    return override.partition("=")[0].strip() == "variant"


def _variants(data: dict[str, Any], path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    variants = data.get("variants", {})
    sections = RunConfig.model_fields
    if not isinstance(variants, dict):
        raise ConfigError(f"configuration {path_text(path)}: variants is not a mapping of sections")
    for name, variant in variants.items():
        where = f"variants.{name}"
        if not isinstance(variant, dict) or not all(isinstance(keys, dict) for keys in variant.values()):
            raise ConfigError(
                f"configuration {path_text(path)}: {_key_text(where)} is not a mapping of sections"
            )
        for section in variant.keys() - sections.keys():
            raise ConfigError(
                f"{path_text(path)}: unknown key {quoted(f'{where}.{section}')}{nearest(str(section), sections)}"
            )
    return {str(name): variant for name, variant in variants.items()}


def _with_variant(data: dict[str, Any], chosen: str | None, path: Path) -> dict[str, Any]:
    """The sections of a file, with those of its variant laid over them, key by key."""
    variants = _variants(data, path)
    sections = {key: value for key, value in data.items() if key not in ("variant", "variants")}
    name = data.get("variant") if chosen is None else chosen
    if name is None and not variants:
        return sections
    if not isinstance(name, str | int) or str(name) not in variants:
        known = f"they are {', '.join(variants)}" if variants else "it has no variants"
        raise ConfigError(f"{path_text(path)} has no variant {quoted(name)}; {known}")
    for section, values in variants[str(name)].items():
        shared = sections.get(section) or {}
        if not isinstance(shared, dict):
            raise ConfigError(f"{path_text(path)}: section {quoted(section)} is not a mapping")
        sections[section] = {**shared, **values}
    return sections


def parse_section[Model: Section](model: type[Model], data: dict[str, Any], source: str) -> Model:
    """Validates a mapping as `model`; `source` names it in error messages. Raises `ConfigError`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_problem(model, error)}") from error


def _apply(data: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or len(keys) != 2 or not all(keys):
        raise ConfigError(
            f"setting {quoted(override)} is not SECTION.KEY=VALUE, such as megatron.train_iters=20"
        )
    value = parse_yaml(text, f"value of setting {quoted(override)}", ConfigError)
    section = data.setdefault(keys[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"setting {quoted(override)}: section {quoted(keys[0])} is not a mapping")
    section[keys[1]] = value


def _key_text(key: str) -> str:
    return shortened(key, MOST_QUOTED_CHARACTERS)


_KINDS = {
    "model_type": "input should be a mapping of keys to values",
    "path_type": "input should be a path",
}
"""Where pydantic's own words name classes of Python."""


def _message(problem: Mapping[str, Any]) -> str:
    words: str = _KINDS.get(problem["type"], problem["msg"])
    return words.lower()


def _first_problem(model: type[Section], error: ValidationError) -> str:
    problem, *others = error.errors()
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *parents, key = (str(part) for part in problem["loc"])
        return f"unknown key {quoted(where)}{nearest(key, _known_keys(model, parents))}"
    if problem["type"] == "missing":
        return f"key {quoted(where)} is missing"
    if len(problem["loc"]) > 1 and any(other["loc"][:-1] == problem["loc"][:-1] for other in others):
        # A value of several types: what follows its name says which of them is meant.
        where = ".".join(str(part) for part in problem["loc"][:-1])
        same = [_message(x) for x in (problem, *others) if x["loc"][:-1] == problem["loc"][:-1]]
        return f"{_key_text(where)}: {', or '.join(same)}, but is {quoted(problem['input'])}"
    return f"{_key_text(where)}: {_message(problem)}, but is {quoted(problem['input'])}"


def _known_keys(root: type[Section], parents: list[str]) -> list[str]:
    model: type[BaseModel] = root
    for parent in parents:
        inner = model.model_fields[parent].annotation
        if get_origin(inner) in (types.UnionType,):
            inner = get_args(inner)[0]
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        model = inner
    return list(model.model_fields)
