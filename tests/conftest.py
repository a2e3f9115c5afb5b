"""Annotations are checked at run time, the network is blocked, one thread."""

import socket

import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook("lens_gemma4", "beartype.beartype")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """No test may reach out: a folder loads without a socket."""

    def refuse(*args, **kwargs):
        raise AssertionError("this test opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def tiny_model():
    """The shipped checkpoint, loaded once; tests leave no hook behind."""
    from lens_gemma4 import HookedModel

    return HookedModel.from_pretrained("tiny")
