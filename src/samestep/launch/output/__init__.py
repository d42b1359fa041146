"""What workers print: one readable stream on the terminal, and a log each."""

from samestep.launch.output.outputs import Outputs, Pipes, print_to

__all__ = ["Outputs", "Pipes", "print_to"]
