"""Annotations are checked at run time, the network is blocked, one thread."""

import os
import socket

# Also of the processes that tests start, so that the tests of several workers (make test) share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from jaxtyping import install_import_hook

# Before anything imports the package: what is imported already stays unchecked.
install_import_hook("lens_gemma4", "beartype.beartype")

# Small models lose more by waking threads than they gain, and sums over threads round unlike.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """No test may reach out. Sockets between processes of this machine are let through."""
    connect = socket.socket.connect

    def refuse(*args, **kwargs):
        raise AssertionError(f"this test asked for the network: {args}")

    def only_local(sock, address):
        return connect(sock, address) if sock.family == socket.AF_UNIX else refuse(address)

    monkeypatch.setattr(socket.socket, "connect", only_local)
    monkeypatch.setattr(socket.socket, "connect_ex", only_local)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def tiny_model():
    """The shipped checkpoint, loaded once; tests leave no hook behind."""
    from lens_gemma4 import HookedModel

    return HookedModel.from_pretrained("tiny")
