"""Commands that rank 0 sends to the followers between steps: new weights, and sleep.

The ring's messages are plans. A message that begins with DRAFT is a plan for the draft model. One that begins with
COMMAND has a command, as JSON. A tensor that belongs to it follows by broadcast.
"""

import json

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import IntArray
from nanovllm.features.renewal import Command
from nanovllm.models.layers.parallel import Parallel

COMMAND = -1
"""The first element of a message that has a command. A plan begins with its number of sequences."""
DRAFT = -2
"""The first element of a message that has a plan for the draft model. The plan follows it."""


def pack_command(command: Command) -> IntArray:
    """Return the message for the ring that has a command."""
    encoded = json.dumps(command).encode()
    padding = b" " * (-len(encoded) % 4)  # JSON ignores it
    return np.insert(np.frombuffer(encoded + padding, np.int32), 0, COMMAND)


def receive_command(message: IntArray, parallel: Parallel, device: torch.device) -> tuple[Command, Tensor | None]:
    """Return the command that a message has, and its tensor on this rank's device."""
    command: Command = json.loads(message[1:].tobytes())
    if "shape" not in command:
        return command, None
    tensor = torch.empty(command["shape"], dtype=getattr(torch, command["dtype"]), device=device)
    received = parallel.broadcast(as_bytes(tensor))
    return command, received.view(tensor.dtype).view(tensor.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [n]: every library can broadcast those, whatever the dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
