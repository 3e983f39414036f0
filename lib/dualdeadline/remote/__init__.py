"""Experts in another process or host that answers activations: nothing of their weights crosses the link.

    python -m dualdeadline.remote.worker --model FOLDER --token-file FILE
    offload(model, slots=..., tier="remote", remote="host:port", remote_token=FILE)

frames.py   what crosses the wire          keys.py    tokens                  worker.py  the process
held.py     experts and their products     client.py  asking, again if need be
tier.py     the engine's side              link.py    two hosts emulated by network namespaces
study.py    round trips taken apart        peer.py    another GPU's memory instead
"""

from dualdeadline.remote.client import Client, RemoteError
from dualdeadline.remote.keys import new_token, read_token

__all__ = ["Client", "RemoteError", "new_token", "read_token"]
