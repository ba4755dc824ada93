"""Commands that rank 0 sends to the followers between steps: new weights, and sleep.

The ring's messages are plans. A message that begins with DRAFT is a plan for the draft model. A message that begins
with COMMAND says that a command follows by broadcast, and how many bytes its JSON has. A command may be followed by a
tensor, which is broadcast, too.
"""

import json

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import IntArray
from nanovllm.layers.parallel import Parallel
from nanovllm.runner.renewal import Command

COMMAND = -1
"""The first element of a message that announces a command. A plan begins with its number of sequences."""
DRAFT = -2
"""The first element of a message that has a plan for the draft model. The plan follows it."""


def announce(command: Command) -> IntArray:
    """Return the message for the ring that announces a command."""
    return np.array([COMMAND, len(_encode(command))], np.int32)


def _encode(command: Command) -> bytes:
    return json.dumps(command).encode()


def broadcast_command(command: Command, tensor: Tensor | None, parallel: Parallel, device: torch.device) -> None:
    """Send a command, and the tensor that belongs to it, to the ranks that have read the announcement."""
    parallel.broadcast(torch.frombuffer(bytearray(_encode(command)), dtype=torch.uint8).to(device))
    if tensor is not None:
        parallel.broadcast(_as_bytes(tensor.to(device)))


def receive_command(announcement: IntArray, parallel: Parallel, device: torch.device) -> tuple[Command, Tensor | None]:
    """Return the command that was announced, and its tensor on this rank's device."""
    num_bytes = int(announcement[1])
    encoded = parallel.broadcast(torch.empty(num_bytes, dtype=torch.uint8, device=device))
    command: Command = json.loads(bytes(encoded.cpu().numpy()))
    if "shape" not in command:
        return command, None
    tensor = torch.empty(command["shape"], dtype=getattr(torch, command["dtype"]), device=device)
    received = parallel.broadcast(_as_bytes(tensor))
    return command, received.view(tensor.dtype).view(tensor.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [n]: every library can broadcast those, whatever the dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
