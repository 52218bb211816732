"""How a device works off the transfers that a rank posts: what may wait for what without having to."""

from dataclasses import dataclass

from charm_megatron.errors import ScheduleFault
from charm_megatron.schedule.actions import Post
from charm_megatron.topology.domains import Domains


@dataclass(frozen=True)
class Queues:
    """A GPU under NCCL: each communicator is a stream of its own, in which posts run one after the other.

    A post begins after the blocks that come before it in the program, and is over when all its transfers are; a Wait
    holds the blocks behind it up for the whole post. With two communicators, one has the posts inside domains and the
    other those across. `is_single`: all streams share one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`), so that
    what cannot begin holds up everything behind it.
    """

    num_communicators: int = 2
    is_single: bool = False

    def communicator(self, post: Post, rank: int, domains: Domains) -> int:
        """Which one carries a post. Raises `ScheduleFault` for a post that would need both."""
        if self.num_communicators == 1:
            return 0
        crossing = {domains.crosses(rank, message.peer) for message in (*post.sends, *post.recvs)}
        if len(crossing) > 1:
            raise ScheduleFault(
                f"post {post.key} has transfers inside the domain and across; on two communicators posts are made lane "
                f"by lane (fuse: false)"
            )
        return int(True in crossing)


ONE_QUEUE = Queues(1)
"""All posts of a rank, one after the other: what ends here ends with more queues as well."""
