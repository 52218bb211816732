"""Starts the ranks of a job as processes, follows them, and lets none outlive it.

`start` makes a rank of a function, by fork or through a `server` that has imported what ranks need; `commands` makes
one of a command line. `follow` runs all of them to their end, and its error names the rank that failed first, and how
(`failure`). `group` runs a function on ranks inside one gloo group. `environment` is what launchers tell a process,
and what ranks of our own are told.
"""
