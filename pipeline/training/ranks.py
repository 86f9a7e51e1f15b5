"""Data-parallel training: ranks are processes that read streams of their own and average their gradients after every step.

On one machine `run_ranks` starts them and they meet over the loopback interface. Under torchrun (its environment variables are set) a process joins
the ranks that torchrun started, on this machine or on several.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from pipeline.errors import BevError, ConfigError, ModelError

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")

# Longer than any step, shorter than a night.
TIMEOUT = timedelta(minutes=10)
# Rank 0 gives the others this long to say why they failed, s.
LAST_WORDS_S = 10.0


@dataclass(frozen=True)
class Ranks:
    """This process among `size` that train together; alone by default, and then every method is free."""

    rank: int = 0
    size: int = 1

    def sum_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks; all ranks get the same bits."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the ranks, in one message."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.div_(self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.reshape(tensor.shape))

    def average_gradients(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Mean gradients, and mean running statistics. A parameter that only some ranks have used counts as zero on the others."""
        if self.size == 1:
            return
        used = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        dist.all_reduce(used)
        for parameter, count in zip(parameters, used.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.average_([*(parameter.grad for parameter in parameters if parameter.grad is not None), *buffers])

    def gather(self, item: Item) -> list[Item]:
        """The items of all ranks, in order of rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items


ALONE = Ranks()


def run_ranks(function: Callable[Concatenate[Ranks, P], R], processes: int, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function(ranks, ...)` in `processes` ranks, of which this process is the first, and return its result here.

    Under torchrun nothing is started: this process is the rank its environment says, and `processes` is not used.

    Raises:
        BevError: what a rank raised. Other ranks are stopped.
        ConfigError: torchrun would restart ranks in a way that can hang.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _refuse_shared_store(os.environ)
        try:
            return _joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", function, *args, **kwargs)
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            raise ModelError(f"training: the connection to another rank broke ({error}); that rank's own message says why") from error
    if processes == 1:
        return function(ALONE, *args, **kwargs)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        meeting = (Path(directory) / "meeting").as_uri()
        children: list[BaseProcess] = []
        words: list[Connection] = []
        for rank in range(1, processes):
            listen, speak = spawn.Pipe(duplex=False)
            child: BaseProcess = spawn.Process(target=_child, args=(speak, rank, processes, meeting, function, args, kwargs), daemon=True)
            child.start()
            speak.close()
            children.append(child)
            words.append(listen)
        try:
            _wait_until_started(words)
            return _joined(0, processes, meeting, function, *args, **kwargs)
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            # The others are gone: one of them knows why.
            raise _reason(words) or ModelError(f"training: the connection between the processes broke ({error})") from error
        finally:
            for child in children:
                child.terminate()
                child.join()


def _refuse_shared_store(environment: Mapping[str, str]) -> None:
    """By default the ranks of every attempt meet in one store of torchrun's first agent (pytorch/pytorch#135712). It still holds the addresses of the
    attempt before: a restarted rank that is quicker than rank 0 takes the dead one's and waits for it.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        advice = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node, or restarted ranks can wait forever"
        raise ConfigError(f"torchrun --max-restarts: {advice}")


def _wait_until_started(words: Sequence[Connection]) -> None:
    """A process that dies while it starts would leave the others waiting for it until the time-out."""
    for rank, listen in enumerate(words, start=1):
        try:
            listen.recv()
        except EOFError:
            raise ModelError(f"training: process {rank} died while it started; its own message stands above") from None


def _joined(rank: int, size: int, meeting: str, function: Callable[Concatenate[Ranks, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        return function(Ranks(rank, size), *args, **kwargs)
    finally:
        dist.destroy_process_group()


def _child(
    speak: Connection, rank: int, size: int, meeting: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        speak.send(rank)
        _joined(rank, size, meeting, function, *args, **kwargs)
    except BevError as error:
        speak.send(error)
    except RuntimeError as error:
        if not _is_lost_peer(error):  # else another rank failed first, and says so itself
            raise
    finally:
        speak.close()


def _is_lost_peer(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _reason(words: Sequence[Connection]) -> BevError | None:
    for listen in words:
        try:
            if listen.poll(LAST_WORDS_S):
                error: BevError = listen.recv()
                return error
        except (EOFError, pickle.UnpicklingError):
            continue
    return None
