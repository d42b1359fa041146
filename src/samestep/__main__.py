"""`python -m samestep`: the command line."""

from samestep.cli import main_and_exit

main_and_exit()
