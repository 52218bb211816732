"""`python -m charm_megatron.launch SCRIPT ...`: the same as `charm-megatron launch`, for torchrun's -m."""

import sys

from charm_megatron.cli.main import app

if __name__ == "__main__":
    app(["launch", *sys.argv[1:]], prog_name="charm-megatron")
