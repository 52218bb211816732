"""How large what we are asked for may be, and how old what we stand on, in one place.

Everything that comes from outside (files, options, variables of launchers) is held to these before anything is built
from it: what is larger is a mistake, or would take hours and all memory.
"""

MOST_RANKS = 4096
"""Of a context-parallel group. A schedule has a hop or block for each pair of ranks, or more."""
MOST_JOB_RANKS = 2**17
"""Of a whole job: more than the largest published runs have GPUs."""
MOST_TOKENS = 2**40
"""Of a sequence, and of what a mask's window reaches. Leaves room in int64 for sums and products of positions."""
MOST_CHUNKS = 2 * MOST_RANKS
"""Of a sequence, as two for each rank: what is masked is a table of all pairs of chunks."""
MOST_DOCUMENTS = MOST_CHUNKS
"""Of a packed sequence: each is at least one chunk."""
MOST_HEADS = 4096
"""Of one tensor-parallel rank, and groups of them."""
MOST_HEAD_DIM = 2**16
MOST_BATCH = 2**20
MOST_STEPS = 2**16
"""Of a schedule: 16 for each of the most ranks."""
MOST_COPIES = 2**16
"""Times that a piece is resent."""
MOST_BLOCKS = 2**20
"""Of one pass in a schedule file."""
MOST_IDLE_MIB = 2**24
"""That a rank keeps between calls: 16 TiB."""
MOST_OWN_RANKS = 256
"""That a benchmark starts on one machine."""
MOST_ELEMENTS = 2**36
"""Of q on one rank of a benchmark: 128 GiB in a type of two bytes."""
MOST_REPETITIONS = 10**6
MOST_DEADLINE_S = 7 * 24 * 3600.0
"""A week: a transfer that takes longer will not come."""

OLDEST_NCCL = (2, 8)
"""2.7 has the first sends and receives, but takes one of each between two ranks in a group of them: "Known Issues" in
its release notes up to 2.7.8, no longer in those of 2.8.3. A fused post may have two."""

MOST_YAML_BYTES = 64 * 2**10
MOST_YAML_VALUES = 2 * MOST_RANKS
"""Keys and values together: a file of domains may name every rank's host."""
MOST_YAML_DEPTH = 20
MOST_NUMBER_CHARACTERS = 40
"""Of a number in YAML."""

MOST_JSON_BYTES = 32 * 2**20
"""The file of charm for 256 ranks has 22 MB."""
MOST_JSON_LISTS = 2**16
"""Objects too: a program for each rank and pass."""
MOST_JSON_VALUES = 2**20
MOST_JSON_DEPTH = 20

MOST_MASK_CHARACTERS = 16 * MOST_DOCUMENTS
MOST_LAUNCHER_CHARACTERS = 2**16
"""Of a variable that SLURM or torchrun sets, and of what the machine says of itself."""
MOST_PROCESSORS = 2**16
MOST_MULTIPROCESSORS = 1024
"""Of a GPU: several times those of the largest."""
MOST_NAME_CHARACTERS = 255
"""Of a host, as POSIX has it; of a schedule, too."""
