"""Context-parallel attention for Megatron-LM whose schedule is data: checked, printed, then executed.

Rooms, in the order in which they may import each other: `errors`; `config`, `workload`, `sharding`,
`topology`; `schedule`; `simulator`; `planner` (up to here nothing imports torch); `kernels`; `executor`;
`mcore`; `train`; `cli`.
"""

__version__ = "0.1.0"
