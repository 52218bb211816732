"""Context-parallel attention for Megatron-LM whose schedule is data: checked, printed, then executed.

Rooms, in the order in which they may import each other: `errors`; `config`, `workload`, `sharding`,
`topology`; `schedule`; `lowering`; `cost`; `show`; `verify`; `planner` (up to here nothing imports torch); `kernels`;
`executor`; `mcore`; `processes`; `train`; `testbed`, `peers`, `paper`; `bench`; `cli`.
"""

__version__ = "0.1.0"
