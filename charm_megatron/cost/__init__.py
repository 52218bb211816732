"""What a schedule costs: bytes on the wire, buffers, memory, and time under a model of the links."""
