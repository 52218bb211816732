"""What a rank has forked ends with it, also where the rank is killed and its launcher knows nothing of its children."""

import os
import select
import signal
import threading


def end_forks_with_this_process() -> None:
    """From now on processes that are forked from this one, and from those, are killed once it is gone.

    By a thread in each: the kernel's own signal for that (PR_SET_PDEATHSIG) comes when a *thread* of the parent ends.
    Commands that are executed are left alone.
    """
    descriptor = os.pidfd_open(os.getpid())  # stays open: forks inherit it

    def end_with_it() -> None:
        gone = select.poll()
        gone.register(descriptor, select.POLLIN)
        gone.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        threading.Thread(target=end_with_it, name="end-with-rank", daemon=True).start()

    os.register_at_fork(after_in_child=watch)
