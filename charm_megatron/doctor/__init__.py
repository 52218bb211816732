"""What context-parallel attention needs, looked at ahead of a job: packages, settings, places of ranks, links.

`packages`, `settings` and `verdicts` decide from facts, and talk to nothing; `probe` collects the facts of packages, in
processes of their own, and `rounds` those of ranks and links. All end as findings.
"""
